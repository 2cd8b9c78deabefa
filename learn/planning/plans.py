"""The call `learn.plan`: a job's layouts on several GPUs, whether they fit, and their step times.

Start reading at `plan`; `LayoutSearch.rows` decides which micro-batches of a layout are traced. `Screening.traces`
extrapolates the trace of a model whose blocks repeat from those of two shallow copies; `deeper` repeats a block's
part. A `LayoutPlan` is the result, and `plan_page` draws it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import CommandError, UsageError, first_line, require_one_of, shown
from conf.files.outputs import checked_output
from conf.plain_text import MISSING, count_of
from conf.reports.blocks import Callout, Drawn, Lead, Legend, Outcome, Page, Section, table, write_page
from conf.reports.charts import Axis, Margins, Plot, Svg
from featurize.configs.trial import TrialConfig
from featurize.job.layout import Parallel
from featurize.job.training_settings import CHECKPOINTING, Training, training_of
from featurize.recording.skeleton import alike_blocks, built_to_shorten, with_blocks
from featurize.recording.step_trace import CannotDeepen, deeper
from learn.estimation.answers import make_estimate
from learn.estimation.estimate_view import rate
from learn.estimation.job_estimate import Estimate
from learn.estimation.requests import Request, request_of
from learn.estimators.protocol import LEVEL
from learn.job.traced import trace_of
from learn.job.training_job import as_a_training_script
from learn.planning.meshes import (
    check_gpus,
    in_search_order,
    layout_settings,
    mesh_text,
    meshes_of,
    modes_of,
    ranks_within,
    shards_of,
    tokens_of,
    traced_as,
    within_text,
)

if TYPE_CHECKING:
    from torch import nn

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


FEWEST = 8  # blocks: shallower models are traced in full
SHALLOW = 4  # blocks of the shallow copy: the first and the last, and two between them to compare


class Screening:
    """Shallow copies of one model, and the model's traces extrapolated from theirs.

    blocks   number of the model's identical blocks; 0: it is traced in full

    Args:
        factory: Makes the model.
    """

    def __init__(self, factory: Callable[[], nn.Module]) -> None:
        self._factory = factory
        self._short: dict[int, nn.Module] = {}
        self._whole: set[Hashable] = set()  # kinds of layouts that cannot be extrapolated

    @cached_property
    def model(self) -> nn.Module | None:
        """The model on the meta device. None where it cannot be built, or a copy would differ from it."""
        try:
            return built_to_shorten(self._factory)
        except Exception:  # a model may raise anything; its trace raises it again
            return None

    @cached_property
    def blocks(self) -> int:
        """The number of blocks. The model is built on first use."""
        return 0 if self.model is None else alike_blocks(self.model)

    def count_experts(self) -> set[int]:
        """Return the numbers of experts in the model's mixtures."""
        from featurize.training.sharding import expert_counts  # its imports take a while

        return set() if self.model is None else expert_counts(self.model)

    def traces(self, request: Request) -> Traces:
        """Return the traces of a job, as `learn.estimation.answers` takes them; empty where it has to be traced in
        full."""
        parallel, training = request.job.parallel, training_of(request.job.settings)
        # Buckets of gradients hold parts of several blocks, each stage of a pipeline has its own blocks, and FSDP1's
        # host waits for earlier blocks.
        if parallel is None or not parallel.shards or parallel.flat or parallel.degrees.pp > 1:
            return {}
        kind = tuple(parallel.groups), training.checkpointing
        period = training.checkpoint_every if training.checkpointing else 1
        times, remainder = divmod(self.blocks - SHALLOW * period, period)
        if self.blocks < FEWEST * period or remainder or kind in self._whole:
            return {}
        try:
            shallow, longer = (self._trace_with(request, count * period) for count in (SHALLOW, SHALLOW + 1))
            return {kernels: deeper(trace, longer[kernels], times) for kernels, trace in shallow.items()}
        except (CommandError, CannotDeepen):  # an error of the job itself is raised again by its own trace
            self._whole.add(kind)
            return {}

    def _trace_with(self, request: Request, count: int) -> Traces:
        assert self.model is not None, "it has blocks"
        if count not in self._short:
            self._short[count] = with_blocks(self.model, count)
        short = self._short[count]
        traces: Traces = {}
        with as_a_training_script():
            trace_of(replace(request.job, build=lambda: short), request.platform.device, traces)
        return traces


