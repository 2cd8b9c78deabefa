"""The time of a pipeline's step, from the traces of its ranks: each rank's waiting time.

Start reading at `waits_of`. PyTorch's own schedules, run over empty stages, define the order of each rank.
"""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from torch.distributed.pipelining import schedules

from featurize.device.device_spec import DeviceSpec
from featurize.job.layout import GPIPE, INTERLEAVED, ONE_F_ONE_B, Parallel
from featurize.job.training_settings import TrainingSettings, training_of
from featurize.operators.replacing import replaced
from featurize.recording.step_trace import PipelinePart, StepTrace
from featurize.timing.collectives import SEND, collective_s, fabric_of, fabrics_of
from featurize.timing.step_time import begin_moments_ms, delays_ms, overlap_times, time_step


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


_CLASSES = {
    GPIPE: schedules.ScheduleGPipe,
    ONE_F_ONE_B: schedules.Schedule1F1B,
    INTERLEAVED: schedules.ScheduleInterleaved1F1B,
}


def schedule_class(parallel: Parallel) -> type:
    """Return PyTorch's class of a layout's schedule."""
    return _CLASSES[parallel.order]


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
            run = _CLASSES[schedule](given, chunks, loss_fn=lambda *_: None)
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
    def in_transit(messages: tuple[Message, ...]) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: items.append(Exchange(messages, waits=True)))

    def batched(messages: Sequence[Message], desc: str | None = None) -> list[SimpleNamespace]:
        """Post as PyTorch does: messages of one direction one by one, others together."""
        both_directions = len(messages) > 1 and len({message.sends for message in messages}) == 2
        groups = [tuple(messages)] if both_directions else [(message,) for message in messages]
        items.extend(Exchange(group, waits=False) for group in groups)
        return list(map(in_transit, groups))

    def by_peer(messages: Sequence[Message], desc: str | None = None) -> dict[int, list[SimpleNamespace]]:
        return {0: batched(messages)} if messages else {}

    ready = lambda *_args, **_kwargs: (True, True)  # noqa: E731
    with (
        replaced(schedules, "_batch_p2p", batched),
        replaced(schedules, "_sorted_batch_p2p", by_peer),
        replaced(schedules._PipelineSchedule, "_initialize_pp_stages", ready),
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


AXIS = "pp"
_BEFORE, _AFTER = ("before", 0, 0, 0), ("after", 0, 0, 0)  # the parts before and after the schedule's passes


# Milliseconds of each part of a rank's step: by phase, number of the stage on its rank, micro-batch, and run of the
# schedule.
_Lasting: TypeAlias = dict[tuple[str, int, int, int], float]


def waits_of(
    part: PipelinePart, spec: DeviceSpec, settings: TrainingSettings, parallel: Parallel, step_ms: float
) -> tuple[float, float]:
    """Return `exposed_ms` and `bubble_ms` of one rank.

    All passes of the schedule are put into their order on all ranks. The bubble is the waiting time if messages and
    collectives took no time.

    Args:
        part: The rank's part, with the traces of all ranks.
        spec: The GPU model.
        settings: The traces' training settings.
        parallel: The job's layout.
        step_ms: The rank's own step, without any waiting.
    """
    alone: dict[int, _Lasting] = {}  # each rank's durations
    waiting: dict[int, _Lasting] = {}  # each rank's durations with waits for collectives
    for group in part.groups:
        timed = _time_passes(group.trace, spec, settings, parallel)
        for of_rank, lasting in zip((alone, waiting), timed, strict=True):
            of_rank.update(dict.fromkeys(group.ranks, lasting))
    moves_ms = _moves_ms(part.sent, spec, parallel)

    def pass_ms(of_rank: Mapping[int, _Lasting], run: int, computed: Compute) -> float:
        number, rank = divmod(computed.stage, parallel.degrees.pp)
        return of_rank[rank][computed.phase, number, computed.micro_batch, run]

    def message_ms(message: Message) -> float:
        return moves_ms[message.stage - 1 if message.phase == "forward" else message.stage]

    def end_ms(of_rank: Mapping[int, _Lasting], message_ms: Callable[[Message], float]) -> float:
        ends = [of_rank[rank][_BEFORE] for rank in range(parallel.degrees.pp)]
        for run in range(training_of(settings).accumulation):
            ends = finished_ms(orders_of(parallel), functools.partial(pass_ms, of_rank, run), message_ms, ends)
        return max(end + of_rank[rank][_AFTER] for rank, end in enumerate(ends))

    computed_ms = end_ms(alone, lambda _: 0.0)
    return max(end_ms(waiting, message_ms) - computed_ms, 0.0), max(computed_ms - step_ms, 0.0)


def _time_passes(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings, parallel: Parallel) -> list[_Lasting]:
    part = trace.pipeline
    assert part is not None and part.passes, "a rank of a pipeline"
    step = time_step(trace, spec, settings)
    begins = begin_moments_ms(trace, spec, settings, step.busy_ms)
    collectives = [collective for collective in trace.collectives if collective.axis != AXIS]
    fabrics = fabrics_of(spec, parallel, [collective.axis for collective in collectives])
    lasts = [
        collective_s(collective.kind, collective.nbytes, fabrics[collective.axis]) * 1e3 for collective in collectives
    ]
    delays = delays_ms(collectives, lasts, begins)
    moments = [moment for moment, _ in delays]

    def late(moment: int) -> float:
        place = bisect.bisect_right(moments, moment)
        return delays[place - 1][1] if place else 0.0

    # A rank's pass continues until its next one begins.
    runs: Counter[tuple[str, int, int]] = Counter()
    keys = [_BEFORE]
    for part_pass in part.passes:
        key = part_pass.phase, part_pass.stage // parallel.degrees.pp, part_pass.micro_batch
        keys.append((*key, runs[key]))
        runs[key] += 1
    keys.append(_AFTER)
    edges = [0, *(part_pass.begin for part_pass in part.passes), part.end, len(begins) - 1]
    waiting = [0.0, *(begins[edge] + late(edge) for edge in edges[1:])]
    lasting = []
    for ends_ms in ([begins[edge] for edge in edges], waiting):
        # The host launches at the same time: moments of the GPU's own time are scaled to the step's.
        slower = overlap_times(ends_ms[-1], step.host_ms) / ends_ms[-1] if ends_ms[-1] else 1.0
        lasts_ms = np.diff([end * slower for end in ends_ms]).tolist()
        lasting.append(dict(zip(keys, lasts_ms, strict=True)))
    return lasting


def _moves_ms(sent: Sequence[int], spec: DeviceSpec, parallel: Parallel) -> list[float]:
    """Return the duration in ms of a message from each stage to the next one, and back."""
    fabric, times = replace(fabric_of(spec, parallel), ranks=2), []
    for stage, nbytes in enumerate(sent):
        firsts = [number % parallel.degrees.pp * parallel.of_stage for number in (stage, stage + 1)]
        ends = [(first, first + parallel.of_stage - 1) for first in firsts]
        nodes = [{rank // parallel.cluster.gpus_per_node for rank in pair} for pair in zip(*ends, strict=True)]
        times.append(collective_s(SEND, nbytes, replace(fabric, nodes=max(map(len, nodes)))) * 1e3)
    return times
