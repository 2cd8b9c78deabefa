"""The durable queue: jobs and their tasks in one SQLite file, leased at least once, never lost.

Start reading at `Queue`; the life of a task is drawn in `farm.queue.queue_file`. Time comes in as an argument, in
seconds since the epoch. `task_of_row` makes the typed tasks (`workers.task`) of rows: a data folder can come from
anybody, so a row may hold any text. Only this module parses the queue's texts of configs and settings.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from conf.errors import OUTPUT_STARTS, UsageError, shown, unknown_name
from farm.queue.queue_file import QueueError, QueueFile, Submission, prepare_queue
from featurize.configs.trial import TrialConfig, canonical_json, config_from_mapping, mapping_hash
from warehouse.files.folder import DataFolder, check_name
from warehouse.files.plain_file import queue_copy
from workers.devices import DeviceChoice, TrialSettings
from workers.task import Lease, Task

_JOB_COLUMNS = "job_id, family, space_json, n, seed, policy, priority, settings_json, device, submitted_at"
MIXED_FAMILY = "mixed"  # a job with tasks of several families; each run lands under its config's family


@dataclass(frozen=True, kw_only=True)
class Job:
    """One submission, as its row holds it. `settings_of_text` and `device_from_key` read its texts."""

    job_id: str
    family: str
    space_json: str
    n: int
    seed: int
    policy: str
    priority: int = 0  # higher first
    settings_json: str = "{}"
    device: str = ""  # tasks are leased only to a dispatcher of the same device; any text
    submitted_at: float


@dataclass(frozen=True, kw_only=True)
class UnreadableTask(Lease):
    """A leased task that this version cannot read; it lands as `invalid`, with the problem.

    `config`: None if its text is not a JSON object.
    """

    family: str
    problem: str
    config: Mapping[str, Any] | None
    simulated: bool


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Tasks by state; `by_status`: the done ones by their run's status."""

    queued: int = 0  # including those that wait for their next attempt
    waiting: int = 0  # the queued ones in backoff
    leased: int = 0  # including those with exhausted attempts whose run has not landed
    done: int = 0  # with a run in the warehouse
    cancelled: int = 0
    by_status: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.queued + self.leased + self.done + self.cancelled

    @property
    def pending(self) -> int:
        return self.queued + self.leased


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """One job as `status` shows it. `rate_per_s` and `eta_s` are None if too few runs finished lately."""

    job: Job
    counts: Counts
    state: str  # submitting | queued | running | done | cancelling | cancelled
    rate_per_s: float | None
    eta_s: float | None


def _job_of(row: Sequence[Any]) -> Job:
    job = Job(**dict(zip(_JOB_COLUMNS.split(", "), row, strict=True)))
    return replace(job, submitted_at=_time_of(job.submitted_at))


