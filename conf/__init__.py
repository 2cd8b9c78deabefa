"""Hydra configuration files (`pkg://conf`), one YAML per command and one folder per config group.

Start reading at `submit.yaml`; `conf.cli` turns any of these files into a command line.
"""
