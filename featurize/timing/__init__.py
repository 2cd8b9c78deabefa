"""Time, activity and power of a traced step on a GPU model: kernels, the host, collectives, pipelines.

Start reading at `simulation.simulate`: `kernels` lists an operator's kernels and prices them. Called by estimates,
features and simulated devices; it calls recordings, operators and memory.
"""
