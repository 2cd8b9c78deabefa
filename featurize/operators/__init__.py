"""Operators as CUDA runs them: the table of names, and the differences between PyTorch on a GPU and meta tensors.

Start reading at `table` and `cuda_policy`. Called by recordings, timing and training; it calls `cudnn` for its types.
"""
