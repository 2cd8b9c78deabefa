"""A cycle's report: the night's results, its problems and what to do, as JSON; `report_page` makes the page.

Start reading at `gather`; `Report` holds everything. `say` sums up the night in one sentence, with advice;
`report_rows` counts rows.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

import warehouse
from conf.errors import CommandError
from conf.plain_text import error_line
from conf.reports.blocks import Level
from farm.nights.journal import (
    STEPS,
    CanariesPayload,
    ChoicePayload,
    Cycle,
    DriftPayload,
    LandPayload,
    LearnPayload,
    LearntTarget,
    RunPayload,
    plain,
)
from farm.nights.report_rows import FAILED, ReportRows, read_rows
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import NOW
from warehouse.reading.checks import Finding
from warehouse.reading.pairing import Difference, diff

_MANY_FAILED = 0.1  # share of the night's runs from which on it is worth a look
_BEGINNINGS = {
    "done": "The night is done",
    "cut short": "The night was cut short",
    "sick": "The machine is sick, and only canaries ran",
    "failed": "The cycle failed",
}
SIMULATED = "simulated"  # warehouse.tables.schema.SOURCES
_SAID = 300  # characters of an error's sentence
NEW_MODEL = ("promoted", "first")  # decisions that put the candidate into use
LEARNING_STEPS = ("run", "learn")  # what a cycle is for; the rest is its overhead


@dataclass(frozen=True, kw_only=True)
class Said:
    """The outcome of a cycle in one line. `level` says how urgent it is."""

    outcome: str
    level: Level
    sentence: str
    advice: tuple[str, ...]  # most urgent first; what there is to do, or that there is nothing


def say(
    cycle: Cycle,
    changed: Difference | None,
    rows: ReportRows | None,
    findings: Sequence[Finding],
    notes: Sequence[str] = (),
) -> Said:
    """Return the outcome of a cycle, with the sentence that the journal has of it."""
    canaries = cycle.payload(CanariesPayload) or CanariesPayload()
    run = cycle.payload(RunPayload)
    urgent = _canaries(canaries)
    if cycle.outcome == "failed":
        urgent = ["Fix it, and run the same command again.", *urgent]
    errors = [finding for finding in findings if finding.severity == "error"]
    look = [*_findings(errors), *_failures(run), *_learning(cycle), *_list_moved(changed, canaries)]
    if rows is None:
        look.append("The rows could not be read: see the notes on this page.")
    elif notes:
        look.append(
            "Some files could not be read: see the notes on this page, and run python -m farm.doctor repair=true."
        )
    short = cycle.outcome == "cut short" or (run is not None and run.ended == "time" and not run.runs)
    level: Level = "bad" if cycle.outcome in ("failed", "sick") else "look" if urgent or look or short else "good"
    return Said(
        outcome=cycle.outcome,
        level=level,
        sentence=f"{_BEGINNINGS[cycle.outcome]}: {_sentence_of(cycle.said)}",
        advice=tuple(urgent + look) or (_calm(cycle.outcome, run),),
    )


def gist(error: str, most: int = _SAID) -> str:
    """Return the line of an error with its message, at most `most` characters."""
    return error_line(error)[:most].strip()


def _sentence_of(text: str) -> str:
    """Return the gist of a text with a full stop."""
    line = gist(text)
    return line if line.endswith(".") else line + "."


def _canaries(canaries: CanariesPayload) -> list[str]:
    if canaries.verdict == "sick":
        causes = "; ".join(canaries.causes) or "no cause is known"
        return [
            f"Check the machine before the next measurement ({causes}); python -m farm.doctor reports its state. "
            "If tonight's labels are right, canaries=accept makes them the new reference."
        ]
    if canaries.verdict == "drift":
        drift = canaries.drift or DriftPayload()
        return [
            f"Labels changed with the environment: {drift.stale_rows:,} rows are marked stale in it, and "
            f"{drift.remeasure:,} configurations will be measured again first. Check that the change was intended."
        ]
    return []


def _findings(errors: Sequence[Finding]) -> list[str]:
    if not errors:
        return []
    rows = sum(error.count for error in errors)
    rules = ", ".join(error.rule for error in errors[:3]) + (", ..." if len(errors) > 3 else "")
    return [f"Some rows cannot be right: rules are broken {rows:,} times ({rules}). See the quality findings."]


def _failures(run: RunPayload | None) -> list[str]:
    statuses = {} if run is None else run.by_status
    failed, runs = sum(statuses.get(name, 0) for name in FAILED), sum(statuses.values())
    if failed > _MANY_FAILED * runs:
        return [f"{failed:,} of {runs:,} runs failed ({failed / runs:.0%}): see the failures with their logs."]
    return []


def _learning(cycle: Cycle) -> list[str]:
    return [
        f"The estimator of {score.target} could not be fitted: {_sentence_of(score.why)}"
        for score in _scores(cycle)
        if score.decision == "failed"
    ]


def _list_moved(changed: Difference | None, canaries: CanariesPayload) -> list[str]:
    if changed is None:
        return []
    advice = []
    if removed := sum(count.runs for count in changed.removed):
        advice.append(f"{removed:,} runs of {changed.before} are gone; runs should never disappear.")
    beyond = [shift for shift in changed.shifts if shift.beyond]
    if beyond and canaries.verdict not in ("sick", "drift"):
        labels = ", ".join(sorted({shift.label for shift in beyond}))
        advice.append(f"Repeated measurements in the same environment differ ({labels}): see below.")
    return advice


def _calm(outcome: str, run: RunPayload | None) -> str:
    if outcome == "cut short":
        return "Nothing to do: the runs are kept, and the next night continues."
    if run is not None and not run.runs:
        if run.ended == "time":
            return "Give it more time: the canaries used all of it."
        return "Nothing was left to run: widen the search spaces, or name more families."
    return "Nothing to do."


@dataclass(frozen=True, kw_only=True)
class Score(LearntTarget):
    """Decision of one cycle's learning step on one target. Figures are of held-out rows."""

    cycle: str
    in_use: Mapping[str, Any] | None  # figures of the model that the decision left in use

    def of_model(self, which: str) -> Mapping[str, Any]:
        """Return the figures of the `current` model, the `candidate` or the one `in_use`, if there are any."""
        return (self.in_use if which == "in_use" else self.figures.get(which)) or {}


