"""Asks cuDNN which engine and workspace it takes for a convolution, on a machine without a GPU.

Start reading at `oracle.py`; `signature.py` has what is asked, `workspaces.py` what a trace makes of the answers.
"""
