"""The page of a growth cycle's report. Start reading at `report_page`; `conf.reports` draws it.

Labels and errors come from third-party code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from conf.files.outputs import write_file
from conf.plain_text import MISSING, count_of, duration, energy, figure
from conf.reports.blocks import (
    Block,
    Bullets,
    Callout,
    Cell,
    Chart,
    Charts,
    Fold,
    Heading,
    Lead,
    Legend,
    Level,
    Outcome,
    Page,
    Preformatted,
    Section,
    Table,
    linked,
    page_bytes,
    table,
)
from conf.reports.charts import SHADES, Curve, Grid, curves, heat_map
from farm.nights.journal import (
    CanariesPayload,
    ChoicePayload,
    ComparedLabel,
    Cycle,
    DriftPayload,
    LandPayload,
    RunPayload,
    plain,
)
from farm.nights.plan import choice_lines
from farm.nights.report import Report, gather, gist, learnt_in, night_figures
from learn.fitting.artifacts import Promotion
from learn.rows.data import TARGETS
from warehouse.files.folder import DataFolder, check_name
from warehouse.tables.schema import STATUSES

_OUTCOMES = {"good": "good night", "look": "worth a look", "bad": "needs somebody"}
LATEST = "latest"


def write_report(folder: DataFolder, cycle: Cycle, cycles: Sequence[Cycle], next_plan: ChoicePayload | None) -> Path:
    """Write `reports/CYCLE.html` and `.json`, and copies named `latest`, each atomically; return the page's path.

    `cycles` are the journal's; the cycle, whose outcome is known, may be among them. `next_plan` comes from the next
    night's dry run. Raises `OSError` if the folder cannot be written; the report names what could not be read.
    """
    report = gather(folder, cycle, cycles, next_plan)
    page = page_bytes(report_page(report))
    text = report.as_json().encode()
    folder.reports.mkdir(parents=True, exist_ok=True)
    for name in (check_name("cycle", cycle.name), LATEST):
        write_file(folder.reports / f"{name}.json", text)
        write_file(folder.reports / f"{name}.html", page)
    return folder.reports / f"{cycle.name}.html"


def report_page(report: Report) -> Page:
    """Return the page's contents."""
    sections = {
        "Rows": _rows(report),
        "Coverage": _coverage(report),
        "Failures": _failures(report),
        "Canaries": _canaries(report),
        "Estimators": _models(report),
        "Time and energy": _time(report),
        "Quality": _findings(report),
        "Next night": _next_night(report),
    }
    return Page(title=f"Growth cycle {report.cycle.name}", head=_head(report), sections=linked(sections))


def _head(report: Report) -> tuple[Block, ...]:
    outcome = report.said
    return (
        Lead(plain(report.cycle.started_at)),
        Outcome(outcome.level, _OUTCOMES[outcome.level], outcome.sentence),
        *(Callout(text, outcome.level) for text in outcome.advice),
        *map(Callout, report.notes),
    )


def _rows(report: Report) -> Section | None:
    if report.rows is None:
        return None
    by_kind: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for count in report.rows.counts:
        counted = Counter({count.status: count.rows, "tonight": count.tonight, "rows": count.rows})
        for kind in ((count.family, count.device_name or MISSING, count.source), ("all", "", "")):
            by_kind[kind] += counted
    shown = ("rows", "tonight", *(status for status in STATUSES if by_kind["all", "", ""][status]))
    lines: list[tuple[Cell, ...]] = [
        (*kind, *(counts[name] for name in shown)) for kind, counts in sorted(by_kind.items())
    ]
    landed = report.cycle.payload(LandPayload) or LandPayload()
    whose = f"Rows of the snapshot {landed.snapshot}" if landed.snapshot else "Rows of the folder as it is"
    intro = Lead(f"{whose}; tonight: what finished since the cycle began.")
    counts_table = table(("family", "device", "source", *shown), lines, words=3)
    return Section("rows", "Rows by family, device and status", (intro, counts_table))


