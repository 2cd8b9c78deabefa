"""Runs a Python program as a child of its own, within limits. Start reading at `ChildRunner`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.children.keeper import Ended
from conf.errors import EnvironmentProblem

_KEEPER = Path(__file__).with_name("__main__.py")


class ChildRunner:
    """A temporary folder, and a Python program that may use it; a context manager.

    At its end, or when this process ends in whatever way, all processes that the program started are ended and the
    folder is deleted.

    Args:
        environment: Of the program; None is this process's.
    """

    folder: Path

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment

    def __enter__(self) -> ChildRunner:
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, str(_KEEPER), tempfile.gettempdir()],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal is this process's to handle
            )
        except OSError as error:
            raise EnvironmentProblem(f"no child process can be started: {error}") from error
        try:
            self.folder = Path(self._answer()["folder"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._write("")  # not the end of the file alone: a process that was forked from this one may hold the pipe
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        self._keeper.stdout.close()
        self._keeper.wait()

    def run(
        self, program: Sequence[str], *, time_limit_s: float, memory_limit_bytes: float, shows_output: bool = False
    ) -> Ended:
        """Run a program and end all that it started. Call it once.

        Args:
            program: The path of a Python file, and its arguments.
            time_limit_s: Seconds after which it is ended.
            memory_limit_bytes: Memory of all of its processes beyond which they are ended.
            shows_output: Whether its output goes to standard error, rather than into the result.
        """
        wanted = {
            "program": list(program),
            "time_limit_s": time_limit_s,
            "memory_limit_bytes": memory_limit_bytes,
            "shows_output": shows_output,
        }
        self._write(json.dumps(wanted))
        return Ended(**self._answer())

    def _write(self, line: str) -> None:
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):  # the keeper is gone
            self._keeper.stdin.write(line.encode() + b"\n")
            self._keeper.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        """Return the keeper's next line. Raises `EnvironmentProblem` where it cannot go on, or was killed."""
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"problem": "its keeper was killed"}
        if "problem" in answer:
            raise EnvironmentProblem(f"no child process can be run: {answer['problem']}")
        return answer
