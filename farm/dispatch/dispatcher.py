"""The dispatcher: leases tasks, hands them to workers and lands their runs; a kill at any point loses none.

Start reading at `Dispatcher.run`. One dispatcher at a time for a data folder (`hold_dispatcher_lock`); a task is done
only after its run is durable in the warehouse. Everything that a worker sends passes through `accept`, which turns it
into a run that can land.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from conf.errors import safe_text
from conf.files.identity import identity
from farm.dispatch.executors import Completion, Executor, InlineExecutor
from farm.dispatch.monitoring import Service
from farm.dispatch.ray_cluster import ClusterSettings, RayExecutor, gpu_problem
from farm.dispatch.submitted_code import SubmittedCode
from farm.queue.jobs import Queue, UnreadableTask, device_from_key
from farm.queue.leftovers import SESSION_VARIABLE
from farm.queue.queue_file import QueueError
from featurize.configs.trial import TrialConfig, config_hash, mapping_hash
from warehouse.files.folder import DataFolder
from warehouse.files.plain_file import is_passing
from warehouse.files.writer import RunWriter
from warehouse.tables.schema import JSON_COLUMNS, RUN_SCHEMA, SCHEMA_VERSION, TELEMETRY_SCHEMA, Run
from workers.devices import DeviceChoice
from workers.settings import TrialSettings
from workers.task import RunResult, Task

if TYPE_CHECKING:
    from farm.dispatch.working import Progress

LEASE_S = 60.0
_RENEW_EVERY_S = LEASE_S / 3
_WAIT_S = 0.2
_REFUSED_AT_ONCE = 20  # tasks that land as refused before the dispatcher looks after its workers again
_LAND_WITHIN_S = 60.0  # for a landing that fails with an error that may pass
_STUCK_AFTER_S = 240.0  # past its trial's deadline: starting a server takes up to 120 s, ending a trial up to 30 s


def make_executor(choice: DeviceChoice, cluster: ClusterSettings) -> Executor:
    """Return the executor that `cluster` asks for, with its processes marked as this dispatcher's."""
    marker = {SESSION_VARIABLE: identity(os.getpid())}
    environment = {**cluster.environment, **marker}
    if cluster.kind == "inline":
        return InlineExecutor(choice, environment)
    os.environ.update(marker)  # Ray's own processes inherit it
    return RayExecutor(choice, cluster, environment)


class Clocks(NamedTuple):
    """Functions that return seconds: since the epoch, which may jump, and of a clock that never does."""

    wall: Callable[[], float]
    steady: Callable[[], float]


REAL_CLOCKS = Clocks(time.time, time.monotonic)


