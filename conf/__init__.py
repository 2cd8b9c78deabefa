"""Command lines: settings classes (`conf.cli.settings`), and Hydra's files (`pkg://conf`), one folder per config group.

Start reading at `conf.cli.commands`; `conf.cli.command_line` turns a settings class into a command line.
"""
