"""`python -m learn.fit target=memory`: fit one estimator, judge it on held-out rows, keep it as an artifact.

The function is `learn.fit`; the command's body is `learn.commands.fit`.
"""

from __future__ import annotations

if __name__ == "learn.fit":  # an imported module of this name would take the function's place in `learn`
    raise ImportError("learn.fit is a function, and as a module a command only: from learn import fit")

from conf.cli.command_line import command
from learn.commands.fit import entry

if __name__ == "__main__":
    command("fit", entry)
