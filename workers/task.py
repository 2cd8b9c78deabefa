"""What a worker is given and what it returns: a task, and the runs that became of it."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from featurize.trial import TrialConfig
from warehouse.run import Run
from workers.alone import AloneRun
from workers.settings import TrialSettings

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task as its worker receives it; the types of the configs' names of code say what may be imported."""

    job_id: str
    task_index: int
    attempt: int
    config: TrialConfig
    settings: TrialSettings
    seed: int
    partners: tuple[TrialConfig, ...] = ()  # trials that start together with it on the same device
    part: str = ""  # of a task of several runs: which one, as in `with-1`; the task's own run has none
    # Of `config` and each partner the run alone, where it is known; None, or nothing: it is measured first.
    alone: tuple[AloneRun | None, ...] = ()

    @property
    def run_id(self) -> str:
        """Return the run's id, which is the same for every attempt, so that a repeated task lands once."""
        own = f"{self.job_id}-{self.task_index:06d}"
        return f"{own}-{self.part}" if self.part else own


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One row of `runs`, its rows of `telemetry`, of `kernels` and of `ranks`.

    `retryable`: the failure was not the trial's own, try again. `repeat`: the trial ended, but its labels
    cannot be trusted."""

    run: Run
    telemetry: pa.Table
    kernels: pa.Table | None = None  # columns of `kernels` that are not its run's; None: not asked for, or none came
    ranks: pa.Table | None = None  # columns of `ranks` that are not its run's; None: one device
    collocations: pa.Table | None = None  # columns of `collocations` that are not its run's; None: it ran alone
    others: tuple[RunResult, ...] = ()  # further runs of the task, which land first: of members alone, and of partners
    retryable: bool = False
    repeat: bool = False


@dataclass(frozen=True)
class RunClock:
    """When a trial began: by the calendar, and in monotonic nanoseconds."""

    started_at: datetime.datetime
    t0_ns: int

    @classmethod
    def started(cls) -> RunClock:
        """Return the clock of a trial that begins now."""
        return cls(datetime.datetime.now(datetime.UTC), time.monotonic_ns())
