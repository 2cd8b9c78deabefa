"""Calls drivers and networks with a timeout, since such calls may never return.

Start reading at `call_within`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from workers.telemetry.base import SensorUnavailable

Answer = TypeVar("Answer")

_hanging: dict[str, _Call] = {}  # name -> the call that has not come back


class _Call(threading.Thread):
    """A thread that makes one call."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__(name="telemetry-call", daemon=True)
        self._call, self._arguments = function, arguments
        self._lock = threading.Lock()
        self._given_up = False
        self.answer: Any = None
        self.error: BaseException | None = None
        self.is_back = False

    def run(self) -> None:
        try:
            self.answer = self._call(*self._arguments)
        except BaseException as raised:
            self.error = raised
        with self._lock:
            self.is_back = True
        if self._given_up and hasattr(self.answer, "close"):
            self.answer.close()

    def give_up(self) -> bool:
        """Have a late answer closed; return False where the answer came just now."""
        with self._lock:
            self._given_up = not self.is_back
        return self._given_up


def call_within(name: str, timeout_s: float, function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Return or raise the result of `function`. Raises `SensorUnavailable` after `timeout_s` seconds.

    A call that hangs in a driver cannot be ended: its thread stays, and until it returns other calls of the same name
    fail at once, so that there is never more than one. A late result is closed, if it can be.
    """
    if (earlier := _hanging.get(name)) is not None and earlier.is_alive():
        raise SensorUnavailable(f"{name} has not returned from an earlier call")
    call = _Call(function, arguments)
    call.start()
    call.join(timeout_s)
    if not call.is_back and call.give_up():
        _hanging[name] = call
        raise SensorUnavailable(f"{name} does not answer within {timeout_s:g} s")
    if call.error is not None:
        raise call.error
    answer: Answer = call.answer
    return answer
