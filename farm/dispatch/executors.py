"""The executor Protocol, its inline implementation, and the checks of what an executor returns.

Start reading at `Executor`, which `ray_cluster.py` implements with Ray. An executor owns the workers; the dispatcher
owns the queue and never sees Ray. `accept` turns whatever a worker sends into a run that can land.
"""

from __future__ import annotations

import datetime
import json
import time
import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from conf.children.running import ServerLost
from conf.errors import UsageError, safe_text
from farm.queue.jobs import UnreadableTask
from featurize.configs.trial import TrialConfig, mapping_hash
from warehouse.tables.schema import JSON_COLUMNS, RUN_SCHEMA, SCHEMA_VERSION, TELEMETRY_SCHEMA, Run
from workers.devices import DeviceChoice, make_device
from workers.task import RunResult, Task
from workers.worker import Worker


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A task that left its worker: with a result, or because the worker was lost (`lost` has the reason)."""

    worker: str
    task: Task
    result: RunResult | None = None
    lost: str | None = None


@runtime_checkable
class Executor(Protocol):
    """A pool of workers that take one task at a time. Used from one thread."""

    def start(self) -> None:
        """Start the workers without waiting until they are ready. Raises `UsageError` if they cannot start."""

    def idle(self) -> list[str]:
        """Return the workers that can take a task now."""

    def submit(self, worker: str, task: Task, upcoming: Task | None = None) -> None:
        """Hand a task to an idle worker; `upcoming` is its probable next task, which it may prepare."""

    def wait(self, timeout_s: float) -> list[Completion]:
        """Return the tasks that ended since the last call; wait at most `timeout_s` for one (inline: run it)."""

    def running(self) -> Mapping[str, Task]:
        """Return the tasks handed out and not yet returned by `wait`, by worker."""

    def waiting(self) -> Collection[str]:
        """Return the keys of `running` whose tasks still wait for further GPUs."""
        return ()

    def most_gpus(self) -> int | None:
        """Return the most GPUs of one node that a trial may have; None: ranks need no separate GPUs."""

    def restart(self, worker: str) -> None:
        """Kill a stuck worker; `wait` returns its task as lost (inline: no effect)."""

    def notices(self) -> list[str]:
        """Return new messages for the user, a line each."""
        return []

    def close(self) -> None:
        """End every worker and its trial immediately."""


class InlineExecutor(Executor):
    """One worker in this process, without Ray; trials still run in children of a trial server."""

    def __init__(self, choice: DeviceChoice, environment: dict[str, str]):
        slot = make_device(choice).slots()[0]  # the first usable one: index 0 may be a display's GPU
        self._choice = choice
        self._worker = Worker(choice, str(slot.index), "inline-0", environment)
        self._task: Task | None = None
        self._upcoming: Task | None = None

    def start(self) -> None:
        self._worker.server()

    def idle(self) -> list[str]:
        return [] if self._task else [self._worker.name]

    def submit(self, worker: str, task: Task, upcoming: Task | None = None) -> None:
        assert self._task is None, "one task at a time"
        self._task, self._upcoming = task, upcoming

    def wait(self, timeout_s: float) -> list[Completion]:
        if self._task is None:  # all remaining tasks wait for their next attempt
            time.sleep(timeout_s)
            return []
        try:
            self._worker.ready()
        except ServerLost as error:
            raise UsageError(f"the trial server does not start: {error}") from error
        task, result, lost = self._task, None, None
        try:
            result = self._worker.run(task, self._upcoming)
        except Exception:  # a bug of ours must cost one task, not the job
            lost = f"worker failed: {traceback.format_exc()}"
        self._task = None
        return [Completion(worker=self._worker.name, task=task, result=result, lost=lost)]

    def running(self) -> Mapping[str, Task]:
        return {self._worker.name: self._task} if self._task else {}

    def most_gpus(self) -> int | None:
        return 1 if self._choice.backend == "cuda" else None

    def restart(self, worker: str) -> None:
        """Do nothing: `wait` runs the task itself, so no caller can get here."""

    def close(self) -> None:
        self._worker.close()


_TEXT_CHARACTERS = 4_000  # characters of any text of a run, except its error
_JSON_CHARACTERS = 64_000  # a longer JSON column is left out: truncated JSON is invalid
_OWN_COLUMNS = ("run_id", "job_id", "task_index", "family")  # columns that connect a run with its task
_TEXT_COLUMNS = tuple(
    field.name for field in RUN_SCHEMA if pa.types.is_string(field.type) and field.name not in JSON_COLUMNS
)
_MAPPING_COLUMNS = tuple(name for name in JSON_COLUMNS if name != "config")


def attempt_run_id(run_id: str, attempt: int) -> str:
    """Return the run id of an attempt that was not the task's last, which keeps it from replacing the task's run."""
    return f"{run_id}-a{attempt}"


def as_attempt(result: RunResult, attempt: int) -> RunResult:
    """Return a result as that of an attempt after which its task is queued again."""
    run = replace(result.run, run_id=attempt_run_id(result.run.run_id, attempt), final=False)
    telemetry = result.telemetry
    if "run_id" in telemetry.column_names:
        telemetry = telemetry.drop_columns(["run_id"])  # the writer adds the new one
    # Only a final group has rows in `collocations`.
    return replace(result, run=run, telemetry=telemetry, collocations=None)


def as_final(result: RunResult) -> RunResult:
    """Return a result marked as its task's final one."""
    return replace(result, run=replace(result.run, final=True))


