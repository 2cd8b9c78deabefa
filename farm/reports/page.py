"""A cycle's report as one HTML page. Start reading at `report_page`.

The page needs no network and no JavaScript, and every text in it is escaped: labels and errors come from other
people's code. What is of the machine and of the cycles is in `farm.reports.nights`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farm.reports.charts import SHADES, heat_map
from farm.reports.nights import canaries_section, next_section, scores_section, time_section
from farm.reports.parts import (
    Html,
    chart,
    charts,
    clean,
    count_of,
    duration,
    energy,
    fold,
    lead,
    legend,
    note,
    page,
    section,
    table,
    tiles,
)
from warehouse.schema import STATUSES
from warehouse.writer import RUN_RATIOS

if TYPE_CHECKING:
    from farm.reports.report import Report
    from warehouse.diff import Difference

_STATUS_CSS = dict(zip(STATUSES, ("k4", "k5", "k2", "k6", "k0"), strict=True))  # ok, oom, timeout, crashed, invalid
_OUTCOMES = {"good": "good night", "look": "worth a look", "bad": "needs somebody"}
_SHOWN = 12  # of what a page names; the rest is counted
_SETTINGS = 400  # characters of one


def report_page(report: Report) -> str:
    """The page's text."""
    title = f"Growth cycle {report.cycle}"
    sections = {
        "changed": ("Tonight", _changed(report)),
        "rows": ("Rows", _rows(report)),
        "coverage": ("Coverage", _coverage(report)),
        "failures": ("Failures", _failures(report)),
        "doubts": ("Untrusted", _doubts(report)),
        "canaries": ("Canaries", canaries_section(report)),
        "scores": ("Estimators", scores_section(report)),
        "time": ("Time" if report.simulated else "Time and energy", time_section(report)),
        "findings": ("Quality", _findings(report)),
        "next": ("Next night", next_section(report)),
        "settings": ("Settings", _settings(report)),
    }
    if (report.canaries or {}).get("verdict") in ("sick", "drift"):  # what explains the rest comes first
        sections = {"canaries": sections["canaries"], **sections}
    return page(title, sections, lambda links: _head(report, title, links))


def _head(report: Report, title: str, links: str) -> str:
    said = report.said
    ended = f" to {report.ended_at}" if report.ended_at else ""
    advice = "".join(note(text, said.level) for text in said.advice)
    return (
        f'<header><h1>{clean(title)}</h1><p>{clean(report.started_at + ended)}</p><p class="outcome">'
        f'<span class="verdict {said.level}">{clean(_OUTCOMES[said.level])}</span>{clean(said.sentence)}</p>'
        f"{advice}{''.join(note(text) for text in report.notes)}{_tiles(report)}<nav>{links}</nav></header>\n"
    )


def _tiles(report: Report) -> str:
    run, night = report.run or {}, report.nights[-1]
    rows = report.rows
    tonight = sum(one.tonight for one in rows.counts) if rows else 0
    total = sum(one.rows for one in rows.counts) if rows else 0
    gained = sum(map(len, report.gained.values()))
    failed = rows.failed_tonight if rows else 0
    figures = [
        ("rows tonight", f"{tonight:,}", f"{total:,} in all"),
        ("cells with their first row", f"{gained:,}", "bins and regions"),
        ("failed", f"{failed:,}", f"{rows.doubted_tonight if rows else 0:,} untrusted"),
        ("time of the runs", duration(run.get("gpu_seconds")), "simulated: no GPU was used")
        if report.simulated
        else ("GPU time", duration(run.get("gpu_seconds")), energy(run.get("energy_j"))),
        ("overhead", duration(night.overhead_s), "all but running and fitting"),
    ]
    promoted = [s.target for s in report.scores if s.cycle == report.cycle and s.decision in ("promoted", "first")]
    figures.append(("new models", f"{len(promoted):,}", ", ".join(promoted[:3]) + (", …" if len(promoted) > 3 else "")))
    return tiles(figures)


def _changed(report: Report) -> str:
    parts = []
    if report.changed is not None:
        parts.append(_difference(report.changed))
    elif report.rows is None:
        parts.append(lead("The rows could not be read."))
    elif report.before is None:
        parts.append(lead("There is no snapshot of an earlier cycle to compare with: everything is new."))
    gained = {name: cells for name, cells in report.gained.items() if cells}
    if gained:
        rows = [(name, len(cells), _some(cells)) for name, cells in gained.items()]
        parts.append("<h3>Cells that had no row before</h3>" + table(("by", "cells", "*which"), rows))
    return section("changed", "What changed tonight", *parts)


