"""A worker: pinned to one slot of a device, it runs one trial after another and turns each into a run.

Start reading at `Worker.run`. Never imports torch. Under Ray it lives in an actor; inline it lives in the dispatcher.
Its processes: the worker starts a trial server, which has imported torch; that forks a keeper for each trial, which
forks the trial and ends with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import platform
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from conf.children.running import ServerLost
from conf.errors import safe_text
from featurize.configs.trial import code_marks, config_hash
from warehouse.tables.schema import KERNEL_SCHEMA, SCHEMA_VERSION, Run
from workers.devices import DeviceChoice, MemberAlone, Together, core_count, host_memory_share_mib, make_device
from workers.labels import MEANS, EndedMember, label_ranks, label_run, labelled_group, table_of_rows
from workers.task import RunClock, RunResult, Task
from workers.telemetry.nvml import memory_before, open_nvml
from workers.telemetry.sensors import SensorUnavailable, call_within, to_table
from workers.trial.reports import KERNEL_COLUMNS, Failure, Observed, ReportReader
from workers.trial.running import (
    MpsDaemon,
    MpsUnavailable,
    RunningTrial,
    TrialServer,
    kernel_oom_kills,
    kernels_missing,
    outcome_of,
)

_TICK_S = 0.1  # between checks of the deadline and new samples while a trial runs
_NVML_S = 5.0  # limit of the reading before a trial
_CORES_TO_PREPARE = 4  # for each worker: the trial that is measured, its sampling, and the next trial side by side


class Worker:
    """Runs trials in one slot. Use from one thread. `close` ends its trial server and all processes under it."""

    def __init__(
        self,
        choice: DeviceChoice,
        slot_key: str | None,
        name: str,
        environment: dict[str, str] | None = None,
        workers: int = 1,
        gpus: int = 1,
    ):
        """Make a worker without starting its trial server.

        Args:
            choice: The device.
            slot_key: The slot's UUID or its index as text; None: all `gpus` slots of the device.
            name: The worker's name in its runs.
            environment: Added to the trial server's environment.
            workers: Workers on this machine, among which the host's memory is divided.
            gpus: Slots that the worker holds; more than one runs trials of as many ranks.
        """
        self.name = name
        self._choice = choice
        self.device = make_device(choice)
        slots = list(self.device.slots())
        if slot_key is not None:
            slots = [slot for slot in slots if slot_key in (slot.device_uuid, str(slot.index))]
        assert len(slots) == gpus, f"slot {slot_key} of {slots}"
        self.slots = slots
        self._slot = slots[0]  # names the device of runs: the first of several GPUs of one model
        self._workers = workers
        self._nvml = None
        if self.device.sampled and self._slot.device_uuid is not None:
            with contextlib.suppress(SensorUnavailable):
                # Held for the worker's life: NVML counts its users, so the sensors of each trial start quickly.
                self._nvml = open_nvml()
        self._environment = {**(environment or {}), **self.device.environment(*self.slots)}
        self._server: TrialServer | None = None
        self._mps: MpsDaemon | None = None
        self._prepared: tuple[Task, RunningTrial] | None = None  # the next trial, which waits to start

    def server(self) -> TrialServer:
        """Return the trial server, started if there is none, without waiting for it."""
        if self._server is None:
            mps_environment = {} if self._mps is None else self._mps.environment
            self._server = TrialServer({**self._environment, **mps_environment})
        return self._server

    def set_sharing(self, sharing: str) -> str | None:
        """Set how later trials share the GPU, starting the MPS service for `mps`. Return the reason if that fails."""
        if self.device.backend != "cuda" or (sharing == "mps") == (self._mps is not None):
            return None
        self.discard_server()  # it has the earlier environment, and its trials use the service
        if self._mps is not None:
            self._mps.close()
            self._mps = None
            return None
        try:
            self._mps = MpsDaemon(self._environment)
        except MpsUnavailable as problem:
            return str(problem)
        return None

    def ready(self) -> dict[str, Any]:
        """Wait until trials can be forked; return the software environment. Raises `ServerLost`."""
        return self.server().hello()

    @property
    def prepares(self) -> bool:
        """Return whether `trial.prepare_ahead=auto` prepares the next trial here.

        True if the device is not the CPU and spare cores keep the preparation from disturbing the measurement."""
        return self.device.prepares and core_count() >= _CORES_TO_PREPARE * self._workers

    def run(self, task: Task, upcoming: Task | None = None) -> RunResult:
        """Run one trial to its end and return its result. A failure of the trial is a result, not an exception.

        `upcoming` probably runs next: its process gets ready while this trial is measured.
        """
        if task.partners:
            return run_group(self, task)
        self.set_sharing(task.settings.sharing)
        observed = self.observed()
        lost, clock = _run_all(self, [task], [observed], upcoming=upcoming)
        return self.conclude(task, observed, lost, clock)

    def observed(self, *, shared: bool = False) -> Observed:
        """Return the record of a trial that begins."""
        return Observed(
            backend=self.device.backend,
            device_memory_mib=self._slot.device_memory_mib,
            shared=shared,
        )

    def conclude(self, task: Task, observed: Observed, lost: str | None, clock: RunClock) -> RunResult:
        """Return the result of a trial that has ended. `lost`: why its trial server was lost, or None."""
        settings, ranks = task.settings, task.config.ranks
        outcome, retryable = outcome_of(observed, settings, lost, self.device.backend, ranks)
        finished_at, wall_s = datetime.datetime.now(datetime.UTC), (time.monotonic_ns() - clock.t0_ns) / 1e9
        observed.status, observed.oom_kind = outcome["status"], outcome["oom_kind"]
        observed.t0_ns = clock.t0_ns if self.device.sampled else 0  # virtual time begins at 0
        observed.clock_drift_s = (finished_at - clock.started_at).total_seconds() - wall_s
        rank_table = None
        if ranks > 1:
            labels, samples, rank_table = label_ranks(observed, self.slots, ranks)
        else:
            labels, samples = label_run(observed)
        kernels = self._kernels(task, observed)
        began_ns = observed.warmup_ns if self.device.sampled else None  # virtual time has no start-up
        # The software that the trial reported replaces what its server knew.
        run = Run(
            **{**self._identity(task), **outcome, **labels},
            half_widths=observed.half_widths or None,
            window_kind=settings.window.kind,
            startup_s=None if began_ns is None else (began_ns - clock.t0_ns) / 1e9,
            prepared=observed.prepared,
            telemetry_rows=len(observed.samples),
            telemetry_missing={name: safe_text(why, 1000) for name, why in observed.missing.items()} or None,
            started_at=clock.started_at,
            finished_at=finished_at,
            wall_s=wall_s,
        )
        table = to_table(
            task.run_id,
            samples,
            observed.t0_ns,
            observed.warmup_ns,
            observed.window_ns,
            observed.window_end_ns,
        )
        return RunResult(
            run=run,
            telemetry=table,
            kernels=kernels,
            ranks=rank_table,
            retryable=retryable,
            repeat=run.quality == "untrusted",
        )

    def _kernels(self, task: Task, observed: Observed) -> pa.Table | None:
        """Return the kernels that a finished trial reported; note the reason if requested ones are missing."""
        if not (task.settings.kernels.steps and observed.finished) or observed.shared:
            return None
        problem = kernels_missing(observed) if self._profiles(task) else "trials of several ranks are not profiled"
        if problem is not None:
            observed.missing["kernels"] = problem
            return None
        return table_of_rows(observed.kernels, [KERNEL_SCHEMA.field(name) for name in KERNEL_COLUMNS])

    def close(self) -> None:
        self.discard_server()
        self.set_sharing("time_slicing")
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def discard_server(self) -> None:
        """End the trial server and every trial on it; the next trial starts another."""
        server, self._server = self._server, None
        if self._prepared is not None:
            self._prepared[1].close()  # the process ends with the server
            self._prepared = None
        if server is not None:
            server.close()

    def take_trial(self, task: Task, observed: Observed) -> RunningTrial:
        """Return the task's process: the prepared one if it is this task's, else a new one."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            spec, trial = prepared
            if spec == task and not trial.outgrew_memory():
                trial.tell("go")
                observed.prepared = True
                return trial
            trial.discard()
        return self.start_trial(task, self.described(task))

    def start_trial(self, task: Task, described: dict[str, Any], *, members: int = 1) -> RunningTrial:
        """Start a process for a task, or for one of `members` in a group. Raises `ServerLost`."""
        limit_mib = task.settings.host_memory_limit_mib or host_memory_share_mib(self._workers)
        reader = ReportReader(
            since_ns=time.monotonic_ns(),
            virtual=not self.device.sampled,
            kernels=self._profiles(task),
            ranks=task.config.ranks,
        )
        return RunningTrial(self.server(), described, reader, limit_mib / members, task.settings, self.slots)

    def _profiles(self, task: Task) -> bool:
        """Return whether the trial reports its kernels. Real ranks do not: their steps would wait for each other."""
        return task.settings.kernels.steps > 0 and not (self.device.sampled and task.config.ranks > 1)

    def drop_prepared(self) -> None:
        """End the process that was made ready, if there is one. Raises `ServerLost`."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared[1].discard()

    def prepare(self, task: Task | None) -> None:
        """Start the next trial's process, which builds what it can on the host and waits."""
        if task is None or self._prepared is not None:
            return
        settings = task.settings
        if settings.prepare_ahead == "never" or (settings.prepare_ahead == "auto" and not self.prepares):
            return
        self._prepared = task, self.start_trial(task, {**self.described(task), "ahead": True})

    def described(self, task: Task) -> dict[str, Any]:
        """Return the message that describes the task to its process."""
        return {
            "config": task.config.to_mapping(),
            "code_marks": code_marks(task.config),
            "settings": task.settings.to_mapping(),
            "seed": task.seed,
            "device": self._choice.to_mapping(),
            "slots": [dataclasses.asdict(slot) for slot in self.slots],
        }

    def read_before(self, task: Task, observed: Observed) -> None:
        """Read the kernel's count of out-of-memory kills and each GPU's memory in use, before the trial starts."""
        observed.oom_kills = kernel_oom_kills()
        if self._nvml is None or "nvml" not in task.settings.telemetry.sources:
            return
        for rank, slot in enumerate(self.slots):
            with contextlib.suppress(SensorUnavailable):
                before = call_within("nvml", _NVML_S, memory_before, self._nvml, slot.device_uuid)
                number = rank if task.config.ranks > 1 else None
                observed.samples += [("nvml", dataclasses.replace(sample, rank=number)) for sample in before]

    def _identity(self, task: Task) -> dict[str, Any]:
        software = self._server.hello() if self._server is not None else {}
        return {
            **software,
            "run_id": task.run_id,
            "job_id": task.job_id,
            "task_index": None if task.part else task.task_index,  # it marks the run that ends the task
            "attempt": task.attempt,
            "family": task.config.family,
            "config": task.config.to_mapping(),
            "config_hash": config_hash(task.config),
            "source": self.device.source,
            "device_name": self._slot.device_name,
            "device_uuid": self._slot.device_uuid,
            "device_memory_mib": self._slot.device_memory_mib,
            "driver_version": self._slot.driver_version,
            "node": platform.node(),
            "worker": self.name,
            "memory_fraction": self._slot.memory_fraction,
            "mig_profile": self._slot.mig_profile,
            "mps": True if self._mps is not None else self._slot.mps,
            "schema_version": SCHEMA_VERSION,
            "batch_size": task.config.batch_size,
            "precision": task.config.precision,
            "optimizer": task.config.optimizer,
            "parallel": task.config.parallel,
        }


