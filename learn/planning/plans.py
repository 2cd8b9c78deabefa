"""The call `learn.plan`: a job's layouts on several GPUs, whether they fit, and their step times.

Start reading at `plan`; `learn.planning.search` decides which micro-batches are traced.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError, require_one_of, shown
from conf.files.outputs import checked_output
from conf.plain_text import count_of
from conf.reports.blocks import write_page
from featurize.configs.trial import TrialConfig
from featurize.job.training_settings import CHECKPOINTING, Training, training_of
from learn.estimation.answers import make_estimate
from learn.estimation.job_estimate import Estimate
from learn.estimation.requests import Request, request_of
from learn.estimators.protocol import LEVEL
from learn.planning.meshes import (
    check_gpus,
    in_search_order,
    layout_settings,
    mesh_text,
    meshes_of,
    modes_of,
    tokens_of,
    traced_as,
)
from learn.planning.plan_report import EXTRAPOLATED, TRACED, LayoutPlan, PlanRow, in_order, plan_page
from learn.planning.search import SHALLOW, Findings, LayoutSearch, MicroBatches, Screening

if TYPE_CHECKING:
    from featurize.job.layout import Parallel
    from featurize.trace.trace_cache import Traces
    from learn.estimation.requests import Inputs, Model

NONE = "none"
WAYS = (NONE, *reversed(CHECKPOINTING))  # in ascending order of recomputation
_TRIED = (NONE, "full")
Progress = Callable[[str, int, int], None]


def plan(
    model: Model,
    inputs: Inputs,
    *,
    gpus: int | Sequence[int],
    global_batch: int | None = None,
    checkpointing: str | Sequence[str] | None = None,
    parallel: Mapping[str, Any] | str | None = None,
    modes: str | Sequence[str] | None = None,
    report: str | os.PathLike[str] | None = None,
    progress: Progress = lambda _layout, _done, _of: None,
    **options: Any,
) -> LayoutPlan:
    """Return the layouts of a training job on several GPUs: those that fit first, sorted by samples a second.

    All degrees of the estimated modes that multiply to the number of GPUs are tried. Layouts that differ in their
    replicas or their network alone share a trace.

    Args:
        model: A module or a factory of one, as in `estimate`.
        inputs: A rank's batch of any size, as in `estimate`: it is doubled while it fits, or halved until it does.
        gpus: GPUs of the job, or several numbers of them.
        global_batch: Samples of a step of all ranks. Micro-batches are then powers of two, and gradients are
            accumulated to reach it. None: any micro-batch, with `accumulation` micro-steps.
        checkpointing: Names of `WAYS` to try; by default `none` and `full`.
        parallel: Settings that all layouts share, without degrees: `"gpus_per_node=4,network_gb_s=50"`.
        modes: Names of the modes whose degrees are tried, of pp, ddp, fsdp, cp, tp and ep. By default pp, ddp, fsdp and
            tp, and combined with fsdp alone: cp where samples have 32,768 tokens or more, ep where the model has
            experts. A pipeline that its bubble alone makes slower than a layout without one is not traced.
        report: A file to write: one HTML page with the layouts' memory over their throughput.
        progress: Called with a layout, the number of completed ones, and their total.
        **options: Further keywords of `estimate`: `device`, training settings, `machine`, ... A `target` belongs to the
            given batch.

    Raises:
        UsageError: As in `estimate`; no layout is possible.

    Known limitations:
        A micro-batch smaller than one that fits is not tried: it is assumed to be slower.

    Example:
        >>> plan(make_gpt, [8, 1024], input_dtype="int64", gpus=64, device="H100-SXM5-80GB", precision="bf16").best
    """
    began = time.monotonic_ns()
    if report is not None:
        checked_output(report, key="report")
    counts = check_gpus(gpus)
    request = _request(model, inputs, global_batch, options)
    job, spec = request.job, request.platform.device
    searches = _Searches(request, global_batch, _ways(checkpointing, training_of(job.settings)))
    layouts, notes = [], []
    chosen = modes_of(modes, tokens_of(job.batch("meta")[0]), searches.screening.count_experts)
    for count in counts:
        several, left_out = meshes_of(count, layout_settings(count, parallel, chosen.names), chosen)
        layouts += several
        notes += left_out
    searches.run(layouts, progress)
    ordered = in_order(searches.rows)
    if all(row.fits is None for row in ordered):
        raise UsageError(f"no layout is possible: {ordered[0].mesh}: {ordered[0].why}")
    best = ordered[0]
    limit_mib = min((estimate.allowed_mib for estimate in searches.estimates.values()), default=spec.memory_mib)
    warnings = searches.estimates[best].warnings if best.fits else ()
    layout_plan = LayoutPlan(
        name=job.name,
        device=spec.name,
        limit_mib=limit_mib,
        coverage=options.get("coverage", LEVEL),
        global_batch=global_batch,
        rows=ordered,
        notes=tuple(dict.fromkeys([*notes, *searches.notes(), *warnings])),
        seconds=(time.monotonic_ns() - began) / 1e9,
    )
    if report is not None:
        write_page(Path(report), plan_page(layout_plan))
    return layout_plan


def _request(model: object, inputs: Inputs | None, global_batch: object, options: Mapping[str, Any]) -> Request:
    """Return the request that all layouts have in common, on one GPU, checked. Raises `UsageError`."""
    if isinstance(model, TrialConfig | Mapping) or not callable(model):
        raise UsageError(
            f"plan takes an nn.Module or a factory of one, and no trial config; got {type(model).__name__}"
        )
    if inputs is None:
        raise UsageError("a module needs inputs: tensors or shapes, as in input=[64,3,224,224]")
    if global_batch is not None and (type(global_batch) is not int or global_batch < 1):
        raise UsageError(f"global_batch must be a whole number >= 1, got {shown(global_batch)}")
    request = request_of(model, inputs, **options)
    if global_batch is not None and training_of(request.job.settings).accumulation != 1:
        raise UsageError("global_batch decides how many micro-steps a step has: leave accumulation out")
    request.job.with_samples(2 * request.job.batch_size)  # raises where the inputs cannot be scaled
    return request


# (micro-batch, accumulation, checkpointing) -> traces of one step, which layouts share, and a row's `known`.
_SharedTraces = dict[tuple[int, int, str | None], tuple["Traces", str]]


class _Searches:
    """The search over all layouts.

    screening   shallow copies of the job's model
    rows        all layouts so far; `estimates`: those of the traced ones

    Args:
        request: What all layouts have in common.
        global_batch: Samples of a step of all ranks.
        ways: Checkpointing to try.
    """

    def __init__(self, request: Request, global_batch: int | None, ways: Sequence[str | None]) -> None:
        self._request, self._global_batch, self._ways = request, global_batch, ways
        self._settings = training_of(request.job.settings)
        self._findings = Findings(request.platform.device.memory_mib)
        self.screening = Screening(request.job.build)
        self.rows: list[PlanRow] = []
        self.estimates: dict[PlanRow, Estimate] = {}

    def run(self, layouts: Sequence[Parallel], progress: Progress) -> None:
        """Add the rows of all layouts. Layouts that share their traces follow each other."""
        completed = 0
        for _, alike in groupby(sorted(layouts, key=in_search_order), key=traced_as):
            traces: _SharedTraces = {}
            for layout in alike:
                progress(mesh_text(layout), completed, len(layouts))
                self._add(layout, traces)
                completed += 1

    def _add(self, layout: Parallel, traces: _SharedTraces) -> None:
        batches, why = self._batches(layout), self._findings.not_worth(layout)
        if batches is None:
            why = f"{self._global_batch:,} samples do not divide over {layout.replicas:,} replicas"
        elif why is None:
            why = self._findings.bubble_too_long(layout, batches)
        if why is not None or batches is None:
            self.rows.append(
                PlanRow(parallel=layout, micro_batch=None, accumulation=1, checkpointing=None, fits=None, why=why)
            )
            return

        def estimate_sharing_traces(size: int, count: int, way: str | None) -> tuple[Estimate, str]:
            request = self._request_of(layout, size, count, way)
            if (size, count, way) not in traces:
                screened = self.screening.traces(request)
                traces[size, count, way] = screened, EXTRAPOLATED if screened else TRACED
            shared, known = traces[size, count, way]
            return make_estimate(request, traces=shared)[0], known

        search = LayoutSearch(layout, batches, self._ways, self._findings, estimate_sharing_traces)
        self.rows += search.rows()
        self.estimates |= search.estimates

    def _batches(self, layout: Parallel) -> MicroBatches | None:
        """Return the micro-batches of a layout; None where its replicas do not divide the global batch."""
        given = self._request.job.batch_size
        if self._global_batch is None:
            return MicroBatches(given=given, micro_steps=self._settings.accumulation, pipelined=layout.degrees.pp)
        if self._global_batch % layout.replicas:
            return None
        return MicroBatches(given=given, per_replica=self._global_batch // layout.replicas, pipelined=layout.degrees.pp)

    def _request_of(self, layout: Parallel, size: int, count: int, way: str | None) -> Request:
        """Return the request for one layout with one micro-batch."""
        if layout.degrees.pp > 1:  # its micro-steps are micro-batches of one schedule
            layout, size, count = layout.changed(micro_batches=count), size * count, 1
        without: dict[str, Any] = {} if way is not None else {"checkpoint_every": 1, "checkpoint_reentrant": False}
        settings = replace(self._settings, accumulation=count, checkpointing=way, **without)
        job = replace(self._request.job.with_samples(size), settings=settings, parallel=layout)
        return replace(self._request, job=job)

    def notes(self) -> list[str]:
        """Return notes on the traces that rows were extrapolated from; empty where all were traced."""
        rows = [row for row in self.rows if row.known == EXTRAPOLATED]
        if not rows:
            return []
        return [
            f"{count_of(len(rows), 'row')} extrapolated: traced with {SHALLOW} and {SHALLOW + 1} of "
            f"{self.screening.blocks} blocks, and what a block adds repeated; known=traced: with all blocks"
        ]


def _ways(given: str | Sequence[str] | None, settings: Training) -> tuple[str | None, ...]:
    """Return the checkpointing to try, as in `Training`, in ascending order of recomputation."""
    asked_for = settings.checkpointing
    if given is None:
        given = _TRIED if asked_for is None else asked_for
    elif asked_for is not None:
        raise UsageError("checkpointing is given twice: in settings, and by itself")
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        require_one_of("checkpointing", name, WAYS)
    if not names:
        raise UsageError(f"checkpointing names nothing to try; known: {', '.join(WAYS)}")
    return tuple(None if way == NONE else way for way in WAYS if way in names)
