"""Calls drivers and networks with a timeout, since such calls may never return.

Start reading at `call_within`.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from workers.telemetry.base import SensorUnavailable

Answer = TypeVar("Answer")

_hanging: dict[str, _Caller] = {}  # name -> the thread with a call that has not come back
_idle: list[_Caller] = []


class _Caller:
    """A thread that makes calls, one at a time. It is used again while its calls come back: starting one takes longer
    than most calls."""

    def __init__(self) -> None:
        self.process = os.getpid()  # a fork has the object and not the thread
        self.busy = False
        self._calls: queue.SimpleQueue[tuple[_Call, Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="telemetry-calls", daemon=True).start()

    def begin(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> _Call:
        self.busy = True
        call = _Call()
        self._calls.put((call, function, arguments))
        return call

    def _run(self) -> None:
        while True:
            call, function, arguments = self._calls.get()
            try:
                answer, error = function(*arguments), None
            except BaseException as raised:
                answer, error = None, raised
            with call.lock:
                late = call.given_up
                call.answers.put((answer, error))
            if late and hasattr(answer, "close"):
                answer.close()
            self.busy = False
            if late:
                return
            del call, function, arguments, answer, error


class _Call:
    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.given_up = False


def call_within(name: str, timeout_s: float, function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Return or raise the result of `function`. Raises `SensorUnavailable` after `timeout_s` seconds.

    A call that hangs in a driver cannot be ended: its thread stays, and until it returns other calls of the same name
    fail at once, so that there is never more than one. A late result is closed, if it can be.
    """
    if (earlier := _hanging.get(name)) is not None and earlier.busy and earlier.process == os.getpid():
        raise SensorUnavailable(f"{name} has not returned from an earlier call")
    caller = _idle.pop() if _idle else _Caller()
    if caller.process != os.getpid():
        caller = _Caller()
    call = caller.begin(function, arguments)
    try:
        answer, error = call.answers.get(timeout=timeout_s)
    except queue.Empty:
        with call.lock:
            call.given_up = True
            came_just_now = not call.answers.empty()
        if not came_just_now:
            _hanging[name] = caller
            raise SensorUnavailable(f"{name} does not answer within {timeout_s:g} s") from None
        answer, error = call.answers.get()
    _idle.append(caller)
    if error is not None:
        raise error
    value: Answer = answer
    return value
