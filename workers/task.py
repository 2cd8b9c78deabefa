"""A worker's input and output: a task, and the runs that became of it. Start reading at `Task`."""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass, field

import pyarrow as pa

from featurize.configs.trial import TrialConfig
from warehouse.tables.schema import Run
from workers.devices import DeviceChoice
from workers.settings import TrialSettings


@dataclass(frozen=True, kw_only=True)
class Lease:
    """One leased task. `attempt` is 1 for the first execution, and distinguishes its holder from earlier ones."""

    job_id: str
    task_index: int
    attempt: int

    @property
    def run_id(self) -> str:
        """Return the run's id, which is the same for every attempt, so that a repeated task lands once."""
        return run_id_of(self.job_id, self.task_index)


@dataclass(frozen=True, kw_only=True)
class Task(Lease):
    """A leased task, parsed.

    The config's names of code are data until `farm.dispatch.submitted_code` has said which may run; then their types
    say so.
    """

    config: TrialConfig
    settings: TrialSettings
    device: DeviceChoice = field(default_factory=DeviceChoice)
    partners: tuple[TrialConfig, ...] = ()  # trials that start together with it on the same device
    part: str = ""  # which run of a task of several, as in `with-1`; the task's own run has none
    # Of `config` and each partner the run alone, against which its run beside the others is held; None, or nothing: it
    # is not known, and measured first.
    alone: tuple[RunAlone | None, ...] = ()

    @property
    def run_id(self) -> str:
        task_id = run_id_of(self.job_id, self.task_index)
        return f"{task_id}-{self.part}" if self.part else task_id

    @property
    def family(self) -> str:
        """Return the family of its config, also in a job of several families."""
        return self.config.family

    @property
    def seed(self) -> int:
        """Return the trial's seed: the index, so that repeats are equal."""
        return self.task_index

    @property
    def simulated(self) -> bool:
        return self.device.backend == "simulated"


def run_id_of(job_id: str, task_index: int) -> str:
    """Return the id of a task's run."""
    return f"{job_id}-{task_index:06d}"


@dataclass(frozen=True, kw_only=True)
class RunAlone:
    """Figures that are kept of a member's run alone. They are None where the run has none."""

    run_id: str
    status: str
    step_ms: float | None
    memory_mib: float | None
    gpu_util: float | None
    smact: float | None
    smocc: float | None
    drama: float | None
    power_w: float | None

    @classmethod
    def of(cls, run: Run) -> RunAlone:
        return cls(
            run_id=run.run_id,
            status=run.status,
            step_ms=run.step_time_ms,
            memory_mib=run.peak_memory_mib,
            gpu_util=run.gpu_util,
            smact=run.smact,
            smocc=run.smocc,
            drama=run.drama,
            power_w=run.power_w,
        )


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
