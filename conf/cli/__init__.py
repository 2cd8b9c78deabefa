"""The command line of every command: settings classes in, keys, help and one-line errors out.

Start reading at `settings` and `command_line.command`. Every command of every room calls it; it calls Hydra, and
no other folder.
"""
