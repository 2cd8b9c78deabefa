"""Canaries: a few fixed configurations whose labels show whether the machine or its software has changed."""
