"""Several jobs on one GPU: how much each slows the others, the memory they take together, which may join.

Start reading at `slowdowns.JobProfile` and `admitting.admit`. Called by commands, the service and replays; it calls
estimates and fits.
"""
