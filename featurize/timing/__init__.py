"""Time, activity and power of a traced step on a GPU model: kernels, the host, collectives, pipelines.

Start reading at `step_time.time_step`: `calls` lists an operator's kernels, `times` prices them, and `overlap` adds
communication. Called by estimates, features and simulated devices; it calls recordings, operators
and memory.
"""
