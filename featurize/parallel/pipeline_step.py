"""The time of a pipeline's step, from the traces of its ranks: what each waits for others.

Start reading at `waits_of`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from featurize.device_spec import DeviceSpec
from featurize.kernel_model.step_time import overlapped, time_step
from featurize.parallel.collectives import SEND, collective_s, fabric_of, fabrics_of
from featurize.parallel.delays import begin_moments_ms, delays_ms
from featurize.parallel.layout import Parallel
from featurize.parallel.pipeline_order import orders_of
from featurize.parallel.pipeline_time import Compute, Item, Message, Post, Wait, finished_ms
from featurize.parallel.traced_stage import AXIS
from featurize.step_trace import PipelinePart, StepTrace
from featurize.training_settings import TrainingSettings, training_of

_BEFORE, _AFTER = "before", "after"  # the schedule's passes, as phases


@dataclass(frozen=True)
class _Timed:
    """What of a rank's step takes how long, in ms: by phase, number of the stage on its rank, and micro-batch."""

    alone: dict[tuple[str, int, int], float]
    waiting: dict[tuple[str, int, int], float]  # for collectives, too


def waits_of(
    part: PipelinePart, spec: DeviceSpec, settings: TrainingSettings, parallel: Parallel, step_ms: float
) -> dict[str, float]:
    """Return `exposed_ms` and `bubble_ms` of one rank.

    All passes of the schedule are put into their order on all ranks. The bubble is what is left with messages and
    collectives that take no time.

    Args:
        part: The rank's, with the traces of all.
        spec: The GPU model.
        settings: The traces' own.
        parallel: The job's layout.
        step_ms: The rank's own step, without waiting for any other.
    """
    runs = training_of(settings).accumulation
    timed: dict[int, _Timed] = {}
    for group in part.groups:
        of_group = _timed(group.trace, spec, settings, parallel)
        timed |= dict.fromkeys(group.ranks, of_group)
    orders = [_whole_step(order, rank, runs, parallel.chunks) for rank, order in enumerate(orders_of(parallel))]

    def key(one: Compute) -> tuple[str, int, int]:
        return one.phase, one.stage // parallel.pp, one.micro_batch

    def rank_of(one: Compute) -> _Timed:
        return timed[one.stage % parallel.pp]

    computed_ms = max(finished_ms(orders, lambda one: rank_of(one).alone[key(one)], lambda _: 0.0))
    moves_ms = _moves_ms(part.sent, spec, parallel)

    def message_ms(one: Message) -> float:
        return moves_ms[one.stage - 1 if one.phase == "forward" else one.stage]

    whole_ms = max(finished_ms(orders, lambda one: rank_of(one).waiting[key(one)], message_ms))
    return {"exposed_ms": max(whole_ms - computed_ms, 0.0), "bubble_ms": max(computed_ms - step_ms, 0.0)}


def _whole_step(order: Sequence[Item], rank: int, runs: int, chunks: int) -> list[Item]:
    """All runs of a schedule in a step, which number their micro-batches on; what comes before and after them."""

    def later(item: Item, run: int) -> Item:
        if isinstance(item, Compute):
            return item._replace(micro_batch=item.micro_batch + run * chunks)
        moved = tuple(one._replace(micro_batch=one.micro_batch + run * chunks) for one in item.messages)
        return Post(moved) if isinstance(item, Post) else Wait(moved)

    passes = [later(item, run) for run in range(runs) for item in order]
    return [Compute(_BEFORE, rank, 0), *passes, Compute(_AFTER, rank, 0)]


def _timed(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings, parallel: Parallel) -> _Timed:
    part = trace.pipeline
    assert part is not None and part.passes, "a rank of a pipeline"
    step = time_step(trace, spec, settings)
    begins = begin_moments_ms(trace, spec, settings, step.busy_ms)
    collectives = [one for one in trace.collectives if one.axis != AXIS]
    fabrics = fabrics_of(spec, parallel, [one.axis for one in collectives])
    lasts = [collective_s(one.kind, one.nbytes, fabrics[one.axis]) * 1e3 for one in collectives]
    delays = delays_ms(collectives, lasts, begins)
    moments = [moment for moment, _ in delays]

    def late(moment: int) -> float:
        place = bisect.bisect_right(moments, moment)
        return delays[place - 1][1] if place else 0.0

    # A rank's pass goes on until its next one begins; the micro-steps of a step number their micro-batches on.
    runs: dict[tuple[str, int, int], int] = {}
    keys = [(_BEFORE, 0, 0)]
    for one in part.passes:
        pass_key = one.phase, one.stage // parallel.pp, one.micro_batch
        run = runs[pass_key] = runs.get(pass_key, -1) + 1
        keys.append((*pass_key[:2], one.micro_batch + run * parallel.chunks))
    keys.append((_AFTER, 0, 0))
    edges = [0, *(one.begin for one in part.passes), part.end, len(begins) - 1]
    alone = _beside_the_host([begins[edge] for edge in edges], step.host_ms)
    waiting = _beside_the_host([0.0, *(begins[edge] + late(edge) for edge in edges[1:])], step.host_ms)
    return _Timed(
        dict(zip(keys, _differences(alone), strict=True)), dict(zip(keys, _differences(waiting), strict=True))
    )


def _beside_the_host(ends_ms: Sequence[float], host_ms: float) -> list[float]:
    """Return moments of the GPU's own time in a step that the host launches meanwhile: later, in proportion."""
    slower = overlapped(ends_ms[-1], host_ms) / ends_ms[-1] if ends_ms[-1] else 1.0
    return [end * slower for end in ends_ms]


def _differences(moments: Sequence[float]) -> list[float]:
    return [end - begin for begin, end in itertools.pairwise(moments)]


def _moves_ms(sent: Sequence[int], spec: DeviceSpec, parallel: Parallel) -> list[float]:
    """How long a message takes from each stage to the next one, and back."""
    fabric, times = replace(fabric_of(spec, parallel), ranks=2), []
    for stage, nbytes in enumerate(sent):
        firsts = [one % parallel.pp * parallel.of_stage for one in (stage, stage + 1)]
        ends = [(first, first + parallel.of_stage - 1) for first in firsts]
        nodes = [{at // parallel.gpus_per_node for at in pair} for pair in zip(*ends, strict=True)]
        times.append(collective_s(SEND, nbytes, replace(fabric, nodes=max(map(len, nodes)))) * 1e3)
    return times
