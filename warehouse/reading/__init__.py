"""Reading a data folder: connections that survive damage and compaction, pairs of runs, checks of rows.

Start reading at `connection.connect`. Called by commands, the explorer, `learn` and `farm`; it calls `files`.
"""