_MEMBER_TICK_S = 0.02  # longest turn of listening to one member
_WARM_BY = 0.5  # share of the deadline: a member not warm by then holds up the others and is killed


def run_group(worker: Worker, task: Task) -> RunResult:
    """Run a task with partners to its end and return the result of its first member.

    `others` has the solo runs that were not known, then the other members' runs. Failures of trials never raise.
    """
    lone = dataclasses.replace(task, partners=(), alone=())
    others = [
        dataclasses.replace(lone, config=config, part=f"with-{place}")
        for place, config in enumerate(task.partners, start=1)
    ]
    specs = [lone, *others]
    problem = worker.set_sharing(task.settings.sharing)
    alone, runs_alone = _alone(worker, task, specs) if problem is None else ([None] * len(specs), [])
    lost_alone = next((result for result in runs_alone if result.retryable), None)
    records = [worker.observed(shared=True) for _ in specs]
    lost, clock = None, RunClock.started()
    if problem is not None:
        for observed in records:
            observed.failure = Failure(
                status="invalid",
                oom_kind=None,
                error_type="MpsUnavailable",
                error=problem,
                device_fault=False,
                values={},
            )
    elif lost_alone is not None:  # a solo run lost its worker: retry the whole task
        lost = lost_alone.run.error or "a run alone was lost"
    else:
        lost, clock = _run_all(worker, specs, records, alone)
    results = [worker.conclude(spec, observed, lost, clock) for spec, observed in zip(specs, records, strict=True)]
    sharing = "mig" if worker.slots[0].mig_profile is not None else task.settings.sharing
    finished = labelled_group(
        task.run_id,
        [EndedMember(*parts) for parts in zip(results, records, alone, strict=True)],
        sharing=sharing,
    )
    first, *partners = finished
    return dataclasses.replace(
        first,
        others=(*runs_alone, *partners),
        retryable=any(result.retryable for result in finished),
        repeat=any(result.repeat for result in (*runs_alone, *finished)),
    )


