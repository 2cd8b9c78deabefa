"""Memory of a traced step on a GPU: PyTorch's caching allocator, simulated, and the step's blocks replayed through it.

Start reading at `replay`; `allocator` holds the rules. Called by estimates, features and simulated devices; it calls
recordings, operators and cuDNN's answers.
"""
