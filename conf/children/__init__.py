"""Starts child processes, limits their time, memory and output, and ends them with everything that they start.

Start reading at `running.ChildServer`. `keeper` has the process that forks children, and the keeper of each child.
"""
