"""The page of a comparison. Start reading at `comparison_page`; `conf.reports` draws it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from conf.files.outputs import write_output
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
    Page,
    Preformatted,
    Section,
    Tile,
    Tiles,
    keep_page,
    linked,
    page_bytes,
    table,
)
from conf.reports.charts import Axis, Margins, Plot, Svg
from conf.reports.page_text import MISSING, count_of
from farm.comparison.operators import Change, Operators
from farm.comparison.pairs import LABELS, MEMORY, STEP_TIME, Comparison
from farm.comparison.run import Result
from farm.comparison.view import (
    as_json,
    change_row,
    changed_dtypes,
    config_words,
    figure,
    headline,
    pair_row,
    percent,
    share,
    shift_row,
)
from warehouse.files.folder import DataFolder
from warehouse.reading.pairing import Pair
from warehouse.tables.schema import ENVIRONMENT

_SHOWN = 20  # of a table; the rest is in the JSON beside the page
_COLUMNS = {"calls": "calls", "moved_mib": "MiB moved", "gflops": "GFLOP", "ms": "ms", "peak_mib": "MiB at the peak"}


def write_comparison(home: DataFolder, result: Result, report: str | None) -> Path:
    """Write the page and, beside it, its JSON, each atomically; return the page's path.

    They go to `comparisons/` of the data folder, or to the file `report` and one of the same name ending in `.json`.
    Raises `UsageError` where they cannot be written.
    """
    page, figures = comparison_page(result), as_json(result)
    if report is None:
        return keep_page(home.comparisons / f"{result.name}.html", page, figures)
    path = Path(report)
    for target, content in ((path.with_suffix(".json"), figures.encode() + b"\n"), (path, page_bytes(page))):
        write_output(target, content, key="report", data=[home.root])
    return path


def comparison_page(result: Result) -> Page:
    """Return the page's contents."""
    sections = {
        "Labels": _labels(result.comparison),
        "Statuses": _statuses(result.comparison),
        "Configurations": _largest(result.comparison),
        "Operator families": _families(result.comparison),
        "Operators": _operators(result),
        "Modules": _modules(result.operators),
        "Without a partner": _alone(result),
        "Environments": _sides(result),
    }
    title = f"{result.before.label} → {result.after.label}"
    return Page(title=title, head=_head(result), sections=linked(sections))


def _head(result: Result) -> tuple[Block, ...]:
    comparison = result.comparison
    where = ", ".join(comparison.devices) + (f" ({', '.join(comparison.sources)})" if comparison.sources else "")
    changed = sum(s.configurations for s in comparison.statuses if s.before != s.after)
    tiles = [Tile("pairs", f"{len(comparison.pairs):,}", "configurations on both sides")]
    for shift in comparison.shifts:
        if shift.label in (MEMORY, STEP_TIME):
            name = "peak memory" if shift.label == MEMORY else "step time"
            tiles.append(Tile(name, percent(shift.median), f"median; largest {percent(shift.largest)}"))
    tiles.append(Tile("ended otherwise", f"{changed:,}", "ok → oom, ok → crashed, ..."))
    tiles.append(Tile("without a partner", f"{sum(map(len, comparison.alone)):,}", "on one side only"))
    return (
        Lead(where or "no pairs"),
        Lead(headline(result)),
        Tiles(tuple(tiles)),
        Callout(result.caveat),
    )


def _labels(comparison: Comparison) -> Section:
    if not comparison.shifts:
        return Section("labels", "Memory and step time", (Lead("No configuration has figures on both sides."),))
    families = list(dict.fromkeys(pair.before["family"] for pair in comparison.pairs))
    css = {family: f"k{k % 7 + 1}" for k, family in enumerate(families)}
    drawn: list[Chart] = []
    for label, name in ((MEMORY, "Peak memory"), (STEP_TIME, "Step time")):
        svg = shift_chart(comparison.pairs, label, css, comparison.tolerance)
        if svg is not None:
            drawn.append(Chart(f"{name}: difference of each configuration by its size before", svg))
    heads = ("label", "pairs", "median", "p90", "largest", f"beyond {share(comparison.tolerance)}", "equal")
    blocks: list[Block] = [
        Lead("Differences are relative to before; p90 is of their sizes."),
        table(heads, map(shift_row, comparison.shifts)),
    ]
    if len(css) > 1:
        blocks.append(Legend(css))
    return Section("labels", "Memory and step time", (*blocks, Charts(tuple(drawn))))


