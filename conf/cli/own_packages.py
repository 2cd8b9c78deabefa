"""Prevents files in the user's working folder from hiding this project's packages (`conf`, `workers`, ...).

Start reading at `require_own_packages`. `python -m farm.submit` puts the working folder first on the path, and many
projects have a `conf/` or a `workers.py`. Needs only the standard library: a package runs this file before any other
import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGES = ("conf", "farm", "featurize", "learn", "warehouse", "workers")
ROOT = Path(__file__).parents[2]
SAFE_PATH = "PYTHONSAFEPATH"  # Python's variable that keeps `-m` from putting the working folder first
_BEFORE = "GPUFARM_USERS_PATHS"  # the user's values of Python's variables, from before `put_working_folder_last`
_OF_COMMANDS = ("farm", "learn", "warehouse")


def shadowing_files() -> dict[str, str]:
    """Return each package of this project that an import would take from elsewhere -> that file or folder.

    A folder without `__init__.py` hides a package of an editable install, because its finder comes after the path.
    """
    shadowing = {}
    for package in PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        if spec is None:
            continue
        origin = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        if origin is not None and not _is_same(origin, ROOT / package / "__init__.py"):
            shadowing[package] = origin
    return shadowing


def require_own_packages() -> None:
    """End the process with one line and exit code 2 if another file hides a package of this project."""
    if not (shadowing := shadowing_files()):
        return
    hidden = f"package{'s' * (len(shadowing) > 1)} {' and '.join(shadowing)}"
    files = " and ".join(_printable(path) for path in shadowing.values())
    hides = "hide" if len(shadowing) > 1 else "hides"
    advice = "change to another folder, or take this one out of PYTHONPATH"
    package, _, command = _module_to_run().partition(".")
    if package in _OF_COMMANDS and command:
        advice = f"run `gpufarm {_printable(command)} ...` instead, or change to another folder"
    print(f"error: {files} {hides} gpufarm's own {hidden}; {advice}", file=sys.stderr)
    sys.exit(2)


def _module_to_run() -> str:
    """Return the module that `python -m` runs; empty without one."""
    arguments = sys.orig_argv
    return arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else ""


def working_folder() -> str | None:
    """Return the working folder; None if this project is in it, or if the folder was removed."""
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the command reports it
        return None
    return None if _is_same(here, ROOT) else here


def search_working_folder() -> None:
    """Append the working folder to the path, unless the path already has it."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return
    if "" not in sys.path and here not in sys.path:
        searching_last(here)()


def searching_last(folder: str | None) -> Callable[[], None]:
    """Return a function that makes its process search the folder last, after this project; None changes nothing.

    Ray puts the driver's working folder first on a worker's path, where a user's `workers.py` would hide this project's
    package. Ray sends a nested function by value, so a worker can call it before it imports this project.
    """
    root = str(ROOT)  # added too: an editable install's own finder comes after the whole path

    def search_last() -> None:
        import os
        import sys

        if folder is None:
            return
        last = os.path.realpath(folder)
        others = [path for path in sys.path if path and os.path.realpath(path) != last]
        sys.path[:] = [*others, *(() if root in others else (root,)), folder]

    return search_last


def put_working_folder_last() -> None:
    """Search the working folder after everything else, in this process and in those that it starts.

    A model named by `MODULE:FACTORY` is still found there. Nothing changes if the working folder holds this project.
    """
    if (here := working_folder()) is None:
        return
    os.environ.setdefault(_BEFORE, json.dumps({name: os.environ.get(name) for name in (SAFE_PATH, "PYTHONPATH")}))
    os.environ[SAFE_PATH] = "1"  # for the child processes
    sys.path[:] = [path for path in sys.path if path]
    is_hiding = bool(shadowing_files())
    if is_hiding or here not in sys.path:
        searching_last(here)()
    if is_hiding and "PYTHONPATH" in os.environ:
        paths = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path and not _is_same(path, here))


def users_environment() -> dict[str, str]:
    """Return this process's environment as its user set it, for the user's own programs."""
    environment = dict(os.environ)
    for name, value in json.loads(environment.pop(_BEFORE, "{}")).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def _is_same(path: str | Path, other: str | Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return os.path.abspath(path) == os.path.abspath(other)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _require_libraries() -> None:
    """End the process with one line and exit code 2 if the command needs libraries that are not installed."""
    from conf.cli.commands import TABLE, missing_from

    module = _module_to_run()
    if module in TABLE and (problem := missing_from(module.partition(".")[0])):
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":  # run by a package of this project that `python -m` started
    require_own_packages()
    _require_libraries()
