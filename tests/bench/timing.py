"""Seconds that something takes, for the benchmarks of this folder."""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def timed(act: Callable[..., Value], *arguments: object) -> tuple[float, Value]:
    """Return the wall seconds of one call, and its value."""
    began = time.perf_counter()
    value = act(*arguments)
    return time.perf_counter() - began, value


def seconds_of(act: Callable[..., object], *arguments: object) -> float:
    return timed(act, *arguments)[0]
