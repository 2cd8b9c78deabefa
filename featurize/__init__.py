"""Describe a trial without a GPU: families, features, the traced training step, the device model.

Start reading at `configs/trial.py` (what a trial config is) and `families/` (one file each). Imports no sibling but
`conf`.
"""
