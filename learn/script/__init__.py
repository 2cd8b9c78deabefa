"""The estimate of an unmodified script: runs `python train.py ARGS` for two optimizer steps, with GPU tensors on meta.

Start reading at `estimating.py` (this process) and `child.py` (the process that runs the script).
"""