@dataclass(frozen=True, kw_only=True)
class Night:
    """Cost and result of one cycle, for curves over the cycles. None: not reached.

    seconds  of each step's last attempt, where it ended; overhead_s: of all steps but `run` and `learn`
    rows     rows of the view `runs`, after the cycle
    run      a simulated cycle has no GPU's time, and its energy is modelled
    """

    cycle: str
    outcome: str
    seconds: Mapping[str, float | None]
    overhead_s: float
    rows: int | None
    run: RunPayload | None
    simulated: bool


@dataclass(frozen=True, kw_only=True)
class Report:
    """The contents of a report; figures as the journal and the warehouse have them.

    said      the outcome in a sentence, and what to do about it
    notes     what could not be read for this report
    snapshot  the snapshot of the rows, None: the folder as it is; `before`: what `changed` compares it with
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
    canaries: CanariesPayload | None
    chosen: ChoicePayload | None  # the plan's summary
    run: RunPayload | None
    findings: tuple[Finding, ...]
    scores: tuple[Score, ...]  # scores of all cycles, oldest first
    steps: tuple[Mapping[str, Any], ...]  # name, state, seconds, attempts and error of each
    nights: tuple[Night, ...]  # oldest first, this one last
    next_plan: ChoicePayload | None

    @property
    def simulated(self) -> bool:
        """Return whether no GPU took part: everything that ran was simulated."""
        return _only_simulated(self.rows, self.canaries)

    def as_json(self) -> str:
        return json.dumps(plain(self), indent=1, allow_nan=False)


def gather(folder: DataFolder, cycle: Cycle, cycles: Sequence[Cycle], next_plan: ChoicePayload | None) -> Report:
    """Return the report of `cycle`, whose outcome is known."""
    history = [
        *(earlier for earlier in cycles if earlier.name != cycle.name and earlier.started_at <= cycle.started_at),
        cycle,
    ]
    notes: list[str] = []
    canaries, landed = cycle.payload(CanariesPayload), cycle.payload(LandPayload)
    snapshot, before = landed.snapshot if landed else None, _before(history, landed)
    rows = _rows(folder, cycle, canaries, snapshot, notes)
    if rows is None and snapshot is not None:
        snapshot = None
        rows = _rows(folder, cycle, canaries, None, notes)
    changed = None
    if rows is not None and before is not None:
        with _note_errors(notes, "what changed"):
            changed = diff(folder, before, snapshot or NOW)
    findings = landed.findings if landed else ()
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
        gained=_count_gained(rows),
        canaries=canaries,
        chosen=cycle.payload(ChoicePayload),
        run=cycle.payload(RunPayload),
        findings=findings,
        scores=tuple(score for night in history for score in _scores(night)),
        steps=tuple(_step(cycle, name) for name in STEPS),
        nights=tuple(map(_night, history)),
        next_plan=next_plan,
    )


def _only_simulated(rows: ReportRows | None, canaries: CanariesPayload | None) -> bool:
    """Return whether a cycle ran simulations only, by its rows, or by its canaries where it has no rows."""
    sources = rows.sources_tonight if rows is not None else frozenset()
    return (sources or {canaries and canaries.source}) == {SIMULATED}


def _time(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def _note_errors(notes: list[str], part: str) -> Iterator[None]:
    """Turn a read error into a note, so that the report is written nevertheless."""
    try:
        yield
    except (CommandError, duckdb.Error, OSError) as error:
        notes.append(f"{part} could not be read: {error_line(str(error))[:500]}")


def _rows(
    folder: DataFolder, cycle: Cycle, canaries: CanariesPayload | None, snapshot: str | None, notes: list[str]
) -> ReportRows | None:
    rows = None
    device_name, source = (canaries.device_name, canaries.source) if canaries else (None, None)
    with (
        _note_errors(notes, "rows" if snapshot is None else f"the snapshot {snapshot}"),
        contextlib.closing(warehouse.connect(folder, snapshot=snapshot)) as connection,
    ):
        rows = read_rows(connection, cycle.started_at, device_name, source)
        notes += [f"{path} could not be read: its rows are left out" for path in connection.damaged]
    return rows


def _before(history: Sequence[Cycle], landed: LandPayload | None) -> str | None:
    """Return the snapshot to compare with: the one that landing named, else the newest of earlier cycles."""
    if landed is not None:
        return landed.before
    names = [earlier.snapshot for cycle in reversed(history[:-1]) if (earlier := cycle.payload(LandPayload))]
    return next(filter(None, names), None)


def _count_gained(rows: ReportRows | None) -> dict[str, tuple[str, ...]]:
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


def _step(cycle: Cycle, name: str) -> dict[str, Any]:
    step = cycle.steps.get(name)
    state, error, attempts = (step.state, step.error, len(step.attempts)) if step else ("not reached", "", 0)
    return {"name": name, "state": state, "seconds": cycle.seconds(name), "attempts": attempts, "error": error}


def _night(cycle: Cycle) -> Night:
    landed, seconds = cycle.payload(LandPayload), {name: cycle.seconds(name) for name in STEPS}
    return Night(
        cycle=cycle.name,
        outcome=cycle.outcome,
        seconds=seconds,
        overhead_s=sum(taken for name, taken in seconds.items() if taken and name not in LEARNING_STEPS),
        rows=landed.rows.get("runs") if landed else None,
        run=cycle.payload(RunPayload),
        simulated=_only_simulated(None, cycle.payload(CanariesPayload)),
    )


def _scores(cycle: Cycle) -> list[Score]:
    learnt = cycle.payload(LearnPayload) or LearnPayload()
    return [
        Score(
            **vars(result),
            cycle=cycle.name,
            in_use=result.figures.get("candidate" if result.decision in NEW_MODEL else "current"),
        )
        for result in learnt.results
    ]