def shift_chart(pairs: Sequence[Pair], label: str, css: Mapping[str, str], tolerance: float) -> Svg | None:
    """Draw the shift of each pair over its label before; None where no pair has figures.

    Args:
        pairs: configurations of both sides.
        label: the column that is compared.
        css: family -> class of its dots.
        tolerance: relative; dashed lines show it.
    """
    dots = [(pair, pair.before[label], shift) for pair in pairs if (shift := pair.shift(label)) is not None]
    if not dots:
        return None
    sizes = [size for _, size, _ in dots]
    reach = 1.15 * max([abs(shift) for _, _, shift in dots] + [1.3 * tolerance, 1e-4])
    y_axis = Axis.within(-reach, reach)
    plot = Plot(Axis.log(min(sizes) / 1.12, max(sizes) * 1.12), y_axis, Margins(height=250.0, left=66.0, bottom=40.0))
    plot.grid([f"{100 * tick:+.4g} %" if tick else "0" for tick in y_axis.ticks])
    plot.across("zero", 0.0)
    plot.across("limit", tolerance)
    plot.across("limit", -tolerance)
    plot.ticks_below(f"before, {LABELS[label]}")
    for pair, size, shift in dots:
        family = pair.before["family"]
        title = f"{pair.key['config_hash']} ({family}): {figure(size)} {LABELS[label]}, {percent(shift)}"
        plot.dot(f"dot {css[family]}", size, shift, 3.6, title)
    return plot.picture(f"Relative difference of {label} over its size before, {len(dots):,} configurations")


def _statuses(comparison: Comparison) -> Section:
    if not comparison.statuses:
        return Section("statuses", "Statuses", (Lead("Every pair ended ok on both sides."),))
    rows = [(s.before, s.after, s.configurations, ", ".join(s.examples), s.error) for s in comparison.statuses]
    changed = [k for k, status in enumerate(comparison.statuses) if status.before != status.after]
    heads = ("before", "after", "configurations", "*config hashes", "*error")
    ended = table(heads, rows, words=2, marked=changed)
    return Section("statuses", "Configurations that failed, or ended otherwise", (ended,))


def _largest(comparison: Comparison) -> Section:
    parts: list[Block] = []
    for label, name in ((MEMORY, "peak memory [MiB]"), (STEP_TIME, "step time [ms]")):
        largest = comparison.largest(label, _SHOWN)
        if not largest:
            continue
        rows = [(*pair_row(pair, label), config_words(json.loads(pair.before["config"]))) for pair in largest]
        beyond = [k for k, pair in enumerate(largest) if abs(pair.shift(label) or 0) > comparison.tolerance]
        heads = ("config hash", "family", "before", "after", "difference", "*configuration")
        parts += [Heading(f"Largest differences of {name}"), table(heads, rows, words=2, marked=beyond)]
    if not parts:
        return Section("largest", "Configurations", (Lead("No configuration differs."),))
    return Section("largest", "Configurations that differ most", tuple(parts))


def _families(comparison: Comparison) -> Section | None:
    if not comparison.families:
        return None
    rows = [
        (f.name.replace("_", " "), f.pairs, percent(f.memory), percent(f.step_time), percent(f.largest))
        for f in comparison.families
    ]
    heads = ("operator family", "pairs", "peak memory", "step time", "largest")
    return Section(
        "families",
        "By operator family of the layers",
        (
            Lead(
                "Medians over the pairs whose configuration has layers of that family. A configuration has several: a "
                "family stands out where its neighbours do not."
            ),
            table(heads, rows),
        ),
    )


