"""Replays of a cluster: jobs of a trace on GPUs that they share, under policies and estimators. No GPU takes part.

Start reading at `simulator.replay`; `traces` reads and makes traces, `crossing` has the policies and runs every one.
"""
