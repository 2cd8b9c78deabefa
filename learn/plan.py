"""`python -m learn.plan`: which layouts of a training job on several GPUs fit, and how quick each one is.

The function is `learn.plan`; the command's body is `learn.commands.plan`.
"""

from __future__ import annotations

if __name__ == "learn.plan":  # an imported module of this name would take the function's place in `learn`
    raise ImportError("learn.plan is a function, and as a module a command only: from learn import plan")

from conf.cli.command_line import command
from featurize.trace.light_imports import without_compiler
from learn.commands.plan import entry

if __name__ == "__main__":
    without_compiler()
    command("plan", entry)
