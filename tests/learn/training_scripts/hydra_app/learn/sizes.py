"""Sizes of the models."""

OUTPUTS = 16