def _time_of(value: Any) -> float:
    """Return a time of the queue in seconds since the epoch; 0 for an invalid one."""
    try:
        datetime.datetime.fromtimestamp(value, datetime.UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return 0.0
    return float(value)


def _counts_of(tallies: Iterable[tuple[str, str | None, int]]) -> Counts:
    states: dict[str, int] = {}
    statuses: dict[str, int] = {}
    for state, status, count in tallies:
        states[state] = states.get(state, 0) + count
        if state == "done":
            statuses[status or ""] = statuses.get(status or "", 0) + count
    return Counts(
        queued=states.get("queued", 0) + states.get("waiting", 0),
        waiting=states.get("waiting", 0),
        leased=states.get("leased", 0) + states.get("exhausted", 0),
        done=states.get("done", 0),
        cancelled=states.get("cancelled", 0),
        by_status=statuses,
    )


def _progress_of(
    job: Job, counts: Counts, complete: bool, cancelled: bool, recent: int, first_at: float | None, now: float
) -> JobProgress:
    """Return a job's progress; `recent` runs finished lately, the first of them at `first_at`."""
    if cancelled:
        state = "cancelling" if counts.leased else "cancelled"
    elif not complete:
        state = "submitting"
    elif not counts.pending:
        state = "done"
    else:
        state = "running" if counts.leased else "queued"
    rate = eta = None
    # The first finish only starts the interval.
    if counts.pending and recent >= 2 and first_at is not None and now > first_at:
        rate = (recent - 1) / (now - first_at)
        eta = counts.pending / rate
    return JobProgress(job=job, counts=counts, state=state, rate_per_s=rate, eta_s=eta)


TOGETHER = "together"  # key of a group's members
MOST_TOGETHER = 4
_TASK_COLUMNS = ("job_id", "family", "settings_json", "device", "task_index", "attempt", "config_json")


def task_of_row(row: Sequence[Any]) -> Task | UnreadableTask:
    """Return the typed task of a row of `_TASK_COLUMNS`; an `UnreadableTask` if one of its texts cannot be parsed."""
    job_id, family, settings_json, device, task_index, attempt, config_json = row
    try:
        config, *partners = configs_of_text(config_json)
        return Task(
            job_id=job_id,
            task_index=task_index,
            attempt=attempt,
            config=config,
            partners=tuple(partners),
            settings=settings_of_text(settings_json),
            device=device_from_key(device),
        )
    except UsageError as error:
        mapping = _mapping_of(config_json)
        return UnreadableTask(
            job_id=job_id,
            task_index=task_index,
            attempt=attempt,
            family=_family_of(mapping, family),
            problem=str(error),
            config=mapping,
            simulated='"simulated"' in str(device),
        )


def text_of_task(*members: TrialConfig) -> str:
    """Return a task as the queue holds it, canonical JSON: one config, or those that start together on one device."""
    mappings = [config.to_mapping() for config in members]
    return canonical_json(mappings[0] if len(mappings) == 1 else {TOGETHER: mappings})


def configs_of_text(text: str) -> tuple[TrialConfig, ...]:
    """Return the content of a text of `text_of_task`: one config, or those of a group.

    Their names of code are data. Raises `UsageError`.
    """
    with _refusing(text, "is not a trial config"):
        mapping = json.loads(text)
        if TOGETHER not in mapping:
            return (config_from_mapping(mapping),)
        members = mapping[TOGETHER]
        if mapping.keys() != {TOGETHER} or not isinstance(members, list) or not 2 <= len(members) <= MOST_TOGETHER:
            raise UsageError(f"{shown(text)} is not a group of 2 to {MOST_TOGETHER} trial configs")
        configs = tuple(map(config_from_mapping, members))
        if any(config.ranks > 1 for config in configs):
            raise UsageError(f"{shown(text)}: a trial of several ranks cannot be in a group")
        return configs


def text_of_settings(settings: TrialSettings) -> str:
    """Return the trial settings of a job as the queue holds them: canonical JSON."""
    return canonical_json(settings.to_mapping())


@functools.lru_cache(maxsize=256)  # the tasks of a job share one text
def settings_of_text(text: str) -> TrialSettings:
    """Return the settings that `text_of_settings` wrote. Raises `UsageError`."""
    with _refusing(text, "are not trial settings"):
        return TrialSettings(**json.loads(text))


def device_key(choice: DeviceChoice) -> str:
    """Return the device of a job as the queue holds it: tasks are leased only to a dispatcher with the same text."""
    return canonical_json(choice.to_mapping())


@functools.lru_cache(maxsize=256)
def device_from_key(key: str) -> DeviceChoice:
    """Return the device that `device_key` wrote. Raises `UsageError`."""
    with _refusing(key, "is not a device"):
        fields = json.loads(key)
        return DeviceChoice(backend=fields.pop("backend"), **fields)


@contextlib.contextmanager
def _refusing(text: str, reason: str) -> Iterator[None]:
    """Turn any error of reading `text` into `UsageError`: the classes' checks meet values of any type."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{shown(text)} {reason}: {type(error).__name__}: {error}") from error


def _family_of(mapping: Mapping[str, Any] | None, of_job: str) -> str:
    """Return the family that a config names if it is a valid name, else its job's."""
    members = (mapping or {}).get(TOGETHER)
    if isinstance(members, list) and members and isinstance(members[0], dict):
        mapping = members[0]  # a group's task has the family of its first member
    try:
        return check_name("family", (mapping or {}).get("family"))
    except ValueError:
        return of_job


def _mapping_of(text: str) -> Mapping[str, Any] | None:
    try:
        mapping = json.loads(text)
    except (ValueError, RecursionError, TypeError):
        return None
    return mapping if isinstance(mapping, dict) else None


MAX_ATTEMPTS = 3
BACKOFF_S = 5.0  # before the second attempt; doubles with each further one
MAX_BACKOFF_S = 600.0
SUBMIT_CHUNK = 2000  # tasks per transaction of `submit`
ERROR_CHARACTERS = 2000  # of an error and of its trial's output in the queue; the run's row has all

_AT = "job_seq = ? AND task_index = ?"
_HELD = f"{_AT} AND attempt = ? AND state = 'leased'"
_REPEATABLE = f"SELECT 1 FROM tasks JOIN jobs ON seq = job_seq WHERE {_HELD} AND cancelled_at IS NULL"
_UNLESS_CANCELLED = (
    "CASE WHEN (SELECT cancelled_at FROM jobs WHERE seq = job_seq) IS NULL THEN '{}' ELSE 'cancelled' END"
)
_FINISH = (
    "UPDATE tasks SET state = 'done', status = ?, finished_at = ?, due = NULL, "
    f"error = coalesce(?, error), error_at = coalesce(?, error_at) WHERE {_AT} AND state != 'done'"
)
_TASKS = (  # INDEXED BY: without statistics SQLite takes the primary key, and reads every task of the job
    f"SELECT {', '.join(_TASK_COLUMNS).replace('attempt', '{}')} FROM tasks INDEXED BY {{}} "
    "JOIN configs USING (job_seq, task_index) "
    "JOIN jobs ON seq = job_seq "
)
# Jobs: one (?1), those of one device (?2), or all. The range lets SQLite look up one job instead of reading all.
_OF = (
    "seq BETWEEN coalesce(?1, -9223372036854775808) AND coalesce(?1, 9223372036854775807) "
    "AND (?2 IS NULL OR device = ?2)"
)


class Queue(contextlib.AbstractContextManager["Queue"]):
    """Jobs and tasks in one SQLite file (WAL). Any number of processes may have it open; each method is atomic.

    Submissions and cancellations are synced to the disk before they are reported. Leases and finishes are not: they
    survive a killed process. After a power failure the last ones are undone: a lease is repeated, a finish reconciled
    from the warehouse with `mark_done`. Syncing each would cost a factor of 20.
    Errors: `QueueError`; `UsageError` for an unknown job.
    """

    def __init__(self, file: QueueFile, max_attempts: int, backoff_s: float) -> None:
        self._file = file
        self._seqs: dict[str, int] = {}
        self.max_attempts = max_attempts
        self.backoff_s = backoff_s

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        max_attempts: int = MAX_ATTEMPTS,
        backoff_s: float = BACKOFF_S,
        busy_timeout_s: float = 30.0,
    ) -> Queue:
        """Open the file, creating it if there is none. Its folder has to exist.

        Raises `UsageError` for a file that is not a queue, or one written by a newer version.
        """
        return cls(QueueFile(Path(path), busy_timeout_s, prepare_queue), max_attempts, backoff_s)

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # Submitting

    def submit(
        self,
        job: Job,
        configs: Iterable[tuple[int, str]],
        on_interrupt: Callable[[], None] = lambda: None,
    ) -> int:
        """Add the job and the tasks `(index, config JSON)` that it does not hold yet; return how many were added.

        The same submission again adds nothing; a larger n adds the difference; cancelled tasks are revived. Killed
        in the middle, it leaves the tasks of whole chunks, and the same call completes it. After Ctrl-C it leaves the
        queue as it was before, except for tasks that were started since; `on_interrupt` is called first. `configs` is
        read lazily and may start at `next_index`.
        """
        with self._file.transaction(durable=True):
            submission = Submission(self._file, job.job_id)
            seq = self._upsert_job(job)
            self._file.change(
                "UPDATE tasks SET state = 'queued', attempt = 0, due = NULL, error = NULL, error_at = NULL "
                "WHERE job_seq = ? AND state = 'cancelled'",
                (seq,),
            )
            self._file.change("UPDATE jobs SET cancelled_at = NULL, ready = 1 WHERE seq = ?", (seq,))
        added = 0
        pairs = iter(configs)
        try:
            while chunk := list(islice(pairs, SUBMIT_CHUNK)):
                with self._file.transaction(durable=True):
                    # If another command has cancelled the job since, its further tasks are cancelled too.
                    (is_active,) = self._file.only("SELECT cancelled_at IS NULL FROM jobs WHERE seq = ?", (seq,))
                    state = "queued" if is_active else "cancelled"
                    new = self._file.all(
                        "INSERT INTO tasks (job_seq, task_index, state) SELECT ?, value, ? FROM json_each(?) "
                        "WHERE true ON CONFLICT DO NOTHING RETURNING task_index",  # WHERE: else ON would begin a join
                        (seq, state, json.dumps([index for index, _ in chunk])),
                    )
                    submission.note(index for (index,) in new)
                    added += len(new)
                    self._file.many(
                        "INSERT INTO configs VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                        [(seq, index, text) for index, text in chunk],
                    )
                    self._file.change("UPDATE jobs SET ready = ? WHERE seq = ?", (is_active, seq))
            with self._file.transaction(durable=True):
                self._file.change(
                    "UPDATE jobs SET complete = ((SELECT sum(count) FROM tallies WHERE job_seq = seq) >= n) "
                    "WHERE seq = ?",
                    (seq,),
                )
        except KeyboardInterrupt:
            on_interrupt()
            submission.undo()
            raise
        return added

    def _upsert_job(self, job: Job) -> int:
        row = self._file.one(
            "SELECT seq, family, space_json, seed, policy, settings_json, device FROM jobs WHERE job_id = ?",
            (job.job_id,),
        )
        defined = (job.family, job.space_json, job.seed, job.policy, job.settings_json, job.device)
        if row is None:
            # A job that was removed and is submitted again must not get another number: open queues remember it.
            seq = int(hashlib.sha256(job.job_id.encode()).hexdigest()[:12], 16)
            self._file.change(
                "INSERT INTO jobs (family, space_json, seed, policy, settings_json, device, "
                "seq, job_id, n, priority, submitted_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*defined, seq, job.job_id, job.n, job.priority, job.submitted_at),
            )
            return seq
        if tuple(row[1:]) != defined:
            raise UsageError(f"job {job.job_id} exists with another space, seed, policy, settings or device")
        self._file.change(
            "UPDATE jobs SET complete = complete AND n >= ?, n = max(n, ?), priority = ? WHERE seq = ?",
            (job.n, job.n, job.priority, row[0]),
        )
        return int(row[0])

    def next_index(self, job_id: str) -> int:
        """Return the index from which a submission continues: one past the job's highest, 0 for a new job.

        Also 0 if lower indexes are missing, as after two simultaneous submissions, one interrupted.
        """
        of_job = "WHERE job_seq = (SELECT seq FROM jobs WHERE job_id = ?)"
        (following,) = self._file.only(f"SELECT coalesce(max(task_index) + 1, 0) FROM tasks {of_job}", (job_id,))
        (held,) = self._file.only(f"SELECT coalesce(sum(count), 0) FROM tallies {of_job}", (job_id,))
        return following if held == following else 0

    def cancel(self, job_id: str, now: float) -> int:
        """Cancel the tasks that have not started; return their number. Leased ones finish, but are not retried."""
        seq = self._seq(job_id)
        with self._file.transaction(durable=True):
            self._file.change("UPDATE jobs SET cancelled_at = ?, ready = 0 WHERE seq = ?", (now, seq))
            return self._file.change(
                "UPDATE tasks SET state = 'cancelled', due = NULL WHERE job_seq = ? AND state IN ('queued', 'waiting')",
                (seq,),
            )

    # Working

    def lease(
        self,
        worker: str,
        limit: int,
        now: float,
        lease_s: float,
        job_id: str | None = None,
        device: str | None = None,
        share: tuple[int, int] | None = None,
        held: Collection[Lease] = (),
    ) -> list[Task | UnreadableTask]:
        """Lease up to `limit` tasks to `worker` until now + lease_s: highest priority, oldest job, lowest index.

        Restricted to `job_id` and to jobs for `device`, where given; with `share` (r, k) to tasks with index % k == r.
        `held`: tasks that the caller still works on. They stay leased to it if their lease has run out because a clock
        was set or the caller was slow.
        """
        remainder, shares = share or (0, 1)
        only = None if job_id is None else self._seq(job_id)
        tasks: list[Task | UnreadableTask] = []
        with self._file.transaction():
            self._queue_due(now, held)
            ready = self._file.all(
                f"SELECT seq FROM jobs INDEXED BY jobs_ready WHERE ready = 1 AND {_OF} "
                "ORDER BY priority DESC, submitted_at, seq",
                (only, device),
            )
            for (seq,) in ready:
                wanted = limit - len(tasks)
                if wanted <= 0:
                    break
                rows = self._file.all(
                    _TASKS.format("attempt + 1", "tasks_queued")
                    + "WHERE job_seq = ? AND state = 'queued' AND task_index % ? = ? ORDER BY task_index LIMIT ?",
                    (seq, shares, remainder, wanted),
                )
                if len(rows) < wanted and shares == 1:
                    self._file.change("UPDATE jobs SET ready = 0 WHERE seq = ?", (seq,))
                leased = [task_of_row(row) for row in rows]
                self._file.many(
                    f"UPDATE tasks SET state = 'leased', attempt = ?, due = ?, worker = ? WHERE {_AT}",
                    [(task.attempt, now + lease_s, worker, seq, task.task_index) for task in leased],
                )
                tasks += leased
        return tasks

    def renew(self, tasks: Sequence[Lease], now: float, lease_s: float) -> int:
        """Extend these leases to now + lease_s; return how many this attempt still holds."""
        with self._file.transaction():
            return self._file.many(
                f"UPDATE tasks SET due = ? WHERE {_HELD}", [(now + lease_s, *self._held(t)) for t in tasks]
            )

    def release(self, tasks: Sequence[Lease]) -> int:
        """Give back tasks that were not started, without counting an attempt; return how many were still held."""
        released = 0
        with self._file.transaction():
            for task in tasks:
                seq = self._seq(task.job_id)
                released += self._file.change(
                    f"UPDATE tasks SET state = {_UNLESS_CANCELLED.format('queued')}, "
                    f"attempt = attempt - 1, due = NULL, worker = NULL WHERE {_HELD}",
                    self._held(task),
                )
                self._file.change("UPDATE jobs SET ready = cancelled_at IS NULL WHERE seq = ?", (seq,))
        return released

    def finish(self, task: Lease, status: str, now: float, error: str | None = None) -> bool:
        """Mark a task whose run is durable as done. Returns False if it was done already.

        A holder whose lease has expired may finish it too.
        """
        values = (status, now, *_error_values(error, now), self._seq(task.job_id), task.task_index)
        return self._file.change(_FINISH, values) == 1

    def retry(self, task: Lease, now: float, error: str) -> bool:
        """Retry a task whose attempt failed through no fault of the trial; return whether the caller can drop it.

        True: queued again after a backoff, or no longer this holder's, or its job was cancelled. False: that was the
        last attempt; the task stays leased until the caller has landed a `crashed` run and calls `finish`. If it
        never does, the task turns up in `expired`.
        """
        with self._file.transaction():
            held = f"{_AT} AND attempt = ? AND state IN ('leased', 'exhausted')"
            still_held = self._file.change(
                f"UPDATE tasks SET error = ?, error_at = ?, worker = NULL WHERE {held}",
                (*_error_values(error, now), *self._held(task)),
            )
            if not still_held:
                return True
            if task.attempt >= self.max_attempts:
                return False
            self._file.change(
                f"UPDATE tasks SET state = {_UNLESS_CANCELLED.format('waiting')}, due = ? WHERE {held}",
                (now + self._backoff_s(task), *self._held(task)),
            )
            return True

    def may_repeat(self, task: Lease) -> bool:
        """Return whether `repeat` would queue the task again: held, with an attempt left, its job not cancelled."""
        return task.attempt < self.max_attempts and self._file.one(_REPEATABLE, self._held(task)) is not None

    def repeat(self, task: Lease, now: float, why: str) -> bool:
        """Queue a task whose labels cannot be trusted again, after a backoff, if `may_repeat`; return whether it was.

        It counts as an attempt, as a retry does. False: nothing has changed; finish the task with this result.
        `errors` shows `why`.
        """
        with self._file.transaction():
            if not self.may_repeat(task):
                return False
            self._file.change(
                f"UPDATE tasks SET state = 'waiting', due = ?, error = ?, error_at = ?, worker = NULL WHERE {_HELD}",
                (now + self._backoff_s(task), *_error_values(why, now), *self._held(task)),
            )
            return True

    def _backoff_s(self, task: Lease) -> float:
        return min(self.backoff_s * 2.0 ** (task.attempt - 1), MAX_BACKOFF_S)

    def expired(
        self, now: float, device: str | None = None, held: Collection[Lease] = ()
    ) -> list[Task | UnreadableTask]:
        """Return tasks whose lease ran out on their last attempt, at each call until `finish`; land them as crashed.

        `held` as in `lease`.
        """
        with self._file.transaction():
            self._queue_due(now, held)
            rows = self._file.all(
                _TASKS.format("attempt", "tasks_exhausted")
                + f"WHERE state = 'exhausted' AND {_OF} ORDER BY job_seq, task_index",
                (None, device),
            )
        return [task_of_row(row) for row in rows]

    def leased(self) -> list[Task | UnreadableTask]:
        """Return all leased tasks, and those whose last lease ran out and that have not landed."""
        due = _TASKS.format("attempt", "tasks_due") + "WHERE state IN ('waiting', 'leased') AND state = 'leased'"
        exhausted = _TASKS.format("attempt", "tasks_exhausted") + "WHERE state = 'exhausted'"
        return [task_of_row(row) for row in self._file.all(f"{due} UNION ALL {exhausted}")]

    def void_leases(self) -> int:
        """End every lease, once no holder can be alive; return their number. As an expiry, it counts as an attempt."""
        return self._file.change("UPDATE tasks SET due = 0 WHERE state IN ('waiting', 'leased') AND state = 'leased'")

    def is_done(self, task: Lease) -> bool:
        """Return whether the task is finished."""
        return self._file.one(f"SELECT state FROM tasks WHERE {_AT}", self._held(task)[:2]) == ("done",)

    def mark_done(self, job_id: str, statuses: Mapping[int, str]) -> int:
        """Mark tasks done whose runs are durable in the warehouse (index -> status); return how many were not done."""
        with self._file.transaction():
            return self._file.many(
                _FINISH, [(status, None, None, None, self._seq(job_id), index) for index, status in statuses.items()]
            )

    def cap_waits(self, now: float) -> int:
        """Queue tasks that wait longer than any backoff, as after the clock was set back; return their number.

        The first condition on the state repeats that of the partial index `tasks_due`, which SQLite needs to use it.
        """
        return self._file.change(
            "UPDATE tasks INDEXED BY tasks_due SET due = ? "
            "WHERE state IN ('waiting', 'leased') AND state = 'waiting' AND due > ?",
            (now, now + MAX_BACKOFF_S),
        )

    def requeue(self, job_id: str, indexes: Iterable[int]) -> int:
        """Queue done tasks whose runs were lost again, with all attempts; return their number. Synced to the disk.

        Those of a cancelled job become cancelled: submitting the job again puts them back. Others stay as they are.
        """
        seq = self._seq(job_id)
        with self._file.transaction(durable=True):
            changed = self._file.many(
                f"UPDATE tasks SET state = {_UNLESS_CANCELLED.format('queued')}, attempt = 0, due = NULL, "
                f"worker = NULL, status = NULL, finished_at = NULL, error = NULL, error_at = NULL "
                f"WHERE {_AT} AND state = 'done'",
                [(seq, index) for index in indexes],
            )
            self._file.change("UPDATE jobs SET ready = cancelled_at IS NULL WHERE seq = ?", (seq,))
        return changed

    def indexes(self, *states: str) -> dict[str, set[int]]:
        """Return the indexes of the tasks in any of these states (see `farm.queue.queue_file`), by job id."""
        marks = ", ".join("?" * len(states))
        indexes: dict[str, set[int]] = {}
        for job_id, index in self._file.all(
            f"SELECT job_id, task_index FROM tasks JOIN jobs ON seq = job_seq WHERE state IN ({marks})", states
        ):
            indexes.setdefault(job_id, set()).add(index)
        return indexes

    def families(self, job_id: str) -> dict[int, str]:
        """Return the family of each task of the job by index; a mixed job's is read from the config."""
        return dict(
            self._file.all(
                "SELECT task_index, CASE WHEN family = ? AND json_valid(config_json) THEN "
                "CASE WHEN json_type(config_json, '$.family') = 'text' THEN json_extract(config_json, '$.family') "
                "WHEN json_type(config_json, '$.together[0].family') = 'text' "
                "THEN json_extract(config_json, '$.together[0].family') "
                "ELSE family END ELSE family END FROM configs JOIN jobs ON seq = job_seq WHERE job_seq = ?",
                (MIXED_FAMILY, self._seq(job_id)),
            )
        )

    def _queue_due(self, now: float, held: Collection[Lease]) -> None:
        """Queue tasks whose backoff or lease has ended; set aside those without an attempt left."""
        rows = self._file.all(
            "SELECT job_seq, task_index, state, attempt, cancelled_at FROM tasks INDEXED BY tasks_due "
            "JOIN jobs ON seq = job_seq WHERE state IN ('waiting', 'leased') AND due <= ?",
            (now,),
        )
        if not rows:
            return
        held_keys = {self._held(task) for task in held}
        for seq, index, state, attempt, cancelled_at in rows:
            lost = state == "leased"
            if lost and (seq, index, attempt) in held_keys:
                continue
            new_state = "queued" if cancelled_at is None else "cancelled"
            if lost and attempt >= self.max_attempts:
                new_state = "exhausted"
            self._file.change(f"UPDATE tasks SET state = ?, due = NULL WHERE {_AT}", (new_state, seq, index))
            if lost:  # no worker: a last retry that never landed, whose own error is better
                self._file.change(
                    "UPDATE tasks SET error = 'worker ' || worker || ' lost: the lease of attempt ' || attempt || "
                    f"' ran out', error_at = ? WHERE {_AT} AND worker IS NOT NULL",
                    (now, seq, index),
                )
            if new_state == "queued":
                self._file.change("UPDATE jobs SET ready = 1 WHERE seq = ?", (seq,))

    # Looking

    def jobs(self) -> list[Job]:
        """Return all jobs, oldest first."""
        return [_job_of(row) for row in self._file.all(f"SELECT {_JOB_COLUMNS} FROM jobs ORDER BY submitted_at, seq")]

    def job(self, job_id: str) -> Job:
        """Return one job. Raises `UsageError` listing the known ids for an unknown one."""
        return _job_of(self._file.only(f"SELECT {_JOB_COLUMNS} FROM jobs WHERE seq = ?", (self._seq(job_id),)))

    def counts(self, job_id: str | None = None, device: str | None = None) -> Counts:
        """Return the counts of tasks by state: of one job, of all jobs for one device, or of all."""
        return _counts_of(row[1:] for row in self._tallies(None if job_id is None else self._seq(job_id), device))

    def pending(self, job_id: str | None = None, device: str | None = None) -> int:
        """Return the number of tasks that are neither done nor cancelled."""
        return self.counts(job_id, device).pending

    def waiting_hashes(self, device: str) -> frozenset[str]:
        """Return the config hashes of the tasks of this device that are neither done nor cancelled."""
        rows = self._file.all(
            "SELECT config_json FROM tasks JOIN configs USING (job_seq, task_index) JOIN jobs ON seq = job_seq "
            "WHERE device = ? AND state NOT IN ('done', 'cancelled')",
            (device,),
        )
        mappings = (_mapping_of(text) for (text,) in rows)
        return frozenset(mapping_hash(mapping) for mapping in mappings if mapping is not None)

    def next_device(self, job_id: str | None = None) -> str | None:
        """Return the device of the next job with pending tasks; None if nothing is pending."""
        only = None if job_id is None else self._seq(job_id)
        row = self._file.one(
            "SELECT device FROM jobs WHERE (?1 IS NULL OR seq = ?1) AND EXISTS (SELECT 1 FROM tallies "
            "WHERE job_seq = seq AND state IN ('queued', 'waiting', 'leased', 'exhausted') AND count > 0) "
            "ORDER BY priority DESC, submitted_at, seq LIMIT 1",
            (only,),
        )
        return None if row is None else row[0]

    def progress(self, now: float, job_id: str | None = None, window_s: float = 300.0) -> list[JobProgress]:
        """Return the progress of every job (or one), oldest first, with the rate over the last `window_s` seconds."""
        only = None if job_id is None else self._seq(job_id)
        tallies: dict[int, list[tuple[Any, ...]]] = {}
        for seq, *tally in self._tallies(only, None):
            tallies.setdefault(seq, []).append(tuple(tally))
        jobs = self._file.all(
            f"SELECT seq, complete, cancelled_at IS NOT NULL, {_JOB_COLUMNS} FROM jobs "
            "WHERE (?1 IS NULL OR seq = ?1) ORDER BY submitted_at, seq",
            (only,),
        )
        progress = []
        for seq, complete, cancelled, *row in jobs:
            counts = _counts_of(tallies.get(seq, []))
            recent, first_at = 0, None
            if counts.pending:
                recent, first_at = self._file.only(
                    "SELECT count(*), min(finished_at) FROM tasks INDEXED BY tasks_finished "
                    "WHERE job_seq = ? AND finished_at BETWEEN ? AND 1e12",  # SQLite sorts texts above all numbers
                    (seq, now - window_s),
                )
            progress.append(_progress_of(_job_of(row), counts, bool(complete), bool(cancelled), recent, first_at, now))
        return progress

    def _tallies(self, seq: int | None, device: str | None) -> list[tuple[Any, ...]]:
        return self._file.all(
            f"SELECT job_seq, state, status, count FROM tallies JOIN jobs ON seq = job_seq WHERE count > 0 AND {_OF}",
            (seq, device),
        )

    def errors(self, job_id: str, limit: int = 10) -> list[dict[str, Any]]:
        """Return the latest failed attempts of the job's tasks, newest first, by column of `tasks`."""
        rows = self._file.all(
            "SELECT task_index, attempt, state, status, error, error_at FROM tasks "
            "WHERE job_seq = ? AND error IS NOT NULL ORDER BY error_at DESC, task_index DESC LIMIT ?",
            (self._seq(job_id), limit),
        )
        names = ("task_index", "attempt", "state", "status", "error", "error_at")
        return [dict(zip(names, (*row, _time_of(at)), strict=True)) for *row, at in rows]

    def _seq(self, job_id: str) -> int:
        if job_id not in self._seqs:  # a job keeps its number, so this never goes stale
            row = self._file.one("SELECT seq FROM jobs WHERE job_id = ?", (job_id,))
            if row is None:
                known = [name for (name,) in self._file.all("SELECT job_id FROM jobs")]
                if not known:
                    raise UsageError(f"unknown job {job_id!r}; there are no jobs yet")
                raise unknown_name("job", job_id, known)
            self._seqs[job_id] = row[0]
        return self._seqs[job_id]

    def _held(self, task: Lease) -> tuple[int, int, int]:
        return self._seq(task.job_id), task.task_index, task.attempt


