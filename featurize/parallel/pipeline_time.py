"""How long a step of a pipeline takes: ranks compute in their order, and wait for each other's messages. Torch-free.

Start reading at `finished_ms`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias


class Compute(NamedTuple):
    """A stage's pass over a micro-batch; `phase` is forward or backward."""

    phase: str
    stage: int
    micro_batch: int


class Message(NamedTuple):
    """One side of a message: an activation (forward) or a gradient (backward) on its way into a stage."""

    phase: str
    stage: int
    micro_batch: int
    sends: bool


class Post(NamedTuple):
    """Messages of one call begin, as far as this rank is concerned."""

    messages: tuple[Message, ...]


class Wait(NamedTuple):
    """What follows needs messages to be complete: all of those that were posted together."""

    messages: tuple[Message, ...]


Item: TypeAlias = Compute | Post | Wait
_Key: TypeAlias = tuple[str, int, int]  # of a message: phase, stage, micro-batch


def finished_ms(
    orders: Sequence[Sequence[Item]], lasts_ms: Callable[[Compute], float], message_ms: Callable[[Message], float]
) -> list[float]:
    """Return when each rank has done all of its items, from their common beginning.

    A message begins when both sides have posted it, and runs beside the kernels; what it shares its way with does not
    slow it.

    Args:
        orders: The items of each rank.
        lasts_ms: How long a pass takes.
        message_ms: How long a message takes.
    """
    at, now = [0] * len(orders), [0.0] * len(orders)
    posted: dict[_Key, list[float]] = {}
    moved = True
    while moved:
        moved = False
        for rank, items in enumerate(orders):
            while at[rank] < len(items):
                item = items[at[rank]]
                if isinstance(item, Compute):
                    now[rank] += lasts_ms(item)
                elif isinstance(item, Post):
                    for one in item.messages:
                        posted.setdefault(one[:3], []).append(now[rank])
                else:
                    sides = [posted.get(one[:3], []) for one in item.messages]
                    if any(len(moments) < 2 for moments in sides):
                        break
                    ends = [max(side) + message_ms(one) for side, one in zip(sides, item.messages, strict=True)]
                    now[rank] = max(now[rank], *ends)
                at[rank] += 1
                moved = True
    assert all(place == len(items) for place, items in zip(at, orders, strict=True)), "ranks wait for each other"
    return now