_CLEARLY = 1.1  # times the limit: a layout above it does not fit with fewer shards either
_BEYOND_COMPUTED = 1.05  # factor by which larger batches may exceed the samples a second so far
# Parts of a peak that exist at any moment, with any batch.
_OF_ANY_BATCH = (
    "parameters",
    "master weights",
    "optimizer state",
    "gradient buckets",
    "context",
    "communication",
    "other users",
)
_AS_QUICK = 0.97  # times the samples a second with fewer ranks within layers: below it, more ranks only get slower
_ALIKE = 2  # micro-steps after which memory stops growing, and each one takes as long as the one before
_OF_EACH_RANK = 4  # micro-batches for each rank of a pipeline, without a global batch
LARGEST_BATCH = 2**31 - 1  # beyond it, memory evidently does not depend on the batch


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """Sizes of a rank's forward pass: the given batch, doubled and halved; or the sizes that a global batch allows.

    given        samples of the inputs
    per_replica  samples of a step of one replica: the sizes are the powers of two that divide them. None: any
    micro_steps  micro-steps of a step, where `per_replica` is None
    pipelined    ranks of `pp`, whose micro-steps are the micro-batches of one run of the schedule
    """

    given: int
    per_replica: int | None = None
    micro_steps: int = 1
    pipelined: int = 1

    def at_most(self, size: int) -> int:
        """Return the largest allowed size of at most `size`; 0 means the given batch."""
        most = size or self.given
        if self.per_replica is None:
            return most
        largest_power_of_two = 2 ** (most.bit_length() - 1)
        return math.gcd(self.per_replica, largest_power_of_two)

    def larger(self, size: int) -> int | None:
        """Return the next larger size; None if there is none."""
        if self.per_replica is None:
            return size * 2 if size * 2 <= LARGEST_BATCH else None
        return size * 2 if self.per_replica % (size * 2) == 0 else None

    def accumulation(self, size: int) -> int:
        """Return the micro-steps of a step with this size."""
        if self.per_replica is not None:
            return self.per_replica // size
        return self.micro_steps * (_OF_EACH_RANK * self.pipelined if self.pipelined > 1 else 1)