class Dispatcher:
    """Runs the tasks of one device, or of one of its jobs.

    Deadlines, leases and backoffs follow the steady clock, from the epoch as it was at the start; what is recorded of a
    run follows the wall clock.

    `shares`: number of workers among which the tasks are divided. Worker i gets those with index % shares == i, and
    takes others only when these are done. So each GPU gets its canaries, and none waits for a GPU that is gone.

    `trust`: modules whose code a task may name although this user did not submit it (`farm.dispatch.submitted_code`).
    `ran` collects the jobs whose runs land, in the order of their first run.
    """

    def __init__(
        self,
        folder: DataFolder,
        queue: Queue,
        executor: Executor,
        device_key: str,
        progress: Progress,
        clocks: Clocks = REAL_CLOCKS,
        service: Service | None = None,
        job_id: str | None = None,
        shares: int = 1,
        trust: Sequence[str] = (),
        ran: dict[str, None] | None = None,
    ):
        self._ran = {} if ran is None else ran
        self._code = SubmittedCode(trust)
        self._job_id = job_id
        self._shares = shares
        self._share_of: dict[str, int] = {}  # worker -> number of its share
        self._service = service or Service()
        self._queue = queue
        self._executor = executor
        self._device_key = device_key
        self._progress = progress
        self._clocks = clocks
        # Leases of this dispatcher do not end because the system's clock is set.
        self._epoch_s = clocks.wall() - clocks.steady()
        self._writer = RunWriter(folder)
        self._leased: dict[str, Task | UnreadableTask] = {}  # run_id -> task; an unreadable one is about to land
        self._upcoming: dict[str, Task] = {}  # worker -> its next task, leased already so it can prepare
        self._alone = RunsAlone()
        self._returned: list[Completion] = []  # to land, in this order
        self._failing_since_s: float | None = None  # by `steady`: when the first of them failed to land
        self._stuck_at: dict[str, float] = {}  # run_id -> deadline of its completion, by `steady`
        self._renewed_at = clocks.steady()

    def run(self, stop: StopRequest) -> bool:
        """Work until this device's tasks are done (True) or `stop` asks to leave (False).

        On the way out, whatever the reason, tasks that were handed out and did not land are given back.
        """
        events = self._service.events
        try:
            self._queue.cap_waits(self._now())
            self._executor.start()
            events.emit("device_started", device=device_from_key(self._device_key).to_mapping())
            stop.install()  # again: Ray has replaced the handlers
            while True:
                if not stop.requested:
                    self._hand_out()
                is_busy = self._returned or self._executor.running()
                of_device = None if self._job_id else self._device_key
                # Tasks in backoff become due later.
                if not is_busy and (stop.requested or not self._queue.pending(self._job_id, of_device)):
                    return not stop.requested
                completions = self._executor.wait(_WAIT_S)
                self._renew()  # first: a completed task must not be handed out again because its lease ran out
                if completions and not stop.requested:
                    self._hand_out()  # before landing, so the workers do not stand idle
                self._returned += completions
                self._land_returned()
                self._restart_stuck_workers()
                for notice in self._executor.notices():
                    events.emit("notice", message=notice)
                    self._progress.say(notice)
                self._progress.update()
                phase = "stopping" if stop.requested else "working"
                self._service.pulse.beat(phase, len(self._executor.running()), len(self._executor.idle()))
        finally:
            stop.disarm()
            try:
                given_back = self._queue.release(list(self._leased.values()))
            finally:  # also if a full disk prevents the release
                self._executor.close()
                stop.install()  # Ray's shutdown removes the handlers: the next SIGTERM would kill this process
            events.emit("device_left", given_back=given_back)

    def _hand_out(self) -> None:
        for worker in self._executor.idle():
            task = self._upcoming.pop(worker, None) or self._lease(worker)
            if task is None and self._upcoming:  # take a busy worker's next task
                _, task = self._upcoming.popitem()
            if task is None:
                break
            upcoming = self._lease(worker) if _looks_ahead(task) else None
            if upcoming is not None:
                self._upcoming[worker] = upcoming
            spec = self._spec(task, worker)
            self._expect_back(spec)
            self._service.events.emit("handed_out", spec, worker=worker)
            # A trial of several ranks, or its ranks, may start on other workers: it is not prepared.
            ready = upcoming is not None and upcoming.config.ranks == 1 and not upcoming.partners
            following = self._spec(upcoming, worker) if upcoming is not None and ready else None
            self._executor.submit(worker, spec, following)
        for expired in self._queue.expired(self._now(), device=self._device_key, held=self._leased.values()):
            self._land_run(expired, lost_run(expired, "every attempt lost its worker or its dispatcher"))

    def _spec(self, task: Task, worker: str) -> Task:
        (config, *partners), _ = self._code.decide_all((task.config, *task.partners))
        return dataclasses.replace(task, config=config, partners=tuple(partners), alone=self._alone.of(task, worker))

    def _lease(self, worker: str) -> Task | None:
        """Return the next task that may run. Tasks that may not run land as `invalid`, a few at a time."""
        shares: list[tuple[int, int] | None] = [None]
        if self._shares > 1:  # the worker's share first
            own_share = self._share_of.setdefault(worker, len(self._share_of)) % self._shares
            shares.insert(0, (own_share, self._shares))
        for _ in range(_REFUSED_AT_ONCE):
            for share in shares:
                leased = self._queue.lease(
                    worker,
                    1,
                    self._now(),
                    LEASE_S,
                    job_id=self._job_id,
                    device=self._device_key,
                    share=share,
                    held=self._leased.values(),
                )
                if leased:
                    break
            else:
                return None
            (task,) = leased
            self._leased[task.run_id] = task
            if isinstance(task, UnreadableTask):
                refused = lost_run(task, task.problem, "invalid", "UsageError")
            elif (refusal := self._code.decide_all((task.config, *task.partners))[1]) is not None:
                refused = lost_run(task, refusal, "invalid", "NotTrusted")
            elif (problem := self._problem_of_ranks(task)) is not None:
                refused = lost_run(task, problem, "invalid", "UsageError")
            else:
                return task
            self._land_run(task, refused)
            del self._leased[task.run_id]
        return None

    def _problem_of_ranks(self, task: Task) -> str | None:
        """Return why no node can run a trial of several ranks; None if one can."""
        layout, gpus = task.config.layout, self._executor.most_gpus()
        return None if layout is None or gpus is None else gpu_problem(layout, gpus)

    def _expect_back(self, spec: Task) -> None:
        trials = 1 + (len(spec.alone) if spec.partners else 0)  # a group runs each member alone as well
        self._stuck_at[spec.run_id] = self._clocks.steady() + trials * (spec.settings.timeout_s + _STUCK_AFTER_S)

    def _land_returned(self) -> None:
        """Land the returned completions. After an error that may pass, the rest is kept for the next turn."""
        while self._returned:
            try:
                self._land(self._returned[0])
            except OSError as error:
                if isinstance(error, QueueError) or not is_passing(error):
                    raise
                now_s = self._clocks.steady()
                if self._failing_since_s is None:
                    self._failing_since_s = now_s
                    self._progress.say(f"{self._returned[0].task.run_id} cannot land now, and is kept: {error}")
                if now_s > self._failing_since_s + _LAND_WITHIN_S:
                    raise
                return
            self._failing_since_s = None
            del self._returned[0]

    def _land(self, completion: Completion) -> None:
        task = self._leased.get(completion.task.run_id)
        if not isinstance(task, Task):  # its task has landed or was given back
            self._service.events.emit("unexpected", completion.task, worker=completion.worker)
            return
        completion = accept(completion, task)
        result = completion.result
        is_requeued = False
        if result is None or result.retryable:
            error = completion.lost or (result and result.run.error) or "no reason was given"
            is_requeued = self._queue.retry(task, self._now(), error)
            if is_requeued:
                self._service.events.emit("retried", completion.task, worker=completion.worker, error=error)
            result = result or lost_run(task, error)
        elif result.repeat:
            is_requeued = self._land_for_repeat(task, result)
            if is_requeued:
                self._service.events.emit(
                    "repeated",
                    completion.task,
                    worker=completion.worker,
                    reasons=sorted(result.run.quality_reasons or ()),
                )
        if not is_requeued:
            self._land_run(task, result, completion.worker)
        del self._stuck_at[completion.task.run_id]
        del self._leased[completion.task.run_id]  # last: a task that could not land is given back

    def _land_for_repeat(self, task: Task, result: RunResult) -> bool:
        """Land an untrusted run as an attempt, under its own name, and queue its task again.

        Returns False if it cannot be repeated any more; it then lands as the task's run. Landed attempts count as
        repeats, so a kill between the two steps costs none: the attempt is durable and its task still open.
        """
        run, limit = result.run, task.settings.quality_repeats
        names = [attempt_run_id(run.run_id, attempt) for attempt in range(1, task.attempt + 1)]
        repeated = sum(self._writer.has_landed(run.family, name) for name in names) if limit else 0
        if repeated >= limit or not self._queue.may_repeat(task):
            return False
        try:
            for run_result in (*result.others, result):
                self._write(as_attempt(run_result, task.attempt))
        except (OSError, MemoryError):
            raise
        except Exception:
            return False  # a bug of ours, which `_land_run` reports
        why = "; ".join(f"{name} ({words})" for name, words in (run.quality_reasons or {}).items())
        return self._queue.repeat(task, self._now(), safe_text(f"labels not trusted: {why}"))

    def _land_run(self, task: Task | UnreadableTask, result: RunResult, worker: str | None = None) -> None:
        """Write the run, then mark its task as done; `reconcile` repairs a kill in between."""
        if self._queue.is_done(task):
            return  # another dispatcher landed it after this lease had run out
        try:
            for run_result in (*result.others, result):  # the task's run comes last: it completes the task
                self._write(as_final(run_result))
        except (OSError, MemoryError):  # a fault of this machine, not of the run
            raise
        except Exception as error:  # a bad result fails its task, not the job
            result = lost_run(task, f"its run was refused by the warehouse: {error}")
            for run_result in (*result.others, result):
                self._write(as_final(run_result))
        if isinstance(task, Task) and worker is not None:
            self._alone.landed(task, worker, result.others)
        run = result.run
        self._queue.finish(task, run.status, self._clocks.wall(), error=run.error)
        self._progress.landed(run)
        self._ran.setdefault(task.job_id)
        self._service.samples(run, result.telemetry)
        self._service.events.emit(
            "landed",
            task,
            worker=worker,
            status=run.status,
            family=run.family,
            quality=run.quality,
            wall_s=run.wall_s,
            error=run.error,
        )

    def _write(self, result: RunResult) -> None:
        self._writer.write(result.run, result.telemetry, result.kernels, result.ranks, result.collocations)

    def _restart_stuck_workers(self) -> None:
        """Restart workers long past their trial's deadline: they hang themselves, as with a wedged driver."""
        now = self._clocks.steady()
        waiting = self._executor.waiting()
        for worker, task in self._executor.running().items():
            if worker in waiting:
                self._expect_back(task)  # its time starts once it has its GPUs
            elif now > self._stuck_at[task.run_id]:
                self._service.events.emit("stuck", task, worker=worker)
                self._progress.say(f"{worker} is stuck at {task.run_id}; it is restarted")
                self._expect_back(task)  # it returns as lost; if not, the worker is restarted again
                self._executor.restart(worker)

    def _renew(self) -> None:
        now = self._clocks.steady()
        if now - self._renewed_at >= _RENEW_EVERY_S and self._leased:
            self._queue.renew(list(self._leased.values()), self._now(), LEASE_S)
            self._renewed_at = now

    def _now(self) -> float:
        """Return this dispatcher's seconds since the epoch, which changes of the system's clock do not affect."""
        return self._epoch_s + self._clocks.steady()


