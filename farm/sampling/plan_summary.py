"""Summarises what a choice would gain and cost before anything runs, as `dry_run=true` prints it.

Start reading at `summary`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from farm.sampling.known_runs import Known
from farm.sampling.selection import Chosen, Selection

_PAST_RUNS = 10  # of a family, from which on its own median wall time is what a run is expected to take
_STARTUP_S, _STEPS = 15.0, 100  # else: a guess of process start and context, and of the steps until a window is steady
_LOG_ERROR = 0.15  # of a rough memory figure: standard deviation of its logarithm where nothing better is known


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of one choice.

    runs           chosen; by family in `families`
    bins_gained    cells without any row so far that get some, by dimension; `gained` has every cell
    measured, repeated  candidates left out: measured already, copies of one another
    gpu_hours      expected; `from_past`: the share of runs whose family's past runs it was taken from
    out_of_memory  expected number of runs that will not fit
    ways           how the figures were found -> runs
    """

    policy: str
    runs: int
    families: Mapping[str, int]
    pool: int
    measured: int
    repeated: int
    bins_gained: Mapping[str, int]
    gained: Mapping[str, Mapping[str, tuple[int, int]]]
    gpu_hours: float
    from_past: float
    out_of_memory: float
    ways: Mapping[str, int]
    notes: tuple[str, ...]

    def lines(self, source: str = "measured") -> list[str]:
        """Return the summary as text, a fact a line. `source` of the runs: `measured` or `simulated`."""
        families = ", ".join(f"{name}: {n}" for name, n in self.families.items())
        new = ", ".join(f"{name}: {n}" for name, n in self.bins_gained.items() if n) or "none"
        past = f"{self.from_past:.0%} of it from past runs of the family" if self.from_past else "a guess: no past runs"
        hours = "hours of simulated runs" if source == "simulated" else "GPU-hours"
        return [
            f"policy {self.policy}: {self.runs:,} of {self.pool:,} candidates ({families})",
            f"left out: {self.measured:,} {source} already, {self.repeated:,} copies of one another",
            f"bins and regions that had no row: {new}",
            f"expected: {self.gpu_hours:.2f} {hours} ({past}), {self.out_of_memory:.0f} runs out of memory",
            f"figures from: {', '.join(f'{way}: {n}' for way, n in self.ways.items())}",
            *self.notes,
        ]

    def to_mapping(self) -> dict:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def summary(choice: Selection, known: Known, capacity_mib: float) -> Summary:
    """Summarise what the choice gains and costs on a device with that much memory, using `known` runs if possible."""
    seconds, past = expected_seconds(choice, known)
    return Summary(
        policy=choice.policy,
        runs=len(choice.chosen),
        families=dict(sorted(Counter(one.config.family for one in choice.chosen).items())),
        pool=choice.pool,
        measured=choice.measured,
        repeated=choice.repeated,
        bins_gained={name: sum(not before for before, _ in of.values()) for name, of in choice.gained.items()},
        gained=choice.gained,
        gpu_hours=float(sum(seconds)) / 3600,
        from_past=past / max(len(choice.chosen), 1),
        out_of_memory=float(sum(may_run_out(one, capacity_mib) for one in choice.chosen)),
        ways=choice.ways,
        notes=choice.notes,
    )


def may_run_out(one: Chosen, capacity_mib: float) -> float:
    """Return the probability that a run does not fit.

    Log memory is normal around the figure, as wide as the committee's disagreement, or 15 %."""
    from math import erf, log, sqrt

    error = max(_LOG_ERROR, one.disagreement or 0.0)
    return 0.5 * (1 + erf(log(max(one.figures["memory"], 1.0) / capacity_mib) / error / sqrt(2)))


def expected_seconds(choice: Selection, known: Known) -> tuple[list[float], int]:
    """Return the expected wall time of each chosen run in s, and for how many it is the family's median so far.

    Without past runs it is start-up plus a hundred steps as the kernel model times them."""
    family = np.array([config.family for config in known.configs], dtype=object)
    medians: dict[str, float] = {}
    for name in {one.config.family for one in choice.chosen}:
        of_family = known.seconds[(family == name) & np.isfinite(known.seconds)] if len(family) else np.zeros(0)
        if len(of_family) >= _PAST_RUNS:
            medians[name] = float(np.median(of_family))
    seconds = []
    for one in choice.chosen:
        guess = _STARTUP_S + _STEPS * one.figures["step_time"] / 1e3
        seconds.append(medians.get(one.config.family, guess))
    return seconds, sum(one.config.family in medians for one in choice.chosen)
