"""Asks cuDNN for a convolution's engine and workspace, on a machine without a GPU.

Start reading at `oracle.py`, which asks a process, `child.py`, that loads cuDNN; `signature.py` has question and
answer.
"""