def _looks_ahead(task: Task) -> bool:
    """Return whether the worker may prepare the next trial while it runs this one; `Worker.prepares` decides."""
    if task.config.ranks > 1 or task.partners:
        return False
    wish = task.settings.prepare_ahead
    return wish == "always" or (wish == "auto" and task.device.backend == "cuda")


class StopRequest:
    """Signal handling: the first Ctrl-C or SIGTERM finishes running trials, the second raises `KeyboardInterrupt`.

    After `seconds` a stop is requested as well.
    """

    def __init__(self, seconds: float | None = None):
        self.asked = False  # by a signal
        self._until_s = None if seconds is None else time.monotonic() + seconds

    @property
    def requested(self) -> bool:
        return self.asked or (self._until_s is not None and time.monotonic() >= self._until_s)

    def install(self) -> None:
        """Take over SIGINT and SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Take over the signals, and give them back at the end."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def disarm(self) -> None:
        """Cancel later interrupts: giving back running tasks must complete."""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.disarm()
            raise KeyboardInterrupt
        self.asked = True
        print("\nfinishing what runs, then leaving; Ctrl-C again stops at once (nothing is lost)", file=sys.stderr)


_TEXT_CHARACTERS = 4_000  # characters of any text of a run, except its error
_JSON_CHARACTERS = 64_000  # a longer JSON column is left out: truncated JSON is invalid
_OWN_COLUMNS = ("run_id", "job_id", "task_index", "family")  # columns that connect a run with its task
_TEXT_COLUMNS = tuple(
    field.name for field in RUN_SCHEMA if pa.types.is_string(field.type) and field.name not in JSON_COLUMNS
)
_MAPPING_COLUMNS = tuple(name for name in JSON_COLUMNS if name != "config")


def attempt_run_id(run_id: str, attempt: int) -> str:
    """Return the run id of an attempt that was not the task's last, which keeps it from replacing the task's run."""
    return f"{run_id}-a{attempt}"


def as_attempt(result: RunResult, attempt: int) -> RunResult:
    """Return a result as that of an attempt after which its task is queued again."""
    run = dataclasses.replace(result.run, run_id=attempt_run_id(result.run.run_id, attempt), final=False)
    telemetry = result.telemetry
    if "run_id" in telemetry.column_names:
        telemetry = telemetry.drop_columns(["run_id"])  # the writer adds the new one
    # Only a final group has rows in `collocations`.
    return dataclasses.replace(result, run=run, telemetry=telemetry, collocations=None)


def as_final(result: RunResult) -> RunResult:
    """Return a result marked as its task's final one."""
    return dataclasses.replace(result, run=dataclasses.replace(result.run, final=True))


