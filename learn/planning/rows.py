"""Rows of a plan: each layout of a job.

Start reading at `LayoutPlan`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from featurize.job.layout import Parallel
from learn.planning.meshes import mesh_text

TRACED, EXTRAPOLATED = "traced", "extrapolated"


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A job in one layout, with one micro-batch. MiB and ms of the rank that needs most; None: not known.

    micro_batch   samples of a rank's forward pass; None: the layout takes none
    accumulation  micro-steps of an optimizer step; with `pp`, micro-batches of the schedule
    checkpointing of the repeated blocks, as in `featurize.job.training_settings.Training`; None: nothing is recomputed
    fits          whether the bound is at most the card's memory; None: the layout cannot be, or was not tried
    upper_mib     the bound
    exposed_ms    of the step time, in which a rank waits for others
    samples_per_s of all ranks. This and times are only known of what fits
    why           it does not fit, cannot be, or was not tried
    known         `TRACED`, or `EXTRAPOLATED` from traces of fewer blocks; None: neither, as `why` says
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
        """Text of what a rank does in a step, as `8 samples x 4, checkpointing full`."""
        samples = "no samples" if self.micro_batch is None else f"{self.micro_batch:,} samples"
        times = f" x {self.accumulation:,}" if self.accumulation > 1 else ""
        return f"{samples}{times}{f', checkpointing {self.checkpointing}' if self.checkpointing else ''}"

    @property
    def needed_mib(self) -> float:
        """MiB that have to fit: the bound, or the estimate where there is none; 0 where nothing is known."""
        return (self.peak_memory_mib if self.upper_mib is None else self.upper_mib) or 0.0


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """All layouts of a job that were looked at: what fits first, the most samples a second first.

    name          of the job
    device        name of the GPU model
    limit_mib     what a rank may take of it
    coverage      share of jobs that stay below the bound
    global_batch  samples of a step of all ranks, where they were given
    notes         on what was left out, and what was assumed of the best layout
    seconds       what the plan itself took
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
        """The rows that fit, the quickest first."""
        return tuple(row for row in self.rows if row.fits)

    @property
    def best(self) -> PlanRow | None:
        """The row with the most samples a second of those that fit."""
        return next(iter(self.fitting), None)

    @cached_property
    def best_of_meshes(self) -> tuple[PlanRow, ...]:
        """The best row of each mesh that fits, the quickest first."""
        return tuple({row.parallel: row for row in reversed(self.fitting)}.values())[::-1]

    @cached_property
    def frontier(self) -> tuple[PlanRow, ...]:
        """The rows that fit where none is as quick with less memory, the quickest first."""
        chosen: list[PlanRow] = []
        for row in self.fitting:
            if not chosen or row.needed_mib < chosen[-1].needed_mib:
                chosen.append(row)
        return tuple(chosen)

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields, each row with `mesh` and whether it is on the `frontier`."""
        rows = [{"mesh": row.mesh, **asdict(row), "frontier": row in self.frontier} for row in self.rows]
        return {**{name: getattr(self, name) for name in _PLAIN}, "notes": list(self.notes), "rows": rows}


_PLAIN = ("name", "device", "limit_mib", "coverage", "global_batch", "seconds")


def in_order(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """Return rows as a plan has them: by samples a second, then the nearest to fit, then those that cannot be."""

    def place(row: PlanRow) -> tuple[int, float]:
        if row.fits:
            return 0, -(row.samples_per_s or 0.0)
        return (1, row.needed_mib or float("inf")) if row.fits is False else (2, 0.0)

    return tuple(sorted(rows, key=place))
