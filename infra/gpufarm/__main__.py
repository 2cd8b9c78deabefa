"""`gpufarm NAME ...` runs each command of the project, like `python -m PACKAGE.NAME ...`.

Start reading at `main`. Unlike `python -m`, it searches the working folder last (`conf.cli.own_packages`).
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the first argument names, and exit with its code.

    Without arguments, and for `--help`, list the commands. `--version` prints the version.

    Args:
        arguments: The arguments; None takes the process's.

    Raises:
        SystemExit: Always, with the command's exit code: 2 for an unknown command.
    """
    own_packages = _own_packages()
    own_packages.put_working_folder_last()
    own_packages.require_own_packages()
    from conf.cli.commands import COMMANDS, missing_from

    name, *remaining = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "help"):
        _exit_after_printing(_listing())
    if name == "--version":
        from importlib.metadata import version

        _exit_after_printing(f"gpufarm {version('gpufarm')}")
    module = COMMANDS.get(name)
    if module is None:
        from conf.errors import unknown_name

        _exit_with_error(str(unknown_name("command", name, COMMANDS)))
    if problem := missing_from(module.partition(".")[0]):
        _exit_with_error(problem)
    sys.argv = [sys.argv[0], *remaining]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _own_packages() -> ModuleType:
    """Load `conf.cli.own_packages` by its path: before it has run, `conf` may be a user's file."""
    here = Path(__file__).resolve()
    # Installed, and in a checkout's infra/.
    paths = [here.parents[up] / "conf" / "cli" / "own_packages.py" for up in (1, 2)]
    spec = importlib.util.spec_from_file_location("own_packages", next(path for path in paths if path.is_file()))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _listing() -> str:
    from conf.cli.commands import COMMANDS, TABLE

    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: gpufarm COMMAND [KEY=VALUE ...]",
            "",
            *(f"  {name:<{width}}  {TABLE[module].summary}" for name, module in COMMANDS.items()),
            "",
            "`gpufarm COMMAND --help` explains a command and its keys. `python -m farm.submit` is the same as",
            "`gpufarm submit`, and so on, but searches the working folder for modules first.",
        ]
    )


def _exit_with_error(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(EXIT_USAGE)


def _exit_after_printing(text: str) -> NoReturn:
    """Print and exit with 0, even if the reader has closed its end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


if __name__ == "__main__":
    main()
