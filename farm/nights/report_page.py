"""The page of a growth cycle's report. Start reading at `report_page`; `conf.reports` draws it.

Labels and errors come from third-party code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.files.outputs import write_file
from conf.plain_text import MISSING, clean_text, count_of, duration, energy, figure, first_few
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
    ShareBar,
    SharePart,
    Table,
    Tile,
    Tiles,
    linked,
    page_bytes,
    table,
)
from conf.reports.charts import SHADES, Curve, Grid, columns, curves, heat_map
from farm.nights.journal import STEPS, ChoicePayload, ComparedLabel, Cycle, DriftPayload, RunPayload
from farm.nights.plan import choice_lines
from farm.nights.report import LOG_CHARACTERS, NEW_MODEL, Night, Report, RowCount, Score, gather, gist
from learn.judging.scores import NOT_INFORMATIVE
from learn.rows.data import TARGETS
from warehouse.files.folder import DataFolder, check_name
from warehouse.reading.pairing import difference_blocks
from warehouse.tables.schema import ENVIRONMENT, STATUSES

_STATUS_CSS = dict(zip(STATUSES, ("k4", "k5", "k2", "k6", "k0"), strict=True))  # ok, oom, timeout, crashed, invalid
_OUTCOMES = {"good": "good night", "look": "worth a look", "bad": "needs somebody"}
_SHOWN = 12  # items that a page names; further ones are counted
_SETTINGS = 400  # characters of a setting's value
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
        "Tonight": _changes_section(report),
        "Rows": _rows(report),
        "Coverage": _coverage(report),
        "Failures": _failures(report),
        "Untrusted": _doubts(report),
        "Canaries": _canaries(report),
        "Estimators": _models(report),
        "Time" if report.simulated else "Time and energy": _time(report),
        "Quality": _findings(report),
        "Next night": _next_night(report),
        "Settings": _settings(report),
    }
    if report.canaries is not None and report.canaries.verdict in ("sick", "drift"):  # they explain the other sections
        sections = {"Canaries": sections["Canaries"], **sections}
    return Page(title=f"Growth cycle {report.cycle}", head=_head(report), sections=linked(sections))


def _head(report: Report) -> tuple[Block, ...]:
    outcome = report.said
    return (
        Lead(report.started_at),
        Outcome(outcome.level, _OUTCOMES[outcome.level], outcome.sentence),
        *(Callout(text, outcome.level) for text in outcome.advice),
        *map(Callout, report.notes),
        _tiles(report),
    )


def _tiles(report: Report) -> Tiles:
    counts = report.rows.counts if report.rows else ()
    gained = sum(map(len, report.gained.values()))
    failed, doubted = (report.rows.failed_tonight, report.rows.doubted_tonight) if report.rows else (0, 0)
    gpu_time, used = _time_spent(report)
    promoted = [s.target for s in report.scores if s.cycle == report.cycle and s.decision in NEW_MODEL]
    return Tiles(
        (
            Tile(
                "rows tonight",
                f"{sum(count.tonight for count in counts):,}",
                f"{sum(count.rows for count in counts):,} in all",
            ),
            Tile("cells with their first row", f"{gained:,}", "bins and regions"),
            Tile("failed", f"{failed:,}", f"{doubted:,} untrusted"),
            Tile("time of the runs" if report.simulated else "GPU time", gpu_time, used),
            Tile("overhead", duration(report.nights[-1].overhead_s), "all but running and fitting"),
            Tile("new models", f"{len(promoted):,}", first_few(promoted, 3, ", ")),
        )
    )


def _time_spent(report: Report) -> tuple[str, str]:
    """Return the time of the night's runs and their energy as text; simulated ones take none."""
    run = report.run or RunPayload()
    spent = duration(run.gpu_seconds if report.run else None)
    return spent, "simulated: no GPU was used" if report.simulated else energy(run.energy_j)


def _changes_section(report: Report) -> Section:
    parts: list[Block] = []
    if report.changed is not None:
        parts += difference_blocks(report.changed, 2 * _SHOWN)
    elif report.rows is None:
        parts.append(Lead("The rows could not be read."))
    elif report.before is None:
        parts.append(Lead("There is no snapshot of an earlier cycle to compare with: everything is new."))
    gained = {name: cells for name, cells in report.gained.items() if cells}
    if gained:
        rows = [(name, len(cells), first_few(cells, _SHOWN)) for name, cells in gained.items()]
        parts += [Heading("Cells that had no row before"), table(("by", "cells", "*which"), rows)]
    return Section("changed", "What changed tonight", tuple(parts))


