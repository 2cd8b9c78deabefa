"""Several jobs on one GPU: their slowdowns, their memory together, and which job may join.

Start reading at `slowdowns.JobProfile` and `admitting.admit`. Called by commands, the service and replays; it calls
estimates and fits.
"""