def _operators(result: Result) -> Section:
    operators = result.operators
    if operators is None:
        return Section("operators", "Operators", (Lead(f"Not compared: {result.no_operators}."),))
    parts: list[Block] = [
        Lead(
            f"Sums over one traced step of each of {count_of(operators.compared, 'configuration')}, priced on "
            f"{operators.device}. Memory at the peak is of the tensors that an operator made."
        )
    ]
    if operators.failed:
        failed = [(key, before or "traced", after or "traced") for key, (before, after) in operators.failed.items()]
        parts.append(Callout(f"{count_of(len(operators.failed), 'configuration')} cannot be traced on a side."))
        inside = table(("config hash", "*before", "*after"), failed[:_SHOWN])
        parts.append(Fold("Configurations and errors", (inside,)))
    if not operators.compared:
        return Section("operators", "By operator", tuple(parts))
    parts += _changes("operator", operators.operators)
    moved = [
        (k, figure(a), figure(b), percent(b / a - 1 if a else None)) for k, (a, b) in operators.peak.items() if a or b
    ]
    parts.append(Heading("What the peak consists of, MiB"))
    parts.append(table(("kind", "before", "after", "difference"), [(k.replace("_", " "), *rest) for k, *rest in moved]))
    dtypes = changed_dtypes(operators)
    if dtypes:
        counts = [(name, int(old), int(new)) for name, (old, new) in dtypes.items()]
        parts += [Heading("Operators by dtype"), table(("dtype", "before", "after"), counts)]
    return Section("operators", "By operator", tuple(parts))


def _modules(operators: Operators | None) -> Section | None:
    if operators is None or not operators.compared:
        return None
    intro = Lead("Modules whose paths differ in numbers only are one.")
    return Section("modules", "By module", (intro, *_changes("module", operators.modules)))


def _changes(noun: str, entries: tuple[Change, ...]) -> list[Block]:
    changed = [change for change in entries if change.changed]
    same = [change for change in entries if not change.changed]
    parts: list[Block] = []
    if changed:
        heads = (noun, "class", "in", *_COLUMNS.values(), "*config hashes")
        rows: list[tuple[Cell, ...]] = [
            (c.name, c.kind.replace("_", " "), c.configurations, *change_row(c, tuple(_COLUMNS)), ", ".join(c.examples))
            for c in changed[:_SHOWN]
        ]
        parts.append(table(heads, rows, words=2))
        if len(changed) > _SHOWN:
            parts.append(Lead(f"And {count_of(len(changed) - _SHOWN, noun)} more, in the JSON beside this page."))
    else:
        parts.append(Lead(f"No {noun} differs."))
    if same:
        unchanged = [(c.name, c.kind.replace("_", " "), *change_row(c, tuple(_COLUMNS))) for c in same]
        inside = table((noun, "class", *_COLUMNS.values()), unchanged, words=2)
        parts.append(Fold(f"{count_of(len(same), noun)} without a difference", (inside,)))
    return parts


def _alone(result: Result) -> Section | None:
    parts: list[Block] = []
    for side, alone in zip((result.before, result.after), result.comparison.alone, strict=True):
        if alone:
            summary = f"{count_of(len(alone), 'configuration')} of {side.label} only"
            parts.append(Fold(summary, (Preformatted(" ".join(alone[:500])),)))
    for side, count in zip((result.before, result.after), result.comparison.unhashed, strict=True):
        if count:
            parts.append(Lead(f"{count_of(count, 'row')} of {side.label} name no configuration and are left out."))
    return Section("alone", "Without a partner", tuple(parts)) if parts else None


def _sides(result: Result) -> Section:
    rows: list[tuple[str, ...]] = [
        ("given as", result.before.text, result.after.text),
        ("runs in", *map(str, result.folders)),
    ]
    for name in ENVIRONMENT:
        values = [", ".join(versions.get(name, ())) or MISSING for versions in result.comparison.versions]
        rows.append((name.replace("_", " "), *values))
    differing = [k for k, (_, old, new) in enumerate(rows) if k > 1 and old != new]
    return Section("sides", "Environments", (table(("", "*before", "*after"), rows, marked=differing),))