def _difference(changed: Difference) -> str:
    rows = [
        (view, changed.rows_before.get(view, 0), after, f"{after - changed.rows_before.get(view, 0):+,}")
        for view, after in changed.rows_after.items()
    ]
    after = "now, as no snapshot was taken" if changed.after == "now" else changed.after
    parts = [
        lead(f"From the snapshot {changed.before} to {after}."),
        table(("view", "rows before", "rows now", "change"), rows),
    ]
    counts = [
        (what, one.family, one.device_name, one.status, one.runs)
        for what in ("added", "removed", "changed")
        for one in getattr(changed, what)
    ]
    if counts:
        summary = ", ".join(
            f"{what} {sum(one.runs for one in getattr(changed, what)):,}" for what in ("added", "removed", "changed")
        )
        inside = table(("what", "family", "device", "status", "runs"), counts, words=4)
        parts.append(fold(f"Runs {summary}", inside, open_=len(counts) <= _SHOWN))
    beyond = [shift for shift in changed.shifts if shift.beyond]
    again = sum(shift.configurations for shift in changed.shifts)
    if not changed.shifts:
        parts.append(lead("No configuration ran again in the same environment."))
    elif not beyond:
        again_line = f"Taken again in the same environment: {again:,} labels"
        parts.append(lead(f"{again_line}, none beyond {changed.tolerance:g} of before."))
    else:
        rows = []
        for shift in sorted(beyond, key=lambda one: -abs(one.largest_shift))[: 2 * _SHOWN]:
            form = "+.3f" if shift.label in RUN_RATIOS else "+.1%"
            rows.append((
                shift.label, shift.family, shift.device_name, shift.configurations, shift.beyond,
                format(shift.median_shift, form), format(shift.largest_shift, form), ", ".join(shift.examples),
            ))  # fmt: skip
        heads = ("label", "family", "device", "configurations", "moved", "median", "largest", "*config hashes")
        parts.append(
            f"<h3>Labels that moved by more than {changed.tolerance:g} in the same environment</h3>"
            + table(heads, rows, words=3)
            + _rest(len(beyond) - 2 * _SHOWN, "label")
        )
    for change in changed.schema:
        changes = "; ".join(
            f"{what}: {', '.join(names)}"
            for what, names in (("added", change.added), ("removed", change.removed), ("retyped", change.retyped))
            if names
        )
        parts.append(note(f"Columns of {change.table}: {changes}"))
    return "".join(parts)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return "; ".join(names[:_SHOWN]) + more


def _rest(count: int, noun: str) -> str:
    return lead(f"And {count_of(count, noun)} more, in the JSON beside this page.") if count > 0 else ""


def _rows(report: Report) -> str:
    rows = report.rows
    if rows is None:
        return ""
    if not rows.counts:
        return section("rows", "Rows", lead("There is no run yet."))
    families: dict[str, Counter[str]] = defaultdict(Counter)
    kinds: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for one in rows.counts:
        families[one.family] += Counter({one.status: one.rows, "tonight": one.tonight})
        kinds[one.family, one.device_name or "–", one.source] += Counter({one.status: one.rows, "tonight": one.tonight})
    shown = [status for status in STATUSES if any(counts[status] for counts in families.values())]
    most = max(sum(counts[status] for status in shown) for counts in families.values())
    lines = []
    for family, counts in sorted(families.items()):
        total = sum(counts[status] for status in shown)
        lines.append((
            family, Html(_stack(counts, shown, total / most)), total, _plus(counts["tonight"]),
            *(counts[status] for status in shown),
        ))  # fmt: skip
    totals = sum(families.values(), Counter())
    lines.append(
        ("all", "", sum(totals[s] for s in shown), _plus(totals["tonight"]), *(totals[s] for s in shown))
    )  # fmt: skip
    by_family = table(("family", "", "rows", "tonight", *shown), lines)
    by_kind = table(
        ("family", "device", "source", "rows", "tonight", *shown),
        [
            (*kind, sum(counts[s] for s in shown), _plus(counts["tonight"]), *(counts[s] for s in shown))
            for kind, counts in sorted(kinds.items())
        ],
        words=3,
    )
    whose = f"Rows of the snapshot {report.snapshot}" if report.snapshot else "Rows of the folder as it is"
    return section(
        "rows",
        "Rows by family, device and status",
        lead(f"{whose}; tonight: what finished since the cycle began."),
        legend({status: _STATUS_CSS[status] for status in shown}),
        by_family,
        fold(f"By device and source ({count_of(len(kinds), 'kind')})", by_kind, open_=len(kinds) <= _SHOWN),
    )


def _stack(counts: Counter[str], shown: list[str], share: float) -> str:
    total = max(sum(counts[status] for status in shown), 1)
    parts = "".join(
        f'<span class="{_STATUS_CSS[status]}" style="width:{100 * counts[status] / total:.3f}%" '
        f'title="{status} {counts[status]:,}"></span>'
        for status in shown
        if counts[status]
    )
    return f'<div class="stack" style="width:{max(100 * share, 1):.2f}%">{parts}</div>'


