"""Runs the queue of a data folder, device after device, with one dispatcher at a time.

Start reading at `work`, which runs all of it, and `run_job`, which runs one job. Called by `farm.work`, `farm.submit`,
nights and comparisons. `failed_jobs` lists the jobs whose every trial failed; out of memory is a measured outcome, not
a failure.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from conf.cli.command_line import EXIT_INTERRUPTED, start_bar
from conf.errors import UsageError, error_line, one_line, print_lines
from farm.dispatch.dispatcher import Dispatcher, StopRequest, make_executor
from farm.dispatch.monitoring import PATIENCE_S, Service
from farm.dispatch.ray_cluster import EXIT_CLUSTER_LOST, ClusterLost, ClusterSettings, lost_words
from farm.queue.jobs import Job, Queue, device_from_key, settings_of_text
from farm.queue.leftovers import DispatcherBusy, dispatcher_of, hold_dispatcher_lock
from warehouse.files.folder import DataFolder
from warehouse.tables.schema import STATUSES, Run
from workers.task import run_id_of

if TYPE_CHECKING:
    import rich.progress


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
            return EXIT_CLUSTER_LOST
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
        _summary(folder, queue, job_id)
        ran.setdefault(job_id)
    failures = failed_jobs(queue, ran)
    _report_failures(failures, service)
    return EXIT_ALL_FAILED if (failures if job_id is None else job_id in failures) else 0


def _report_failures(failures: Mapping[str, str], service: Service) -> None:
    for job_id, failure in failures.items():
        service.events.emit("job_failed", job=job_id, message=failure)
        print_lines([f"error: {failure}"], sys.stderr)


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
                    _report_failures(failed_jobs(self.queue, self.ran), self.service)
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


def _summary(folder: DataFolder, queue: Queue, job_id: str) -> None:
    counts = queue.counts(job_id)
    by_status = ", ".join(f"{status} {count}" for status, count in counts.by_status.items() if count)
    cancelled = f"; {counts.cancelled} were cancelled" if counts.cancelled else ""
    wanted = counts.total - counts.cancelled
    print_lines([f"{job_id}: {counts.done} of {wanted} runs are in {folder.root} ({by_status}){cancelled}"])


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
    tasks |= _find_landed(folder, queue)
    if not tasks:
        return 0
    import pyarrow as pa

    from warehouse.reading.connection import connect

    with contextlib.closing(connect(folder.root)) as connection:
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


def _find_landed(folder: DataFolder, queue: Queue) -> dict[str, tuple[str, int]]:
    """Return (job_id, index) by run_id of tasks that are open in the queue but have landed in the warehouse."""
    from warehouse.files.integrity import landed_tasks

    if not queue.pending():
        return {}
    waiting = queue.indexes("queued", "waiting")
    return {
        run_id_of(job_id, index): (job_id, index)
        for job_id, indexes in landed_tasks(folder).items()
        for index in waiting.get(job_id, set()).intersection(indexes)
    }


_PLAIN_EVERY_S = 10.0


class Progress:
    """A progress bar, or a line now and then without a terminal. Use as a context manager.

    totals  returns (ended tasks by status, all tasks), also those that ended before; the rate counts runs landed here
    quiet   print nothing, because a program reads the events
    """

    def __init__(
        self,
        label: str,
        totals: Callable[[], tuple[Mapping[str, int], int]],
        quiet: bool = False,
    ):
        from rich.console import Console

        self._label = one_line(label)
        self._totals = totals
        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        self._landed = 0
        self._first_landed_at = 0.0
        self._printed_at = time.monotonic()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.quiet:
            from rich.progress import TextColumn

            self._bar, self._task = start_bar(
                self._console, self._label, TextColumn("{task.fields[note]}"), note="starting workers"
            )
        else:
            self.say(f"{self._label}: starting workers")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._refresh()
            self._bar.stop()
        elif self._landed:
            self._say_state()

    def say(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        (self._bar.console if self._bar is not None else self._console).print(one_line(text), markup=False)

    def landed(self, _run: Run) -> None:
        """Count one run that has landed."""
        if not self._landed:
            self._first_landed_at = time.monotonic()
        self._landed += 1

    def update(self) -> None:
        """Redraw the bar; cheap enough for every turn of the dispatcher's loop."""
        if self._bar is not None:
            self._refresh()
        elif time.monotonic() - self._printed_at >= _PLAIN_EVERY_S and self._landed:
            self._say_state()

    def rate_per_s(self) -> float | None:
        """Return the runs landed per second since the first, so without the start-up; None before the second run."""
        if self._landed < 2:
            return None
        return (self._landed - 1) / max(time.monotonic() - self._first_landed_at, 1e-3)

    def _state(self) -> tuple[int, int, str]:
        by_status, total = self._totals()
        completed = sum(by_status.values())
        if not self._landed:
            return completed, total, "starting workers"
        parts = [f"{status} {by_status[status]}" for status in STATUSES if by_status.get(status)]
        rate = self.rate_per_s()
        if rate:
            parts.append(f"{rate:.1f}/s" if rate >= 1 else f"{rate * 60:.1f}/min")
            parts.append(f"{datetime.timedelta(seconds=round((total - completed) / rate))} left")
        return completed, total, "  ".join(parts)

    def _refresh(self) -> None:
        assert self._bar is not None and self._task is not None
        completed, total, note = self._state()
        self._bar.update(self._task, completed=completed, total=total, note=note)

    def _say_state(self) -> None:
        self._printed_at = time.monotonic()
        completed, total, note = self._state()
        self.say(f"{self._label}: {completed}/{total}  {note}")


EXIT_ALL_FAILED = 1
MEASURED = ("ok", "oom")  # statuses of trials that measured something
_ERRORS_READ = 10_000  # latest errors of a job
_CHARACTERS = 300  # characters of a reason to show


def failed_jobs(queue: Queue, job_ids: Iterable[str]) -> dict[str, str]:
    """Return the failure, in words, of each of these jobs whose every ended trial failed, in the given order."""
    failures = {job_id: failed_job(queue, job_id) for job_id in job_ids}
    return {job_id: failure for job_id, failure in failures.items() if failure is not None}


def failed_job(queue: Queue, job_id: str) -> str | None:
    """Return the failure of a job, in words, if every ended trial failed, else None. Only its latest errors are read.

    It names the most common reason, if the queue has one: runs that it knows from the warehouse alone have none there.
    """
    counts = sorted(queue.counts(job_id).by_status.items(), key=lambda pair: -pair[1])
    by_status = {status: count for status, count in counts if count}
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
    statuses = ", ".join(f"{status} {count:,}" for status, count in by_status.items())
    failure = f"{job_id}: every trial that ran failed ({statuses})"
    if not reasons:
        return failure
    ((key, count),) = reasons.most_common(1)
    return f"{failure}; most common reason ({count:,} of {reasons.total():,}): {examples[key]}"


def reason_of(error: str | None) -> str:
    """Return the line of a run's error with the exception's message, without the module of its type."""
    line = re.sub(r"^(?:\w+\.)+(?=[A-Z]\w*(?:: |$))", "", error_line(error or "")) or "no reason was given"
    return line if len(line) <= _CHARACTERS else f"{line[: _CHARACTERS - 3]}..."
