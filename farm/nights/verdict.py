"""Sums up a night in one sentence, with advice. Start reading at `say`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.plain_text import error_line
from conf.reports.blocks import Level
from farm.nights.journal import STEPS, Cycle
from farm.nights.report_rows import FAILED, ReportRows
from warehouse.reading.pairing import Difference

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
    errors = [one for one in findings if one.get("severity") == "error"]
    look = [*_findings(errors), *_failures(run), *_learning(cycle), *_moved(changed, canaries)]
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


def _outcome(cycle: Cycle, canaries: Mapping, run: Mapping | None) -> str:
    if any(step.state == "failed" for step in cycle.steps.values()):
        return "failed"
    if canaries.get("verdict") == "sick":
        return "sick"
    return "cut short" if run is None or run.get("ended") == "asked" else "done"


def _sentence(
    cycle: Cycle, outcome: str, canaries: Mapping, run: Mapping | None, rows: ReportRows | None, ran: str
) -> str:
    """Return the outcome in a sentence. `ran` is measured or simulated."""
    finished = sum(one.tonight for one in rows.counts) if rows else 0
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


def _canaries(canaries: Mapping) -> list[str]:
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


def _findings(errors: Sequence[Mapping]) -> list[str]:
    if not errors:
        return []
    rows = sum(int(one.get("count") or 0) for one in errors)
    rules = ", ".join(str(one.get("rule")) for one in errors[:3]) + (", ..." if len(errors) > 3 else "")
    return [f"Some rows cannot be right: rules are broken {rows:,} times ({rules}). See the quality findings."]


def _failures(run: Mapping | None) -> list[str]:
    statuses = (run or {}).get("by_status") or {}
    failed, runs = sum(statuses.get(name, 0) for name in FAILED), sum(statuses.values())
    if runs and failed > _MANY_FAILED * runs:
        return [f"{failed:,} of {runs:,} runs failed ({failed / runs:.0%}): see the failures with their logs."]
    return []


def _learning(cycle: Cycle) -> list[str]:
    results = (cycle.done("learn") or {}).get("results") or ()
    return [
        f"The estimator of {one.get('target')} could not be fitted: {_sentence_of(str(one.get('why') or ''))}"
        for one in results
        if one.get("decision") == "failed"
    ]


def _moved(changed: Difference | None, canaries: Mapping) -> list[str]:
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


def _calm(outcome: str, run: Mapping | None, ran: str) -> str:
    if outcome == "cut short":
        return f"Nothing to do: the {ran} runs are kept, and the next night continues."
    if run is not None and run.get("ended") == "time" and not run.get("runs"):
        return "Give it more time: the canaries used all of it."
    if run is not None and not run.get("runs"):
        return "Nothing was left to run: widen the search spaces, or name more families."
    return "Nothing to do."
