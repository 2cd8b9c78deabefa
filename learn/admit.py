"""`python -m learn.admit`: whether a job may join the jobs of a GPU.

The function is `learn.admit`; the command's body is `learn.commands.sharing.admit_entry`.
"""

from __future__ import annotations

if __name__ == "learn.admit":  # an imported module of this name would take the function's place in `learn`
    raise ImportError("learn.admit is a function, and as a module a command only: from learn import admit")

from conf.cli.command_line import command
from featurize.trace.light_imports import without_compiler
from learn.commands.sharing import admit_entry

if __name__ == "__main__":
    without_compiler()
    command("admit", admit_entry)
