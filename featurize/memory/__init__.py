"""Memory of a traced step on a GPU: PyTorch's caching allocator, simulated, and the replay of the step's blocks on it.

Start reading at `replay`; `allocator` holds the rules. Called by estimates, features and simulated devices; it calls
recordings, operators and cuDNN's answers.
"""
