"""Remembers what was computed of a trace and is the same for other GPU models.

Start reading at `of_trace`. It remembers the last few traces only, and none of them longer than it lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from featurize.step_trace import StepTrace

Value = TypeVar("Value")
_MOST = 4  # a job's trace, and the one in a plain loop, of the job and of a neighbour
_kept: list[tuple[weakref.ref[StepTrace], dict[Hashable, Any]]] = []


def of_trace(trace: StepTrace, key: Hashable, compute: Callable[[], Value]) -> Value:
    """Return what `compute` gave for this trace and key, or call it now.

    Args:
        trace: Recognized by its identity.
        key: All that the value depends on besides the trace; a tuple that begins with the value's name.
        compute: Gives the value, which nobody may change afterwards.
    """
    memo = _memo(trace)
    if key not in memo:
        memo[key] = compute()
    return memo[key]


def _memo(trace: StepTrace) -> dict[Hashable, Any]:
    for kept, memo in _kept:
        if kept() is trace:
            return memo
    new: dict[Hashable, Any] = {}
    _kept[:] = [(weakref.ref(trace), new), *(one for one in _kept[: _MOST - 1] if one[0]() is not None)]
    return new