def _error_values(error: str | None, now: float) -> tuple[str | None, float | None]:
    if error is None:
        return None, None
    text, mark, output = error.partition(OUTPUT_STARTS)  # the message is at the end of a traceback
    return text[-ERROR_CHARACTERS:] + mark + output[-ERROR_CHARACTERS:], now


_UNWRITABLE = (errno.EROFS, errno.EACCES)


@contextlib.contextmanager
def queue_to_read(path: Path) -> Iterator[Queue]:
    """Open an existing queue for reading, or a copy of it if its folder is read-only.

    Prints a line about the copy to standard error. Writes nothing to the folder. Raises as `Queue.open` does.
    """
    with contextlib.ExitStack() as stack:
        try:
            queue = stack.enter_context(Queue.open(path))
            queue.next_device()  # an unwritable file may fail only here
        except QueueError as error:
            if error.errno not in _UNWRITABLE:
                raise
            copy = stack.enter_context(queue_copy(path))
            print(
                f"{path.parent} is read-only: reading a copy of the queue; changes made by a running dispatcher may be "
                "missing",
                file=sys.stderr,
            )
            queue = stack.enter_context(Queue.open(copy))
        yield queue


def existing_queue(folder: DataFolder, job_id: str | None) -> Path:
    """Return the queue's path in a readable data folder. Raises `UsageError` if there is none, so no job is known."""
    if not folder.open().queue.is_file():
        raise UsageError(f"unknown job {job_id!r}; there are no jobs in {folder.root}")
    return folder.queue
