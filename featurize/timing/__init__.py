"""Time, activity and power of a traced step on a GPU model: kernels, the host, collectives, pipelines.

Start reading at `step_time.time_step`: `calls` says which kernels an operator runs, `times` how long each takes,
`overlap` what communication adds. Called by estimates, features and simulated devices; it calls recordings, operators
and memory.
"""
