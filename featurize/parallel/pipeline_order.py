"""What each rank of a pipeline does in a step, in its order, as PyTorch's schedules say it.

Start reading at `orders_of`. The schedules run here over stages that hold nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch.distributed.pipelining import schedules

from featurize.parallel.layout import Parallel
from featurize.parallel.layout_modes import GPIPE, INTERLEAVED, ONE_F_ONE_B
from featurize.parallel.pipeline_time import Compute, Item, Message, Post, Wait
from featurize.replacing import replaced

_CLASSES = {
    GPIPE: schedules.ScheduleGPipe,
    ONE_F_ONE_B: schedules.Schedule1F1B,
    INTERLEAVED: schedules.ScheduleInterleaved1F1B,
}


def schedule_class(parallel: Parallel) -> type:
    """Return PyTorch's class of a layout's schedule."""
    return _CLASSES[parallel.order]


def orders_of(parallel: Parallel) -> tuple[tuple[Item, ...], ...]:
    """Return the items of each rank of `pp`, in the order in which it comes to them."""
    return _orders(parallel.order, parallel.pp, parallel.chunks, parallel.parts)


@functools.lru_cache(maxsize=8)
def _orders(schedule: str, ranks: int, chunks: int, parts: int) -> tuple[tuple[Item, ...], ...]:
    """One schedule runs as each of its ranks: PyTorch's own plan all of them when they are made."""
    items: list[Item] = []
    run = None
    orders = []
    for rank in range(ranks):
        stages = [_BlankStage(items, ranks, ranks * parts, number) for number in range(rank, ranks * parts, ranks)]
        if run is None:
            given = cast(Any, stages if parts > 1 else stages[0])
            run = _CLASSES[schedule](given, chunks, loss_fn=lambda *_: None)
        vars(run).update(_stages=stages, rank=rank) if parts > 1 else vars(run).update(_stage=stages[0])
        with _noting(items):
            run._step_microbatches(target_mbs=[None] * chunks, return_outputs=False)
        orders.append(tuple(items))
        items.clear()
    return tuple(orders)


def noted_micro_batches(order: Sequence[Item], *, by_state: bool) -> dict[int, set[int]]:
    """Return micro-batches of each stage of a rank whose passes show what all others do, but for the first one's.

    Args:
        order: Of the rank.
        by_state: A pass finds the parameters of its stage as the pass before it left them: gathered, or not.
    """
    noted: dict[int, set[int]] = {}
    before: dict[int, str] = {}
    known: set[tuple[str | int, ...]] = set()
    for one in order:
        if not isinstance(one, Compute):
            continue
        context = (one.stage, one.phase, before.get(one.stage, "") if by_state else "")
        of_stage = noted.setdefault(one.stage, set())
        if one.micro_batch and context not in known:
            known.add(context)
            of_stage.add(one.micro_batch)
        before[one.stage] = one.phase
    return noted


@contextmanager
def _noting(items: list[Item]) -> Iterator[None]:
    def batched(messages: Sequence[Message], desc: str | None = None) -> list[_Posted]:
        """As PyTorch's own: messages of one direction are posted one by one, others together."""
        both = len(messages) > 1 and len({one.sends for one in messages}) == 2
        groups = [tuple(messages)] if both else [(one,) for one in messages]
        items.extend(map(Post, groups))
        return [_Posted(items, group) for group in groups]

    def by_peer(messages: Sequence[Message], desc: str | None = None) -> dict[int, list[_Posted]]:
        return {0: batched(messages)} if messages else {}

    ready = lambda *_args, **_kwargs: (True, True)  # noqa: E731
    with (
        replaced(schedules, "_batch_p2p", batched),
        replaced(schedules, "_sorted_batch_p2p", by_peer),
        replaced(schedules._PipelineSchedule, "_initialize_pp_stages", ready),
    ):
        yield


class _Posted:
    """Messages that are under way."""

    def __init__(self, items: list[Item], messages: tuple[Message, ...]) -> None:
        self._items, self._messages = items, messages

    def wait(self) -> None:
        self._items.append(Wait(self._messages))


class _BlankStage:
    """Stands for a `PipelineStage`: notes what a schedule asks of it."""

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
