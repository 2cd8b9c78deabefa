"""Asks cuDNN which engine and workspace it takes for a convolution, on a machine without a GPU.

Start reading at `workspaces.py`, what a trace asks; `oracle.py` asks it of a process, `child.py`, which loads cuDNN.
"""
