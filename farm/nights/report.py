"""A cycle's report: the night's results, its problems and what to do, as JSON; `report_page` makes the page.

Start reading at `gather`; `Report` holds everything. `say` sums up the night in one sentence, with advice;
`report_rows` counts rows.
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
from conf.reports.blocks import Level
from farm.nights.journal import STEPS, Cycle, plain
from farm.nights.report_rows import FAILED, ReportRows, read_rows
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import NOW
from warehouse.reading.pairing import Difference, diff

_MANY_FAILED = 0.1  # share of the night's runs from which on it is worth a look
_ENDED = {"time": "its time was up", "asked": "it was asked to stop"}
SIMULATED = "simulated"  # warehouse.tables.schema.SOURCES
_SAID = 300  # characters of an error's sentence


@dataclass(frozen=True, kw_only=True)
class Said:
    """The outcome of a cycle in one line. `level` says how urgent it is."""

    outcome: str
    level: Level
    sentence: str
    advice: tuple[str, ...]  # most urgent first; what there is to do, or that there is nothing


def only_simulated(rows: ReportRows | None, canaries: Mapping[str, Any] | None) -> bool:
    """Return whether a cycle ran simulations only, by its rows, or by its canaries where it has no rows."""
    sources = rows.sources_tonight if rows is not None else frozenset()
    return (sources or {(canaries or {}).get("source")}) == {SIMULATED}


def say(
    cycle: Cycle,
    changed: Difference | None,
    rows: ReportRows | None,
    findings: Sequence[Mapping[str, Any]],
    notes: Sequence[str] = (),
) -> Said:
    """Return the outcome of a cycle. An open cycle, as while its report is written, is judged by its steps so far."""
    canaries, run = cycle.done("canaries") or {}, cycle.done("run")
    outcome = cycle.outcome or _outcome(cycle, canaries, run)
    urgent = [*_failed_step(cycle), *_canaries(canaries)]
    errors = [finding for finding in findings if finding.get("severity") == "error"]
    look = [*_findings(errors), *_failures(run), *_learning(cycle), *_list_moved(changed, canaries)]
    if rows is None:
        look.append("The rows could not be read: see the notes on this page.")
    elif notes:
        look.append(
            "Some files could not be read: see the notes on this page, and run python -m farm.doctor repair=true."
        )
    ran = SIMULATED if only_simulated(rows, canaries) else "measured"
    calm = _calm(outcome, run, ran)
    short = outcome == "cut short" or (run is not None and run.get("ended") == "time" and not run.get("runs"))
    level: Level = "bad" if outcome in ("failed", "sick") else "look" if urgent or look or short else "good"
    return Said(
        outcome=outcome,
        level=level,
        sentence=_sentence(cycle, outcome, canaries, run, rows, ran),
        advice=tuple(urgent + look) or (calm,),
    )


def _outcome(cycle: Cycle, canaries: Mapping[str, Any], run: Mapping[str, Any] | None) -> str:
    if any(step.state == "failed" for step in cycle.steps.values()):
        return "failed"
    if canaries.get("verdict") == "sick":
        return "sick"
    return "cut short" if run is None or run.get("ended") == "asked" else "done"


def _sentence(
    cycle: Cycle,
    outcome: str,
    canaries: Mapping[str, Any],
    run: Mapping[str, Any] | None,
    rows: ReportRows | None,
    ran: str,
) -> str:
    """Return the outcome in a sentence. `ran` is measured or simulated."""
    finished = sum(count.tonight for count in rows.counts) if rows else 0
    runs_said = f"nothing was {ran}"
    if run is None and finished:  # the canaries, or a run step that did not come to its end
        runs_said = f"runs that finished, canaries included: {finished:,}"
    elif run is not None:
        runs = int(run.get("runs") or 0)
        statuses = ", ".join(f"{status} {n:,}" for status, n in sorted((run.get("by_status") or {}).items()))
        runs_said = (f"{runs:,} run was {ran}" if runs == 1 else f"{runs:,} runs were {ran}") + (
            f" ({statuses})" if statuses else ""
        )
    if outcome == "failed":
        failed = next((name for name in STEPS if name in cycle.steps and cycle.steps[name].state == "failed"), None)
        where = f" at the step {failed}" if failed else ""
        return f"The cycle failed{where}; {runs_said}."
    if outcome == "sick":
        canary_sentence = canaries.get("said") or cycle.said
        return f"The machine is sick, and only canaries ran: {_sentence_of(canary_sentence) or 'they moved.'}"
    if outcome == "cut short":
        why = _ENDED.get(str((run or {}).get("ended")), "it was stopped")
        return f"The night was cut short: {why}; {runs_said}."
    ended = f", until {_ENDED[run['ended']]}" if run and run.get("ended") in _ENDED else ""
    drift = "; labels drifted with the environment" if canaries.get("verdict") == "drift" else ""
    return f"The night is done: {runs_said}{ended}{drift}."


def gist(error: str, most: int = _SAID) -> str:
    """Return the line of an error with its message, at most `most` characters."""
    return error_line(error)[:most].strip()


def _sentence_of(text: str | None) -> str:
    """Return the gist of a text with a full stop."""
    line = gist(text or "")
    return line if not line or line.endswith(".") else line + "."


def _failed_step(cycle: Cycle) -> list[str]:
    advice = []
    for name in STEPS:
        step = cycle.steps.get(name)
        if step is not None and step.state == "failed":
            cause = gist(str(step.payload.get("error", "")))
            advice.append(f"Step {name} failed: {_sentence_of(cause)} Fix it, and run the same command again.")
    if not advice and cycle.outcome == "failed":
        advice.append(f"{_sentence_of(cycle.said) or 'It failed.'} Fix it, and run the same command again.")
    return advice


def _canaries(canaries: Mapping[str, Any]) -> list[str]:
    if canaries.get("verdict") == "sick":
        causes = "; ".join(map(str, canaries.get("causes") or ())) or "no cause is known"
        return [
            f"Check the machine before the next measurement ({causes}); python -m farm.doctor reports its state. "
            "If tonight's labels are right, canaries=accept makes them the new reference."
        ]
    if canaries.get("verdict") == "drift":
        drift = canaries.get("drift") or {}
        return [
            f"Labels changed with the environment: {drift.get('stale_rows') or 0:,} rows are marked stale in it, and "
            f"{drift.get('remeasure') or 0:,} configurations will be measured again first. Check that the change was "
            "intended."
        ]
    return []


def _findings(errors: Sequence[Mapping[str, Any]]) -> list[str]:
    if not errors:
        return []
    rows = sum(int(error.get("count") or 0) for error in errors)
    rules = ", ".join(str(error.get("rule")) for error in errors[:3]) + (", ..." if len(errors) > 3 else "")
    return [f"Some rows cannot be right: rules are broken {rows:,} times ({rules}). See the quality findings."]


def _failures(run: Mapping[str, Any] | None) -> list[str]:
    statuses = (run or {}).get("by_status") or {}
    failed, runs = sum(statuses.get(name, 0) for name in FAILED), sum(statuses.values())
    if runs and failed > _MANY_FAILED * runs:
        return [f"{failed:,} of {runs:,} runs failed ({failed / runs:.0%}): see the failures with their logs."]
    return []


def _learning(cycle: Cycle) -> list[str]:
    results = (cycle.done("learn") or {}).get("results") or ()
    return [
        f"The estimator of {result.get('target')} could not be fitted: {_sentence_of(str(result.get('why') or ''))}"
        for result in results
        if result.get("decision") == "failed"
    ]


def _list_moved(changed: Difference | None, canaries: Mapping[str, Any]) -> list[str]:
    if changed is None:
        return []
    advice = []
    if removed := sum(count.runs for count in changed.removed):
        advice.append(f"{removed:,} runs of {changed.before} are gone; runs should never disappear.")
    beyond = [shift for shift in changed.shifts if shift.beyond]
    if beyond and canaries.get("verdict") not in ("sick", "drift"):
        labels = ", ".join(sorted({shift.label for shift in beyond}))
        advice.append(f"Repeated measurements in the same environment differ ({labels}): see below.")
    return advice


def _calm(outcome: str, run: Mapping[str, Any] | None, ran: str) -> str:
    if outcome == "cut short":
        return f"Nothing to do: the {ran} runs are kept, and the next night continues."
    if run is not None and run.get("ended") == "time" and not run.get("runs"):
        return "Give it more time: the canaries used all of it."
    if run is not None and not run.get("runs"):
        return "Nothing was left to run: widen the search spaces, or name more families."
    return "Nothing to do."


LEARNING_STEPS = ("run", "learn")  # what a cycle is for; the rest is its overhead


@dataclass(frozen=True, kw_only=True)
class CycleStepTime:
    """One step of the cycle. `seconds` of its last attempt, None where it did not end."""

    name: str
    state: str  # done | failed | started | not reached
    seconds: float | None
    attempts: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Night:
    """Cost and result of one cycle, for curves over the cycles. None: not reached, or not measured.

    gpu_seconds  its workers' time: for a simulated cycle no GPU's time, and `energy_j` is modelled
    """

    cycle: str
    outcome: str
    seconds: Mapping[str, float | None]  # by step
    overhead_s: float  # time of all steps but `run` and `learn`
    runs: int | None
    rows: int | None  # rows of the view `runs`, after the cycle
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
    canaries: Mapping[str, Any] | None
    chosen: Mapping[str, Any] | None  # the plan's summary
    run: Mapping[str, Any] | None
    findings: tuple[Mapping[str, Any], ...]
    scores: tuple[Score, ...]  # scores of all cycles, oldest first
    steps: tuple[CycleStepTime, ...]
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
    history = [
        *(earlier for earlier in cycles if earlier.name != cycle.name and earlier.started_at <= cycle.started_at),
        cycle,
    ]
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
        with _note_errors(notes, "what changed"):
            changed = diff(folder, before, snapshot or NOW)
    findings = tuple(landed.get("findings") or ())
    steps = tuple(_step(cycle, name) for name in STEPS)
    scores = tuple(score for night in history for score in _scores(night))
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
        chosen=cycle.done("choose"),
        run=cycle.done("run"),
        findings=findings,
        scores=scores,
        steps=steps,
        nights=tuple(map(_night, history)),
        next_plan=next_plan,
    )


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
    folder: DataFolder, cycle: Cycle, canaries: Mapping[str, Any], snapshot: str | None, notes: list[str]
) -> ReportRows | None:
    rows = None
    with (
        _note_errors(notes, "rows" if snapshot is None else f"the snapshot {snapshot}"),
        contextlib.closing(warehouse.connect(folder, snapshot=snapshot)) as connection,
    ):
        rows = read_rows(connection, cycle.started_at, canaries.get("device_name"), canaries.get("source"))
        notes += [f"{path} could not be read: its rows are left out" for path in connection.damaged]
    return rows


def _before(history: Sequence[Cycle], landed: Mapping[str, Any]) -> str | None:
    """Return the snapshot to compare with: the one that landing named, else the newest of earlier cycles."""
    if landed:
        return landed.get("before")
    names = [(earlier.done("land") or {}).get("snapshot") for earlier in history[:-1]]
    return next((name for name in reversed(names) if name), None)


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


def _step(cycle: Cycle, name: str) -> CycleStepTime:
    step = cycle.steps.get(name)
    if step is None:
        return CycleStepTime(name=name, state="not reached", seconds=None, attempts=0)
    error = str(step.payload.get("error", "")) if step.state == "failed" else ""
    return CycleStepTime(
        name=name, state=step.state, seconds=step.seconds, attempts=len(step.attempts) or 1, error=error
    )


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