class Findings:
    """Results of earlier layouts that bound those of later ones.

    hopeless  layout that does not fit with any batch -> MiB that it holds with any batch
    largest   checkpointing -> largest micro-batch that fitted in the last layout

    Args:
        limit_mib: Memory of the card.
    """

    def __init__(self, limit_mib: float) -> None:
        self._limit_mib = limit_mib
        self._outgrown: list[PlanRow] = []
        self.hopeless: dict[Parallel, float] = {}
        self.largest: dict[str | None, int] = {}
        self._best: dict[int, float] = {}  # ranks -> samples a second
        # ranks, degrees within layers -> samples a second
        self._of_degrees: dict[tuple[int, tuple[int, ...]], float] = {}
        self._computed: dict[str | None, float] = {}  # checkpointing -> samples a second of one GPU that never waits

    def add(self, row: PlanRow) -> None:
        """Store a row's results."""
        if row.fits is False and row.needed_mib > _CLEARLY * self._limit_mib:
            self._outgrown.append(row)
        if row.fits and row.samples_per_s and row.step_time_ms:
            ranks, way = row.parallel.ranks, row.checkpointing
            alone = row.samples_per_s / ranks * row.step_time_ms / (row.step_time_ms - (row.exposed_ms or 0.0))
            self._best[ranks] = max(row.samples_per_s, self._best.get(ranks, 0.0))
            degrees = ranks, ranks_within(row.parallel)
            self._of_degrees[degrees] = max(row.samples_per_s, self._of_degrees.get(degrees, 0.0))
            self._computed[way] = max(alone, self._computed.get(way, 0.0))

    def outgrown_by(self, layout: Parallel, micro_batch: int, accumulation: int, way: str | None) -> str | None:
        """Return why a step cannot fit: a layout with at least as many shards of each kind exceeds the limit by far.
        None where only a trace can tell."""
        for row in self._outgrown:
            alike = (row.micro_batch, row.checkpointing) == (micro_batch, way)
            if alike and _shards_at_most(layout, row.parallel) and min(row.accumulation, _ALIKE) <= accumulation:
                return f"{mesh_text(row.parallel)} takes {row.needed_mib:,.0f} MiB already"
        return None

    def not_worth(self, layout: Parallel) -> str | None:
        """Return why a layout is not tried; None if it is.

        It holds too much with any batch, or a layout with more shards of each kind does. Or a layout with fewer ranks
        within layers was already slower than one with still fewer.
        """
        for other, held_mib in self.hopeless.items():
            if _shards_at_most(layout, other):
                return f"not tried: with any batch, {mesh_text(other)} holds {held_mib:,.0f} MiB"
        for fewer in self._fewer(layout.ranks, ranks_within(layout)):
            for fewest in self._fewer(layout.ranks, fewer):
                if self._of_degrees[layout.ranks, fewer] < _AS_QUICK * self._of_degrees[layout.ranks, fewest]:
                    beside = within_text(fewest) or "none of it"
                    return f"not tried: {within_text(fewer)} is slower than {beside}"
        return None

    def _fewer(self, ranks: int, degrees: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the fitting degrees that differ in one mode, by its next smaller degree."""
        fitting = [degrees_fitting for of_ranks, degrees_fitting in self._of_degrees if of_ranks == ranks]
        chosen = []
        for place in range(len(degrees)):
            others = degrees[:place], degrees[place + 1 :]
            smaller = [
                candidate
                for candidate in fitting
                if (candidate[:place], candidate[place + 1 :]) == others and candidate[place] < degrees[place]
            ]
            chosen += [max(smaller)] if smaller else []
        return chosen

    def bubble_too_long(self, layout: Parallel, batches: MicroBatches) -> str | None:
        """Return why a pipeline is not tried: with its bubble alone, it is slower than the best layout so far. None if
        it may be faster."""
        if layout.degrees.pp == 1 or not self._computed or layout.ranks not in self._best:
            return None
        passes = layout.parts * batches.accumulation(1)
        rate = (
            _BEYOND_COMPUTED * max(self._computed.values()) * layout.ranks * passes / (passes + layout.degrees.pp - 1)
        )
        if rate >= self._best[layout.ranks]:
            return None
        return "not tried: if it waited for its bubble alone, it would be slower than the best without pp"

    def cannot_win(self, layout: Parallel, way: str | None) -> bool:
        """Return whether this checkpointing is slower than the best layout so far, even if no rank ever waits."""
        alone = self._computed.get(way)
        return alone is not None and _BEYOND_COMPUTED * alone * layout.ranks < self._best.get(layout.ranks, 0.0)


class LayoutSearch:
    """Rows of one layout.

    Args:
        layout: The degrees and settings.
        batches: The sizes to try.
        ways: Checkpointing to try, the one that recomputes least first.
        findings: Results of earlier layouts; new ones are added.
        estimated: `estimated(micro_batch, accumulation, checkpointing)` -> the estimate of this layout, and a row's
            `known`.
    """

    def __init__(
        self,
        layout: Parallel,
        batches: MicroBatches,
        ways: Sequence[str | None],
        findings: Findings,
        estimated: Callable[[int, int, str | None], tuple[Estimate, str]],
    ) -> None:
        self._layout, self._batches, self._ways = layout, batches, ways
        self._findings, self._estimated = findings, estimated
        self.estimates: dict[PlanRow, Estimate] = {}

    def rows(self) -> Iterator[PlanRow]:
        """Yield the rows: larger batches while they fit, or smaller ones until one does.

        Checkpointing that recomputes more is tried from the largest batch that fits without it: below, it can only be
        slower. If the first row of a checkpointing is impossible, it is the only one.
        """
        before = 0  # the largest size that fits with less recomputation
        for way in self._ways:
            if before and self._findings.cannot_win(self._layout, way):
                return
            if self._findings.not_worth(self._layout) is not None:  # with any batch and checkpointing
                return
            largest = 0
            for row in self._walk(way, self._batches.at_most(max(before, self._findings.largest.get(way, 0)))):
                self._findings.add(row)
                yield row
                if row.fits:
                    largest = max(row.micro_batch or 0, largest)
            if largest:
                self._findings.largest[way] = before = largest

    def _walk(self, way: str | None, size: int) -> Iterator[PlanRow]:
        row = self.row(size, way)
        yield row
        grows = row.fits
        while row.fits == grows and row.fits is not None:
            following = self._batches.larger(size) if grows else self._smaller(row, size)
            if following is None:
                return
            reason = self._outgrown_by_half(row) if grows else None
            size, row = following, self.row(following, way, reason)
            yield row

    def _outgrown_by_half(self, row: PlanRow) -> str | None:
        """Return why a batch of twice the size cannot fit: it has twice the activations at the same moment."""
        estimate = self.estimates[row]
        parts = estimate.breakdown
        least_mib = estimate.peak_memory_mib - parts.get("fragmentation", 0.0) + parts.get("activations", 0.0)
        if least_mib <= estimate.allowed_mib:
            return None
        return f"takes {least_mib:,.0f} MiB or more: twice the activations of {row.micro_batch:,} samples"

    def _smaller(self, row: PlanRow, size: int) -> int | None:
        """Return the next smaller size that may fit, or None: at the same moment, its activations shrink in proportion,
        and the other parts stay."""
        estimate = self.estimates.get(row)
        smaller = size // 2 or None
        if estimate is None:
            return smaller
        held_mib = sum(estimate.breakdown.get(part, 0.0) for part in _OF_ANY_BATCH)
        room_mib = estimate.allowed_mib - held_mib
        if room_mib < 0:
            self._findings.hopeless[self._layout] = held_mib
            return None
        while smaller is not None and smaller / size * estimate.breakdown.get("activations", 0.0) > room_mib:
            smaller = smaller // 2 or None
        return smaller

    def row(self, size: int, way: str | None, reason: str | None = None) -> PlanRow:
        """Return the row of one micro-batch; `reason`: why it cannot fit, if that is known."""
        count, alike = self._batches.accumulation(size), _ALIKE
        if self._layout.degrees.pp > 1:  # all micro-batches run in one schedule
            alike = count
        about: dict[str, Any] = {
            "parallel": self._layout,
            "micro_batch": size,
            "accumulation": count,
            "checkpointing": way,
        }
        if reason := reason or self._findings.outgrown_by(self._layout, size, count, way):
            return PlanRow(**about, fits=False, why=reason)
        try:
            estimate, about["known"] = self._estimated(size, min(count, alike), way)
            memory: dict[str, Any] = {"peak_memory_mib": estimate.peak_memory_mib, "upper_mib": estimate.upper_mib}
            if not estimate.fits_device:
                row = PlanRow(**about, **memory, fits=False, why=f"takes {estimate.needed_mib:,.0f} MiB")
                self.estimates[row] = estimate
                return row
            first = self._estimated(size, 1, way)[0] if count > alike else estimate
        except UsageError as error:
            return PlanRow(**about | {"known": None}, fits=None, why=first_line(error))
        row = PlanRow(**about, **memory, **self._times(estimate, first, size, count, alike), fits=True)
        self.estimates[row] = estimate
        return row

    def _times(self, estimate: Estimate, first: Estimate, size: int, count: int, alike: int) -> dict[str, Any]:
        """Return the times of a step with `count` micro-steps: those beyond `alike` take as long as the last one."""
        more = max(count - alike, 0)

        def time_of(name: str) -> float | None:
            last, alone = getattr(estimate, name), getattr(first, name)
            return None if last is None or alone is None else last + more * (last - alone)

        step_ms, exposed_ms = time_of("step_time_ms"), time_of("exposed_ms")
        rate = self._layout.replicas * size * count / (step_ms / 1e3) if step_ms else None
        return {"step_time_ms": step_ms, "exposed_ms": exposed_ms, "samples_per_s": rate}


def _shards_at_most(layout: Parallel, other: Parallel) -> bool:
    """Return whether a layout has at most as many shards of each kind as another one, and so holds at least as much.
    ZeRO's stages shard among replicas."""
    stage, degrees = layout.zero.stage, layout.degrees
    if (stage, degrees.ep) != (other.zero.stage, other.degrees.ep) or (stage and degrees.ddp > other.degrees.ddp):
        return False
    return all(fewer <= more for fewer, more in zip(shards_of(layout), shards_of(other), strict=True))


TRACED, EXTRAPOLATED = "traced", "extrapolated"


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A job in one layout, with one micro-batch. MiB and ms of the rank that needs the most memory; None: not known.

    micro_batch   samples of a rank's forward pass; None: no micro-batch is possible
    accumulation  micro-steps of an optimizer step; with `pp`, micro-batches of the schedule
    checkpointing of the repeated blocks, as in `featurize.job.training_settings.Training`; None: nothing is recomputed
    fits          whether the bound is at most the card's memory; None: the layout is impossible, or was not tried
    upper_mib     the bound
    exposed_ms    part of the step time in which a rank waits for others
    samples_per_s all ranks' samples. This and times are known only for rows that fit
    why           why it does not fit, is impossible, or was not tried
    known         `TRACED`, or `EXTRAPOLATED` from traces of fewer blocks; None: neither, for the reason `why`
    """

    parallel: Parallel
    micro_batch: int | None
    accumulation: int
    checkpointing: str | None
    fits: bool | None
    peak_memory_mib: float | None = None
    upper_mib: float | None = None
    step_time_ms: float | None = None
    exposed_ms: float | None = None
    samples_per_s: float | None = None
    why: str | None = None
    known: str | None = None

    @property
    def mesh(self) -> str:
        """The degrees, as `ddp=8, fsdp=8`."""
        return mesh_text(self.parallel)

    @property
    def step_text(self) -> str:
        """A rank's work in a step as text, as in `8 samples x 4, checkpointing full`."""
        samples = "no samples" if self.micro_batch is None else f"{self.micro_batch:,} samples"
        times = f" x {self.accumulation:,}" if self.accumulation > 1 else ""
        return f"{samples}{times}{f', checkpointing {self.checkpointing}' if self.checkpointing else ''}"

    @property
    def needed_mib(self) -> float:
        """MiB that have to fit: the bound, or the estimate without a bound; 0 where neither is known."""
        return (self.peak_memory_mib if self.upper_mib is None else self.upper_mib) or 0.0


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """All layouts of a job that were considered: those that fit first, sorted by samples a second.

    name          name of the job
    device        name of the GPU model
    limit_mib     memory that a rank may take, in MiB
    coverage      share of jobs that stay below the bound
    global_batch  samples of a step of all ranks; None if not given
    notes         on layouts that are left out, and on the assumptions of the best layout
    seconds       duration of the plan
    """

    name: str
    device: str
    limit_mib: float
    coverage: float
    global_batch: int | None
    rows: tuple[PlanRow, ...]
    notes: tuple[str, ...]
    seconds: float

    @cached_property
    def fitting(self) -> tuple[PlanRow, ...]:
        """The rows that fit, the fastest first."""
        return tuple(row for row in self.rows if row.fits)

    @property
    def best(self) -> PlanRow | None:
        """The row that fits with the most samples a second; None if none fits."""
        return next(iter(self.fitting), None)

    @cached_property
    def frontier(self) -> tuple[PlanRow, ...]:
        """The rows that fit and that no faster row undercuts in memory, the fastest first."""
        chosen: list[PlanRow] = []
        for row in self.fitting:
            if not chosen or row.needed_mib < chosen[-1].needed_mib:
                chosen.append(row)
        return tuple(chosen)

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields, each row with `mesh` and whether it is on the `frontier`."""
        rows = [
            {
                "mesh": row.mesh,
                **asdict(row),
                "parallel": row.parallel.settings(),
                "frontier": row in self.frontier,
            }
            for row in self.rows
        ]
        return {**{name: getattr(self, name) for name in _PLAIN}, "notes": list(self.notes), "rows": rows}


_PLAIN = ("name", "device", "limit_mib", "coverage", "global_batch", "seconds")


def in_order(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """Return rows in a plan's order: by samples a second, then the nearest to fit, then the impossible ones."""

    def place(row: PlanRow) -> tuple[int, float]:
        if row.fits:
            return 0, -(row.samples_per_s or 0.0)
        return (1, row.needed_mib or float("inf")) if row.fits is False else (2, 0.0)

    return tuple(sorted(rows, key=place))


HEADS = ("mesh", "micro-batch", "checkpointing", "peak", "bound", "step ms", "waits ms", "samples/s", "known")
_WORDS = ("mesh", "checkpointing", "known")
DOT, FRONTIER = "k3", "k6"  # colour classes
_MARGINS = Margins(width=1000.0, height=440.0, left=66.0, right=24.0, top=30.0, bottom=46.0)
_GIB = 1024.0
_DOT = 3.5  # radius in pixels


def cells(row: PlanRow) -> tuple[str, ...]:
    """Return a row under `HEADS`."""
    micro = MISSING if row.micro_batch is None else f"{row.micro_batch:,}"
    memory = [MISSING if mib is None else f"{mib:,.0f}" for mib in (row.peak_memory_mib, row.upper_mib)]
    times = [MISSING if ms is None else f"{ms:,.1f}" for ms in (row.step_time_ms, row.exposed_ms)]
    speed = MISSING if row.samples_per_s is None else rate(row.samples_per_s)
    steps = f" x {row.accumulation:,}" if row.accumulation > 1 else ""
    return row.mesh, f"{micro}{steps}", row.checkpointing or "none", *memory, *times, speed, row.known or MISSING


def plan_page(plan: LayoutPlan, most: int | None = None) -> Page:
    """Return the page's contents, with at most `most` rows of each table."""
    sections = []
    if plan.fitting:
        names = {"no other row is as quick with less memory": FRONTIER, "other rows that fit": DOT}
        sections.append(Section("picture", "Memory over throughput", (Drawn(plan_svg(plan)), Legend(names))))
    sections += _tables(plan, most)
    if plan.notes:
        sections.append(Section("notes", "Notes", tuple(map(Callout, plan.notes))))
    counts = sorted({row.parallel.ranks for row in plan.rows})
    return Page(
        title=f"{plan.name} on {', '.join(f'{count:,}' for count in counts)} x {plan.device}",
        head=(_outcome(plan),),
        sections=tuple(sections),
    )


def _outcome(plan: LayoutPlan) -> Outcome:
    fitting, meshes = (len({row.parallel for row in rows}) for rows in (plan.fitting, plan.rows))
    of_all = f"{fitting} of {count_of(meshes, 'layout')}"
    sentence = f"{of_all}; a rank may take {plan.limit_mib:,.0f} MiB, by the {100 * plan.coverage:g} % bound"
    return Outcome("good", "fits", sentence) if fitting else Outcome("bad", "does not fit", sentence)


def _tables(plan: LayoutPlan, most: int | None) -> list[Section]:
    sections = []
    if plan.fitting:
        rows = [(*cells(row), "yes" if row in plan.frontier else "") for row in plan.fitting[:most]]
        lead = Lead(f"{count_of(len(plan.fitting), 'row')}; MiB and ms of a rank; samples a second of all ranks.")
        heads = [f"{'*' if name in _WORDS else ''}{name}" for name in (*HEADS, "frontier")]
        sections.append(Section("fits", "What fits", (lead, table(heads, rows))))
    others = [row for row in plan.rows if not row.fits]
    if others:
        rows = [(row.mesh, row.step_text, row.why or "") for row in others[:most]]
        lead = Lead(count_of(len(others), "row"))
        sections.append(Section("left", "What does not fit", (lead, table(("mesh", "step", "*why"), rows, words=2))))
    return sections


def plan_svg(plan: LayoutPlan) -> Svg:
    """Return the picture of the rows that fit; there is at least one."""
    rate_axis = Axis.within(0.0, 1.08 * max(row.samples_per_s or 0.0 for row in plan.fitting), 6)
    plot = Plot(rate_axis, Axis.within(0.0, 1.06 * plan.limit_mib / _GIB), _MARGINS)
    plot.grid([f"{tick:,.6g}" for tick in plot.y_axis.ticks], "GiB")
    plot.ticks_below("samples a second of all ranks →")
    limit = plan.limit_mib / _GIB
    plot.across("limit", limit)
    plot.text("capacity", plot.left + 6, plot.y(limit) - 6, f"{plan.device}: {plan.limit_mib:,.0f} MiB", "start")
    frontier = set(plan.frontier)
    for row in plan.fitting:
        css = f"full {FRONTIER if row in frontier else DOT}"
        plot.dot(css, row.samples_per_s or 0.0, row.needed_mib / _GIB, _DOT, _row_text(row))
    return plot.picture(
        f"Memory of a rank over samples a second; the most: {_row_text(plan.fitting[0])}", css="timeline"
    )


def _row_text(row: PlanRow) -> str:
    return f"{row.mesh}: {row.step_text}, {row.samples_per_s or 0.0:,.1f} samples/s, {row.needed_mib:,.0f} MiB"