def accept(completion: Completion, task: Task) -> Completion:
    """Return the completion in a form that queue and warehouse accept; its content never raises.

    Texts are made storable and truncated (a line in them says how much is missing). A result that is not a run of this
    task becomes a `crashed` one that says why. Only a `crashed` run is tried again.
    """
    if completion.lost is not None:
        return dataclasses.replace(completion, lost=safe_text(str(completion.lost)), result=None)
    try:
        result = _check(completion.result, task)
    except ValueError as error:
        result = lost_run(task, f"the worker's answer is not a run of this task: {error}")
    return dataclasses.replace(completion, result=result)


def _check(result: object, task: Task) -> RunResult:
    """Check the shapes of a result and of the further runs that come with it. Raises `ValueError`."""
    expected = {name: getattr(task, name) for name in _OWN_COLUMNS}
    checked = _checked_run(result, expected, task.config, task.attempt)
    assert isinstance(result, RunResult)
    parts = _parts_of(task)
    others = []
    for other in result.others if isinstance(result.others, tuple) else ():
        run_id = getattr(getattr(other, "run", None), "run_id", None)
        config = parts.pop(run_id, None) if isinstance(run_id, str) else None
        if config is None:
            raise ValueError(f"{safe_text(repr(run_id), _TEXT_CHARACTERS)} is not a further run of it")
        expected = {"run_id": run_id, "job_id": task.job_id, "task_index": None, "family": config.family}
        others.append(_checked_run(other, expected, config, task.attempt))
    return dataclasses.replace(checked, others=tuple(others))


