"""Several jobs on one GPU: how much each slows the others down, how much memory they take together, which to admit.

Start reading at `profile.JobProfile`, the figures of one job alone.
"""
