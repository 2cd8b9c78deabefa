"""The service's log: one JSON object a line. Start reading at `RequestLog`."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Mapping
from typing import IO, Any

from conf.errors import UsageError

STDERR, NONE = "stderr", "none"


class RequestLog:
    """Writes events to standard error, a file or nowhere; several processes may append to one file.

    Args:
        to: `stderr`, `none`, or a file's path.

    Raises:
        UsageError: The file cannot be written.
    """

    def __init__(self, to: str) -> None:
        self._file: IO[str] | None = None
        if to == STDERR:
            self._file = sys.stderr
        elif to != NONE:
            try:
                self._file = open(os.path.expanduser(to), "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                raise UsageError(f"log={to}: {error.strerror}") from error

    def event(self, name: str, **fields: Any) -> None:
        """Write an event; each line has `time` (ISO 8601, UTC), `event` and `pid`."""
        if self._file is None:
            return
        moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": moment, "event": name, "pid": os.getpid(), **fields})
        try:
            self._file.write(f"{line}\n")
        except (OSError, ValueError):  # a full disk stops no answers
            pass

    def request(self, request_id: str, scope: Mapping[str, Any], status: int, seconds: float, sent_bytes: int) -> None:
        """Write a line of one request: neither its body nor its token."""
        if self._file is None:
            return
        self.event(
            "request",
            request_id=request_id,
            method=scope["method"],
            path=scope["path"],
            status=status,
            ms=round(1e3 * seconds, 3),
            bytes=sent_bytes,
        )

    def failure(self, request_id: str, trace: str) -> None:
        """Write the traceback of a request that failed."""
        self.event("failure", request_id=request_id, traceback=trace)
