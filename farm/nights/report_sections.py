"""The report's sections on the machine and on the cycles: canaries and drift, estimators, time, the next night.

Start reading at `canaries_section`; `farm.nights.report_page` puts them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    Preformatted,
    Section,
    Table,
    table,
)
from conf.reports.charts import Curve, columns, curves
from conf.reports.page_text import MISSING, clean_text, count_of, duration, energy, figure
from farm.nights.journal import STEPS
from farm.nights.report_rows import LOG_CHARACTERS
from farm.nights.verdict import gist
from learn.judging.scores import NOT_INFORMATIVE
from learn.rows.targets import TARGETS
from warehouse.tables.schema import ENVIRONMENT

if TYPE_CHECKING:
    from farm.nights.report import Report, Score

SHOWN_CYCLES = 40  # of a curve: the newest
OVERHEAD_MIN = 5.0  # what a cycle may take beside running and fitting
_STEP_CSS = dict(zip(STEPS, ("k3", "k2", "k1", "k7", "k4", "k0"), strict=True))
_CELLS_SHOWN = 10
_WHY = 1000  # characters of a decision's reason
_SHARES = ("median_rel_error", "median_relative_error", "accuracy", "above_bound", "coverage")
_COUNTS = ("rows", "out_of_memory")  # which hold whoever made the labels
_NO_FIGURE = ("rows", "own_labels")
_OF_A_WHOLE = ("accuracy", "above_bound", "coverage")  # of the shares: an error may be more than 100 %
_FIGURES = {
    "rows": "rows",
    "mean_abs_error": "mean absolute error",
    "median_abs_error": "median absolute error",
    "median_rel_error": "median relative error",
    "accuracy": "accuracy",
    "above_bound": "above the bound",
    "out_of_memory": "rows out of memory",
}


def canaries_section(report: Report) -> Section:
    """Return the section on the canaries, changes of the environment, and drift."""
    canaries = report.canaries
    if canaries is None:
        return Section("canaries", "Canaries", (Lead("No canary was compared."),))
    compared = list(canaries.get("compared") or ())
    moved = [one for one in compared if one.get("moved")]
    verdict = str(canaries.get("verdict"))
    level: Level = "bad" if verdict == "sick" else "look" if verdict == "drift" else "good"
    where = " ".join(str(canaries[name]) for name in ("device_name", "source") if canaries.get(name))
    parts: list[Block] = [Callout(f"{verdict}: {canaries.get('said') or 'nothing to say'}", level)]
    parts += [Callout(f"Cause: {cause}", level) for cause in canaries.get("causes") or ()]
    parts.append(Lead(f"{count_of(int(canaries.get('runs') or 0), 'run')} on {where or 'an unknown device'}"))
    if moved:
        parts += [Heading("What moved"), _compared(moved)]
    if compared:
        names = {(one.get("family"), one.get("config_hash")) for one in compared}
        summary = f"All {count_of(len(compared), 'label')} of {count_of(len(names), 'canary configuration')}"
        is_open = not moved and len(compared) <= 2 * _CELLS_SHOWN
        parts.append(Fold(summary, (_compared(compared),), is_open))
    parts += _environment(canaries.get("environment") or {}, canaries.get("before"))
    parts += _drift(canaries.get("drift"))
    return Section("canaries", "Canaries and drift", tuple(parts))


def _compared(compared: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for one in compared:
        before, now = one.get("before"), one.get("now")
        change = _number(now - before, sign=True) if before is not None and now is not None else MISSING
        rows.append(
            (
                one.get("family"),
                str(one.get("config_hash") or MISSING)[:12],
                f"{one.get('label')} [{one.get('unit')}]",
                _number(before),
                _number(now),
                change,
                _number(one.get("tolerance")),
                one.get("history_runs"),
                one.get("said") or "",
            )
        )
    heads = ("family", "configuration", "label", "before", "now", "change", "tolerance", "earlier runs", "*said")
    return table(heads, rows, words=3, marked=[k for k, one in enumerate(compared) if one.get("moved")])


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


def _drift(drift: Mapping[str, Any] | None) -> list[Block]:
    if not drift:
        return []
    operators = [(label, ", ".join(map(str, names))) for label, names in (drift.get("operators") or {}).items()]
    parts: list[Block] = [
        Heading("Drift"),
        Lead(
            f"{count_of(int(drift.get('stale_rows') or 0), 'row')} marked stale for this environment, "
            f"{count_of(int(drift.get('remeasure') or 0), 'configuration')} to be measured again first."
        ),
        *map(Callout, drift.get("moved") or ()),
    ]
    if operators:
        parts.append(table(("label", "*operator families that moved"), operators))
    for key, title in (("stale_by_family", "family"), ("stale_by_operator", "operator family")):
        counts = sorted((drift.get(key) or {}).items(), key=lambda item: (-item[1], item[0]))
        if counts:
            parts.append(table((title, "stale rows"), counts))
    return parts


def scores_section(report: Report) -> Section:
    """Return the section on the learning step's decisions, with each estimator's figures over the cycles."""
    tonight = [score for score in report.scores if score.cycle == report.cycle]
    parts: list[Block] = _decisions(tonight) if tonight else [Lead("No estimator was fitted tonight.")]
    names = [night.cycle for night in report.nights][-SHOWN_CYCLES:]
    series: dict[tuple[str, str], dict[str, Score]] = {}
    for score in report.scores:
        series.setdefault((score.target, score.estimator), {})[score.cycle] = score
    drawn: list[Chart] = []
    for (target, estimator), of in sorted(series.items()):
        drawn += [
            _score_chart(f"{target} by {estimator}", target, key, names, of)
            for key in _drawn_figures(list(of.values()))
        ]
    if drawn:
        parts.append(Lead("A full dot: a model was promoted. The held-out set grows from night to night."))
        parts.append(Charts(tuple(drawn)))
    return Section("scores", "Estimators over the cycles", tuple(parts))


def _decisions(scores: Sequence[Score]) -> list[Block]:
    both = [of or {} for one in scores for of in (one.current, one.candidate)]
    keys = [key for key in dict.fromkeys([*_FIGURES, *(key for of in both for key in of)]) if key not in _NO_FIGURE]
    keys = [key for key in keys if any(of.get(key) is not None for of in both)]
    rows: list[tuple[Cell, ...]] = []
    for one in scores:
        compared = (f"{_figure_of(key, one.current)} / {_figure_of(key, one.candidate)}" for key in keys)
        rows.append((one.target, one.estimator, one.decision, one.held_out, *compared))
    heads = ("target", "estimator", "decision", "held out", *map(_name, keys))
    failed = [k for k, one in enumerate(scores) if one.decision == "failed"]
    reasons = tuple(f"{one.target}: {one.decision}: {gist(one.why, _WHY)}" for one in scores)
    blocks: list[Block] = [table(heads, rows, words=3, marked=failed), Bullets(reasons)]
    if not keys:
        return blocks
    return [Lead("Figures of the model so far / of the night's candidate, on the same held-out rows."), *blocks]


def _name(key: str) -> str:
    """Return a figure's readable name."""
    return _FIGURES.get(key, key.replace("_", " "))


