"""The order in which each rank of a pipeline computes, sends and receives, and the moments at which it has done so.

Start reading at `orders_of`: PyTorch's own schedules, run over empty stages, define the order of each rank.
`featurize.timing.simulation.waits_of` prices it. It is a separate module, since the import of schedules is slow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, cast

from torch.distributed.pipelining import schedules

from featurize.job.layout import GPIPE, INTERLEAVED, ONE_F_ONE_B, Parallel
from featurize.operators.replacing import replaced


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


class Exchange(NamedTuple):
    """One call's messages, on this rank's side: their start, or a wait for all of them."""

    messages: tuple[Message, ...]
    waits: bool


Item: TypeAlias = Compute | Exchange


def finished_ms(
    orders: Sequence[Sequence[Item]],
    lasts_ms: Callable[[Compute], float],
    message_ms: Callable[[Message], float],
    begin_ms: Iterable[float] = (),
) -> list[float]:
    """Return the time in ms at which each rank has completed all of its items.

    A message begins when both sides have posted it, and overlaps the kernels. Contention for the link is ignored.

    Args:
        orders: The items of each rank.
        lasts_ms: Returns the duration of a pass.
        message_ms: Returns the duration of a message.
        begin_ms: When each rank begins; empty: all at 0.
    """
    position, now = [0] * len(orders), [*begin_ms] or [0.0] * len(orders)
    posted: dict[tuple[str, int, int], list[float]] = {}  # phase, stage and micro-batch of a message -> moments
    moved = True
    while moved:
        moved = False
        for rank, items in enumerate(orders):
            while position[rank] < len(items):
                item = items[position[rank]]
                if isinstance(item, Compute):
                    now[rank] += lasts_ms(item)
                elif not item.waits:
                    for message in item.messages:
                        posted.setdefault(message[:3], []).append(now[rank])
                else:
                    sides = [posted.get(message[:3], []) for message in item.messages]
                    if any(len(moments) < 2 for moments in sides):
                        break
                    ends = [max(side) + message_ms(message) for side, message in zip(sides, item.messages, strict=True)]
                    now[rank] = max(now[rank], *ends)
                position[rank] += 1
                moved = True
    assert all(place == len(items) for place, items in zip(position, orders, strict=True)), "ranks wait for each other"
    return now


# Order of a layout -> PyTorch's class of its schedule.
SCHEDULES = {
    GPIPE: schedules.ScheduleGPipe,
    ONE_F_ONE_B: schedules.Schedule1F1B,
    INTERLEAVED: schedules.ScheduleInterleaved1F1B,
}


def orders_of(parallel: Parallel) -> tuple[tuple[Item, ...], ...]:
    """Return the items of each rank of `pp`, in order."""
    return _orders(parallel.order, parallel.degrees.pp, parallel.chunks, parallel.parts)


@functools.lru_cache(maxsize=8)
def _orders(schedule: str, ranks: int, chunks: int, parts: int) -> tuple[tuple[Item, ...], ...]:
    """Return each rank's items. One schedule is run as each rank: PyTorch plans all ranks when a schedule is made."""
    items: list[Item] = []
    run = None
    orders = []
    for rank in range(ranks):
        stages = [_BlankStage(items, ranks, ranks * parts, number) for number in range(rank, ranks * parts, ranks)]
        if run is None:
            given = cast(Any, stages if parts > 1 else stages[0])
            run = SCHEDULES[schedule](given, chunks, loss_fn=lambda *_: None)
        vars(run).update(_stages=stages, rank=rank) if parts > 1 else vars(run).update(_stage=stages[0])
        with _noting(items):
            run._step_microbatches(target_mbs=[None] * chunks, return_outputs=False)
        orders.append(tuple(items))
        items.clear()
    return tuple(orders)


def noted_micro_batches(order: Sequence[Item], *, by_state: bool) -> dict[int, set[int]]:
    """Return the micro-batches of each of a rank's stages whose passes represent all others, without the first one.

    Args:
        order: The rank's order.
        by_state: Whether a pass finds its stage's parameters as the pass before it left them: gathered, or not.
    """
    noted: dict[int, set[int]] = {}
    before: dict[int, str] = {}
    known: set[tuple[str | int, ...]] = set()
    for action in order:
        if not isinstance(action, Compute):
            continue
        context = (action.stage, action.phase, before.get(action.stage, "") if by_state else "")
        of_stage = noted.setdefault(action.stage, set())
        if action.micro_batch and context not in known:
            known.add(context)
            of_stage.add(action.micro_batch)
        before[action.stage] = action.phase
    return noted


@contextmanager
def _noting(items: list[Item]) -> Iterator[None]:
    def batched(messages: Sequence[Message], desc: str | None = None) -> list[SimpleNamespace]:
        """Post as PyTorch does: messages of one direction one by one, others together."""
        both_directions = len(messages) > 1 and len({message.sends for message in messages}) == 2
        groups = [tuple(messages)] if both_directions else [(message,) for message in messages]
        items.extend(Exchange(group, waits=False) for group in groups)
        waits = (functools.partial(items.append, Exchange(group, waits=True)) for group in groups)
        return [SimpleNamespace(wait=wait) for wait in waits]

    def by_peer(messages: Sequence[Message], desc: str | None = None) -> dict[int, list[SimpleNamespace]]:
        return {0: batched(messages)} if messages else {}

    with (
        replaced(schedules, "_batch_p2p", batched),
        replaced(schedules, "_sorted_batch_p2p", by_peer),
        replaced(schedules._PipelineSchedule, "_initialize_pp_stages", lambda *_, **__: (True, True)),
    ):
        yield


class _BlankStage:
    """A `PipelineStage` without computation: it notes a schedule's calls."""

    submod: object = None
    has_backward = True
    _nothing: Callable[..., None] = staticmethod(lambda *_args, **_kwargs: None)
    scale_grads = perform_reduce_grad = set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = _nothing

    def __init__(self, items: list[Item], ranks: int, stages: int, number: int) -> None:
        self._items, self.stage_index, self.num_stages = items, number, stages
        self.group_size, self.group_rank = ranks, number % ranks
        self.is_first, self.is_last = number == 0, number == stages - 1
        self.args_recv_info: dict[int, tuple[()]] = {0: ()}
        self.act_send_info: dict[int, list[int]] = {}

    def forward_one_chunk(self, chunk: int, *_args: Any, **_kwargs: Any) -> None:
        self._items.append(Compute("forward", self.stage_index, chunk))

    def backward_one_chunk(self, chunk: int, *_args: Any, **_kwargs: Any) -> None:
        self._items.append(Compute("backward", self.stage_index, chunk))

    def get_fwd_recv_ops(self, chunk: int) -> list[Message]:
        return [] if self.is_first else [Message("forward", self.stage_index, chunk, sends=False)]

    def get_fwd_send_ops(self, chunk: int) -> list[Message]:
        return [] if self.is_last else [Message("forward", self.stage_index + 1, chunk, sends=True)]

    def get_bwd_recv_ops(self, chunk: int) -> list[Message]:
        return [] if self.is_last else [Message("backward", self.stage_index, chunk, sends=False)]

    def get_bwd_send_ops(self, chunk: int) -> list[Message]:
        return [] if self.is_first else [Message("backward", self.stage_index - 1, chunk, sends=True)]
