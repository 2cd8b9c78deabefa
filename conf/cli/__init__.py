"""The command line of every command: derives keys, help and one-line errors from settings classes.

Start reading at `settings` and `command_line.command`. Commands of all packages call it; it calls Hydra, and no other
folder.
"""
