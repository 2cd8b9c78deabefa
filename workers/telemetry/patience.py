"""Calls into drivers and networks that may never come back: waited for so long, and then left alone.

Start reading at `call_within`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from workers.telemetry.base import SensorUnavailable

Answer = TypeVar("Answer")

_hanging: dict[str, threading.Thread] = {}  # name -> the thread of a call that has not come back


def call_within(name: str, timeout_s: float, function: Callable[..., Answer], *arguments: Any) -> Answer:
    """Return what `function` returns, or raise what it raises; `SensorUnavailable` after `timeout_s` seconds.

    Nothing can end a call that hangs in a driver: its thread stays, and until it is gone other calls of the same name
    fail at once, so that there is never more than one. What comes back too late is closed, if it can be.
    """
    if (earlier := _hanging.get(name)) is not None and earlier.is_alive():
        raise SensorUnavailable(f"{name} has not come back from an earlier call")
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    given_up = threading.Event()

    def call() -> None:
        try:
            answer = function(*arguments)
        except BaseException as error:
            answers.put((None, error))
            return
        answers.put((answer, None))
        if given_up.is_set() and hasattr(answer, "close"):
            answer.close()

    thread = threading.Thread(target=call, name=f"telemetry-call-{name}", daemon=True)
    thread.start()
    try:
        answer, error = answers.get(timeout=timeout_s)
    except queue.Empty:
        given_up.set()
        _hanging[name] = thread
        raise SensorUnavailable(f"{name} does not answer within {timeout_s:g} s") from None
    if error is not None:
        raise error
    return answer