def _alone(worker: Worker, task: Task, specs: Sequence[Task]) -> tuple[list[Run | None], list[RunResult]]:
    """Return each member's solo run (None after one was lost), and the results of those that had to run."""
    given = task.alone or (None,) * len(specs)
    known = {config_hash(spec.config): run for spec, run in zip(specs, given, strict=True) if run is not None}
    results: list[RunResult] = []
    for place, spec in enumerate(specs):
        name = config_hash(spec.config)
        if name not in known and not any(result.retryable for result in results):
            result = worker.run(dataclasses.replace(spec, part=f"alone-{place}"))
            results.append(result)
            known[name] = result.run
    return [known.get(config_hash(spec.config)) for spec in specs], results


def _run_all(
    worker: Worker,
    specs: Sequence[Task],
    records: Sequence[Observed],
    alone: Sequence[Run | None] = (),
    upcoming: Task | None = None,
) -> tuple[str | None, RunClock]:
    """Run one trial, or several side by side; return why the server was lost (or None), and the clock."""
    lost, clock = None, RunClock.started()
    try:
        worker.ready()
        if len(specs) > 1:
            worker.drop_prepared()
        clock = RunClock.started()  # restarted: the trials' clock leaves out the server's start
        _run_members(worker, specs, records, alone, upcoming, clock)
    except ServerLost as error:
        lost = str(error)
        worker.discard_server()
    except BaseException:
        worker.discard_server()  # trials may still run on it
        raise
    return lost, clock


