"""A cycle's report: the night's results, its problems and what to do, as a page and as JSON.

Start reading at `gather`; `Report` holds everything. `rows` counts rows, `verdict` judges the night, `page` lays out
the page and puts it into the data folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

import warehouse
from conf.errors import CommandError
from conf.plain_text import error_line
from farm.nights.journal import STEPS, Cycle, plain
from farm.nights.report_rows import ReportRows, read_rows
from farm.nights.verdict import Said, only_simulated, say
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import NOW
from warehouse.reading.pairing import Difference, diff

LEARNING_STEPS = ("run", "learn")  # what a cycle is for; the rest is its overhead


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One step of the cycle. `seconds` of its last attempt, None where it did not end."""

    name: str
    state: str  # done | failed | started | not reached
    seconds: float | None
    attempts: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Night:
    """Cost and result of one cycle, for curves over the cycles. None: not reached, or not measured.

    gpu_seconds  of its workers: of a simulated cycle no GPU's time; energy_j: of that modelled
    """

    cycle: str
    outcome: str
    seconds: Mapping[str, float | None]  # by step
    overhead_s: float  # of all steps but `run` and `learn`
    runs: int | None
    rows: int | None  # of the view `runs`, after the cycle
    wall_s: float | None
    gpu_seconds: float | None
    energy_j: float | None
    simulated: bool


@dataclass(frozen=True, kw_only=True)
class Score:
    """Decision of one cycle's learning step on one target. Figures are of held-out rows."""

    cycle: str
    target: str
    estimator: str
    decision: str  # promoted | kept | first | skipped | failed
    why: str
    held_out: int | None
    current: Mapping[str, float | None] | None
    candidate: Mapping[str, float | None] | None
    in_use: Mapping[str, float | None] | None  # one of the two, the one that the decision left in use


@dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a report; figures as the journal and the warehouse have them.

    said      the outcome in a sentence, and what to do about it
    notes     what could not be read for this report
    snapshot  whose rows these are, None: the folder as it is; `before`: what `changed` compares it with
    rows      None where the warehouse could not be read
    """

    cycle: str
    started_at: str
    ended_at: str | None
    settings: Mapping[str, Any]
    said: Said
    notes: tuple[str, ...]
    snapshot: str | None
    before: str | None
    changed: Difference | None
    rows: ReportRows | None
    gained: Mapping[str, tuple[str, ...]]  # grid -> cells that had no row before, in words
    canaries: Mapping[str, Any] | None
    chosen: Mapping[str, Any] | None  # the plan's summary
    run: Mapping[str, Any] | None
    findings: tuple[Mapping[str, Any], ...]
    scores: tuple[Score, ...]  # of all cycles, oldest first
    steps: tuple[StepTime, ...]
    nights: tuple[Night, ...]  # oldest first, this one last
    next_plan: Mapping[str, Any] | None

    @property
    def simulated(self) -> bool:
        """Return whether no GPU took part: everything that ran was simulated."""
        return only_simulated(self.rows, self.canaries)

    def as_json(self) -> str:
        return json.dumps(plain(dataclasses.asdict(self)), indent=1, allow_nan=False)


def gather(folder: DataFolder, cycle: Cycle, cycles: Sequence[Cycle], next_plan: Mapping[str, Any] | None) -> Report:
    """Return the report of `cycle`."""
    history = [*(one for one in cycles if one.name != cycle.name and one.started_at <= cycle.started_at), cycle]
    notes: list[str] = []
    canaries = cycle.done("canaries")
    landed = cycle.done("land") or {}
    snapshot, before = landed.get("snapshot"), _before(history, landed)
    rows = _rows(folder, cycle, canaries or {}, snapshot, notes)
    if rows is None and snapshot is not None:
        snapshot = None
        rows = _rows(folder, cycle, canaries or {}, None, notes)
    changed = None
    if rows is not None and before is not None:
        with _told(notes, "what changed"):
            changed = diff(folder, before, snapshot or NOW)
    findings = tuple(landed.get("findings") or ())
    steps = tuple(_step(cycle, name) for name in STEPS)
    scores = tuple(score for one in history for score in _scores(one))
    return Report(
        cycle=cycle.name,
        started_at=_time(cycle.started_at),
        ended_at=None if cycle.ended_at is None else _time(cycle.ended_at),
        settings=cycle.settings,
        said=say(cycle, changed, rows, findings, notes),
        notes=tuple(dict.fromkeys(notes)),
        snapshot=snapshot,
        before=before,
        changed=changed,
        rows=rows,
        gained=_gained(rows),
        canaries=canaries,
        chosen=cycle.done("choose"),
        run=cycle.done("run"),
        findings=findings,
        scores=scores,
        steps=steps,
        nights=tuple(map(_night, history)),
        next_plan=next_plan,
    )


def _time(at: datetime.datetime) -> str:
    return at.astimezone(datetime.UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def _told(notes: list[str], part: str) -> Iterator[None]:
    """Turn a read error into a note, so that the report is written nevertheless."""
    try:
        yield
    except (CommandError, duckdb.Error, OSError) as error:
        notes.append(f"{part} could not be read: {error_line(str(error))[:500]}")


def _rows(
    folder: DataFolder, cycle: Cycle, canaries: Mapping, snapshot: str | None, notes: list[str]
) -> ReportRows | None:
    rows = None
    with (
        _told(notes, "rows" if snapshot is None else f"the snapshot {snapshot}"),
        contextlib.closing(warehouse.connect(folder, snapshot=snapshot)) as connection,
    ):
        rows = read_rows(connection, cycle.started_at, canaries.get("device_name"), canaries.get("source"))
        notes += [f"{path} could not be read: its rows are left out" for path in connection.damaged]
    return rows


def _before(history: Sequence[Cycle], landed: Mapping) -> str | None:
    """Return the snapshot to compare with: the one that landing named, else the newest of earlier cycles."""
    if landed:
        return landed.get("before")
    names = [(one.done("land") or {}).get("snapshot") for one in history[:-1]]
    return next((name for name in reversed(names) if name), None)


def _gained(rows: ReportRows | None) -> dict[str, tuple[str, ...]]:
    """Return the cells that had no row before this cycle, by grid."""
    if rows is None:
        return {}
    gained = {
        grid.name: tuple(f"{row} {column}" for row, column, _ in grid.gained) for grid in (rows.memory, *rows.levels)
    }
    regions = tuple(
        f"{grid.name}, batch {row}, parameters from {column}" for grid in rows.regions for row, column, _ in grid.gained
    )
    return {**gained, "batch size and parameters": regions}


def _step(cycle: Cycle, name: str) -> StepTime:
    step = cycle.steps.get(name)
    if step is None:
        return StepTime(name=name, state="not reached", seconds=None, attempts=0)
    error = str(step.payload.get("error", "")) if step.state == "failed" else ""
    return StepTime(name=name, state=step.state, seconds=step.seconds, attempts=len(step.attempts) or 1, error=error)


def _night(cycle: Cycle) -> Night:
    run = cycle.done("run") or {}
    seconds = {name: cycle.seconds(name) for name in STEPS}
    return Night(
        cycle=cycle.name,
        outcome=cycle.outcome,
        seconds=seconds,
        overhead_s=sum(taken for name, taken in seconds.items() if taken and name not in LEARNING_STEPS),
        runs=run.get("runs"),
        rows=((cycle.done("land") or {}).get("rows") or {}).get("runs"),
        wall_s=run.get("wall_s"),
        gpu_seconds=run.get("gpu_seconds"),
        energy_j=run.get("energy_j"),
        simulated=only_simulated(None, cycle.done("canaries")),
    )


def _scores(cycle: Cycle) -> list[Score]:
    scores = []
    for result in (cycle.done("learn") or {}).get("results") or ():
        figures = result.get("figures") or {}
        decision = str(result.get("decision", ""))
        scores.append(
            Score(
                cycle=cycle.name,
                target=str(result.get("target", "")),
                estimator=str(result.get("estimator", "")),
                decision=decision,
                why=str(result.get("why", "")),
                held_out=result.get("held_out"),
                current=figures.get("current"),
                candidate=figures.get("candidate"),
                in_use=figures.get("candidate" if decision in ("promoted", "first") else "current"),
            )
        )
    return scores