def _coverage(report: Report) -> Section | None:
    rows = report.rows
    if rows is None or not rows.memory.rows:
        return None
    where = f"{', '.join(rows.device_names)} ({rows.source})"
    scale = {"no row": "h0"}
    floors = (1, 4, 10, 32, 100, 317)
    for k in range(1, SHADES + 1):
        scale[f"{floors[k - 1]}–{floors[k] - 1}" if k < SHADES else f"{floors[-1]} and more"] = f"h{k}"
    blocks: list[Block] = [
        Lead(f"Usable rows on {where}; below a figure, what tonight added."),
        Legend({**scale, "had no row before tonight": "fresh"}),
    ]
    if rows.absent_families:
        blocks.append(Lead(f"No row yet: {', '.join(rows.absent_families)}."))
    blocks += [
        _map("Peak memory by family, GiB", rows.memory, "family", "GiB"),
        Charts(tuple(_map(f"{grid.name} by family", grid, "family", "level") for grid in rows.levels)),
        Heading("Batch size and parameters, by family"),
        Charts(tuple(_map(grid.name, grid, "batch", "parameters, from") for grid in rows.regions)),
    ]
    return Section("coverage", "Coverage", tuple(blocks))


def _map(title: str, grid: Grid, row_title: str, column_title: str) -> Chart:
    """Return a heat map, with the number of empty cells in its title."""
    cells = len(grid.rows) * len(grid.columns)
    empty = f": {grid.empty:,} of {cells:,} cells empty" if grid.empty else ""
    return Chart(f"{title}{empty}", heat_map(grid, row_title, column_title))


def _failures(report: Report) -> Section | None:
    rows = report.rows
    if rows is None:
        return None
    parts: list[Block] = [
        Lead(f"{count_of(rows.failed_tonight, 'run')} of tonight crashed, timed out or were invalid."),
        Lead(f"{count_of(rows.untrusted_tonight, 'execution')} cannot be trusted; nothing is learned from them."),
    ]
    for group in rows.failures:
        head = f"{group.runs:,} × {group.status}: {group.said} ({', '.join(group.families)})"
        parts.append(Fold(head, (Lead(", ".join(group.run_ids)), Preformatted(group.log))))
    return Section("failures", "Failures", tuple(parts))


def _findings(report: Report) -> Section:
    landed = report.cycle.payload(LandPayload)
    if landed is None:
        return Section("findings", "Quality findings", (Lead("Nothing was checked: the night was not landed."),))
    if not landed.findings:
        return Section("findings", "Quality findings", (Lead("Every check passed."),))
    lines = [(f.severity, f.rule, f.count, f.said, "; ".join(f.examples)) for f in landed.findings]
    heads = ("severity", "rule", "count", "*what is wrong", "*as")
    return Section("findings", "Quality findings", (table(heads, lines, words=2),))


SHOWN_CYCLES = 40  # cycles of a curve: the newest
_WHY = 1000  # characters of a decision's reason
_DRAWN = {"mean_abs_error": "mean absolute error", "accuracy": "accuracy"}


def _canaries(report: Report) -> Section:
    """Return the section on the canaries and drift."""
    canaries = report.cycle.payload(CanariesPayload)
    if canaries is None:
        return Section("canaries", "Canaries", (Lead("No canary was compared."),))
    level: Level = "bad" if canaries.verdict == "sick" else "look" if canaries.verdict == "drift" else "good"
    parts: list[Block] = [Callout(f"{canaries.verdict}: {canaries.said}", level)]
    parts += [Callout(f"Cause: {cause}", level) for cause in canaries.causes]
    parts.append(Lead(f"{count_of(canaries.runs, 'run')} on {canaries.device_name} ({canaries.source})."))
    if canaries.moved:
        parts += [Heading("What moved"), _compare(canaries.moved)]
    return Section("canaries", "Canaries and drift", (*parts, *_drift(canaries.drift)))


