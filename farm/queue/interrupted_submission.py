"""Undoes a submission that Ctrl-C interrupted: removes the tasks that it added and that were not started.

Start reading at `Submission`; `farm.queue.jobs.Queue.submit` uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from farm.queue.queue_file import QUALITIES_TABLE, REMOVED_JOBS_TABLE, QueueError, QueueFile

_TASKS_AT_ONCE = 20_000  # of one transaction: other processes that use the queue wait for no more than these
_NOT_STARTED = ("queued", "cancelled")  # states of tasks that were added and never leased
_JOB = "n, priority, complete, cancelled_at"


class Submission:
    """A submission in progress: the tasks that it adds, and the job's earlier state."""

    def __init__(self, file: QueueFile, job_id: str) -> None:
        """Look at the job as it is. Call in the transaction that changes it."""
        self._file = file
        self._job_id = job_id
        self._job_before = file.one(f"SELECT {_JOB} FROM jobs WHERE job_id = ?", (job_id,))
        self._ranges: list[tuple[int, int]] = []  # of indices, first and last

    def adds(self, indices: Sequence[int]) -> None:
        """Record those of the indices that the job lacks, which this submission adds.

        Call in the transaction that adds them, before it does.
        """
        first, last = min(indices), max(indices)
        held = self._file.all(
            "SELECT task_index FROM tasks WHERE task_index BETWEEN ? AND ? "
            "AND job_seq = (SELECT seq FROM jobs WHERE job_id = ?)",
            (first, last, self._job_id),
        )
        if not held and len(indices) == last - first + 1:
            self._note(first, last)
            return
        for index in sorted(set(indices).difference(index for (index,) in held)):
            self._note(index, index)

    def _note(self, first: int, last: int) -> None:
        if self._ranges and self._ranges[-1][1] + 1 == first:
            first = self._ranges.pop()[0]
        self._ranges.append((first, last))

    def undo(self) -> None:
        """Remove the added tasks and restore the job. Started tasks, and so their job, stay."""
        (seq,) = self._file.only("SELECT seq FROM jobs WHERE job_id = ?", (self._job_id,))
        for first, last in self._ranges:
            for low in range(first, last + 1, _TASKS_AT_ONCE):
                with self._file.transaction():
                    self._take_out(seq, low, min(low + _TASKS_AT_ONCE - 1, last))
        with self._file.transaction(durable=True):
            self._restore(seq)
        self._shrink()

    def _take_out(self, seq: int, low: int, high: int) -> None:
        here = "job_seq = ? AND task_index BETWEEN ? AND ?"
        for state in _NOT_STARTED:
            removed = self._file.change(
                f"DELETE FROM tasks WHERE {here} AND state = ? AND attempt = 0", (seq, low, high, state)
            )
            self._file.change(
                "UPDATE tallies SET count = count - ? WHERE job_seq = ? AND state = ? AND status = ''",
                (removed, seq, state),
            )
        self._file.change(
            f"DELETE FROM configs WHERE {here} AND NOT EXISTS (SELECT 1 FROM tasks "
            "WHERE tasks.job_seq = configs.job_seq AND tasks.task_index = configs.task_index)",
            (seq, low, high),
        )

    def _restore(self, seq: int) -> None:
        if self._job_before is None:
            if self._file.one("SELECT 1 FROM tasks WHERE job_seq = ?", (seq,)) is None:
                self._file.change(QUALITIES_TABLE)
                self._file.change(REMOVED_JOBS_TABLE)
                self._file.change("INSERT INTO removed_jobs VALUES (?, ?) ON CONFLICT DO NOTHING", (self._job_id, seq))
                for table in ("tallies", "qualities"):
                    self._file.change(f"DELETE FROM {table} WHERE job_seq = ?", (seq,))
                self._file.change("DELETE FROM jobs WHERE seq = ?", (seq,))
            return
        self._file.change(
            f"UPDATE jobs SET ({_JOB}) = (?, ?, ?, coalesce(cancelled_at, ?)) WHERE seq = ?", (*self._job_before, seq)
        )
        self._file.change(
            "UPDATE tasks SET state = 'cancelled', due = NULL WHERE job_seq = ? AND state IN ('queued', 'waiting') "
            "AND (SELECT cancelled_at FROM jobs WHERE seq = job_seq) IS NOT NULL",
            (seq,),
        )

    def _shrink(self) -> None:
        """Shrink the file if most of it is free now; otherwise later tasks reuse the space."""
        (free,), (pages,) = (self._file.only(f"PRAGMA {name}") for name in ("freelist_count", "page_count"))
        if 2 * free > pages:
            with contextlib.suppress(QueueError, ValueError):  # a process reads: later tasks reuse the room
                self._file.all("VACUUM")
                self._file.all("PRAGMA wal_checkpoint(TRUNCATE)")
