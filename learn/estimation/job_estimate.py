"""The estimate of one training job on one GPU model.

Start reading at `Estimate`, which consists of the classes before it; `learn.estimation.answers` makes one.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from typing import Any, Self, TypeVar

import numpy as np

from conf.errors import UsageError
from learn.estimation.estimate_view import Note, estimate_text
from learn.estimators.protocol import LEVEL

COVERAGES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # points of the distribution that an estimate holds

Part = TypeVar("Part")


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
                  model has no such rate. See `featurize.timing.kernels.seconds_at_peak`
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