def _compare(moved: Sequence[ComparedLabel]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for entry in moved:
        name = (entry.family, entry.config_hash[:12], f"{entry.label} [{entry.unit}]")
        figures = map(_number, (entry.before, entry.now, entry.tolerance))
        rows.append((*name, *figures, entry.history_runs, entry.said))
    heads = ("family", "configuration", "label", "before", "now", "tolerance", "earlier runs", "*said")
    return table(heads, rows, words=3)


def _number(value: float | None) -> str:
    return MISSING if value is None else figure(value)


def _drift(drift: DriftPayload | None) -> tuple[Block, ...]:
    if drift is None:
        return ()
    return (
        Heading("Drift"),
        Lead(
            f"{count_of(drift.stale_rows, 'row')} marked stale for this environment, "
            f"{count_of(drift.remeasure, 'configuration')} to be measured again first."
        ),
        *map(Callout, drift.moved),
    )


def _models(report: Report) -> Section:
    """Return the section on the learning step's decisions, with each estimator's figures over the cycles."""
    reasons = tuple(
        f"{result.target} by {result.estimator}: {result.decision}: {gist(result.why, _WHY)}"
        for result in learnt_in(report.cycle)
    )
    parts: list[Block] = [Bullets(reasons) if reasons else Lead("No estimator was fitted tonight.")]
    nights = [night for night in report.nights if learnt_in(night)][-SHOWN_CYCLES:]
    series: dict[tuple[str, str], dict[str, Promotion]] = defaultdict(dict)
    for night in nights:
        for result in learnt_in(night):
            series[result.target, result.estimator][night.name] = result
    drawn = [
        _score_chart(key, [results.get(night.name, Promotion()) for night in nights], nights, target, estimator)
        for (target, estimator), results in sorted(series.items())
        for key in _DRAWN
        if any(value is not None for result in results.values() for value in _figures(result, key))
    ]
    if drawn:
        parts.append(Lead("The held-out set grows from night to night."))
        parts.append(Charts(tuple(drawn)))
    return Section("scores", "Estimators over the cycles", tuple(parts))


def _figures(result: Promotion, key: str) -> list[float | None]:
    """Return a figure of the candidate and of the model in use; None where its own trace simulated the labels."""
    models = (result.figures.get("candidate") or {}, result.in_use or {})
    return [None if figures.get("own_labels") else figures.get(key) for figures in models]


def _score_chart(key: str, results: Sequence[Promotion], nights: Sequence[Cycle], target: str, estimator: str) -> Chart:
    axis, unit, most = _DRAWN[key], "", None
    if key == "accuracy":
        unit, most = "of 1", 1.0
    elif target in TARGETS:  # in the target's space, as learn.fitting.promotion takes it
        is_log = TARGETS[target].space == "log"
        axis, unit = (f"{axis} of the logarithm", "ln") if is_log else (axis, TARGETS[target].unit)
    figures = [_figures(result, key) for result in results]
    lines = [
        Curve(name="candidate", css="k5", values=[candidate for candidate, _ in figures]),
        Curve(name="in use", css="k1", values=[in_use for _, in_use in figures]),
    ]
    chips = Legend({"model in use": "k1", "the night's candidate": "k5"})
    svg = curves(_days(nights), lines, unit, most=most)
    return Chart(f"{target} by {estimator}: {axis}", svg, (chips,), newest_first_seen=True)


def _days(nights: Iterable[Cycle]) -> list[str]:
    """Return cycles as `11-20.2`, without their year."""
    return [night.name[5:] for night in nights]


def _time(report: Report) -> Section:
    """Return the section on the time of the steps and runs, their energy, and the same over the cycles."""
    run = report.cycle.payload(RunPayload)
    spent = f"Time of the runs: {duration(run.gpu_seconds if run else None)}; "
    spent += f"energy: {energy(run.energy_j if run else None)}."
    if report.simulated:
        spent += " They are simulated: no GPU was used."
    total = sum(step.seconds or 0.0 for step in report.steps)
    rows = [(step.name, step.state, duration(step.seconds), gist(step.error)) for step in report.steps]
    steps = table(("step", "state", "time", "*error"), rows, words=2)
    nights = report.nights[-SHOWN_CYCLES:]
    drawn = [
        _night_chart(nights, "Rows in all", "k1", "rows", "rows"),
        _night_chart(nights, "Time of the runs", "k5", "h", "gpu_hours"),
        _night_chart(nights, "Energy of the runs", "k6", "kWh", "energy_kwh"),
    ]
    parts = (Lead(f"{duration(total)} in all. {spent}"), steps, Charts(tuple(drawn)))
    return Section("time", "Time and energy", parts)


def _night_chart(nights: Sequence[Cycle], title: str, css: str, unit: str, key: str) -> Chart:
    line = Curve(name=title, css=css, values=[night_figures(night)[key] for night in nights])
    svg = curves(_days(nights), [line], unit)
    return Chart(title, svg, newest_first_seen=True)


def _next_night(report: Report) -> Section:
    """Return the section on the next night's dry run."""
    plan, source = report.next_plan, "simulated" if report.simulated else "measured"
    if plan is None:
        return Section("next", "What to measure next", (Lead("No dry run of the next night was made."),))
    stale = f" {plan.remeasured:,} of them were {source} before, and are stale since." if plan.remeasured else ""
    lines = Bullets(tuple(choice_lines(plan, source)))
    return Section("next", "What to measure next", (Lead(f"{count_of(plan.runs, 'run')}.{stale}"), lines))