def _parts_of(task: Task) -> dict[str, TrialConfig]:
    """Return the configs of the further runs that a group's task may bring, by their ids."""
    if not task.partners:
        return {}
    members = dict(enumerate((task.config, *task.partners)))
    alone = {f"{task.run_id}-alone-{place}": config for place, config in members.items()}
    return alone | {f"{task.run_id}-with-{place}": config for place, config in members.items() if place}


def _checked_run(result: object, expected: Mapping[str, Any], config: TrialConfig, attempt: int) -> RunResult:
    """Check the shape of one run. Raises `ValueError`. The warehouse checks types and ranges of values."""
    if not isinstance(result, RunResult):
        raise ValueError(f"it is a {type(result).__name__}")
    if not isinstance(result.run, Run):
        raise ValueError(f"its run is a {type(result.run).__name__}")
    if not isinstance(result.telemetry, pa.Table):
        raise ValueError(f"its telemetry is a {type(result.telemetry).__name__}")
    for name in ("kernels", "ranks", "collocations"):
        table = getattr(result, name)
        if table is not None and not isinstance(table, pa.Table):
            raise ValueError(f"its {name} are a {type(table).__name__}")
    for name in _OWN_COLUMNS:
        if getattr(result.run, name) != expected[name]:
            answer = safe_text(repr(getattr(result.run, name)), _TEXT_CHARACTERS)
            raise ValueError(f"{name} must be {expected[name]!r}, got {answer}")
    storable: dict[str, Any] = {name: _storable(name, getattr(result.run, name)) for name in _TEXT_COLUMNS}
    storable |= {name: _truncate(getattr(result.run, name)) for name in _MAPPING_COLUMNS}
    run = dataclasses.replace(result.run, **storable, attempt=attempt, config=config.to_mapping())
    return RunResult(
        run=run,
        telemetry=result.telemetry,
        kernels=result.kernels,
        ranks=result.ranks,
        collocations=result.collocations,
        retryable=result.retryable is True and run.status == "crashed",
        repeat=result.repeat is True,
    )


