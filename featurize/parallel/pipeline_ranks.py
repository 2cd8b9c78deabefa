"""The ranks of a pipeline: one of each kind is traced, and the one with the most bytes alive stands for the job.

Start reading at `trace_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from torch import nn

from featurize.deeper import built_to_shorten
from featurize.parallel.layout import Parallel
from featurize.parallel.repeated_passes import DoesNotRepeat
from featurize.step_trace import RanksAlike, StepTrace


def trace_ranks(of_rank: Callable[[int, bool], StepTrace], parallel: Parallel, rank: int | None = None) -> StepTrace:
    """Return the trace of the rank with the most bytes alive, with those of all others in its `pipeline.groups`.

    Ranks are of one kind whose stages hold modules that are alike. The first of them has the most micro-batches in
    flight, whatever the schedule.

    Args:
        of_rank: Gives the trace of one of all ranks; its second argument is `every_pass` of `trace_step`.
        parallel: The job, with a pipeline.
        rank: The only one that is wanted, of all ranks. None: all of them.
    """

    def trace_rank(number: int) -> StepTrace:
        try:
            return of_rank(number, False)
        except DoesNotRepeat:
            return of_rank(number, True)

    if rank is not None:
        return trace_rank(rank)
    first = trace_rank(0)
    assert first.pipeline is not None, "a rank of a pipeline"
    traces: dict[Hashable, StepTrace] = {}
    members: dict[Hashable, list[int]] = {}
    for rank in range(parallel.pp):
        kind = first.pipeline.kinds[rank :: parallel.pp]
        if kind not in traces:
            traces[kind] = trace_rank(rank * parallel.of_stage) if rank else first
        members.setdefault(kind, []).append(rank)
    groups = tuple(RanksAlike(tuple(members[kind]), trace) for kind, trace in traces.items())
    worst = max(traces.values(), key=lambda trace: trace.peak_live_bytes)
    assert worst.pipeline is not None
    return replace(worst, pipeline=replace(worst.pipeline, groups=groups))


def built_once(model: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    """Return a model that all ranks can be cut from; a factory where a copy would not be like what it makes."""
    if isinstance(model, nn.Module):
        return model
    try:
        return built_to_shorten(model) or model
    except Exception:  # a factory may raise anything, and the trace says so
        return model
