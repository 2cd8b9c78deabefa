"""What a queued task becomes: what its worker is given, what of the answer is accepted, what lands without one.

Start reading at `accepted`: everything that a worker sends passes through it, whatever it holds.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from farm.executors import Completion
from farm.jobs import Doubt, Task
from warehouse.schema import RUN_SCHEMA, SCHEMA_VERSION, TELEMETRY_SCHEMA
from workers.safe_text import safe_text
from workers.worker import RunResult, TaskSpec

_TEXT_CHARACTERS = 4_000  # of any text of a run, but its error
_JSON_CHARACTERS = 64_000  # a column of JSON that is longer is left out: cut JSON is none
_JSON_COLUMNS = ("telemetry_missing", "quality_reasons", "quality_summary", "half_widths")
_TEXT_COLUMNS = frozenset(field.name for field in RUN_SCHEMA if pa.types.is_string(field.type))


def task_spec(task: Task) -> TaskSpec:
    """Return a queued task as its worker needs it; the trial's seed is the task's index, so that repeats are alike."""
    return TaskSpec(
        job_id=task.job_id,
        task_index=task.task_index,
        attempt=task.attempt,
        config=task.config_json,
        settings=task.settings_json,
        seed=task.task_index,
    )


def attempt_run_id(run_id: str, attempt: int) -> str:
    """Return the id of an attempt that was not the task's last: it never takes the place of the task's run."""
    return f"{run_id}-a{attempt}"


def accepted(completion: Completion, task: Task) -> Completion:
    """Return the completion as the queue and the warehouse can take it; never raises for what it holds.

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
    """Raises `ValueError`; the values' types and ranges are the warehouse's to check."""
    if not isinstance(result, RunResult):
        raise ValueError(f"it is a {type(result).__name__}")
    if not isinstance(result.run, Mapping) or not all(isinstance(name, str) for name in result.run):
        raise ValueError(f"its run is a {type(result.run).__name__} without the columns of one")
    if not isinstance(result.telemetry, pa.Table):
        raise ValueError(f"its telemetry is a {type(result.telemetry).__name__}")
    run = {name: _text(name, value) if isinstance(value, str) else value for name, value in result.run.items()}
    spec = task_spec(task)
    own = {"run_id": spec.run_id, "job_id": task.job_id, "task_index": task.task_index, "family": _family(task)}
    for name, value in own.items():
        if run.get(name) != value:
            raise ValueError(f"{name} must be {value!r}, got {safe_text(repr(run.get(name)), _TEXT_CHARACTERS)}")
    for name in _TEXT_COLUMNS & set(run):
        if run[name] is not None and not isinstance(run[name], str):
            shown = safe_text(repr(run[name]), _TEXT_CHARACTERS)
            raise ValueError(f"{name} must be a text, got {shown}")
    for name in _JSON_COLUMNS:
        if run.get(name) is not None and _mapping_of(run[name]) is None:
            run[name] = None
    run |= {"attempt": task.attempt, "config": task.config_json}
    crashed = run.get("status") == "crashed"
    return RunResult(
        run=run,
        telemetry=result.telemetry,
        retryable=result.retryable is True and crashed,
        repeat=result.repeat is True,
    )


def _family(task: Task) -> str:
    return json.loads(task.config_json).get("family", task.family)  # the tasks of a growth cycle's job are of several


def _text(name: str, value: str) -> str | None:
    if name == "config":
        return value
    if name in _JSON_COLUMNS:
        return value if len(value) <= _JSON_CHARACTERS else None
    return safe_text(value) if name == "error" else safe_text(value, _TEXT_CHARACTERS)


def _mapping_of(text: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def reasons_of(run: Mapping[str, Any]) -> dict[str, str]:
    """Return why an accepted run is not trusted: reason -> words."""
    return {
        safe_text(name): safe_text(str(words))
        for name, words in (_mapping_of(run.get("quality_reasons")) or {}).items()
    }


def doubt_of(run: Mapping[str, Any]) -> Doubt | None:
    """Return how a run was judged; None for one that is trusted, or that nobody judged."""
    if run.get("quality") in (None, "trusted"):
        return None
    return Doubt(quality=run["quality"], reasons=tuple(reasons_of(run)))


def refused_run(task: Task, error: str) -> RunResult:
    """Return the run of a task that is not handed out, because nobody allowed its code: `invalid`."""
    result = lost_run(task, error)
    return dataclasses.replace(result, run={**result.run, "status": "invalid", "error_type": "NotTrusted"})


def lost_run(task: Task, error: str) -> RunResult:
    """Return the run of a task that no worker ever brought back: `crashed`, with what is known."""
    from featurize.trial import mapping_hash

    config = json.loads(task.config_json)
    device = json.loads(task.device)
    run = {
        "run_id": task_spec(task).run_id,
        "job_id": task.job_id,
        "task_index": task.task_index,
        "attempt": task.attempt,
        "family": _family(task),
        "config": task.config_json,
        "config_hash": mapping_hash(config),
        "status": "crashed",
        "error_type": "WorkerLost",
        "error": safe_text(error),
        "source": "simulated" if device["backend"] == "simulated" else "measured",
        "schema_version": SCHEMA_VERSION,
        "batch_size": config.get("batch_size"),
        "precision": config.get("precision"),
        "optimizer": config.get("optimizer"),
        "finished_at": datetime.datetime.now(datetime.UTC),
    }
    return RunResult(run=run, telemetry=TELEMETRY_SCHEMA.empty_table())
