"""Submissions: their settings, and what is checked before anything is queued.

Start reading at `settings`. Called by `farm.submit`, `farm.grow` and comparisons; it calls sampling and dispatch.
"""
