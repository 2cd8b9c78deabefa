"""The dispatcher: leases tasks, hands them to workers and lands their runs; a kill at any point loses none.

Start reading at `work`, which runs the queue of a data folder, device after device, and at `Dispatcher.run`. One
dispatcher at a time for a data folder (`hold_dispatcher_lock`); a task is done only after its run is durable in the
warehouse. Everything that a worker sends passes through `accept`, which turns it into a run that can land.
`failed_job` names a job whose every trial failed; out of memory is a measured outcome, not a failure.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import NamedTuple

from conf.cli.command_line import EXIT_INTERRUPTED, EXIT_TEMPORARY
from conf.errors import UsageError, error_line, print_lines, safe_text
from conf.files.identity import identity
from farm.dispatch.executors import (
    Completion,
    Executor,
    InlineExecutor,
    accept,
    as_attempt,
    as_final,
    attempt_run_id,
    lost_run,
)
from farm.dispatch.monitoring import PATIENCE_S, Progress, Service
from farm.dispatch.ray_cluster import (
    ClusterLost,
    ClusterSettings,
    RayExecutor,
    gpu_problem,
    lost_words,
)
from farm.dispatch.submitted_code import SubmittedCode
from farm.queue.jobs import Job, Queue, UnreadableTask, device_from_key, settings_of_text
from farm.queue.leftovers import SESSION_VARIABLE, DispatcherBusy, dispatcher_of, hold_dispatcher_lock
from farm.queue.queue_file import QueueError
from featurize.configs.trial import config_hash
from warehouse.files.folder import DataFolder
from warehouse.files.plain_file import is_passing
from warehouse.files.writer import RunWriter
from warehouse.tables.schema import Run
from workers.devices import DeviceChoice, TrialSettings
from workers.task import RunResult, Task, run_id_of

EXIT_ALL_FAILED = 1
_LOOK_AGAIN_S = 2.0


def work(
    folder: DataFolder,
    queue: Queue,
    cluster: ClusterSettings,
    job_id: str | None = None,
    wait: bool = False,
    seconds: float | None = None,
    service: Service | None = None,
    trust: Sequence[str] = (),
) -> int:
    """Run the queued tasks, device after device, until none is left (`job_id`: only of that job's device).

    After `seconds` running trials finish and it returns, as after Ctrl-C: for a machine available for a limited time.
    If another dispatcher works on the folder, print that and return 0; with `wait`, stand by until it has ended.
    `trust` as in `Dispatcher`.

    Returns 1 if every trial of `job_id` failed, or without it every trial of some job that it ran, and prints the
    most common reason. Earlier trials count; out of memory is not a failure.
    """
    service = service or Service()
    ran: dict[str, None] = {}
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest(seconds).installed())
        try:
            is_held = _take_lock(stack, folder, stop, service, wait)
        except DispatcherBusy as busy:
            hint = follow_hint(folder, job_id)
            also = "that dispatcher runs it if it is for the same device, otherwise `python -m farm.work` does"
            print_lines([f"{busy}. This job is queued: {also}, when it has ended. {hint}"])
            return 0
        try:
            if is_held:
                _Work(
                    folder=folder, queue=queue, cluster=cluster, stop=stop, service=service, ran=ran, trust=trust
                ).run_all(job_id, wait)
        except ClusterLost as lost:
            service.events.emit("left", how="the cluster was lost")
            print(f"error: {lost_words(lost)}", file=sys.stderr)
            return EXIT_TEMPORARY
        except KeyboardInterrupt:
            service.events.emit("left", how="stopped")
            print("stopped; run the same command again to continue", file=sys.stderr)
            return EXIT_INTERRUPTED
    if stop.requested:
        service.events.emit("left", how="finished what ran")
        print("left; run the same command again to continue", file=sys.stderr)
        return EXIT_INTERRUPTED
    service.events.emit("left", how="nothing is queued")
    if job_id is not None:
        counts = queue.counts(job_id)
        by_status = ", ".join(f"{status} {count}" for status, count in counts.by_status.items() if count)
        cancelled = f"; {counts.cancelled} were cancelled" if counts.cancelled else ""
        wanted = counts.total - counts.cancelled
        print_lines([f"{job_id}: {counts.done} of {wanted} runs are in {folder.root} ({by_status}){cancelled}"])
        ran.setdefault(job_id)
    failures = _report_failures(queue, ran, service)
    return EXIT_ALL_FAILED if (failures if job_id is None else job_id in failures) else 0


def _report_failures(queue: Queue, job_ids: Iterable[str], service: Service) -> dict[str, str]:
    """Report each of these jobs whose every ended trial failed, in the given order. Returns the failures by job."""
    failures = {job_id: failure for job_id in job_ids if (failure := failed_job(queue, job_id)) is not None}
    for job_id, failure in failures.items():
        service.events.emit("job_failed", job=job_id, message=failure)
        print_lines([f"error: {failure}"], sys.stderr)
    return failures


def run_job(
    folder: DataFolder,
    queue: Queue,
    cluster: ClusterSettings,
    job_id: str,
    stop: StopRequest,
    service: Service,
    shares: int = 1,
) -> bool:
    """Run this job only; return False if `stop` asked to leave.

    Stands by while another dispatcher has the folder, which may run the job itself. `shares` as in `Dispatcher`.
    """
    with stop.installed(), contextlib.ExitStack() as stack:
        if not _take_lock(stack, folder, stop, service, wait=True, unless=lambda: not queue.pending(job_id)):
            return not queue.pending(job_id)
        service.pulse.patience_s = PATIENCE_S
        _reconcile_and_report(folder, queue, service)
        job = queue.job(job_id)
        if not queue.pending(job_id):
            return True
        work = _Work(folder=folder, queue=queue, cluster=cluster, stop=stop, service=service)
        return work.run_device(job.device, [job], job_id=job_id, shares=shares)


def _take_lock(
    stack: contextlib.ExitStack,
    folder: DataFolder,
    stop: StopRequest,
    service: Service,
    wait: bool,
    unless: Callable[[], bool] = lambda: False,
) -> bool:
    """Hold the lock until `stack` closes. With `wait`, wait until the other dispatcher has ended.

    Returns False if `stop` asks to leave or `unless` returns True. Raises `DispatcherBusy` without `wait`.
    """
    announced = False
    while not stop.requested and not (announced and unless()):
        try:
            stack.enter_context(hold_dispatcher_lock(folder.dispatcher_lock))
        except DispatcherBusy as busy:
            if not wait:
                raise
            if not announced:
                service.events.emit("standby", message=str(busy))
                print_lines([f"{busy}; waiting until it has ended"])
                announced = True
        else:
            stack.callback(setattr, service.pulse, "holds_lock", False)
            service.pulse.holds_lock = True
            service.events.emit("started", process=os.getpid())
            return True
        service.pulse.beat("standby")
        time.sleep(_LOOK_AGAIN_S)
    return False


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A dispatcher's resources for running a queue."""

    folder: DataFolder
    queue: Queue
    cluster: ClusterSettings
    stop: StopRequest
    service: Service
    ran: dict[str, None] = field(default_factory=dict)  # jobs whose runs have landed
    trust: Sequence[str] = ()

    def run_all(self, job_id: str | None, wait: bool) -> None:
        """Run device after device (`job_id`: only that job's), and compact whenever nothing is left.

        Before a job's first task, reconcile what a killed dispatcher or a lost queue left of it.
        """
        reconciled: set[str] = set()
        compacted = False
        while not self.stop.requested:
            device_key = self.queue.next_device(job_id)
            if device_key is not None:
                jobs = self.queue.jobs()
                if job_ids := {job.job_id for job in jobs} - reconciled:
                    _reconcile_and_report(self.folder, self.queue, self.service)
                    reconciled |= job_ids
                    continue
                jobs = [job for job in jobs if job.device == device_key and self.queue.pending(job.job_id)]
                if jobs:  # none if all were just cancelled
                    self.run_device(device_key, sorted(jobs, key=lambda job: job.job_id != job_id))
                compacted = False
            elif wait:
                if not compacted:
                    _compact(self.folder, self.service)
                    compacted = True
                    _report_failures(self.queue, self.ran, self.service)
                    self.ran.clear()
                self.service.pulse.beat("waiting")
                time.sleep(_LOOK_AGAIN_S)
            else:
                break
        if not compacted:
            _compact(self.folder, self.service)

    def run_device(self, device_key: str, jobs: Sequence[Job], job_id: str | None = None, shares: int = 1) -> bool:
        """Run the tasks of jobs of one device; return False if `stop` asked to leave. Rest as in `Dispatcher`."""
        if self.cluster.kind == "inline":  # a running trial blocks the loop
            self.service.pulse.patience_s = PATIENCE_S + max((_timeout_s(job) for job in jobs), default=0.0)
        names = [job.job_id for job in jobs]
        label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        with Progress(label, partial(_totals, self.queue, names), quiet=self.service.quiet) as progress:
            return Dispatcher(
                self.folder,
                self.queue,
                make_executor(device_from_key(device_key), self.cluster),
                device_key,
                progress,
                service=self.service,
                job_id=job_id,
                shares=shares,
                trust=self.trust,
                ran=self.ran,
            ).run(self.stop)


def _reconcile_and_report(folder: DataFolder, queue: Queue, service: Service) -> None:
    mended = reconcile(folder, queue)
    if mended:
        service.events.emit("mended", count=mended)
        print(f"{mended} runs of queued tasks are in the warehouse already; they are done")


def _timeout_s(job: Job) -> float:
    """Return the time limit of the job's trials in s; 0 if its settings cannot be read: none of them runs."""
    try:
        return settings_of_text(job.settings_json).timeout_s
    except UsageError:
        return 0.0


def _totals(queue: Queue, names: Sequence[str]) -> tuple[Counter[str], int]:
    """Return the ended tasks of these jobs by status, and the number of those that are not cancelled."""
    counts = [queue.counts(name) for name in names]
    by_status = sum((Counter(job_counts.by_status) for job_counts in counts), Counter[str]())
    return by_status, sum(job_counts.total - job_counts.cancelled for job_counts in counts)


def _compact(folder: DataFolder, service: Service) -> None:
    from warehouse.files.compaction import compact

    service.pulse.beat("compacting")
    try:
        problems = compact(folder).problems
    except OSError as error:
        problems = [f"not all is compacted: {error}"]
    print_lines((f"warning: {problem}" for problem in problems), sys.stderr)


def follow_hint(folder: DataFolder, job_id: str | None) -> str:
    """Return the hint on how to continue."""
    job = f" job={job_id}" if job_id else ""
    run = "" if dispatcher_of(folder.dispatcher_lock) else "`python -m farm.work` runs it; "
    return f"{run}`python -m farm.status{job}` shows its progress."


def reconcile(folder: DataFolder, queue: Queue) -> int:
    """Finish tasks whose runs are durable and void the other leases of a killed dispatcher. Call with the lock.

    After a lost queue, or one restored from an older copy, tasks whose runs are in the warehouse do not run again
    either. An attempt that landed for a repeat finishes no task. Returns the number of tasks finished.
    """
    tasks = {task.run_id: (task.job_id, task.task_index) for task in queue.leased()}
    if queue.pending():
        from warehouse.files.integrity import landed_tasks

        waiting = queue.indexes("queued", "waiting")
        tasks |= {
            run_id_of(job_id, index): (job_id, index)
            for job_id, indexes in landed_tasks(folder).items()
            for index in waiting.get(job_id, set()).intersection(indexes)
        }
    if not tasks:
        return 0
    import pyarrow as pa

    from warehouse.reading.connection import connect

    with connect(folder.root) as connection:
        connection.register("wanted", pa.table({"run_id": list(tasks)}))
        rows = connection.execute("SELECT run_id, status FROM runs JOIN wanted USING (run_id)").fetchall()
    landed: dict[str, dict[int, str]] = {}
    for run_id, status in rows:
        job_id, index = tasks[run_id]
        landed.setdefault(job_id, {})[index] = status
    for job_id, statuses in landed.items():
        queue.mark_done(job_id, statuses)
    queue.void_leases()
    return len(rows)


MEASURED = ("ok", "oom")  # statuses of trials that measured something
_ERRORS_READ = 10_000  # latest errors of a job
_CHARACTERS = 300  # characters of a reason to show


def failed_job(queue: Queue, job_id: str) -> str | None:
    """Return the failure of a job, in words, if every ended trial failed, else None. Only its latest errors are read.

    It names the most common reason, if the queue has one: runs that it knows from the warehouse alone have none there.
    """
    by_status = Counter({status: count for status, count in queue.counts(job_id).by_status.items() if count})
    if not by_status or any(status in MEASURED for status in by_status):
        return None
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for error in queue.errors(job_id, _ERRORS_READ):
        if error["status"] is not None:
            reason = reason_of(error["error"])
            key = re.sub(r"\d+", "0", reason)  # sizes and addresses differ from trial to trial
            reasons[key] += 1
            examples[key] = reason
    statuses = ", ".join(f"{status} {count:,}" for status, count in by_status.most_common())
    failure = f"{job_id}: every trial that ran failed ({statuses})"
    if not reasons:
        return failure
    ((key, count),) = reasons.most_common(1)
    return f"{failure}; most common reason ({count:,} of {reasons.total():,}): {examples[key]}"


def reason_of(error: str | None) -> str:
    """Return the line of a run's error with the exception's message, without the module of its type."""
    line = re.sub(r"^(?:\w+\.)+(?=[A-Z]\w*(?:: |$))", "", error_line(error or "")) or "no reason was given"
    return line if len(line) <= _CHARACTERS else f"{line[: _CHARACTERS - 3]}..."


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
        # Solo runs landed here, by worker, settings and config: those of another GPU or night would differ.
        self._alone: dict[tuple[str, TrialSettings, str], Run] = {}
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
                # Tasks in backoff become due later.
                if not is_busy and (stop.requested or not self._queue.pending(self._job_id, self._device_key)):
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
        members = (task.config, *task.partners) if task.partners else ()
        alone = tuple(self._alone.get((worker, task.settings, config_hash(member))) for member in members)
        return replace(task, config=config, partners=tuple(partners), alone=alone)

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
            elif (problem := gpu_problem(task.config.layout, self._executor.most_gpus())) is not None:
                refused = lost_run(task, problem, "invalid", "UsageError")
            else:
                return task
            self._land_run(task, refused)
            del self._leased[task.run_id]
        return None

    def _expect_back(self, spec: Task) -> None:
        trials = 1 + len(spec.alone)  # a group runs each member alone as well
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
            for solo in (further.run for further in result.others if further.run.group_id is None):
                if solo.status in MEASURED and solo.quality != "untrusted" and solo.config_hash:
                    self._alone[worker, task.settings, solo.config_hash] = solo
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
