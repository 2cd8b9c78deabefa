"""Estimators that learn from rows.

Start reading at `hybrid.py`, the default; `learn.estimators` has the Protocol they keep.
"""
