"""Records of the durable queue: jobs, tasks, counts, progress, and a job's id.

Start reading at `Job`; `workers.task` has the tasks, `farm.queue.jobs` is the queue itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.task import Lease

JOB_COLUMNS = "job_id, family, space_json, n, seed, policy, priority, settings_json, device, submitted_at"


MIXED_FAMILY = "mixed"  # of a job whose tasks are of several; each run lands under its own config's


@dataclass(frozen=True, kw_only=True)
class Job:
    """One submission, as its row holds it. `queue_values` reads and writes the texts of settings and device."""

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

    `config` as far as its text is a JSON object.
    """

    family: str
    problem: str
    config: Mapping[str, Any] | None
    simulated: bool


@dataclass(frozen=True, kw_only=True)
class Added:
    """Result of `Queue.submit`: counts of its tasks."""

    added: int
    existing: int
    revived: int = 0  # tasks, of those existing, that a cancel had taken out


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Tasks by state; `by_status` are the done ones by their run's status, only those that occur."""

    queued: int = 0  # those that wait for their next attempt included
    waiting: int = 0  # of the queued ones: in backoff
    leased: int = 0  # those included whose attempts are exhausted and whose run is not landed yet
    done: int = 0
    cancelled: int = 0
    by_status: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.queued + self.leased + self.done + self.cancelled

    @property
    def ended(self) -> int:
        """Return the number of tasks with a run in the warehouse."""
        return self.done

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


@dataclass(frozen=True, kw_only=True)
class TaskError:
    """The last failed attempt of a task."""

    task_index: int
    attempt: int
    state: str
    status: str | None
    error: str
    error_at: float


@dataclass(frozen=True, kw_only=True)
class RunDoubt:
    """Judgement of a run that is not trusted: `quality` is suspect, untrusted, or repeated if it was run again."""

    quality: str
    reasons: tuple[str, ...] = ()


def job_id_for(
    family: str,
    space: Mapping[str, Any],
    seed: int,
    policy: str,
    limits: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> str:
    """Return a submission's id, such as `cnn-3f2a9c1b`, which does not depend on n and priority.

    `space` is `Space.to_mapping()`, `limits` is `Limits.to_mapping()`, all of them JSON-serialisable.
    """
    from farm.sampling.draws import SAMPLER_VERSION

    identity = [SAMPLER_VERSION, family, space, seed, policy, limits, settings]
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"{family}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def job_of(row: Sequence) -> Job:
    return Job(**dict(zip(JOB_COLUMNS.split(", "), row, strict=True)))


def counts_of(tallies: Iterable[tuple[str, str | None, int]]) -> Counts:
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


def progress_of(
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
    # The first finish only starts the clock.
    if counts.pending and recent >= 2 and first_at is not None and now > first_at:
        rate = (recent - 1) / (now - first_at)
        eta = counts.pending / rate
    return JobProgress(job=job, counts=counts, state=state, rate_per_s=rate, eta_s=eta)
