"""Submissions: their settings, and the checks before anything is queued.

Start reading at `submitting`. Called by `farm.submit`, `farm.grow` and comparisons; it calls sampling and dispatch.
"""
