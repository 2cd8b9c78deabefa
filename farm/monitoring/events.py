"""Events of a dispatcher for programs: one JSON line each, in a file or on standard output.

Start reading at `Events`. An event has `time` (ISO 8601, UTC), `event`, and of `job, task, run, attempt, worker,
status` what applies; docs/operations.md lists them all.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import logging.handlers
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.cli.settings import Checked, key
from conf.errors import UsageError
from conf.files.outputs import checked_output, checked_report, folder_problems
from workers.task import Lease

_KEY = "log.file"
FORMATS = ("human", "json")
Sink = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class LogSettings(Checked, section="log"):
    """The `log` key. `file` gets JSON lines; at `max_mib` it becomes `file.1`, and `keep` of those are kept."""

    file: str | None = key(
        None, "one JSON line an event; without it, and in the human format, nothing is logged", "new path"
    )
    format: str = key("human", "json: events on standard output, and no progress bar", choices=FORMATS)
    max_mib: float = key(64, "the file is then renamed to FILE.1", "number > 0")
    keep: int = key(5, "how many of these are kept", "int >= 1")

    def problems(self) -> Sequence[str]:
        if self.file is None:
            return ()
        file = Path(self.file).expanduser()
        if not file.parent.is_dir():
            return folder_problems(file.parent, key=_KEY)
        checked_report(file, key=_KEY, like="events.jsonl", data=[])
        return ()


class Events:
    """Passes each event to every sink; a context manager. Without sinks its cost is negligible."""

    def __init__(self, sinks: list[Sink] | None = None, clock: Callable[[], float] = time.time) -> None:
        self._sinks = list(sinks or ())
        self._clock = clock
        self._handlers: list[logging.Handler] = []
        self._has_told = False

    @classmethod
    def open(cls, settings: LogSettings, data: Sequence[Path] = ()) -> Events:
        """Open the log. Raises `UsageError` if the file cannot be written, or is in `data` or another data folder."""
        events = cls()
        if settings.file is not None:
            events._add(_file_handler(settings.file, settings, data))
        if settings.format == "json":
            events._add(logging.StreamHandler(sys.stdout))
        return events

    def listen(self, sink: Sink) -> None:
        """Pass every event to `sink` from now on."""
        self._sinks.append(sink)

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(logging.Formatter("%(message)s"))
        handler.handleError = self._tell_write_error  # type: ignore[method-assign]
        self._handlers.append(handler)

        def write(event: Mapping[str, Any]) -> None:
            handler.handle(_record(json.dumps(event, default=str)))

        self._sinks.append(write)

    def _tell_write_error(self, record: logging.LogRecord) -> None:
        """Print once that events are lost; the work goes on."""
        if not self._has_told:
            self._has_told = True
            print(f"note: {_KEY} cannot be written, events are lost: {sys.exc_info()[1]}", file=sys.stderr)

    def emit(self, event: str, task: Lease | None = None, **fields: Any) -> None:
        """Emit an event; fields that are None are left out."""
        if not self._sinks:
            return
        moment = datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)
        entry: dict[str, Any] = {"time": moment.isoformat(timespec="milliseconds"), "event": event}
        if task is not None:
            entry |= {"job": task.job_id, "task": task.task_index, "run": task.run_id, "attempt": task.attempt}
        entry |= {name: value for name, value in fields.items() if value is not None}
        for sink in self._sinks:
            sink(entry)

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        for handler in self._handlers:
            handler.close()


def _file_handler(file: str, settings: LogSettings, data: Sequence[Path]) -> logging.Handler:
    """Return a handler with a rotated file; a device or a pipe is not rotated."""
    try:
        Path(file).expanduser().parent.mkdir(parents=True, exist_ok=True)
        output = checked_output(file, key=_KEY, data=data)
        if not output.is_plain:
            descriptor = None if output.descriptor is None else os.dup(output.descriptor)
            return _StreamHandler(open(output.path if descriptor is None else descriptor, "w", encoding="utf-8"))
        return logging.handlers.RotatingFileHandler(
            output.path, maxBytes=int(settings.max_mib * 2**20), backupCount=settings.keep, encoding="utf-8"
        )
    except OSError as error:
        raise UsageError(f"log.file={file}: {error.strerror}") from error


class _StreamHandler(logging.StreamHandler):
    """A handler that closes its own stream."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which has been told
            self.stream.close()
        super().close()


def _record(line: str) -> logging.LogRecord:
    return logging.LogRecord("farm", logging.INFO, "", 0, line, None, None)
