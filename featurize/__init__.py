"""Describes a trial without a GPU: families, features, the traced training step, the device model.

Start reading at `configs/trial.py` (trial configs) and `families/` (one file each). Imports no other room except
`conf`.
"""