def _plus(count: int) -> str:
    return f"+{count:,}" if count else "–"


def _coverage(report: Report) -> str:
    rows = report.rows
    if rows is None or not rows.memory.rows:
        return ""
    where = f"{', '.join(rows.device_names)} ({rows.source})"
    left_out = [
        f"{rows.unusable:,} without a label that can be learned from" if rows.unusable else "",
        f"{rows.no_place:,} without batch size or parameters are in no map of these" if rows.no_place else "",
    ]
    scale = {"no row": "h0"}
    floors = (1, 4, 10, 32, 100, 317)
    for k in range(1, SHADES + 1):
        scale[f"{floors[k - 1]}–{floors[k] - 1}" if k < SHADES else f"{floors[-1]} and more"] = f"h{k}"
    intro = lead(
        f"Usable rows on {where}; below a figure, what tonight added. "
        + " ".join(f"{text}." for text in left_out if text)
    )
    absent = lead(f"No row yet: {', '.join(rows.absent_families)}.") if rows.absent_families else ""
    memory = chart(_empty("Peak memory by family, GiB", rows.memory), heat_map(rows.memory, "family", "GiB"))
    levels = charts(
        chart(_empty(f"{grid.name} by family", grid), heat_map(grid, "family", "level")) for grid in rows.levels
    )
    regions = charts(
        chart(_empty(grid.name, grid), heat_map(grid, "batch", "parameters, from")) for grid in rows.regions
    )
    return section(
        "coverage", "Coverage", intro, legend({**scale, "had no row before tonight": "fresh"}), absent, memory, levels,
        "<h3>Batch size and parameters, by family</h3>", regions,
    )  # fmt: skip


def _empty(title: str, grid) -> str:
    cells = len(grid.rows) * len(grid.columns)
    return f"{title}: {grid.empty:,} of {cells:,} cells empty" if grid.empty else title


def _failures(report: Report) -> str:
    rows = report.rows
    if rows is None:
        return ""
    before = f"{rows.failed_before:,} of earlier nights." if rows.failed_before else ""
    if not rows.failed_tonight:
        return section("failures", "Failures", lead(f"None tonight. {before}".strip()))
    parts = [lead(f"{count_of(rows.failed_tonight, 'run')} of tonight crashed, timed out or were invalid. {before}")]
    for group in rows.failures:
        # Most sentences begin with their type, its module before it.
        known = group.error_type and group.error_type not in group.said.partition(":")[0]
        kind = f" {group.error_type}" if known else ""
        ids = ", ".join(group.run_ids) + (", …" if group.runs > len(group.run_ids) else "")
        head = f"{group.runs:,} × {group.status}{kind}: {group.said} ({', '.join(group.families)})"
        parts.append(fold(head, f"{lead(ids)}<pre>{clean(group.log or 'nothing was written')}</pre>"))
    more = rows.failed_groups - len(rows.failures)
    if more > 0:
        left = rows.failed_tonight - sum(group.runs for group in rows.failures)
        parts.append(lead(f"And {count_of(more, 'kind')} of failure more, {count_of(left, 'run')}."))
    return section("failures", "Failures", *parts)


def _doubts(report: Report) -> str:
    rows = report.rows
    if rows is None:
        return ""
    if not rows.doubted_tonight:
        return section("doubts", "Untrusted runs", lead("None tonight."))
    lines = [(doubt.reason.replace("_", " "), doubt.runs, doubt.example) for doubt in rows.doubts]
    intro = f"{rows.doubted_tonight:,} of tonight's executions; they are kept, and nothing is learned from them."
    return section("doubts", "Untrusted runs, by reason", lead(intro), table(("reason", "runs", "*as"), lines))


def _findings(report: Report) -> str:
    step = next(step for step in report.steps if step.name == "land")
    if step.state != "done":
        return section("findings", "Quality findings", lead("Nothing was checked: the night was not landed."))
    if not report.findings:
        return section("findings", "Quality findings", lead("Every check passed."))
    lines = [
        (
            *(one.get(name) for name in ("severity", "rule", "count", "said")),
            "; ".join(map(str, one.get("examples") or ())),
        )
        for one in report.findings
    ]
    errors = [k for k, one in enumerate(report.findings) if one.get("severity") == "error"]
    heads = ("severity", "rule", "count", "*what is wrong", "*as")
    return section("findings", "Quality findings", table(heads, lines, words=2, marked=errors))


def _settings(report: Report) -> str:
    lines = [(name, clip(value)) for name, value in sorted(report.settings.items())]
    return section("settings", "Settings", fold(count_of(len(lines), "setting"), table(("key", "*value"), lines)))


def clip(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SETTINGS else text[:_SETTINGS] + "…"