def _storable(name: str, text: object) -> str | None:
    """Return a column's text, storable and truncated. Raises `ValueError` for a value that is not text."""
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name} must be a text, got {safe_text(repr(text), _TEXT_CHARACTERS)}")
    if text is None:
        return None
    return safe_text(text) if name == "error" else safe_text(text, _TEXT_CHARACTERS)


def _truncate(values: object) -> Mapping[str, Any] | None:
    """Return the values of a JSON column; None if JSON cannot hold them or they are too long."""
    if not isinstance(values, Mapping):
        return None
    try:
        return values if len(json.dumps(values, sort_keys=True)) <= _JSON_CHARACTERS else None
    except (TypeError, ValueError, RecursionError):
        return None


def lost_run(
    task: Task | UnreadableTask, error: str, status: str = "crashed", error_type: str = "WorkerLost"
) -> RunResult:
    """Return the run of a task that no worker returned, filled in from the task.

    By default its workers were all lost. A task that is not handed out is `invalid`: its code is not allowed
    (`NotTrusted`), or this version cannot read its row or run it here (`UsageError`).
    """
    typed = task.config if isinstance(task, Task) else None
    config = task.config if isinstance(task, UnreadableTask) else task.config.to_mapping()
    run = Run(
        run_id=task.run_id,
        job_id=task.job_id,
        task_index=task.task_index,
        attempt=task.attempt,
        family=task.family,
        config=config,
        config_hash=None if config is None else mapping_hash(config),
        status=status,
        error_type=error_type,
        error=safe_text(error),
        source="simulated" if task.simulated else "measured",
        schema_version=SCHEMA_VERSION,
        batch_size=None if typed is None else typed.batch_size,
        precision=None if typed is None else typed.precision,
        optimizer=None if typed is None else typed.optimizer,
        parallel=None if typed is None else typed.parallel,
        finished_at=datetime.datetime.now(datetime.UTC),
    )
    nothing = TELEMETRY_SCHEMA.empty_table()
    partners = task.partners if isinstance(task, Task) else ()
    others = tuple(_lost_partner(run, place, config) for place, config in enumerate(partners, start=1))
    if partners:
        run = dataclasses.replace(run, group_id=task.run_id)
    return RunResult(run=run, telemetry=nothing, others=others)


def _lost_partner(run: Run, place: int, config: TrialConfig) -> RunResult:
    """Return the run of a group's further member, which was lost with its first one."""
    lost = dataclasses.replace(
        run,
        run_id=f"{run.run_id}-with-{place}",
        task_index=None,
        group_id=run.run_id,
        family=config.family,
        config=config.to_mapping(),
        config_hash=mapping_hash(config.to_mapping()),
        batch_size=config.batch_size,
        precision=config.precision,
        optimizer=config.optimizer,
        parallel=config.parallel,
    )
    return RunResult(run=lost, telemetry=TELEMETRY_SCHEMA.empty_table())


_CONCLUSIVE = ("ok", "oom")  # statuses of solo runs that need no repeat


class RunsAlone:
    """Solo runs that this dispatcher has landed, by worker: those of another GPU or night would differ."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, TrialSettings, str], Run] = {}

    def of(self, task: Task, worker: str) -> tuple[Run | None, ...]:
        """Return the solo run of each member of a task's group, None if it has to run; () without a group."""
        if not task.partners:
            return ()
        members = (task.config, *task.partners)
        return tuple(self._known.get((worker, task.settings, config_hash(config))) for config in members)

    def landed(self, task: Task, worker: str, results: Iterable[RunResult]) -> None:
        """Remember the reliable solo runs among a task's further runs."""
        for run in (result.run for result in results):
            if run.group_id is None and run.status in _CONCLUSIVE and run.quality != "untrusted" and run.config_hash:
                self._known[worker, task.settings, run.config_hash] = run