def _run_members(
    worker: Worker,
    specs: Sequence[Task],
    records: Sequence[Observed],
    alone: Sequence[Run | None],
    upcoming: Task | None,
    clock: RunClock,
) -> None:
    """Run all trials to their end, listening to them in turns. Raises `ServerLost`.

    `upcoming` gets ready once a window has begun.
    """
    is_group, timeout_ns = len(specs) > 1, int(specs[0].settings.timeout_s * 1e9)
    tick_s = _MEMBER_TICK_S if is_group else _TICK_S
    trials: list[RunningTrial] = []
    try:
        for place, (spec, observed) in enumerate(zip(specs, records, strict=True)):
            worker.read_before(spec, observed)
            if is_group:
                described = {**worker.described(spec), "together": _together_of(worker, specs, place, alone)}
                trials.append(worker.start_trial(spec, described, members=len(specs)))
            else:
                trials.append(worker.take_trial(spec, observed))
        for observed, trial in zip(records, trials, strict=True):
            partners = [other.pid for other in trials if other is not trial]
            trial.watch(observed, clock.t0_ns + timeout_ns, tick_s, partners)
        is_open = not (is_group and worker.device.sampled)  # a single trial, or one in virtual time, waits for no other
        while any(trial.living for trial in trials):
            for trial in [trial for trial in trials if trial.living]:
                event = trial.step()
                if event == "window":
                    worker.prepare(upcoming)
                elif event == "failed":
                    trial.dismiss()
            is_open = _direct(trials, is_open, clock.t0_ns + int(_WARM_BY * timeout_ns))
    finally:
        for trial in trials:
            trial.close()


def _direct(trials: Sequence[RunningTrial], is_open: bool, warm_by_ns: int) -> bool:
    """Open the windows once all living trials are warm, and dismiss all once each has reported.

    Returns whether the windows are open.
    """
    waiting = [trial for trial in trials if not trial.reported]
    if not is_open and waiting:
        cold = [trial for trial in waiting if not trial.observed.warm]
        if not cold:
            is_open = True
            for trial in waiting:
                trial.tell("open")
        elif time.monotonic_ns() > warm_by_ns:
            for trial in cold:
                trial.leave_by_ns = time.monotonic_ns()
    if not waiting:
        for trial in trials:
            if trial.observed.broken is None:  # a broken one is killed instead
                trial.dismiss()
    return is_open


def _together_of(worker: Worker, specs: Sequence[Task], place: int, alone: Sequence[Run | None]) -> dict[str, Any]:
    figures = [] if worker.device.sampled else [None if run is None else _figures_alone(run) for run in alone]
    sharing = specs[0].settings.sharing
    return dataclasses.asdict(Together(member=place, size=len(specs), sharing=sharing, alone=tuple(figures)))


def _figures_alone(run: Run) -> MemberAlone | None:
    """Return a partner's figures for a simulated device; None for one without figures."""
    figures = {"memory_mib": run.peak_memory_mib, **{name: getattr(run, name) for name in MEANS}}
    return None if None in figures.values() else MemberAlone(**figures)
