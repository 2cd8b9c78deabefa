"""Turns queued tasks into work for workers, and the workers' answers into runs that can land.

Start reading at `accepted`: everything that a worker sends passes through it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from farm.executors import Completion
from farm.job_records import RunDoubt, Task, UnreadableTask
from featurize.trial import mapping_hash
from warehouse.run import JSON_COLUMNS, Run
from warehouse.schema import RUN_SCHEMA, SCHEMA_VERSION, TELEMETRY_SCHEMA
from workers.safe_text import safe_text
from workers.worker import RunResult, TaskSpec

_TEXT_CHARACTERS = 4_000  # of any text of a run, but its error
_JSON_CHARACTERS = 64_000  # a column of JSON that is longer is left out: cut JSON is none
_OWN_COLUMNS = ("run_id", "job_id", "task_index", "family")  # by which a run is known as that of its task
_TEXT_COLUMNS = tuple(
    field.name for field in RUN_SCHEMA if pa.types.is_string(field.type) and field.name not in JSON_COLUMNS
)
_MAPPING_COLUMNS = tuple(name for name in JSON_COLUMNS if name != "config")


def task_spec(task: Task, own_code: bool = False) -> TaskSpec:
    """Return a queued task as its worker needs it; its seed is the task's index, so that repeats are equal."""
    return TaskSpec(
        job_id=task.job_id,
        task_index=task.task_index,
        attempt=task.attempt,
        config=task.config,
        settings=task.settings,
        seed=task.task_index,
        own_code=own_code,
    )


def attempt_run_id(run_id: str, attempt: int) -> str:
    """Return the run id of an attempt that was not the task's last, so that it never replaces the task's run."""
    return f"{run_id}-a{attempt}"


def accepted(completion: Completion, task: Task) -> Completion:
    """Return the completion in a form that queue and warehouse accept; its content never raises.

    Texts are made storable and bounded (a line in them says how much was left out). A result that is no run of this
    task becomes a `crashed` one that says why. Only a `crashed` run is tried again.
    """
    if completion.lost is not None:
        return dataclasses.replace(completion, lost=safe_text(str(completion.lost)), result=None)
    try:
        result = _checked(completion.result, task)
    except ValueError as error:
        result = lost_run(task, f"the worker's answer is no run of this task: {error}")
    return dataclasses.replace(completion, result=result)


def _checked(result: object, task: Task) -> RunResult:
    """Check a result's shape. Raises `ValueError`. The warehouse checks types and ranges of values."""
    if not isinstance(result, RunResult):
        raise ValueError(f"it is a {type(result).__name__}")
    if not isinstance(result.run, Run):
        raise ValueError(f"its run is a {type(result.run).__name__}")
    if not isinstance(result.telemetry, pa.Table):
        raise ValueError(f"its telemetry is a {type(result.telemetry).__name__}")
    for name in ("kernels", "ranks"):
        table = getattr(result, name)
        if table is not None and not isinstance(table, pa.Table):
            raise ValueError(f"its {name} are a {type(table).__name__}")
    for name in _OWN_COLUMNS:
        if getattr(result.run, name) != getattr(task, name):
            answer = safe_text(repr(getattr(result.run, name)), _TEXT_CHARACTERS)
            raise ValueError(f"{name} must be {getattr(task, name)!r}, got {answer}")
    storable: dict[str, Any] = {name: _storable(name, getattr(result.run, name)) for name in _TEXT_COLUMNS}
    storable |= {name: _bounded(getattr(result.run, name)) for name in _MAPPING_COLUMNS}
    run = dataclasses.replace(result.run, **storable, attempt=task.attempt, config=task.config.to_mapping())
    return RunResult(
        run=run,
        telemetry=result.telemetry,
        kernels=result.kernels,
        ranks=result.ranks,
        retryable=result.retryable is True and run.status == "crashed",
        repeat=result.repeat is True,
    )


def _storable(name: str, text: object) -> str | None:
    """Return a column's text, storable and bounded. Raises `ValueError` for a value that is no text."""
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name} must be a text, got {safe_text(repr(text), _TEXT_CHARACTERS)}")
    if text is None:
        return None
    return safe_text(text) if name == "error" else safe_text(text, _TEXT_CHARACTERS)


def _bounded(values: object) -> Mapping[str, Any] | None:
    """Return the values of a JSON column; None if JSON cannot hold them or they are too long."""
    if not isinstance(values, Mapping):
        return None
    try:
        return values if len(json.dumps(values, sort_keys=True)) <= _JSON_CHARACTERS else None
    except (TypeError, ValueError, RecursionError):
        return None


def doubt_of(quality: str | None, reasons: Iterable[str]) -> RunDoubt | None:
    """Return a run's doubt; None for a trusted run, and for one that was not judged."""
    if quality in (None, "trusted"):
        return None
    return RunDoubt(quality=quality, reasons=tuple(safe_text(reason) for reason in reasons))


def reason_lines(run: Run) -> list[str]:
    """Return why an accepted run is not trusted: `reason (in words)`."""
    reasons = run.quality_reasons or {}
    return [f"{safe_text(name)} ({safe_text(str(words))})" for name, words in reasons.items()]


def refused_run(task: Task | UnreadableTask, error_type: str, error: str) -> RunResult:
    """Return the run of a task that is not handed out: `invalid`.

    Its code is not allowed (`NotTrusted`), or this version cannot read its row (`UsageError`).
    """
    lost = lost_run(task, error)
    return dataclasses.replace(lost, run=dataclasses.replace(lost.run, status="invalid", error_type=error_type))


def lost_run(task: Task | UnreadableTask, error: str) -> RunResult:
    """Return the run of a task whose workers were all lost: `crashed`, with what is known of it."""
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
        status="crashed",
        error_type="WorkerLost",
        error=safe_text(error),
        source="simulated" if task.simulated else "measured",
        schema_version=SCHEMA_VERSION,
        batch_size=None if typed is None else typed.batch_size,
        precision=None if typed is None else typed.precision,
        optimizer=None if typed is None else typed.optimizer,
        parallel=None if typed is None else typed.parallel,
        finished_at=datetime.datetime.now(datetime.UTC),
    )
    return RunResult(run=run, telemetry=TELEMETRY_SCHEMA.empty_table())
