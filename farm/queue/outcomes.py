"""Outcomes of a command's trials, by job: if every trial of a job failed, the command exits with 1.

Start reading at `JobOutcomes`. Out of memory is a measured outcome and no failure.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from conf.plain_text import error_line
from farm.queue.jobs import Queue
from warehouse.tables.run import Run

EXIT_ALL_FAILED = 1
MEASURED = ("ok", "oom")  # statuses of trials that measured something
_REASONS_KEPT = 1000  # different ones of a job
_CHARACTERS = 300  # characters of a reason that are shown


@dataclass(frozen=True, kw_only=True)
class FailedJob:
    """A job without a single measured trial.

    trials  the job's ended trials, by status; reason: the commonest, of `count` trials (`of` were looked at)
    """

    job_id: str
    by_status: Mapping[str, int]
    reason: str
    count: int
    of: int

    def __str__(self) -> str:
        trials = sum(self.by_status.values())
        statuses = ", ".join(f"{status} {count:,}" for status, count in self.by_status.items())
        which = "the only trial" if trials == 1 else f"all {trials:,} trials"
        reason = "reason" if trials == 1 else f"most common reason ({self.count:,} of {self.of:,})"
        return f"{self.job_id}: {which} that ran failed ({statuses}); {reason}: {self.reason}"


@dataclass
class _Tally:
    """Counts of one job. `examples`: normalised reason -> its first example."""

    by_status: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    measured: bool = False

    def add(self, status: str, error: str | None) -> None:
        self.by_status[status] += 1
        self.measured = self.measured or status in MEASURED
        if self.measured:  # its reasons are never shown
            self.reasons.clear()
            self.examples.clear()
            return
        reason = reason_of(error)
        key = re.sub(r"\d+", "0", reason)  # sizes and addresses differ from trial to trial
        if key in self.reasons or len(self.reasons) < _REASONS_KEPT:
            self.reasons[key] += 1
            self.examples.setdefault(key, reason)

    def failure(self, job_id: str) -> FailedJob | None:
        if self.measured or not self.by_status:
            return None
        ((key, count),) = self.reasons.most_common(1)
        return FailedJob(
            job_id=job_id,
            by_status=dict(self.by_status),
            reason=self.examples[key],
            count=count,
            of=sum(self.by_status.values()),
        )


class JobOutcomes:
    """Counts the runs that land, by job. Memory does not grow with the number of runs."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def landed(self, run: Run) -> None:
        """Count a task's final run."""
        self._tallies.setdefault(run.job_id or "", _Tally()).add(run.status, run.error)

    def ran(self, job_id: str) -> bool:
        """Return whether a run of the job has landed."""
        return job_id in self._tallies

    def failed(self, queue: Queue) -> list[FailedJob]:
        """Return the jobs without a measured trial, counted here or known to the queue, in order of first landing."""
        failures = [failure for job_id, tally in self._tallies.items() if (failure := tally.failure(job_id))]
        return [failure for failure in failures if not _has_measured(_ended_by_status(queue, failure.job_id))]

    def take_failed(self, queue: Queue) -> list[FailedJob]:
        """Return what `failed` does and reset the counts, for a dispatcher that stays when nothing is queued."""
        failures = self.failed(queue)
        self._tallies.clear()
        return failures


def _ended_by_status(queue: Queue, job_id: str) -> dict[str, int]:
    """Return the job's ended trials by status, as the queue counts them."""
    return {status: count for status, count in queue.counts(job_id).by_status.items() if count}


def _has_measured(by_status: Mapping[str, int]) -> bool:
    return any(status in MEASURED for status in by_status)


def failed_before(queue: Queue, job_id: str) -> FailedJob | None:
    """Return the failure of a job if, by the queue, every ended trial failed; else None."""
    by_status = _ended_by_status(queue, job_id)
    if not by_status or _has_measured(by_status):
        return None
    tally = _Tally()
    for error in queue.errors(job_id, _REASONS_KEPT):
        if error.status is not None:
            tally.add(error.status, error.error)
    failure = tally.failure(job_id)
    if failure is None:  # the runs were found in the warehouse, and the queue has no errors of them
        trials = sum(by_status.values())
        reason = "see the column error of the view runs"
        return FailedJob(job_id=job_id, by_status=by_status, reason=reason, count=trials, of=trials)
    return dataclasses.replace(failure, by_status=by_status)


def reason_of(error: str | None) -> str:
    """Return the line of a run's error with the exception's message, without the module of its type."""
    line = re.sub(r"^(?:\w+\.)+(?=[A-Z]\w*(?:: |$))", "", error_line(error or "")) or "no reason was given"
    return line if len(line) <= _CHARACTERS else f"{line[: _CHARACTERS - 3]}..."