def _rows(report: Report) -> Section | None:
    rows = report.rows
    if rows is None:
        return None
    if not rows.counts:
        return Section("rows", "Rows", (Lead("There is no run yet."),))
    families = _counted_by(rows.counts, "family")
    kinds = _counted_by(rows.counts, "family", "device_name", "source")
    ((_, total),) = _counted_by(rows.counts)
    shown = [status for status in STATUSES if total[status]]

    def cells(counts: Counter[str]) -> tuple[Cell, ...]:
        return sum(counts[s] for s in shown), _plus(counts["tonight"]), *(counts[s] for s in shown)

    most = max(sum(counts[status] for status in shown) for _, counts in families)
    lines = [(*family, _stack(counts, shown, most), *cells(counts)) for family, counts in families]
    by_family = table(("family", "", "rows", "tonight", *shown), [*lines, ("all", "", *cells(total))])
    heads = ("family", "device", "source", "rows", "tonight", *shown)
    by_kind = table(heads, [(*kind, *cells(counts)) for kind, counts in kinds], words=3)
    whose = f"Rows of the snapshot {report.snapshot}" if report.snapshot else "Rows of the folder as it is"
    return Section(
        "rows",
        "Rows by family, device and status",
        (
            Lead(f"{whose}; tonight: what finished since the cycle began."),
            Legend({status: _STATUS_CSS[status] for status in shown}),
            by_family,
            Fold(f"By device and source ({count_of(len(kinds), 'kind')})", (by_kind,), is_open=len(kinds) <= _SHOWN),
        ),
    )


def _counted_by(counts: Sequence[RowCount], *names: str) -> list[tuple[tuple[str, ...], Counter[str]]]:
    """Return the rows of each status, and those of tonight, by these fields of the counts."""
    sums: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for count in counts:
        kind = tuple(getattr(count, name) or MISSING for name in names)
        sums[kind] += Counter({count.status: count.rows, "tonight": count.tonight})
    return sorted(sums.items())


def _stack(counts: Mapping[str, int], shown: Sequence[str], most: int) -> ShareBar:
    total = sum(counts[status] for status in shown)
    parts = tuple(
        SharePart(_STATUS_CSS[status], counts[status] / max(total, 1), f"{status} {counts[status]:,}")
        for status in shown
        if counts[status]
    )
    return ShareBar(parts, max(total / most, 0.01))


def _plus(count: int) -> str:
    return f"+{count:,}" if count else "–"


