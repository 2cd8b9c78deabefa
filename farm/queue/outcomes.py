"""Outcomes of jobs, as the queue has them: if every trial of a job failed, its command exits with 1.

Start reading at `failed_jobs`. Out of memory is a measured outcome and no failure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from conf.plain_text import error_line
from farm.queue.jobs import Queue

EXIT_ALL_FAILED = 1
MEASURED = ("ok", "oom")  # statuses of trials that measured something
_ERRORS_READ = 10_000  # of one job, the latest
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


def failed_jobs(queue: Queue, job_ids: Iterable[str]) -> list[FailedJob]:
    """Return those of the jobs of which every ended trial failed, in the given order."""
    failures = (failed_job(queue, job_id) for job_id in job_ids)
    return [failure for failure in failures if failure is not None]


def failed_job(queue: Queue, job_id: str) -> FailedJob | None:
    """Return the failure of a job if every ended trial failed, else None. Its latest errors are looked at."""
    counts = sorted(queue.counts(job_id).by_status.items(), key=lambda pair: -pair[1])
    by_status = {status: count for status, count in counts if count}
    if not by_status or any(status in MEASURED for status in by_status):
        return None
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for error in queue.errors(job_id, _ERRORS_READ):
        if error.status is not None:
            reason = reason_of(error.error)
            key = re.sub(r"\d+", "0", reason)  # sizes and addresses differ from trial to trial
            reasons[key] += 1
            examples[key] = reason
    if not reasons:  # the runs were found in the warehouse, and the queue has no errors of them
        trials = sum(by_status.values())
        reason = "see the column error of the view runs"
        return FailedJob(job_id=job_id, by_status=by_status, reason=reason, count=trials, of=trials)
    ((key, count),) = reasons.most_common(1)
    return FailedJob(job_id=job_id, by_status=by_status, reason=examples[key], count=count, of=reasons.total())


def reason_of(error: str | None) -> str:
    """Return the line of a run's error with the exception's message, without the module of its type."""
    line = re.sub(r"^(?:\w+\.)+(?=[A-Z]\w*(?:: |$))", "", error_line(error or "")) or "no reason was given"
    return line if len(line) <= _CHARACTERS else f"{line[: _CHARACTERS - 3]}..."
