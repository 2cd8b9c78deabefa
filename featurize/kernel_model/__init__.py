"""The time of a training step from its kernels: physics with efficiencies that were learned from measurements.

Start reading at `step_time.time_step`: `calls` says which kernels an operator runs, `times` how long each takes.
"""
