"""Operators as CUDA runs them: the table of names, and where PyTorch on a GPU differs from meta tensors.

Start reading at `table` and `cuda_policy`. Called by recordings, timing and training; it calls `cudnn` for its words.
"""
