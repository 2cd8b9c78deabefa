"""The estimate of one training job on one GPU model, and the causes of its memory's uncertainty.

Start reading at `Estimate`, which consists of the classes before it; `learn.estimation.answers` makes one.
`uncertainty_of` splits the distance between memory and its traced figure into causes, which bound jobs unlike any
measured one. Replayed tensors are known exactly and widen nothing.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from conf.errors import UsageError
from conf.units import MIB
from featurize.device.device_spec import AMD, CURRENT, DESCRIBED, EAGER, DeviceSpec
from learn.estimation.notes import BOUND, INFO, Note
from learn.estimators.protocol import LEVEL, HeldShare, bound_shares

if TYPE_CHECKING:
    from featurize.device.device_spec import MachineProfile
    from featurize.operators.library_calls import LibraryCall
    from featurize.recording.step_trace import StepTrace
    from featurize.timing.overlap import SimulatedStep


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
COVERAGES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # points of the distribution that an estimate holds
# Where memory is short, cuDNN takes a smaller workspace or none, and the allocator frees cached memory. A job therefore
# runs on an empty card if its tensors, twice the assumed workspaces and this margin fit. Of 120 of timm's models (RTX
# 3090, AMP), 85 % are let in at the largest batch that ran, and 2 models at the next one (with 7 %: 90 % and 3).
_WORKSPACES_AT_LIMIT, _OF_LIVE_AT_LIMIT = 2.0, 0.09


Part = TypeVar("Part")
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


@functools.lru_cache(maxsize=256)  # users choose any coverage
def _scores(coverage: float) -> Mapping[float, float]:
    """Return the share of the 99 % margin that belongs to each of `COVERAGES` and to this one, ascending."""
    return {level: score_at(level) for level in sorted({*COVERAGES, coverage})}


@functools.lru_cache(maxsize=256)  # users choose any coverage
def score_at(coverage: float) -> float:
    """Return the share of the 99 % margin that belongs to a coverage."""
    scores = bound_shares().scores
    return float(np.interp(coverage, list(scores), list(scores.values())))


def uncertainty_of(traced: SimulatedStep, device: DeviceSpec, on: MachineProfile) -> Uncertainty:
    """Return how far the memory of a traced step, placed on a machine, may lie above its figure."""
    from featurize.memory.cudnn_workspaces import SETTLED, reserved_by_scenario

    sizes = traced.trace.guessed_sizes(device)
    sizes = sizes | {call: answer.sizes[0] for call, answer in traced.memory.workspaces.items()}
    key = ("largest workspace", *sizes.values())
    largest, most_live = traced.trace.remembered(key, lambda: _largest_and_most_live(traced.trace, sizes))
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


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Ranks with equal memory and work. In a pipeline, ranks after the first may need less: fewer of their
    micro-batches are in flight.

    first   the first of them, counted from 0
    count   their number
    peak_memory_mib, breakdown   each rank's, as in `Memory`
    """

    first: int
    count: int
    peak_memory_mib: float
    breakdown: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A job's peak memory: the figure, its bound, its parts, and the card it has to fit, in MiB.

    peak_memory_mib   the whole card's, by the estimator that `Estimate.answered_by` names
    allocated_mib, reserved_mib, process_mib, card_mib   the same peak by the trace, as the four instruments show it:
                  `torch.cuda.max_memory_allocated`, `max_memory_reserved`, the process in nvidia-smi, the card there
    upper_mib     what a share `coverage` of jobs stay below, 99 of 100 by default; None where no bound is calibrated
                  (training-free estimators but the trace, figures of a trace that was stored)
    least_card_mib   memory of the smallest card that the bound lets the job into: `upper_mib`, or less where the job
                  runs on a smaller card without its caches and spare workspaces
    bound_held_out   how the bound held on rows that its fit had not seen: `share` that it held, and `rows`, their
                  number. Where whole groups were left out, `groups` is their number, and `kind` names them
                  (families, sources, GPU models, configurations). Empty where it was not checked on such rows
    uncertain     cause -> MiB by which it raises the bound above `peak_memory_mib`; empty without a bound. Where the
                  sum is less than the causes' own, the bound is all that the job can take of the card
    distribution  (probability, MiB that memory stays below with it), ascending; see `quantile_mib`
    breakdown     part -> MiB at the peak of the traced step. It sums to the trace's own peak, `trace_memory_mib`,
                  which is not `peak_memory_mib` where that is another estimator's. Without a trace: the parts that the
                  estimator itself distinguishes
    peak_operator, peak_module, peak_phase   the source of the allocation at the peak of allocated memory, in the trace
    activations   module -> MiB that the operators of its forward pass keep alive at that moment: the largest ones
    device_memory_mib   what a job can use of the card
    limit_mib     the limit of the job's figure: the card's memory, or less where the allocator's settings limit the
                  process to a share of it (`per_process_memory_fraction`)
    """

    peak_memory_mib: float
    upper_mib: float | None = None
    least_card_mib: float | None = None
    coverage: float = LEVEL
    bound_held_out: Mapping[str, Any] = field(default_factory=dict)
    uncertain: Mapping[str, float] = field(default_factory=dict)
    distribution: tuple[tuple[float, float], ...] = ()
    breakdown: Mapping[str, float] = field(default_factory=dict)
    trace_memory_mib: float | None = None
    allocated_mib: float | None = None
    reserved_mib: float | None = None
    process_mib: float | None = None
    card_mib: float | None = None
    peak_operator: str | None = None
    peak_module: str | None = None
    peak_phase: str | None = None
    activations: Mapping[str, float] = field(default_factory=dict)
    device_memory_mib: float | None = None
    limit_mib: float | None = None

    def quantile_mib(self, p: float) -> float | None:
        """Return the MiB that the job's memory stays below with probability p; None where no bound is calibrated.

        At 0.5 it is the median of the held-out errors, which need not be `peak_memory_mib`.

        Args:
            p: From 0.01 to 0.99; between the probabilities of `distribution`, a straight line.

        Raises:
            UsageError: p is out of range, or not a number.
        """
        number = isinstance(p, numbers.Real) and not isinstance(p, bool)
        if not number or not COVERAGES[0] <= p <= COVERAGES[-1]:
            raise UsageError(f"a probability from {COVERAGES[0]} to {COVERAGES[-1]} is wanted, got {p!r}")
        if not self.distribution:
            return None
        probabilities, mib = zip(*self.distribution, strict=True)
        return float(np.interp(p, probabilities, mib))

    @property
    def needed_mib(self) -> float:
        """MiB that have to fit: the bound, or the point where no bound is calibrated."""
        return self.peak_memory_mib if self.upper_mib is None else self.upper_mib

    @property
    def allowed_mib(self) -> float:
        """MiB that the job may take of the card; infinite where neither the card nor a limit is known."""
        limits = [mib for mib in (self.limit_mib, self.device_memory_mib) if mib is not None]
        return min(limits, default=math.inf)

    def fits(self, mib: float) -> bool:
        """Return whether the job fits into that much free memory, and into its allocator's share of the card.

        By the bound where there is one, else by the point.
        """
        limit_mib = mib if self.limit_mib is None else min(mib, self.limit_mib)
        return self.needed_mib <= limit_mib

    @property
    def fits_device(self) -> bool | None:
        """Return whether the job fits into the empty card; None where its memory is not known."""
        return None if self.device_memory_mib is None else self.fits(self.device_memory_mib)

    def with_values(self, **values: Any) -> Self:
        """Return a copy with other values of these fields: as `dataclasses.replace`, without the constructor's time."""
        assert values.keys() <= vars(self).keys(), values.keys() - vars(self).keys()
        copied = object.__new__(type(self))
        vars(copied).update(vars(self), **values)
        return copied

    def with_bound(
        self,
        quantiles_mib: Mapping[float, float],
        coverage: float,
        causes_mib: Mapping[str, float],
        *,
        least_card_mib: float | None = None,
        held_out: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the memory with a bound.

        Args:
            quantiles_mib: Probability -> MiB that memory stays below with it, or falls to below one half.
            coverage: Share of jobs that stay below the bound, which is `quantiles_mib[coverage]`.
            causes_mib: As `uncertain`.
            least_card_mib: Memory of the smallest card that has room for the job. None: the bound.
            held_out: As `bound_held_out`; None where it was not counted.
        """
        probabilities = sorted(quantiles_mib)
        ascending = accumulate((float(quantiles_mib[p]) for p in probabilities), max)
        upper_mib = quantiles_mib[coverage]
        return self.with_values(
            distribution=tuple(zip(probabilities, ascending, strict=True)),
            upper_mib=upper_mib,
            coverage=coverage,
            uncertain=dict(causes_mib),
            bound_held_out=dict(held_out or {}),
            least_card_mib=upper_mib if least_card_mib is None else least_card_mib,
        )

    def shift(self, mib: float) -> Self:
        """Return a copy with the estimate and its bound raised by `mib`."""
        bound: dict[str, Any] = {
            name: None if (bound_mib := getattr(self, name)) is None else bound_mib + mib
            for name in ("upper_mib", "least_card_mib")
        }
        distribution = tuple((p, quantile_mib + mib) for p, quantile_mib in self.distribution)
        return self.with_values(peak_memory_mib=self.peak_memory_mib + mib, distribution=distribution, **bound)


@dataclass(frozen=True, kw_only=True)
class Activity:
    """The GPU's activity under a job, as shares in [0, 1]: SM activity, SM occupancy, DRAM activity."""

    smact: float | None = None
    smocc: float | None = None
    drama: float | None = None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A job's optimizer step: its duration in ms, and the figures that follow from it.

    step_time_upper_ms  what 90 of 100 measured steps stay below, where the trace times the step; else None
    bound_by      the longest part of the step time: `gpu`, `host` (which launches the kernels), `communication`
                  or `input`; None where the trace does not time the step
    samples_per_s, tokens_per_s   throughput: all micro-steps of an optimizer step count, padding too. Tokens are
                  those of integer inputs of shape [batch, length]. These two and `mfu` need a trace
    mfu           model FLOPs utilization: FLOPs of the matrix products, convolutions and attention, forward and
                                backward, over those of a step time at the GPU model's peak rate in the job's precision.
                                Recomputation by checkpoints does not count (PaLM, arXiv:2204.02311, appendix B). None
                                where the GPU
                  model has no such rate. See `featurize.timing.times.seconds_at_peak`
    communication_ms   duration of the ranks' collectives in a step; `exposed_ms` of it is not hidden by computation,
                  and part of the step time
    bubble_ms     part of a pipeline's step time in which the rank waits for other stages
    sent_mib      kind of collective -> MiB that a rank sends in a step
    """

    step_time_ms: float | None = None
    step_time_upper_ms: float | None = None
    bound_by: str | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    communication_ms: float | None = None
    exposed_ms: float | None = None
    bubble_ms: float | None = None
    sent_mib: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Energy:
    """The board's energy in a step, in J: the step time times the mean power, which is idle power where the GPU waits.
    None without a trace."""

    energy_j: float | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate(Energy, Timing, Activity, Memory):
    """One training job on one GPU model. MiB, ms, J; ratios lie in [0, 1]. None: not known.

    The parts are `memory`, `time`, `activity` and `energy`; their figures are also attributes of the estimate.

    parameters    number of the model's parameters
    device        the GPU model's name
    machine       the profile of memory outside the allocator; see `featurize.device.device_spec`
    notes         remarks, each with a code and a severity; see `learn.Note`. `warnings` are their texts
    estimator     the estimators of the figures
    answered_by   target -> estimator and version of the figure
    loops         target -> the loop of the figure, a name of `learn.job.training_job.LOOPS`
    seconds       time that the estimate itself took
    ranks         a multi-GPU job's ranks, in groups of equal memory. All other figures are those of the rank
                  that needs the most memory, except samples and tokens a second, which count all ranks
    held_out_errors     for `method=fast`: target -> `median` and `p90` of the error on
                        configurations held out; shares of memory and step time, absolute for ratios
    """

    parameters: int | None
    device: str
    notes: tuple[Note, ...]
    estimator: str
    answered_by: Mapping[str, str]
    seconds: float
    machine: str | None = None
    held_out_errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    loops: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[RankGroup, ...] = ()

    def __str__(self) -> str:
        """Return the figures with their bound, their sources, and at most three notes, in fewer than 15 lines."""
        from learn.estimation.estimate_view import estimate_text

        return estimate_text(self)

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook: the same, and the breakdown as a bar."""
        from learn.estimation.step_report import estimate_html

        return estimate_html(self)

    @property
    def memory(self) -> Memory:
        """The peak memory, its bound and its parts."""
        return self._part(Memory)

    @property
    def time(self) -> Timing:
        """The step time, throughput and communication."""
        return self._part(Timing)

    @property
    def activity(self) -> Activity:
        """The activity of the GPU."""
        return self._part(Activity)

    @property
    def energy(self) -> Energy:
        """The energy of a step."""
        return self._part(Energy)

    def _part(self, kind: type[Part]) -> Part:
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})  # type: ignore[arg-type]

    @property
    def warnings(self) -> tuple[str, ...]:
        """The texts of `notes`."""
        return tuple(note.text for note in self.notes)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Return the estimate that `to_mapping` wrote, also through JSON. Unknown fields are ignored."""
        values = _known_fields(cls, mapping)
        values["notes"] = tuple(
            Note(**{**_known_fields(Note, note), "targets": tuple(note.get("targets", ()))})
            for note in mapping["notes"]
        )
        values["distribution"] = tuple((p, mib) for p, mib in values.get("distribution", ()))
        values["ranks"] = tuple(RankGroup(**_known_fields(RankGroup, group)) for group in values.get("ranks", ()))
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields, `warnings`, and `fits`: whether the job fits the empty card."""
        mapping = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        mapping["notes"] = tuple(dict(vars(note)) for note in self.notes)
        mapping["ranks"] = tuple(map(asdict, self.ranks))
        return {**mapping, "warnings": list(self.warnings), "fits": self.fits_device}


def _known_fields(kind: type, mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: mapping[field.name] for field in fields(kind) if field.name in mapping}


def estimators_named(by: Mapping[str, str]) -> str:
    """Return the distinct estimators of `answered_by`, the trace last."""
    named = sorted({text.partition(" ")[0] for text in by.values()}, key=lambda name: (name == "trace", name))
    return " + ".join(named)
