"""Starts child processes, limits their time, memory and output, and ends them with everything that they start.

Start reading at `running.ChildServer`; `containment` finds and ends what a child started.
"""