def _figure_of(key: str, figures: Mapping[str, Any] | None) -> str:
    """Return a model's figure as text; errors on labels that its own trace simulated are left out."""
    if figures and figures.get("own_labels") and key not in _COUNTS and figures.get(key) is not None:
        return NOT_INFORMATIVE
    return _figure(key, (figures or {}).get(key))


def _figure(key: str, value: Any) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return MISSING if value is None else str(value)
    return f"{value:.1%}" if key in _SHARES else figure(value)


def _drawn_figures(scores: Sequence[Score]) -> list[str]:
    """Return the figures to draw: error and share of correct bins; none if all labels are the models' own."""
    both = [of or {} for one in scores for of in (one.in_use, one.candidate)]
    there = {key for of in both if not of.get("own_labels") for key, value in of.items() if value is not None}
    error = next((key for key in ("mean_abs_error", "median_abs_error", "median_rel_error") if key in there), None)
    return [key for key in (error, "accuracy") if key in there]


def _score_chart(title: str, target: str, key: str, names: Sequence[str], of: Mapping[str, Score]) -> Chart:
    scale = 100.0 if key in _SHARES else 1.0

    def values(which: str) -> list[float | None]:
        figures = [(getattr(of[name], which) or {}) if name in of else {} for name in names]
        shown = [None if one.get("own_labels") else one.get(key) for one in figures]
        return [None if value is None else value * scale for value in shown]

    used, candidate = values("in_use"), values("candidate")
    marks = frozenset(k for k, name in enumerate(names) if name in of and of[name].decision in ("promoted", "first"))
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


