"""The causes of a memory's uncertainty, which bound it, and measured runs that move an estimate and narrow its bound.

Start reading at `uncertainty_of`, which splits the distance between memory and its traced figure into causes; these
bound jobs unlike any measured one. Replayed tensors are known exactly and widen nothing. `move_by_runs` takes runs of
the same job, or of the job at another batch size.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from conf.errors import CommandError, UsageError, first_line, require_one_of, shown, unknown_name
from conf.plain_text import count_of
from conf.units import MIB
from featurize.configs.trial import problem_of_fields
from featurize.device.device_spec import (
    AMD,
    CURRENT,
    DESCRIBED,
    EAGER,
    DeviceSpec,
    device_names,
    known_device,
    plain_device,
)
from featurize.job.training_settings import TRAINING_FIELDS, TrialConfig
from learn.estimation.estimate_view import BOUND, INFO, MAY_RUN_OUT, OUT_OF_MEMORY, PROBLEM, WARNING, Note
from learn.estimation.job_estimate import COVERAGES, Estimate, Memory, estimators_named
from learn.estimators.protocol import LEVEL, HeldShare, bound_shares
from warehouse.files.folder import DataFolder

if TYPE_CHECKING:
    import os

    from featurize.device.device_spec import MachineProfile
    from featurize.operators.library_calls import LibraryCall
    from featurize.recording.step_trace import StepTrace
    from featurize.timing.simulation import SimulatedStep

    MeasuredRow: TypeAlias = tuple[str, int, float]  # GPU model, batch size, MiB of the process

WORKSPACES = "convolution workspaces"
FRAGMENTATION = "fragmentation"
KERNELS = "memory of kernels that the trace does not see"
CONTEXT = "context and libraries"
GRAPHS = "memory pool of CUDA graphs"
COMMUNICATION = "buffers of NCCL"
HELD_OUT = "errors on held-out rows"
NEIGHBOUR = "distance to the measured run"
NARROWED_BY: Mapping[str, str] = {
    WORKSPACES: "one measured run (known=) narrows it",
    FRAGMENTATION: "one measured run (known=) narrows it",
    KERNELS: "one measured run (known=) narrows it",
    CONTEXT: "python -m learn.calibrate narrows it",
    GRAPHS: "one measured run (known=) narrows it",
    COMMUNICATION: "no measured run is known",
    HELD_OUT: "one measured run (known=) narrows it",
    NEIGHBOUR: "the nearer the measured batch is, the narrower it is",
}

# The causes that measured rows cover; the others count unchanged.
MEASURED = (WORKSPACES, FRAGMENTATION, KERNELS, CONTEXT)
# MiB by machine, chosen: on one of five published files, the described machine was off by up to 100 MiB in the median;
# the others were never measured. All other profiles are calibrated.
_OF_CONTEXT_MIB, _OF_OWN_CONTEXT_MIB = {CURRENT: 100.0, DESCRIBED: 100.0, EAGER: 300.0}, 50.0
# AMD GPUs: neither MIOpen's workspaces nor their context is known; chosen.
_OF_SPREAD_ON_AMD, _OF_CONTEXT_ON_AMD_MIB = 2.0, 500.0
_OF_LARGEST = 2.0  # where cuDNN was asked: times the largest workspace, in place of the assumptions' spread; chosen
_BLAS_THREADS = 2  # threads that keep a workspace: those of the forward and of the backward pass
# Where memory is short, cuDNN takes a smaller workspace or none, and the allocator frees cached memory. A job therefore
# runs on an empty card if its tensors, twice the assumed workspaces and this margin fit. Of 120 of timm's models (RTX
# 3090, AMP), 85 % are let in at the largest batch that ran, and 2 models at the next one (with 7 %: 90 % and 3).
_WORKSPACES_AT_LIMIT, _OF_LIVE_AT_LIMIT = 2.0, 0.09


MemoryT = TypeVar("MemoryT", bound="Memory")


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """How far a job's memory may lie above its traced figure.

    Args:
        causes_mib: Cause -> MiB of the 99 % margin.
        needed_mib: Memory that the job cannot do without, with its margin: it runs on a card that has this much.
        held: How such bounds held on left-out rows; None where no row covers the cause or the GPU's vendor.
    """

    causes_mib: Mapping[str, float]
    needed_mib: float
    held: HeldShare | None = None

    def bound(self, memory: MemoryT, centre_mib: float, coverage: float, card_mib: float) -> MemoryT:
        """Return a job's memory with its bound.

        Args:
            memory: The job's memory.
            centre_mib: The estimate that the bound lies above.
            coverage: From 0.01 to 0.99.
            card_mib: MiB that the job can take of the card. A job that runs there never takes more.
        """
        margin_mib = sum(self.causes_mib.values())
        scores = _scores(coverage)

        def least_mib(upper_mib: float) -> float:
            return max(centre_mib, min(self.needed_mib, upper_mib))

        unlimited = {level: max(centre_mib + score * margin_mib, 0.0) for level, score in scores.items()}
        return memory.with_bound(
            {
                level: card_mib if card_mib < mib and least_mib(mib) <= card_mib else mib
                for level, mib in unlimited.items()
            },
            coverage,
            {cause: scores[coverage] * mib for cause, mib in self.causes_mib.items() if mib >= 0.5},
            least_card_mib=least_mib(unlimited[coverage]),
            held_out=None if self.held is None or coverage != LEVEL else vars(self.held),
        )


@lru_cache(maxsize=256)  # users choose any coverage
def _scores(coverage: float) -> Mapping[float, float]:
    """Return the share of the 99 % margin that belongs to each of `COVERAGES` and to this one, ascending."""
    return {level: score_at(level) for level in sorted({*COVERAGES, coverage})}


@lru_cache(maxsize=256)  # users choose any coverage
def score_at(coverage: float) -> float:
    """Return the share of the 99 % margin that belongs to a coverage."""
    scores = bound_shares().scores
    return float(np.interp(coverage, list(scores), list(scores.values())))


def uncertainty_of(traced: SimulatedStep, device: DeviceSpec, on: MachineProfile) -> Uncertainty:
    """Return how far the memory of a traced step, placed on a machine, may lie above its figure."""
    from featurize.memory.cudnn_workspaces import SETTLED, reserved_by_scenario

    sizes = traced.trace.guessed_sizes(device)
    sizes = sizes | {call: answer.sizes[0] for call, answer in traced.memory.workspaces.items()}
    largest, most_live = traced.trace.remembered(
        ("largest workspace", *sizes.values()), lambda: _largest_and_most_live(traced.trace, sizes)
    )
    reserved_mib = traced.peak_reserved_mib
    outside_mib = traced.peak_memory_mib - reserved_mib
    on_amd = device.architecture.vendor == AMD
    context_mib = _OF_CONTEXT_MIB.get(on.name, _OF_OWN_CONTEXT_MIB)
    if on_amd and on.name in _OF_CONTEXT_MIB:
        context_mib = _OF_CONTEXT_ON_AMD_MIB
    blas_mib = _BLAS_THREADS * device.architecture.blas_fallback_bytes / MIB
    reserved = dict(reserved_by_scenario(traced.trace, device))
    settled_mib = max(reserved.pop(SETTLED) / MIB - reserved_mib, 0.0)
    spread_mib = (max(reserved.values()) - min(reserved.values())) / MIB * (_OF_SPREAD_ON_AMD if on_amd else 1.0)
    causes = {
        WORKSPACES: _OF_LARGEST * largest / MIB if traced.memory.workspaces else spread_mib,
        FRAGMENTATION: settled_mib,
        KERNELS: reserved_mib,
        CONTEXT: context_mib,
    }
    if traced.trace.graph_pool_bytes:
        causes[GRAPHS] = traced.trace.graph_pool_bytes / MIB
    if buffers_mib := traced.communication.buffers_mib:
        causes[COMMUNICATION] = buffers_mib
    shares = bound_shares()
    is_measured = not on_amd and causes.keys() <= {*MEASURED}
    causes = {cause: shares.of_causes.get(cause, 1.0) * mib for cause, mib in causes.items()}
    causes[KERNELS] += blas_mib
    needed_mib = (1 + _OF_LIVE_AT_LIMIT) * most_live / MIB + outside_mib + context_mib + blas_mib
    return Uncertainty(
        causes_mib=causes,
        needed_mib=needed_mib,
        held=min(shares.held, key=lambda held: held.share, default=None) if is_measured else None,
    )


def _largest_and_most_live(trace: StepTrace, sizes: Mapping[LibraryCall, int]) -> tuple[int, float]:
    """Return the largest workspace of a convolution, and the peak of live bytes with `_WORKSPACES_AT_LIMIT` times
    it."""
    most, live_at_calls = trace.remembered("live at calls", lambda: _live_at_calls(trace))
    largest, most_live = 0, float(most)
    for call, live_bytes in live_at_calls:
        largest = max(largest, sizes[call] if call.spare else 0)
        most_live = max(most_live, live_bytes + (_WORKSPACES_AT_LIMIT if call.spare else 1) * sizes[call])
    return largest, most_live


def _live_at_calls(trace: StepTrace) -> tuple[int, list[tuple[LibraryCall, int]]]:
    """Return the most live bytes of a step, and those at each call of a library but cuBLAS."""
    from featurize.operators.library_calls import CUBLAS

    live = list(accumulate(event.nbytes for event in trace.events))
    at_calls = []
    for event, live_bytes in zip(trace.events, live, strict=True):
        call = trace.blocks[event.block].call if event.nbytes == 0 else None
        if call is not None and call.kind != CUBLAS:
            at_calls.append((call, live_bytes))
    return max(live, default=0), at_calls


def widest(causes_mib: Mapping[str, float], above_mib: float) -> Note | None:
    """Return a note on the causes that make the bound wide, largest first, and on what would narrow the first."""
    shares = sorted(((mib, cause) for cause, mib in causes_mib.items() if mib >= 0.5), reverse=True)
    if not shares:
        return None
    listed = ", ".join(f"{mib:,.0f} MiB for {cause}" for mib, cause in shares)
    if above_mib < 0.99 * sum(causes_mib.values()):
        text = "the bound is what can be taken of the card: without spare workspaces and caches the job surely fits it"
        return Note(BOUND, INFO, text)
    return Note(BOUND, INFO, f"the bound exceeds the estimate by {listed}; {NARROWED_BY[shares[0][1]]}")


KINDS = {
    "process": "the process, in nvidia-smi's list",
    "card": "the whole card while the process trains",
    "reserved": "torch.cuda.max_memory_reserved",
    "allocated": "torch.cuda.max_memory_allocated",
}
# Width of the 99 % bound, as a share of the estimate: at the measured batch (chosen: no published file repeats a run),
# and the addition for the first doubling of the traced memory and for each further one. One doubling apart, memory lies
# above the bound for some 1 % of 2,026 such pairs. No split into workspaces, fragmentation and the measured difference
# was narrower by more than a percent of the estimate.
_SAME_JOB, _A_DOUBLING, _FURTHER, _MOST_FURTHER = 0.01, 0.06, 0.015, 3.0
# Exponent by which the difference between measurement and trace grows with memory. Towards larger batches it lies
# between a constant (context, libraries) and a share (workspaces, kernels); towards smaller ones it is a share. Of 0,
# 0.5 and 1, these have the least error on 4,870 pairs of rows of timm's models on one A100, without doubted rows.
_GROWTH_UP, _GROWTH_DOWN = 0.5, 1.0
_OF_MEMORY = (OUT_OF_MEMORY, MAY_RUN_OUT, BOUND)  # codes of notes on the figure that the runs replace
RUNS, NONE = "runs", "none"  # in place of a list: the data folder's runs, and no runs at all
# Chosen: a run whose distance from its trace exceeds this factor is left out.
_CONTRADICTS = 1.5
_OTHER_CONTEXT_MIB = 2048.0  # contexts of two machines hardly differ by more, even for small jobs
_LIVE = 0.85  # share of the trace's live memory, which includes assumed workspaces and a typical context
_EXAMPLE = "[{batch_size: 32, memory_mib: 10240, kind: process}]"
_TAKES = f"known is a list of measured runs, as in {_EXAMPLE}, or {RUNS} or {NONE}"


@dataclass(frozen=True, kw_only=True)
class KnownRun:
    """One measured run.

    Args:
        batch_size: The run's batch size.
        memory_mib: Its peak, in MiB.
        kind: The instrument of `memory_mib`: one of `KINDS`.
        device: The run's GPU model, a name of `conf/device`; None: the estimate's.

    Raises:
        UsageError: An invalid value.
    """

    batch_size: int
    memory_mib: float
    kind: str = "process"
    device: str | None = None

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, KINDS)
        size, mib = self.batch_size, self.memory_mib
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
            raise UsageError(f"batch_size is a whole number of at least 1, got {size!r}")
        if isinstance(mib, bool) or not isinstance(mib, numbers.Real) or not (math.isfinite(mib) and mib > 0):
            raise UsageError(f"memory_mib is a number above 0, got {mib!r}")
        if self.device is not None and (not isinstance(self.device, str) or known_device(self.device) is None):
            raise unknown_name("device", self.device, device_names())

    def is_of(self, device: DeviceSpec) -> bool:
        """Return whether the run was measured on this GPU model."""
        return self.device is None or plain_device(self.device) == plain_device(device.name)


def known_runs(given: object) -> tuple[KnownRun, ...]:
    """Return the measured runs of a list of mappings or `KnownRun`, or of such a list as JSON; none for None and for
    the words `RUNS` and `NONE`.

    Raises:
        UsageError: Anything else; the message names the place.
    """
    if given is None or given == RUNS or leaves_out(given):
        return ()
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{_TAKES}; got text that is not JSON ({error}): {shown(given)}") from error
    if isinstance(given, bytes | Mapping) or not isinstance(given, Sequence):
        advice = "; one run is a list, too: put it in brackets" if isinstance(given, Mapping | KnownRun) else ""
        raise UsageError(f"{_TAKES}; got {shown(given)}{advice}")
    runs = []
    for place, value in enumerate(given):
        try:
            if not isinstance(value, Mapping | KnownRun):
                raise UsageError(f"a mapping is wanted, got {type(value).__name__}")
            if isinstance(value, Mapping):
                if problem := problem_of_fields(KnownRun, value):
                    raise UsageError(problem)
                value = KnownRun(**value)
        except UsageError as error:
            raise UsageError(f"known[{place}]: {error}") from error
        runs.append(value)
    return tuple(runs)


def leaves_out(known: object) -> bool:
    """Return whether `known=` asks for an estimate without measured runs: the word `NONE`, or an empty list."""
    return known == NONE or (isinstance(known, Sequence) and not isinstance(known, str | bytes) and not known)


def move_by_runs(
    estimate: Estimate,
    runs: Sequence[KnownRun],
    trace_of: Callable[[int], SimulatedStep],
    coverage: float,
    without: Uncertainty,
) -> Estimate:
    """Return the estimate moved by measured runs, with the bound of a neighbour this near.

    Each run is traced at its batch. The difference between measurement and trace is carried over to the job's batch:
    between two runs by interpolation, above them with the square root of the reserved memory, below them in proportion.
    The bound is never wider than without the runs, except by the spread of runs of one batch. A job that surely fits
    the card is bounded by the card, with or without runs. Runs that contradict the trace are left out, with a note.

    Args:
        estimate: The estimate, traced on its machine.
        runs: At least one.
        trace_of: The job's traced step at a batch size, on the same machine.
        coverage: Coverage of the bound.
        without: The uncertainty of the traced step without the runs.

    Raises:
        UsageError: A run takes more memory than the card has.
    """
    for run in runs:
        if estimate.device_memory_mib is not None and run.memory_mib > estimate.device_memory_mib:
            raise UsageError(
                f"known: {run.memory_mib:,.0f} MiB at a batch of {run.batch_size:,}: {estimate.device} has "
                f"{estimate.device_memory_mib:,.0f} MiB; name the run's own GPU model by its device key"
            )
    assert estimate.card_mib is not None and estimate.reserved_mib is not None, "the job is traced"
    other_mib = estimate.card_mib - (estimate.process_mib or 0.0)
    traced_runs = sorted(((run, trace_of(run.batch_size)) for run in runs), key=lambda pair: pair[1].peak_reserved_mib)
    differences: dict[float, list[float]] = {}  # reserved MiB -> measured minus traced MiB, ascending
    of_another_job: list[Note] = []
    for run, traced in traced_runs:
        difference_mib, note = _compare(run, traced, other_mib)
        if note is None:
            differences.setdefault(max(traced.peak_reserved_mib, 1.0), []).append(difference_mib)
        else:
            of_another_job.append(note)
    if not differences:
        return estimate.with_values(notes=(*of_another_job, *estimate.notes))
    difference_mib = _difference_at(estimate.reserved_mib, differences)
    peak_mib = max(estimate.card_mib + difference_mib, estimate.allocated_mib or 0.0)
    uncertain = replace(
        _uncertainty(differences, estimate.reserved_mib, peak_mib, without),
        needed_mib=without.needed_mib + max(difference_mib, 0.0),
        held=None,
    )
    by = {
        **estimate.answered_by,
        "memory": f"trace with {count_of(len(runs) - len(of_another_job), 'measured run')}",
    }
    notes = [note for note in estimate.notes if note.code not in _OF_MEMORY and note.targets != ("memory",)]
    limit_mib = estimate.allowed_mib
    if peak_mib > limit_mib:
        text = f"out of memory by the measured runs: {limit_mib:,.0f} MiB can be taken of {estimate.device}"
        notes.insert(0, Note(OUT_OF_MEMORY, PROBLEM, text))
    by_runs = uncertain.bound(estimate.with_values(peak_memory_mib=peak_mib), peak_mib, coverage, limit_mib)
    notes += filter(None, [widest(by_runs.uncertain, (by_runs.upper_mib or 0.0) - peak_mib)])
    return by_runs.with_values(
        answered_by=by,
        estimator=estimators_named(by),
        notes=(*of_another_job, *notes),
    )


def _uncertainty(
    differences: Mapping[float, Sequence[float]], reserved_mib: float, peak_mib: float, without: Uncertainty
) -> Uncertainty:
    """Return the uncertainty near the runs, which grows with their distance. It exceeds the one without them at most by
    the largest excess of a run over the median of its batch size: no bound lies below a run."""
    doublings = min(abs(math.log2(reserved_mib / size_mib)) for size_mib in differences)
    further = min(max(doublings - 1.0, 0.0), _MOST_FURTHER)
    margin_mib = (_SAME_JOB + _A_DOUBLING * min(doublings, 1.0) + _FURTHER * further) * peak_mib
    spread_mib = max(max(of_size) - median(of_size) for of_size in differences.values())
    if margin_mib <= sum(without.causes_mib.values()):
        return replace(without, causes_mib={NEIGHBOUR: margin_mib + spread_mib})
    return replace(without, causes_mib={**without.causes_mib, NEIGHBOUR: spread_mib})


def _compare(run: KnownRun, traced: SimulatedStep, other_mib: float) -> tuple[float, Note | None]:
    """Return the measured minus the traced MiB, and a note where the run is left out, as its trace shows that it is
    hardly of this job. `other_mib` is memory of other processes on the card."""
    card_mib, cached_mib = traced.peak_memory_mib, traced.peak_reserved_mib - traced.peak_allocated_mib
    traced_mib = {
        "card": card_mib,
        "process": card_mib - other_mib,
        "reserved": traced.peak_reserved_mib,
        "allocated": traced.peak_allocated_mib,
    }[run.kind]
    difference_mib = run.memory_mib - traced_mib
    # The least that the instrument can show: tensors that are alive together, and memory outside the allocator.
    live_mib = _LIVE * (traced_mib - (0.0 if run.kind == "allocated" else cached_mib))
    ratio, below_live = (card_mib + difference_mib) / card_mib, run.memory_mib < live_mib
    too_high = ratio > _CONTRADICTS and difference_mib > _OTHER_CONTEXT_MIB
    if not (below_live or too_high or ratio < 1 / _CONTRADICTS):
        return difference_mib, None
    less = f", {live_mib:,.0f} MiB of it without any cache" if below_live else ""
    text = (
        f"known: {run.memory_mib:,.0f} MiB at a batch of {run.batch_size:,} is left out: the trace says "
        f"{traced_mib:,.0f} MiB ({run.kind}){less}, so it is probably of another job"
    )
    return difference_mib, Note("runs-left-out", WARNING, text)


def _difference_at(reserved_mib: float, differences: Mapping[float, Sequence[float]]) -> float:
    """Return measured minus traced MiB at this much reserved memory; `differences` ascends in it."""
    sizes, of_size = list(differences), list(map(median, differences.values()))
    if sizes[0] <= reserved_mib <= sizes[-1]:
        return float(np.interp(reserved_mib, sizes, of_size))
    nearest = 0 if reserved_mib < sizes[0] else -1
    growth = _GROWTH_DOWN if nearest == 0 else _GROWTH_UP
    return float(of_size[nearest] * (reserved_mib / sizes[nearest]) ** growth)


_OF_FAMILY = (
    "FROM runs WHERE family = ? AND status = 'ok' AND source = 'measured' AND device_uuid IS NOT NULL "
    "AND coalesce(quality, 'trusted') = 'trusted' AND peak_memory_mib > 0 AND device_name IS NOT NULL "
    "AND group_id IS NULL"
)


@dataclass(frozen=True, kw_only=True)
class OwnRuns:
    """The measured runs of one job in a data folder, read once, and selected by GPU model.

    Only trusted runs on a real GPU count.

    Args:
        data: The data folder; None is the default one.
        config: The job, at any batch size.
        asked_for: Whether the caller named them (`known="runs"`). If not, an unreadable folder is reported in a note.
    """

    data: str | os.PathLike[str] | DataFolder | None
    config: TrialConfig
    asked_for: bool

    def of(self, batch_size: int, device: DeviceSpec) -> tuple[tuple[KnownRun, ...], list[Note]]:
        """Return the job's runs on a GPU model, and notes. The runs are those at its batch size, else at the nearest
        smaller and the nearest larger one: others would change nothing, and each run is traced.

        Several runs at one batch size count as their median. Runs that take more memory than the card are of another
        card.

        Raises:
            CommandError: The folder of `known="runs"` cannot be read.
        """
        try:
            rows = self._rows
        except CommandError as error:
            if self.asked_for:
                raise
            return (), [self.left_out(error)]
        measured_mib: dict[int, list[float]] = {}
        for name, size, mib in rows:
            if plain_device(name) == plain_device(device.name) and mib <= device.memory_mib:
                measured_mib.setdefault(size, []).append(mib)
        smaller = max((size for size in measured_mib if size <= batch_size), default=None)
        larger = min((size for size in measured_mib if size >= batch_size), default=None)
        nearest = sorted({size for size in (smaller, larger) if size is not None})
        runs = tuple(KnownRun(batch_size=size, memory_mib=median(measured_mib[size])) for size in nearest)
        if not runs and self.asked_for:
            text = "known=runs: the data folder has no run of this job that was measured on a GPU"
            return (), [Note("no-known-run", WARNING, text)]
        return runs, []

    def note(self, runs: Iterable[KnownRun]) -> Note:
        """Return a note that names the runs that moved an estimate."""
        sizes = ", ".join(f"{run.batch_size:,}" for run in runs)
        leave_out = "" if self.asked_for else f"; known={NONE} leaves them out"
        text = f"memory: moved by what the data folder measured of this job, at a batch of {sizes}{leave_out}"
        return Note("moved-by-runs", INFO, text, ("memory",))

    def left_out(self, error: CommandError) -> Note:
        """Return a note with the reason why runs, which were not asked for, move nothing."""
        return Note("runs-left-out", WARNING, f"the data folder's measured runs are left out: {first_line(error)}")

    @property
    def changed_ns(self) -> int:
        """Time of the last change of the folder of the job's family, in ns, which decides on the runs; 0 without a
        folder."""
        folder, family = DataFolder.resolve(self.data), self.config.family
        return folder.partition("runs", family).stat().st_mtime_ns if family in folder.families("runs") else 0

    @cached_property
    def _rows(self) -> list[MeasuredRow]:
        changed_ns = self.changed_ns  # before the query: a run that lands meanwhile is read at the next call
        if not changed_ns or not _has_measured(DataFolder.resolve(self.data), self.config.family, changed_ns):
            return []
        return _measured_rows(self.data, self.config)


@lru_cache
def _has_measured(folder: DataFolder, family: str, _changed_ns: int) -> bool:
    """Return whether a family has measured runs; cached, as many simulated runs make the search slow."""
    import warehouse

    with warehouse.connect(folder) as connection:
        return connection.execute(f"SELECT 1 {_OF_FAMILY} LIMIT 1", [family]).fetchone() is not None


def _measured_rows(data: str | os.PathLike[str] | DataFolder | None, config: TrialConfig) -> list[MeasuredRow]:
    """Return the measured runs of a job, at any batch size on any GPU model. Raises `CommandError`."""
    import warehouse
    from featurize.configs.trial import UnreadableConfig, config_of_row

    # Most rows of other jobs are left out before their configs are parsed. A row may lack a field that was added later,
    # and its text may not be JSON.
    same_field = " AND coalesce(json_extract_string(try_cast(config AS JSON), ?) = ?, true)"
    values = []
    for name, value in config.to_mapping().items():
        if type(value) in (int, str) and name not in (*TRAINING_FIELDS, "family"):
            values += [f'$."{name}"', str(value)]
    query = f"SELECT device_name, config, peak_memory_mib {_OF_FAMILY}{same_field * (len(values) // 2)}"
    with warehouse.connect(data) as connection:
        rows = connection.execute(query, [config.family, *values]).fetchall()
    measured = []
    for device_name, text, mib in rows:
        try:
            of_run = config_of_row(text)
        except UnreadableConfig:
            continue
        if replace(of_run, batch_size=config.batch_size).to_mapping() == config.to_mapping():
            measured.append((str(device_name), of_run.batch_size, float(mib)))
    return measured
