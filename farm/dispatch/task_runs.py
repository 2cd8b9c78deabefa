"""Turns the answers of workers into runs that can land.

Start reading at `accepted`: everything that a worker sends passes through it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from conf.plain_text import safe_text
from farm.dispatch.executors import Completion
from farm.queue.job_records import RunDoubt, UnreadableTask
from featurize.configs.trial import TrialConfig, mapping_hash
from warehouse.tables.run import JSON_COLUMNS, Run
from warehouse.tables.schema import RUN_SCHEMA, SCHEMA_VERSION, TELEMETRY_SCHEMA
from workers.task import RunResult, Task

_TEXT_CHARACTERS = 4_000  # of any text of a run, but its error
_JSON_CHARACTERS = 64_000  # a column of JSON that is longer is left out: cut JSON is none
_OWN_COLUMNS = ("run_id", "job_id", "task_index", "family")  # by which a run is known as that of its task
_TEXT_COLUMNS = tuple(
    field.name for field in RUN_SCHEMA if pa.types.is_string(field.type) and field.name not in JSON_COLUMNS
)
_MAPPING_COLUMNS = tuple(name for name in JSON_COLUMNS if name != "config")


def attempt_run_id(run_id: str, attempt: int) -> str:
    """Return the run id of an attempt that was not the task's last, so that it never replaces the task's run."""
    return f"{run_id}-a{attempt}"


def as_attempt(result: RunResult, attempt: int) -> RunResult:
    """Return a result as that of an attempt after which its task is queued again."""
    run = dataclasses.replace(result.run, run_id=attempt_run_id(result.run.run_id, attempt), final=False)
    telemetry = result.telemetry
    if "run_id" in telemetry.column_names:
        telemetry = telemetry.drop_columns(["run_id"])  # the writer puts in the new one
    # Only the group that counts has rows in `collocations`.
    return dataclasses.replace(result, run=run, telemetry=telemetry, collocations=None)


def as_final(result: RunResult) -> RunResult:
    """Return a result as the one that its task ends with."""
    return dataclasses.replace(result, run=dataclasses.replace(result.run, final=True))


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
    """Check the shapes of a result and of the further runs that come with it. Raises `ValueError`."""
    own = {name: getattr(task, name) for name in _OWN_COLUMNS}
    checked = _checked_run(result, own, task.config, task.attempt)
    assert isinstance(result, RunResult)
    parts = _parts_of(task)
    others = []
    for other in result.others if isinstance(result.others, tuple) else ():
        run_id = getattr(getattr(other, "run", None), "run_id", None)
        config = parts.pop(run_id, None) if isinstance(run_id, str) else None
        if config is None:
            raise ValueError(f"{safe_text(repr(run_id), _TEXT_CHARACTERS)} is no further run of it")
        own = {"run_id": run_id, "job_id": task.job_id, "task_index": None, "family": config.family}
        others.append(_checked_run(other, own, config, task.attempt))
    return dataclasses.replace(checked, others=tuple(others))


def _parts_of(task: Task) -> dict[str, TrialConfig]:
    """Return the configs of the further runs that a group's task may bring, by their ids."""
    if not task.partners:
        return {}
    members = dict(enumerate((task.config, *task.partners)))
    alone = {f"{task.run_id}-alone-{place}": config for place, config in members.items()}
    return alone | {f"{task.run_id}-with-{place}": config for place, config in members.items() if place}


def _checked_run(result: object, own: Mapping[str, Any], config: TrialConfig, attempt: int) -> RunResult:
    """Check the shape of one run. Raises `ValueError`. The warehouse checks types and ranges of values."""
    if not isinstance(result, RunResult):
        raise ValueError(f"it is a {type(result).__name__}")
    if not isinstance(result.run, Run):
        raise ValueError(f"its run is a {type(result.run).__name__}")
    if not isinstance(result.telemetry, pa.Table):
        raise ValueError(f"its telemetry is a {type(result.telemetry).__name__}")
    for name in ("kernels", "ranks", "collocations"):
        table = getattr(result, name)
        if table is not None and not isinstance(table, pa.Table):
            raise ValueError(f"its {name} are a {type(table).__name__}")
    for name in _OWN_COLUMNS:
        if getattr(result.run, name) != own[name]:
            answer = safe_text(repr(getattr(result.run, name)), _TEXT_CHARACTERS)
            raise ValueError(f"{name} must be {own[name]!r}, got {answer}")
    storable: dict[str, Any] = {name: _storable(name, getattr(result.run, name)) for name in _TEXT_COLUMNS}
    storable |= {name: _bounded(getattr(result.run, name)) for name in _MAPPING_COLUMNS}
    run = dataclasses.replace(result.run, **storable, attempt=attempt, config=config.to_mapping())
    return RunResult(
        run=run,
        telemetry=result.telemetry,
        kernels=result.kernels,
        ranks=result.ranks,
        collocations=result.collocations,
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
    return dataclasses.replace(
        lost,
        run=dataclasses.replace(lost.run, status="invalid", error_type=error_type),
        others=tuple(
            dataclasses.replace(other, run=dataclasses.replace(other.run, status="invalid", error_type=error_type))
            for other in lost.others
        ),
    )


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
    nothing = TELEMETRY_SCHEMA.empty_table()
    partners = task.partners if isinstance(task, Task) else ()
    others = tuple(_lost_partner(run, place, config) for place, config in enumerate(partners, start=1))
    if partners:
        run = dataclasses.replace(run, group_id=task.run_id)
    return RunResult(run=run, telemetry=nothing, others=others)


def _lost_partner(run: Run, place: int, config: TrialConfig) -> RunResult:
    """Return the run of a group's further member, which was lost with its first one."""
    lost = dataclasses.replace(
        run,
        run_id=f"{run.run_id}-with-{place}",
        task_index=None,
        group_id=run.run_id,
        family=config.family,
        config=config.to_mapping(),
        config_hash=mapping_hash(config.to_mapping()),
        batch_size=config.batch_size,
        precision=config.precision,
        optimizer=config.optimizer,
        parallel=config.parallel,
    )
    return RunResult(run=lost, telemetry=TELEMETRY_SCHEMA.empty_table())
