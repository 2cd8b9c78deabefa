"""Replays of a cluster: jobs of a trace on GPUs that they share, under policies and estimators. No GPU takes part.

Start reading at `simulator.run_crossing`, which replays under every policy; `traces` reads and makes traces.
"""
