"""Command lines: settings classes (`conf.settings`), and Hydra's files (`pkg://conf`), one folder per config group.

Start reading at `conf.commands`; `conf.cli` turns a settings class into a command line.
"""