def accept(completion: Completion, task: Task) -> Completion:
    """Return the completion in a form that queue and warehouse accept; its content never raises.

    Texts are made storable and truncated (a line in them says how much is missing). A result that is not a run of this
    task becomes a `crashed` one that says why. Only a `crashed` run is tried again.
    """
    if completion.lost is not None:
        return replace(completion, lost=safe_text(str(completion.lost)), result=None)
    try:
        result = _check(completion.result, task)
    except ValueError as error:
        result = lost_run(task, f"the worker's answer is not a run of this task: {error}")
    return replace(completion, result=result)


def _check(result: object, task: Task) -> RunResult:
    """Check the shapes of a result and of the further runs that come with it. Raises `ValueError`."""
    expected = {name: getattr(task, name) for name in _OWN_COLUMNS}
    checked = _checked_run(result, expected, task.config, task.attempt)
    assert isinstance(result, RunResult)
    parts = _parts_of(task)
    others = []
    for other in result.others if isinstance(result.others, tuple) else ():
        run_id = getattr(getattr(other, "run", None), "run_id", None)
        config = parts.pop(run_id, None) if isinstance(run_id, str) else None
        if config is None:
            raise ValueError(f"{safe_text(repr(run_id), _TEXT_CHARACTERS)} is not a further run of it")
        expected = {"run_id": run_id, "job_id": task.job_id, "task_index": None, "family": config.family}
        others.append(_checked_run(other, expected, config, task.attempt))
    return replace(checked, others=tuple(others))


def _parts_of(task: Task) -> dict[str, TrialConfig]:
    """Return the configs of the further runs that a group's task may bring, by their ids."""
    if not task.partners:
        return {}
    members = dict(enumerate((task.config, *task.partners)))
    alone = {f"{task.run_id}-alone-{place}": config for place, config in members.items()}
    return alone | {f"{task.run_id}-with-{place}": config for place, config in members.items() if place}


def _checked_run(result: object, expected: Mapping[str, Any], config: TrialConfig, attempt: int) -> RunResult:
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
        if getattr(result.run, name) != expected[name]:
            answer = safe_text(repr(getattr(result.run, name)), _TEXT_CHARACTERS)
            raise ValueError(f"{name} must be {expected[name]!r}, got {answer}")
    storable: dict[str, Any] = {name: _storable(name, getattr(result.run, name)) for name in _TEXT_COLUMNS}
    storable |= {name: _truncate(getattr(result.run, name)) for name in _MAPPING_COLUMNS}
    run = replace(result.run, **storable, attempt=attempt, config=config.to_mapping())
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
    """Return a column's text, storable and truncated. Raises `ValueError` for a value that is not text."""
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name} must be a text, got {safe_text(repr(text), _TEXT_CHARACTERS)}")
    if text is None:
        return None
    return safe_text(text) if name == "error" else safe_text(text, _TEXT_CHARACTERS)


def _truncate(values: object) -> Mapping[str, Any] | None:
    """Return the values of a JSON column; None if JSON cannot hold them or they are too long."""
    if not isinstance(values, Mapping):
        return None
    try:
        return values if len(json.dumps(values, sort_keys=True)) <= _JSON_CHARACTERS else None
    except (TypeError, ValueError, RecursionError):
        return None


def lost_run(
    task: Task | UnreadableTask, error: str, status: str = "crashed", error_type: str = "WorkerLost"
) -> RunResult:
    """Return the run of a task that no worker returned, filled in from the task.

    By default its workers were all lost. A task that is not handed out is `invalid`: its code is not allowed
    (`NotTrusted`), or this version cannot read its row or run it here (`UsageError`).
    """
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
        status=status,
        error_type=error_type,
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
        run = replace(run, group_id=task.run_id)
    return RunResult(run=run, telemetry=nothing, others=others)


def _lost_partner(run: Run, place: int, config: TrialConfig) -> RunResult:
    """Return the run of a group's further member, which was lost with its first one."""
    lost = replace(
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
