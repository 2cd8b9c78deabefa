"""The page of a growth cycle's report. Start reading at `report_page`; `conf.reports` draws it.

Labels and errors come from other people's code. Sections on the machine and on earlier cycles:
`farm.nights.report_sections`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.reports.blocks import (
    Block,
    Callout,
    Cell,
    Chart,
    Charts,
    Fold,
    Heading,
    Lead,
    Legend,
    Outcome,
    Page,
    Preformatted,
    Section,
    ShareBar,
    SharePart,
    Tile,
    Tiles,
    linked,
    page_bytes,
    table,
)
from conf.reports.charts import SHADES, Grid, heat_map
from conf.reports.page_text import MISSING, count_of, duration, energy
from farm.nights.journal import Cycle
from farm.nights.report import Report, gather
from farm.nights.report_sections import canaries_section, next_section, scores_section, time_section
from warehouse.files.folder import DataFolder
from warehouse.files.layout import checked_name, write_bytes
from warehouse.reading.pairing import Difference, shift_text
from warehouse.tables.schema import STATUSES

_STATUS_CSS = dict(zip(STATUSES, ("k4", "k5", "k2", "k6", "k0"), strict=True))  # ok, oom, timeout, crashed, invalid
_OUTCOMES = {"good": "good night", "look": "worth a look", "bad": "needs somebody"}
_SHOWN = 12  # of what a page names; the rest is counted
_SETTINGS = 400  # characters of one
LATEST = "latest"


def write_report(
    folder: DataFolder, cycle: Cycle, cycles: Sequence[Cycle], next_plan: Mapping[str, Any] | None
) -> Path:
    """Write `reports/CYCLE.html` and `.json`, and the same as `latest`, each whole or not at all; the page's path.

    `cycles` are the journal's; the cycle may be among them and may still be open. `next_plan` is a
    `farm.sampling.plan_summary.Summary` as a mapping, of the next night's dry run. Raises `OSError` where the folder
    cannot be written; the report names what could not be read.
    """
    report = gather(folder, cycle, cycles, next_plan)
    page = page_bytes(report_page(report))
    text = report.as_json().encode()
    folder.reports.mkdir(parents=True, exist_ok=True)
    for name in (checked_name("cycle", cycle.name), LATEST):
        write_bytes(folder.reports / f"{name}.json", text)
        write_bytes(folder.reports / f"{name}.html", page)
    return folder.reports / f"{cycle.name}.html"


def report_page(report: Report) -> Page:
    """Return the page's contents."""
    sections = {
        "Tonight": _changed(report),
        "Rows": _rows(report),
        "Coverage": _coverage(report),
        "Failures": _failures(report),
        "Untrusted": _doubts(report),
        "Canaries": canaries_section(report),
        "Estimators": scores_section(report),
        "Time" if report.simulated else "Time and energy": time_section(report),
        "Quality": _findings(report),
        "Next night": next_section(report),
        "Settings": _settings(report),
    }
    if (report.canaries or {}).get("verdict") in ("sick", "drift"):  # what explains the rest comes first
        sections = {"Canaries": sections["Canaries"], **sections}
    return Page(title=f"Growth cycle {report.cycle}", head=_head(report), sections=linked(sections))


def _head(report: Report) -> tuple[Block, ...]:
    outcome = report.said
    ended = f" to {report.ended_at}" if report.ended_at else ""
    return (
        Lead(report.started_at + ended),
        Outcome(outcome.level, _OUTCOMES[outcome.level], outcome.sentence),
        *(Callout(text, outcome.level) for text in outcome.advice),
        *map(Callout, report.notes),
        _tiles(report),
    )


def _tiles(report: Report) -> Tiles:
    run, night = report.run or {}, report.nights[-1]
    rows = report.rows
    tonight = sum(one.tonight for one in rows.counts) if rows else 0
    total = sum(one.rows for one in rows.counts) if rows else 0
    gained = sum(map(len, report.gained.values()))
    failed = rows.failed_tonight if rows else 0
    tiles = [
        Tile("rows tonight", f"{tonight:,}", f"{total:,} in all"),
        Tile("cells with their first row", f"{gained:,}", "bins and regions"),
        Tile("failed", f"{failed:,}", f"{rows.doubted_tonight if rows else 0:,} untrusted"),
        Tile("time of the runs", duration(run.get("gpu_seconds")), "simulated: no GPU was used")
        if report.simulated
        else Tile("GPU time", duration(run.get("gpu_seconds")), energy(run.get("energy_j"))),
        Tile("overhead", duration(night.overhead_s), "all but running and fitting"),
    ]
    promoted = [s.target for s in report.scores if s.cycle == report.cycle and s.decision in ("promoted", "first")]
    names = ", ".join(promoted[:3]) + (", …" if len(promoted) > 3 else "")
    tiles.append(Tile("new models", f"{len(promoted):,}", names))
    return Tiles(tuple(tiles))


def _changed(report: Report) -> Section:
    parts: list[Block] = []
    if report.changed is not None:
        parts += _difference(report.changed)
    elif report.rows is None:
        parts.append(Lead("The rows could not be read."))
    elif report.before is None:
        parts.append(Lead("There is no snapshot of an earlier cycle to compare with: everything is new."))
    gained = {name: cells for name, cells in report.gained.items() if cells}
    if gained:
        rows = [(name, len(cells), _some(cells)) for name, cells in gained.items()]
        parts += [Heading("Cells that had no row before"), table(("by", "cells", "*which"), rows)]
    return Section("changed", "What changed tonight", tuple(parts))


