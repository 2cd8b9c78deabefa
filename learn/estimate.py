"""`python -m learn.estimate`: estimate what a training job takes from a GPU, before it runs.

The function is `learn.estimate`; the command's body is `learn.commands.estimate`.
"""

from __future__ import annotations

if __name__ == "learn.estimate":  # an imported module of this name would take the function's place in `learn`
    raise ImportError("learn.estimate is a function, and as a module a command only: from learn import estimate")

from collections.abc import Sequence

from conf.cli.command_line import command
from featurize.trace.light_imports import without_compiler
from learn.commands.estimate import entry, entry_of_script

_SERVER = "--server"


def _server_as_key(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--server URL` rewritten as the key `server=URL`."""
    rewritten: list[str] = []
    for argument in arguments:
        if rewritten[-1:] == [_SERVER]:
            rewritten[-1] = f"server={argument}"
        else:
            rewritten.append(argument.removeprefix("--") if argument.startswith(f"{_SERVER}=") else argument)
    return rewritten


if __name__ == "__main__":
    without_compiler()
    command("estimate", entry, rewrite=_server_as_key, entry_of_rest=entry_of_script)
