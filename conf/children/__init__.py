"""Child processes: started, held to limits of time, memory and output, and ended with everything that they start.

Start reading at `running.ChildServer`. `keeper` has the process that children are forked from, and what holds each.
"""