def _difference(changed: Difference) -> list[Block]:
    rows = [
        (view, changed.rows_before.get(view, 0), after, f"{after - changed.rows_before.get(view, 0):+,}")
        for view, after in changed.rows_after.items()
    ]
    after = "now, as no snapshot was taken" if changed.after == "now" else changed.after
    parts: list[Block] = [
        Lead(f"From the snapshot {changed.before} to {after}."),
        table(("view", "rows before", "rows now", "change"), rows),
    ]
    groups = {"added": changed.added, "removed": changed.removed, "changed": changed.changed}
    counts = [
        (name, one.family, one.device_name, one.status, one.runs) for name, entries in groups.items() for one in entries
    ]
    if counts:
        summary = ", ".join(f"{name} {sum(one.runs for one in entries):,}" for name, entries in groups.items())
        inside = table(("", "family", "device", "status", "runs"), counts, words=4)
        parts.append(Fold(f"Runs {summary}", (inside,), is_open=len(counts) <= _SHOWN))
    beyond = [shift for shift in changed.shifts if shift.beyond]
    again = sum(shift.pairs for shift in changed.shifts)
    if not changed.shifts:
        parts.append(Lead("No configuration ran again in the same environment."))
    elif not beyond:
        again_line = f"Taken again in the same environment: {again:,} labels"
        parts.append(Lead(f"{again_line}, none beyond {changed.tolerance:g} of before."))
    else:
        moved: list[tuple[Cell, ...]] = []
        for shift in sorted(beyond, key=lambda one: -abs(one.largest))[: 2 * _SHOWN]:
            shown = (shift_text(shift.label, value) for value in (shift.median, shift.largest))
            moved.append(
                (shift.label, *shift.group.values(), shift.pairs, shift.beyond, *shown, ", ".join(shift.examples))
            )
        heads = ("label", "family", "device", "configurations", "moved", "median", "largest", "*config hashes")
        parts += [
            Heading(f"Labels that moved by more than {changed.tolerance:g} in the same environment"),
            table(heads, moved, words=3),
            *_rest(len(beyond) - 2 * _SHOWN, "label"),
        ]
    for change in changed.schema:
        changes = "; ".join(
            f"{change_kind}: {', '.join(names)}"
            for change_kind, names in (
                ("added", change.added),
                ("removed", change.removed),
                ("retyped", change.retyped),
            )
            if names
        )
        parts.append(Callout(f"Columns of {change.table}: {changes}"))
    return parts


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return "; ".join(names[:_SHOWN]) + more


def _rest(count: int, noun: str) -> list[Block]:
    return [Lead(f"And {count_of(count, noun)} more, in the JSON beside this page.")] if count > 0 else []


def _rows(report: Report) -> Section | None:
    rows = report.rows
    if rows is None:
        return None
    if not rows.counts:
        return Section("rows", "Rows", (Lead("There is no run yet."),))
    families: dict[str, Counter[str]] = defaultdict(Counter)
    kinds: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for one in rows.counts:
        families[one.family] += Counter({one.status: one.rows, "tonight": one.tonight})
        kinds[one.family, one.device_name or MISSING, one.source] += Counter(
            {one.status: one.rows, "tonight": one.tonight}
        )
    shown = [status for status in STATUSES if any(counts[status] for counts in families.values())]
    most = max(sum(counts[status] for status in shown) for counts in families.values())
    lines: list[tuple[Cell, ...]] = []
    for family, counts in sorted(families.items()):
        total = sum(counts[status] for status in shown)
        lines.append(
            (
                family,
                _stack(counts, shown, total / most),
                total,
                _plus(counts["tonight"]),
                *(counts[status] for status in shown),
            )
        )
    totals: Counter[str] = sum(families.values(), Counter())
    lines.append(("all", "", sum(totals[s] for s in shown), _plus(totals["tonight"]), *(totals[s] for s in shown)))
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


def _stack(counts: Mapping[str, int], shown: Sequence[str], share: float) -> ShareBar:
    total = max(sum(counts[status] for status in shown), 1)
    parts = tuple(
        SharePart(_STATUS_CSS[status], counts[status] / total, f"{status} {counts[status]:,}")
        for status in shown
        if counts[status]
    )
    return ShareBar(parts, max(share, 0.01))


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
        left = rows.failed_tonight - sum(group.runs for group in rows.failures)
        parts.append(Lead(f"And {count_of(more, 'kind')} of failure more, {count_of(left, 'run')}."))
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
    step = next(step for step in report.steps if step.name == "land")
    if step.state != "done":
        return Section("findings", "Quality findings", (Lead("Nothing was checked: the night was not landed."),))
    if not report.findings:
        return Section("findings", "Quality findings", (Lead("Every check passed."),))
    lines = [
        (
            *(one.get(name) for name in ("severity", "rule", "count", "said")),
            "; ".join(map(str, one.get("examples") or ())),
        )
        for one in report.findings
    ]
    errors = [k for k, one in enumerate(report.findings) if one.get("severity") == "error"]
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
