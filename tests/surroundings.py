"""Surroundings of a command that is tested: processes that wait, notes that come late, files changed by others, disks
of a few MiB."""

from __future__ import annotations

import contextlib
import io
import os
import pkgutil
import runpy
import shutil
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest

from conf.cli import command_line
from conf.cli.commands import COMMANDS

Found = TypeVar("Found")
# What has not come by then never will. A busy machine takes minutes for what a quiet one does in a second.
PATIENCE_S = 600.0
ENDS_WITHIN_S = 60.0  # what is ended is gone, although it would have gone on for minutes
# What a command runs whose module is for `python -m` alone: imported, it would take the place of a function of `learn`.
BODIES = {
    "admit": "learn.commands.sharing:admit_entry",
    "estimate": "learn.commands.estimate:entry",
    "fit": "learn.commands.fit:entry",
    "plan": "learn.commands.plan:entry",
}


def run_command(name: str, *arguments: str) -> int:
    """Run a command in this process and return its exit code.

    Args:
        name: Its name, or for one that `--help` does not list, `MODULE:CLASS` of its settings.
        arguments: As the user types them.
    """
    body = BODIES.get(name) or f"{COMMANDS.get(name, name.partition(':')[0])}:entry"
    return command_line.run(name, pkgutil.resolve_name(body), arguments)


def run_module(module: str, *arguments: str) -> tuple[Any, str, str]:
    """Run `python -m MODULE ARGUMENTS` in this process; return its exit code, standard output and standard error."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="", write_through=True) for _ in "12")
    code: Any = 0
    with (
        mock.patch.object(sys, "argv", [module, *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # of runpy, about a module that was imported before
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code
    return code, *(stream.buffer.getvalue().decode("utf-8") for stream in (out, err))


@contextlib.contextmanager
def waiting_process(start_new_session: bool = False, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that waits until the block ends; `environment` adds to its variables."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=start_new_session,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield process


def await_(condition: Callable[[], Found], awaited: str, within_s: float = PATIENCE_S) -> Found:
    """Return what `condition` finds, asked again and again until that is true."""
    until = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < until, f"never came: {awaited}"
        time.sleep(0.01)
    return found


def await_note(path: Path, process: subprocess.Popen[Any]) -> str:
    """Wait until a file holds something, and return it; fail where the process ends before."""
    while not path.exists() or not path.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    return path.read_text()


def execute_sql(path: Path, *statements: str) -> None:
    """Change an SQLite file as another program would."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Mount a file system of its own at `path`, "8m" large for example; skip the test where none can be mounted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs takes root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