def time_section(report: Report) -> Section:
    """Return the section on the steps' times, and time, rows and energy over the cycles."""
    night, run = report.nights[-1], report.run or {}
    whole = sum(taken for taken in night.seconds.values() if taken)
    rows: list[tuple[Cell, ...]] = [
        (
            step.name,
            step.state,
            duration(step.seconds),
            f"{step.seconds / whole:.0%}" if step.seconds and whole else MISSING,
            step.attempts,
            gist(step.error),
        )
        for step in report.steps
    ]
    failed = [k for k, step in enumerate(report.steps) if step.state == "failed"]
    heads = ("step", "state", "time", "share", "started", "*error")
    of_runs = duration(run.get("gpu_seconds"))
    spent = (
        f"Time of the simulated runs: {of_runs}; no GPU was used."
        if report.simulated
        else f"Time on the GPUs: {of_runs}; energy: {energy(run.get('energy_j'))}."
    )
    parts: list[Block] = [
        Lead(f"{duration(whole)} in all, {duration(night.overhead_s)} of it beside running and fitting. {spent}"),
        table(heads, rows, words=2, marked=failed),
    ]
    errors = [(step.name, step.error) for step in report.steps if step.error]
    parts += [
        Fold(f"The whole error of {name}", (Preformatted(clean_text(error, LOG_CHARACTERS)),)) for name, error in errors
    ]
    nights = report.nights[-SHOWN_CYCLES:]
    names = _days(one.cycle for one in nights)
    longest = max((sum(filter(None, one.seconds.values())) for one in nights), default=0.0)
    unit, scale = ("h", 3600.0) if longest >= 2 * 3600 else ("min", 60.0) if longest >= 120 else ("s", 1.0)
    by_step = {name: (_STEP_CSS[name], [(one.seconds.get(name) or 0.0) / scale for one in nights]) for name in STEPS}
    steps = columns(names, by_step, unit)
    drawn = [Chart("Time by step", steps, (Legend(_STEP_CSS),), newest_first_seen=True)]
    overhead = Curve(name="overhead", css="k2", values=[one.overhead_s / 60 for one in nights])
    title = f"Overhead: all but running and fitting; dashed: {OVERHEAD_MIN:g} min"
    drawn.append(Chart(title, curves(names, [overhead], "min", OVERHEAD_MIN), newest_first_seen=True))
    taken: list[float | None] = []  # of nights on GPUs
    energies: list[float | None] = []
    for one in nights:
        taken.append(None if one.simulated else _over(one.gpu_seconds, 3600))
        energies.append(None if one.simulated else _over(one.energy_j, 3.6e6))
    simulating = [_over(one.gpu_seconds, 60) if one.simulated else None for one in nights]
    series: tuple[tuple[str, str, str, Sequence[float | None]], ...] = (
        ("Rows in all", "k1", "rows", [one.rows for one in nights]),
        ("Runs a night", "k4", "runs", [one.runs for one in nights]),
        ("GPU time", "k5", "h", taken),
        ("Energy", "k6", "kWh", energies),
        ("Time of simulated runs", "k0", "min", simulating),
    )
    for title, css, unit, values in series:
        if any(value is not None for value in values):
            svg = curves(names, [Curve(name=title, css=css, values=values)], unit)
            drawn.append(Chart(title, svg, newest_first_seen=True))
    left = len(report.nights) - len(nights)
    parts.append(Charts(tuple(drawn)))
    if left > 0:
        parts.append(Lead(f"{count_of(left, 'earlier cycle')} not drawn; their figures are in the JSON."))
    return Section("time", "Time" if report.simulated else "Time and energy", tuple(parts))


def _days(names: Iterable[str]) -> list[str]:
    """Return cycles as `11-20.2`, without their year."""
    return [name[5:] if len(name) >= 10 and name[4] == "-" else name[:14] for name in names]


def _over(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def next_section(report: Report) -> Section:
    """Return the section on the next night's dry run."""
    plan = report.next_plan
    if plan is None:
        return Section("next", "What to measure next", (Lead("No dry run of the next night was made."),))
    families = plan.get("families") or {}
    parts: list[Block] = [_plan_line(plan, report.simulated), *map(Callout, plan.get("notes") or ())]
    if families:
        parts.append(table(("family", "runs"), sorted(families.items(), key=lambda item: (-item[1], item[0]))))
    for dimension, of in (plan.get("gained") or {}).items():
        cells = sorted(of.items(), key=lambda item: (item[1][0], -item[1][1], item[0]))
        if not cells:
            continue
        new = sum(not known for _, (known, _) in cells)
        rows = [(cell, known, chosen) for cell, (known, chosen) in cells[:_CELLS_SHOWN]]
        shown = f", the {_CELLS_SHOWN} emptiest" if len(cells) > _CELLS_SHOWN else ""
        title = f"{dimension}: {count_of(len(cells), 'cell')} would gain, {new:,} of them without a row so far{shown}"
        inside = table(("cell", "rows now", "runs planned"), rows)
        parts.append(Fold(title, (inside,), is_open=dimension in ("memory", "region")))
    return Section("next", "What to measure next", tuple(parts))


def _plan_line(plan: Mapping[str, Any], simulated: bool) -> Lead:
    ran = "simulated" if simulated else "measured"
    runs, again = int(plan.get("runs") or 0), int(plan.get("remeasured") or 0)
    stale = f" {again:,} of them were {ran} before, and are stale since." if again else ""
    if "policy" not in plan:  # nothing but stale ones, so that no candidate was looked at
        return Lead(f"{count_of(runs, 'run')}.{stale}")
    past = float(plan.get("from_past") or 0.0)
    how = f"{past:.0%} of it from past runs of the family" if past else "a guess: no past runs"
    hours, out = float(plan.get("gpu_hours") or 0.0), float(plan.get("out_of_memory") or 0.0)
    unit = "hours, simulated" if simulated else "GPU-hours"
    return Lead(
        f"Policy {plan['policy']}: {count_of(runs, 'run')} of {int(plan.get('pool') or 0):,} candidates, about "
        f"{hours:.2f} {unit} ({how}); {out:.0f} of them are expected to run out of memory. Left out: "
        f"{int(plan.get('measured') or 0):,} {ran} already, {int(plan.get('repeated') or 0):,} copies.{stale}"
    )
