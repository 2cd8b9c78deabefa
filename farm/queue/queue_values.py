"""Values of the durable queue: jobs, counts and progress. Only this module parses its texts of configs and settings.

Start reading at `Job` and `task_of_row`; `workers.task` has the tasks, `farm.queue.jobs` is the queue itself. A data
folder can come from anybody, so a row may hold any text.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conf.errors import UsageError, shown
from featurize.configs.trial import TrialConfig, canonical_json, config_from_mapping, mapping_hash
from warehouse.files.folder import check_name
from workers.devices import DeviceChoice
from workers.settings import TrialSettings
from workers.task import Lease, Task

JOB_COLUMNS = "job_id, family, space_json, n, seed, policy, priority, settings_json, device, submitted_at"


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
    from featurize.configs.draws import SAMPLER_VERSION

    identity = [SAMPLER_VERSION, family, space, seed, policy, limits, settings]
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"{family}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def job_of(row: Sequence[Any]) -> Job:
    job = Job(**dict(zip(JOB_COLUMNS.split(", "), row, strict=True)))
    return replace(job, submitted_at=time_of(job.submitted_at))


def time_of(value: Any) -> float:
    """Return a time of the queue in seconds since the epoch; 0 for an invalid one."""
    try:
        datetime.datetime.fromtimestamp(value, datetime.UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        return 0.0
    return float(value)


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
    # The first finish only starts the interval.
    if counts.pending and recent >= 2 and first_at is not None and now > first_at:
        rate = (recent - 1) / (now - first_at)
        eta = counts.pending / rate
    return JobProgress(job=job, counts=counts, state=state, rate_per_s=rate, eta_s=eta)


TOGETHER = "together"  # key of a group's members
MOST_TOGETHER = 4
TASK_COLUMNS = ("job_id", "family", "settings_json", "device", "task_index", "attempt", "config_json")


def task_of_row(row: Sequence[Any]) -> Task | UnreadableTask:
    """Return the typed task of a row of `TASK_COLUMNS`; an `UnreadableTask` if one of its texts cannot be parsed."""
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


def config_hash_of_text(text: str) -> str | None:
    """Return the hash of the config that a text of the queue holds; None for one that is not a JSON object."""
    mapping = _mapping_of(text)
    return None if mapping is None else mapping_hash(mapping)


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