def _coverage(report: Report) -> Section | None:
    rows = report.rows
    if rows is None or not rows.memory.rows:
        return None
    where = f"{', '.join(rows.device_names)} ({rows.source})"
    left_out = [
        f"{rows.unusable:,} without a label that can be learned from" if rows.unusable else "",
        f"{rows.no_place:,} without batch size or parameters are in no map of these" if rows.no_place else "",
    ]
    scale = {"no row": "h0"}
    floors = (1, 4, 10, 32, 100, 317)
    for k in range(1, SHADES + 1):
        scale[f"{floors[k - 1]}–{floors[k] - 1}" if k < SHADES else f"{floors[-1]} and more"] = f"h{k}"
    blocks: list[Block] = [
        Lead(
            f"Usable rows on {where}; below a figure, what tonight added. "
            + " ".join(f"{text}." for text in left_out if text)
        ),
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
    before = f"{rows.failed_before:,} of earlier nights." if rows.failed_before else ""
    if not rows.failed_tonight:
        return Section("failures", "Failures", (Lead(f"None tonight. {before}".strip()),))
    parts: list[Block] = [
        Lead(f"{count_of(rows.failed_tonight, 'run')} of tonight crashed, timed out or were invalid. {before}")
    ]
    for group in rows.failures:
        # Most sentences begin with their type, its module before it.
        known = group.error_type and group.error_type not in group.said.partition(":")[0]
        kind = f" {group.error_type}" if known else ""
        ids = ", ".join(group.run_ids) + (", …" if group.runs > len(group.run_ids) else "")
        head = f"{group.runs:,} × {group.status}{kind}: {group.said} ({', '.join(group.families)})"
        parts.append(Fold(head, (Lead(ids), Preformatted(group.log or "nothing was written"))))
    more = rows.failed_groups - len(rows.failures)
    if more > 0:
        more_runs = rows.failed_tonight - sum(group.runs for group in rows.failures)
        parts.append(Lead(f"And {count_of(more, 'kind')} of failure more, {count_of(more_runs, 'run')}."))
    return Section("failures", "Failures", tuple(parts))


def _doubts(report: Report) -> Section | None:
    rows = report.rows
    if rows is None:
        return None
    if not rows.doubted_tonight:
        return Section("doubts", "Untrusted runs", (Lead("None tonight."),))
    lines = [(doubt.reason.replace("_", " "), doubt.runs, doubt.example) for doubt in rows.doubts]
    intro = f"{rows.doubted_tonight:,} of tonight's executions; they are kept, and nothing is learned from them."
    blocks = (Lead(intro), table(("reason", "runs", "*as"), lines))
    return Section("doubts", "Untrusted runs, by reason", blocks)


def _findings(report: Report) -> Section:
    if report.nights[-1].rows is None:
        return Section("findings", "Quality findings", (Lead("Nothing was checked: the night was not landed."),))
    if not report.findings:
        return Section("findings", "Quality findings", (Lead("Every check passed."),))
    lines = [(f.severity, f.rule, f.count, f.said, "; ".join(f.examples)) for f in report.findings]
    errors = [k for k, finding in enumerate(report.findings) if finding.severity == "error"]
    heads = ("severity", "rule", "count", "*what is wrong", "*as")
    return Section("findings", "Quality findings", (table(heads, lines, words=2, marked=errors),))


def _settings(report: Report) -> Section:
    lines = [(name, clip(value)) for name, value in sorted(report.settings.items())]
    inside = table(("key", "*value"), lines)
    return Section("settings", "Settings", (Fold(count_of(len(lines), "setting"), (inside,)),))


def clip(value: object) -> str:
    """Return a value's text, cut where it is long."""
    text = str(value)
    return text if len(text) <= _SETTINGS else text[:_SETTINGS] + "…"


SHOWN_CYCLES = 40  # cycles of a curve: the newest
OVERHEAD_MIN = 5.0  # longest acceptable overhead beside running and fitting
_STEP_CSS = dict(zip(STEPS, ("k3", "k2", "k1", "k7", "k4", "k0"), strict=True))
_CELLS_SHOWN = 10
_WHY = 1000  # characters of a decision's reason
_SHARES = ("median_rel_error", "median_relative_error", "accuracy", "above_bound", "coverage")
_COUNTS = ("rows", "out_of_memory")  # valid for labels from any source
_NO_FIGURE = ("rows", "own_labels")
_OF_A_WHOLE = ("accuracy", "above_bound", "coverage")  # at most 100 %, unlike a relative error
_FIGURES = {
    "rows": "rows",
    "mean_abs_error": "mean absolute error",
    "median_abs_error": "median absolute error",
    "median_rel_error": "median relative error",
    "accuracy": "accuracy",
    "above_bound": "above the bound",
    "out_of_memory": "rows out of memory",
}


def _canaries(report: Report) -> Section:
    """Return the section on the canaries, changes of the environment, and drift."""
    canaries = report.canaries
    if canaries is None:
        return Section("canaries", "Canaries", (Lead("No canary was compared."),))
    compared, moved = canaries.compared, canaries.moved
    level: Level = "bad" if canaries.verdict == "sick" else "look" if canaries.verdict == "drift" else "good"
    where = " ".join(filter(None, (canaries.device_name, canaries.source))) or "an unknown device"
    parts: list[Block] = [Callout(f"{canaries.verdict}: {canaries.said or 'nothing to say'}", level)]
    parts += [Callout(f"Cause: {cause}", level) for cause in canaries.causes]
    parts.append(Lead(f"{count_of(canaries.runs, 'run')} on {where}"))
    if moved:
        parts += [Heading("What moved"), _compare(moved)]
    if compared:
        names = {entry.name for entry in compared}
        summary = f"All {count_of(len(compared), 'label')} of {count_of(len(names), 'canary configuration')}"
        is_open = not moved and len(compared) <= 2 * _CELLS_SHOWN
        parts.append(Fold(summary, (_compare(compared),), is_open))
    parts += _environment(canaries.environment or {}, canaries.before)
    parts += _drift(canaries.drift)
    return Section("canaries", "Canaries and drift", tuple(parts))


def _compare(compared: Sequence[ComparedLabel]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for entry in compared:
        change = None if entry.before is None or entry.now is None else entry.now - entry.before
        name = (entry.family, entry.config_hash[:12], f"{entry.label} [{entry.unit}]")
        figures = (_number(entry.before), _number(entry.now), _number(change, sign=True), _number(entry.tolerance))
        rows.append((*name, *figures, entry.history_runs, entry.said))
    heads = ("family", "configuration", "label", "before", "now", "change", "tolerance", "earlier runs", "*said")
    return table(heads, rows, words=3, marked=[k for k, entry in enumerate(compared) if entry.moved])


def _number(value: float | None, sign: bool = False) -> str:
    if value is None:
        return MISSING
    text = figure(abs(value))
    return f"{'-' if value < 0 else '+' if sign else ''}{text}"


def _environment(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[Block]:
    names = list(dict.fromkeys([*ENVIRONMENT, *now, *(before or ())]))
    changed = [k for k, name in enumerate(names) if before is not None and now.get(name) != before.get(name)]
    if not now:
        return []
    if not changed:
        versions = ", ".join(
            f"{name.removesuffix('_version')} {now[name]}" for name in names if now.get(name) is not None
        )
        return [Lead(f"Environment{', unchanged' if before is not None else ''}: {versions or 'unknown'}.")]
    rows = [(name, (before or {}).get(name), now.get(name)) for name in names]
    return [Heading("Environment"), table(("", "before", "now"), rows, words=3, marked=changed)]


def _drift(drift: DriftPayload | None) -> list[Block]:
    if drift is None:
        return []
    parts: list[Block] = [
        Heading("Drift"),
        Lead(
            f"{count_of(drift.stale_rows, 'row')} marked stale for this environment, "
            f"{count_of(drift.remeasure, 'configuration')} to be measured again first."
        ),
        *map(Callout, drift.moved),
    ]
    if drift.operators:
        operators = [(label, ", ".join(names)) for label, names in drift.operators.items()]
        parts.append(table(("label", "*operator families that moved"), operators))
    for title, counts in (("family", drift.stale_by_family), ("operator family", drift.stale_by_operator)):
        if counts:
            most_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            parts.append(table((title, "stale rows"), most_first))
    return parts


def _models(report: Report) -> Section:
    """Return the section on the learning step's decisions, with each estimator's figures over the cycles."""
    tonight = [score for score in report.scores if score.cycle == report.cycle]
    parts: list[Block] = _decisions(tonight) if tonight else [Lead("No estimator was fitted tonight.")]
    names = [night.cycle for night in report.nights][-SHOWN_CYCLES:]
    series: dict[tuple[str, str], dict[str, Score]] = {}
    for score in report.scores:
        series.setdefault((score.target, score.estimator), {})[score.cycle] = score
    drawn: list[Chart] = []
    for (target, estimator), scores in sorted(series.items()):
        drawn += [
            _score_chart(f"{target} by {estimator}", target, key, names, scores)
            for key in _drawn_figures(list(scores.values()))
        ]
    if drawn:
        parts.append(Lead("A full dot: a model was promoted. The held-out set grows from night to night."))
        parts.append(Charts(tuple(drawn)))
    return Section("scores", "Estimators over the cycles", tuple(parts))


def _decisions(scores: Sequence[Score]) -> list[Block]:
    models = [score.of_model(which) for score in scores for which in ("current", "candidate")]
    keys = [
        key for key in dict.fromkeys([*_FIGURES, *(key for model in models for key in model)]) if key not in _NO_FIGURE
    ]
    keys = [key for key in keys if any(model.get(key) is not None for model in models)]
    rows: list[tuple[Cell, ...]] = []
    for score in scores:
        current, candidate = score.of_model("current"), score.of_model("candidate")
        compared = (f"{_figure_of(key, current)} / {_figure_of(key, candidate)}" for key in keys)
        rows.append((score.target, score.estimator, score.decision, score.held_out, *compared))
    heads = ("target", "estimator", "decision", "held out", *map(_name, keys))
    failed = [k for k, score in enumerate(scores) if score.decision == "failed"]
    reasons = tuple(f"{score.target}: {score.decision}: {gist(score.why, _WHY)}" for score in scores)
    blocks: list[Block] = [table(heads, rows, words=3, marked=failed), Bullets(reasons)]
    if not keys:
        return blocks
    return [Lead("Figures of the model so far / of the night's candidate, on the same held-out rows."), *blocks]


def _name(key: str) -> str:
    """Return a figure's readable name."""
    return _FIGURES.get(key, key.replace("_", " "))


def _figure_of(key: str, figures: Mapping[str, Any]) -> str:
    """Return a model's figure as text; errors on labels that its own trace simulated are left out."""
    value = figures.get(key)
    if figures.get("own_labels") and key not in _COUNTS and value is not None:
        return NOT_INFORMATIVE
    if not isinstance(value, int | float) or isinstance(value, bool):
        return MISSING if value is None else str(value)
    return f"{value:.1%}" if key in _SHARES else figure(value)


def _drawn_figures(scores: Sequence[Score]) -> list[str]:
    """Return the figures to draw: error and share of correct bins; none if all labels are the models' own."""
    models = [score.of_model(which) for score in scores for which in ("in_use", "candidate")]
    available = {
        key for model in models if not model.get("own_labels") for key, value in model.items() if value is not None
    }
    error = next((key for key in ("mean_abs_error", "median_abs_error", "median_rel_error") if key in available), None)
    return [key for key in (error, "accuracy") if key in available]


def _score_chart(title: str, target: str, key: str, names: Sequence[str], scores: Mapping[str, Score]) -> Chart:
    scale = 100.0 if key in _SHARES else 1.0

    def values(which: str) -> list[float | None]:
        figures = [scores[name].of_model(which) if name in scores else {} for name in names]
        shown = [None if of_model.get("own_labels") else of_model.get(key) for of_model in figures]
        return [None if value is None else value * scale for value in shown]

    used, candidate = values("in_use"), values("candidate")
    marks = frozenset(k for k, name in enumerate(names) if name in scores and scores[name].decision in NEW_MODEL)
    axis, unit = _name(key), "%" if key in _SHARES else ""
    if key == "mean_abs_error" and target in TARGETS:  # in the target's space, as learn.fitting.promotion takes it
        axis, unit = (
            (f"{axis} of the logarithm", "ln") if TARGETS[target].space == "log" else (axis, TARGETS[target].unit)
        )
    lines = [
        Curve(name="candidate", css="k5", values=candidate, figures=False),
        Curve(name="in use", css="k1", values=used, marks=marks),
    ]
    chips = Legend({"model in use": "k1", "the night's candidate": "k5"})
    most = 100.0 if key in _OF_A_WHOLE else None
    svg = curves(_days(names), lines, unit, most=most)
    return Chart(f"{title}: {axis}", svg, (chips,), newest_first_seen=True)


def _time(report: Report) -> Section:
    """Return the section on the steps' times, and time, rows and energy over the cycles."""
    night = report.nights[-1]
    total = sum(taken for taken in night.seconds.values() if taken)
    rows: list[tuple[Cell, ...]] = []
    for step in report.steps:
        share = f"{step['seconds'] / total:.0%}" if step["seconds"] and total else MISSING
        taken = duration(step["seconds"])
        rows.append((step["name"], step["state"], taken, share, step["attempts"], gist(step["error"])))
    failed = [k for k, step in enumerate(report.steps) if step["state"] == "failed"]
    heads = ("step", "state", "time", "share", "started", "*error")
    of_runs, used = _time_spent(report)
    spent = (
        f"Time of the simulated runs: {of_runs}; no GPU was used."
        if report.simulated
        else f"Time on the GPUs: {of_runs}; energy: {used}."
    )
    parts: list[Block] = [
        Lead(f"{duration(total)} in all, {duration(night.overhead_s)} of it beside running and fitting. {spent}"),
        table(heads, rows, words=2, marked=failed),
    ]
    parts += [
        Fold(f"The whole error of {step['name']}", (Preformatted(clean_text(step["error"], LOG_CHARACTERS)),))
        for step in report.steps
        if step["error"]
    ]
    nights = report.nights[-SHOWN_CYCLES:]
    names = _days(past.cycle for past in nights)
    longest = max(sum(filter(None, past.seconds.values())) for past in nights)
    unit, scale = ("h", 3600.0) if longest >= 2 * 3600 else ("min", 60.0) if longest >= 120 else ("s", 1.0)
    by_step = {name: (_STEP_CSS[name], [(past.seconds.get(name) or 0.0) / scale for past in nights]) for name in STEPS}
    steps = columns(names, by_step, unit)
    drawn = [Chart("Time by step", steps, (Legend(_STEP_CSS),), newest_first_seen=True)]
    for title, css, unit, limit, figure_of in _OVER_THE_CYCLES:
        values = [figure_of(past) for past in nights]
        if any(value is not None for value in values):
            svg = curves(names, [Curve(name=title.partition(":")[0], css=css, values=values)], unit, limit)
            drawn.append(Chart(title, svg, newest_first_seen=True))
    parts.append(Charts(tuple(drawn)))
    undrawn = len(report.nights) - len(nights)
    if undrawn > 0:
        parts.append(Lead(f"{count_of(undrawn, 'earlier cycle')} not drawn; their figures are in the JSON."))
    return Section("time", "Time" if report.simulated else "Time and energy", tuple(parts))


def _spent(figure: str, unit: float, *, simulated: bool) -> Callable[[Night], float | None]:
    """Return a function that reads a figure of a night's runs in a unit: None if the night is not `simulated` so."""

    def read(night: Night) -> float | None:
        value = getattr(night.run, figure) if night.run and night.simulated == simulated else None
        return None if value is None else float(value) / unit

    return read


# Curves over the cycles: title, colour class, unit, a value drawn across, and a function that reads a night's value.
_OVER_THE_CYCLES: tuple[tuple[str, str, str, float | None, Callable[[Night], float | None]], ...] = (
    (
        f"Overhead: all but running and fitting; dashed: {OVERHEAD_MIN:g} min",
        "k2",
        "min",
        OVERHEAD_MIN,
        lambda night: night.overhead_s / 60,
    ),
    ("Rows in all", "k1", "rows", None, lambda night: night.rows),
    ("Runs a night", "k4", "runs", None, lambda night: night.run.runs if night.run else None),
    ("GPU time", "k5", "h", None, _spent("gpu_seconds", 3600, simulated=False)),
    ("Energy", "k6", "kWh", None, _spent("energy_j", 3.6e6, simulated=False)),
    ("Time of simulated runs", "k0", "min", None, _spent("gpu_seconds", 60, simulated=True)),
)


def _days(names: Iterable[str]) -> list[str]:
    """Return cycles as `11-20.2`, without their year."""
    return [name[5:] if len(name) >= 10 and name[4] == "-" else name[:14] for name in names]


def _next_night(report: Report) -> Section:
    """Return the section on the next night's dry run."""
    plan, source = report.next_plan, "simulated" if report.simulated else "measured"
    if plan is None:
        return Section("next", "What to measure next", (Lead("No dry run of the next night was made."),))
    stale = f" {plan.remeasured:,} of them were {source} before, and are stale since." if plan.remeasured else ""
    parts: list[Block] = [Lead(f"{count_of(plan.runs, 'run')}.{stale}"), Bullets(tuple(choice_lines(plan, source)))]
    if plan.families:
        families = sorted(plan.families.items(), key=lambda item: (-item[1], item[0]))
        parts.append(table(("family", "runs"), families))
    for dimension, cells_gained in plan.gained.items():
        cells = sorted(cells_gained.items(), key=lambda item: (item[1][0], -item[1][1], item[0]))
        if not cells:
            continue
        new = sum(not known for _, (known, _) in cells)
        rows = [(cell, known, chosen) for cell, (known, chosen) in cells[:_CELLS_SHOWN]]
        shown = f", the {_CELLS_SHOWN} emptiest" if len(cells) > _CELLS_SHOWN else ""
        title = f"{dimension}: {count_of(len(cells), 'cell')} would gain, {new:,} of them without a row so far{shown}"
        inside = table(("cell", "rows now", "runs planned"), rows)
        parts.append(Fold(title, (inside,), is_open=dimension in ("memory", "region")))
    return Section("next", "What to measure next", tuple(parts))
