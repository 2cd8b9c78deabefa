"""A comparison as one HTML page. Start reading at `comparison_page`.

The page needs no network and no JavaScript, and every text in it is escaped. Its frame, parts and style are those of a
growth cycle's report (`farm.reports.parts`).
"""

from __future__ import annotations

from farm.comparison.chart import shift_chart
from farm.comparison.operators import Change, Operators
from farm.comparison.pairs import MEMORY, STEP_TIME, Comparison
from farm.comparison.run import Result
from farm.comparison.view import (
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
from farm.reports.parts import chart, charts, clean, count_of, fold, lead, legend, note, page, section, table, tiles
from warehouse.schema import ENVIRONMENT

_SHOWN = 20  # of a table; the rest is in the JSON beside the page
_COLUMNS = {"calls": "calls", "moved_mib": "MiB moved", "gflops": "GFLOP", "ms": "ms", "peak_mib": "MiB at the peak"}


def comparison_page(result: Result) -> str:
    """The page's text."""
    title = f"{result.before.label} → {result.after.label}"
    sections = {
        "labels": ("Labels", _labels(result.comparison)),
        "statuses": ("Statuses", _statuses(result.comparison)),
        "largest": ("Configurations", _largest(result.comparison)),
        "families": ("Operator families", _families(result.comparison)),
        "operators": ("Operators", _operators(result)),
        "modules": ("Modules", _modules(result.operators)),
        "alone": ("Without a partner", _alone(result)),
        "sides": ("Environments", _sides(result)),
    }
    return page(title, sections, lambda links: _head(result, title, links))


def _head(result: Result, title: str, links: str) -> str:
    comparison = result.comparison
    where = ", ".join(comparison.devices) + (f" ({', '.join(comparison.sources)})" if comparison.sources else "")
    changed = sum(s.configurations for s in comparison.statuses if s.before != s.after)
    figures = [("pairs", f"{len(comparison.pairs):,}", "configurations on both sides")]
    for shift in comparison.shifts:
        if shift.label in (MEMORY, STEP_TIME):
            name = "peak memory" if shift.label == MEMORY else "step time"
            figures.append((name, percent(shift.median), f"median; largest {percent(shift.largest)}"))
    figures.append(("ended otherwise", f"{changed:,}", "ok → oom, ok → crashed, ..."))
    figures.append(("without a partner", f"{sum(map(len, comparison.alone)):,}", "on one side only"))
    return (
        f"<header><h1>{clean(title)}</h1><p>{clean(where or 'no pairs')}</p>"
        f'<p class="outcome">{clean(headline(result))}</p>{tiles(figures)}'
        f"{note(result.caveat)}<nav>{links}</nav></header>\n"
    )


def _labels(comparison: Comparison) -> str:
    if not comparison.shifts:
        return section("labels", "Memory and step time", lead("No configuration has figures on both sides."))
    families = list(dict.fromkeys(pair.before.family for pair in comparison.pairs))
    css = {family: f"k{k % 7 + 1}" for k, family in enumerate(families)}
    drawn = []
    for label, name, unit in ((MEMORY, "Peak memory", "MiB"), (STEP_TIME, "Step time", "ms")):
        svg = shift_chart(comparison.pairs, label, unit, css, comparison.tolerance)
        if svg is not None:
            drawn.append(chart(f"{name}: difference of each configuration by its size before", svg))
    heads = ("label", "pairs", "median", "p90", "largest", f"beyond {share(comparison.tolerance)}", "equal")
    return section(
        "labels", "Memory and step time",
        lead("Differences are relative to before; p90 is of their sizes."),
        table(heads, map(shift_row, comparison.shifts)),
        legend(css) if len(css) > 1 else "", charts(drawn),
    )  # fmt: skip


def _statuses(comparison: Comparison) -> str:
    if not comparison.statuses:
        return section("statuses", "Statuses", lead("Every pair ended ok on both sides."))
    rows = [(s.before, s.after, s.configurations, ", ".join(s.examples), s.error) for s in comparison.statuses]
    changed = [k for k, status in enumerate(comparison.statuses) if status.before != status.after]
    heads = ("before", "after", "configurations", "*config hashes", "*error")
    return section(
        "statuses", "Configurations that failed, or ended otherwise", table(heads, rows, words=2, marked=changed)
    )


def _largest(comparison: Comparison) -> str:
    parts = []
    for label, name in ((MEMORY, "peak memory [MiB]"), (STEP_TIME, "step time [ms]")):
        largest = comparison.largest(label, _SHOWN)
        if not largest:
            continue
        rows = [(*pair_row(pair, label), config_words(pair.before.config)) for pair in largest]
        beyond = [k for k, pair in enumerate(largest) if abs(pair.shift(label) or 0) > comparison.tolerance]
        heads = ("config hash", "family", "before", "after", "difference", "*configuration")
        parts.append(f"<h3>Largest differences of {clean(name)}</h3>" + table(heads, rows, words=2, marked=beyond))
    if not parts:
        return section("largest", "Configurations", lead("No configuration differs."))
    return section("largest", "Configurations that differ most", *parts)


def _families(comparison: Comparison) -> str:
    if not comparison.families:
        return ""
    rows = [
        (f.name.replace("_", " "), f.pairs, percent(f.memory), percent(f.step_time), percent(f.largest))
        for f in comparison.families
    ]
    heads = ("operator family", "pairs", "peak memory", "step time", "largest")
    return section(
        "families", "By operator family of the layers",
        lead("Medians over the pairs whose configuration has layers of that family. A configuration has several: a "
             "family stands out where its neighbours do not."),
        table(heads, rows),
    )  # fmt: skip


def _operators(result: Result) -> str:
    operators = result.operators
    if operators is None:
        return section("operators", "Operators", lead(f"Not compared: {result.no_operators}."))
    parts = [
        lead(
            f"Sums over one traced step of each of {count_of(operators.compared, 'configuration')}, priced on "
            f"{operators.device}. Memory at the peak is of the tensors that an operator made."
        )
    ]
    if operators.failed:
        rows = [(key, before or "traced", after or "traced") for key, (before, after) in operators.failed.items()]
        parts.append(note(f"{count_of(len(operators.failed), 'configuration')} cannot be traced on a side."))
        parts.append(fold("Which, and why", table(("config hash", "*before", "*after"), rows[:_SHOWN])))
    if not operators.compared:
        return section("operators", "By operator", *parts)
    parts.append(_changes("operator", operators.operators))
    moved = [
        (k, figure(a), figure(b), percent(b / a - 1 if a else None)) for k, (a, b) in operators.peak.items() if a or b
    ]
    parts.append("<h3>What the peak consists of, MiB</h3>")
    parts.append(table(("kind", "before", "after", "difference"), [(k.replace("_", " "), *rest) for k, *rest in moved]))
    dtypes = changed_dtypes(operators)
    if dtypes:
        rows = [(name, int(old), int(new)) for name, (old, new) in dtypes.items()]
        parts.append("<h3>Operators by dtype</h3>" + table(("dtype", "before", "after"), rows))
    return section("operators", "By operator", *parts)


def _modules(operators: Operators | None) -> str:
    if operators is None or not operators.compared:
        return ""
    return section(
        "modules", "By module",
        lead("Modules whose paths differ in numbers only are one."),
        _changes("module", operators.modules),
    )  # fmt: skip


def _changes(noun: str, entries: tuple[Change, ...]) -> str:
    changed = [change for change in entries if change.changed]
    same = [change for change in entries if not change.changed]
    parts = []
    if changed:
        heads = (noun, "class", "in", *_COLUMNS.values(), "*config hashes")
        rows = [
            (c.name, c.kind.replace("_", " "), c.configurations, *change_row(c, tuple(_COLUMNS)), ", ".join(c.examples))
            for c in changed[:_SHOWN]
        ]
        parts.append(table(heads, rows, words=2))
        if len(changed) > _SHOWN:
            parts.append(lead(f"And {count_of(len(changed) - _SHOWN, noun)} more, in the JSON beside this page."))
    else:
        parts.append(lead(f"No {noun} differs."))
    if same:
        rows = [(c.name, c.kind.replace("_", " "), *change_row(c, tuple(_COLUMNS))) for c in same]
        inside = table((noun, "class", *_COLUMNS.values()), rows, words=2)
        parts.append(fold(f"{count_of(len(same), noun)} without a difference", inside))
    return "".join(parts)


def _alone(result: Result) -> str:
    parts = []
    for side, alone in zip((result.before, result.after), result.comparison.alone, strict=True):
        if alone:
            summary = f"{count_of(len(alone), 'configuration')} of {side.label} only"
            parts.append(fold(summary, f"<pre>{clean(' '.join(alone[:500]))}</pre>"))
    for side, count in zip((result.before, result.after), result.comparison.unhashed, strict=True):
        if count:
            parts.append(lead(f"{count_of(count, 'row')} of {side.label} name no configuration and are left out."))
    return section("alone", "Without a partner", *parts) if parts else ""


def _sides(result: Result) -> str:
    rows = [("given as", result.before.text, result.after.text), ("runs in", *map(str, result.folders))]
    for name in ENVIRONMENT:
        values = [", ".join(versions.get(name, ())) or "–" for versions in result.comparison.versions]
        rows.append((name.replace("_", " "), *values))
    differing = [k for k, (_, old, new) in enumerate(rows) if k > 1 and old != new]
    return section("sides", "Environments", table(("", "*before", "*after"), rows, marked=differing))
