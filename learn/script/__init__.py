"""The unmodified script: runs `python train.py ARGS` until two optimizer steps are done, with every GPU tensor on meta.

Start reading at `estimating.py` (this process) and `child.py` (the process that runs the script).
"""
