"""A worker's input and output: a task and the runs that it yields. Start reading at `Task`."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass, field

import pyarrow as pa

from featurize.configs.trial import TrialConfig
from warehouse.tables.schema import Run
from workers.devices import DeviceChoice, TrialSettings


@dataclass(frozen=True, kw_only=True)
class Lease:
    """One leased task. `attempt` counts executions from 1 and tells this holder from earlier ones."""

    job_id: str
    task_index: int
    attempt: int

    @property
    def run_id(self) -> str:
        """Return the run's id. Every attempt has the same one, so a repeated task lands once."""
        return run_id_of(self.job_id, self.task_index)


@dataclass(frozen=True, kw_only=True)
class Task(Lease):
    """A leased task, parsed.

    The config's code names are plain data until `farm.dispatch.submitted_code` approves them, which changes their type.
    """

    config: TrialConfig
    settings: TrialSettings
    device: DeviceChoice = field(default_factory=DeviceChoice)
    partners: tuple[TrialConfig, ...] = ()  # trials that start together with it on the same device
    part: str = ""  # names one run of a task that has several, as in `with-1`; empty for the task's own run
    # Solo runs of `config` and of each partner, which their runs together are compared with. An unknown one (None, or
    # an empty tuple) is measured first.
    alone: tuple[Run | None, ...] = ()

    @property
    def run_id(self) -> str:
        task_id = run_id_of(self.job_id, self.task_index)
        return f"{task_id}-{self.part}" if self.part else task_id

    @property
    def family(self) -> str:
        """Return the config's family; a job may have several."""
        return self.config.family

    @property
    def seed(self) -> int:
        """Return the trial's seed: the task's index, so repeats are equal."""
        return self.task_index

    @property
    def simulated(self) -> bool:
        return self.device.backend == "simulated"


def run_id_of(job_id: str, task_index: int) -> str:
    """Return the id of a task's run."""
    return f"{job_id}-{task_index:06d}"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One row of `runs`, with its rows of `telemetry`, `kernels` and `ranks`.

    `retryable`: the trial did not cause the failure, try again. `repeat`: the trial ended, but its labels
    cannot be trusted."""

    run: Run
    telemetry: pa.Table
    kernels: pa.Table | None = None  # without the columns of its run; None: not requested, or none arrived
    ranks: pa.Table | None = None  # without the columns of its run; None: one device
    collocations: pa.Table | None = None  # without the columns of its run; None: it ran alone
    others: tuple[RunResult, ...] = ()  # further runs of the task, which land first: solo runs and partners' runs
    retryable: bool = False
    repeat: bool = False


@dataclass(frozen=True)
class RunClock:
    """Start of a trial: by the calendar, and in monotonic nanoseconds."""

    started_at: datetime.datetime
    t0_ns: int

    @classmethod
    def started(cls) -> RunClock:
        """Return the clock of a trial that starts now."""
        return cls(datetime.datetime.now(datetime.UTC), time.monotonic_ns())
