"""Child processes: started, held to limits of time, memory and output, and ended with everything that they start.

Start reading at `keeper.keep`. `running.ChildRunner` runs a command under a keeper of its own.
"""
