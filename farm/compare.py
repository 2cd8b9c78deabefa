"""`python -m farm.compare before=ENV after=ENV +arch=cnn n=200`: what a release changes.

Start reading at `entry`; `comparison_page` builds the page, which the terminal shows too; `as_json` builds the JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conf.cli.command_line import StepBar, command
from conf.files.outputs import checked_output, write_output
from conf.plain_text import MISSING, count_of
from conf.reports.blocks import (
    Block,
    Callout,
    Cell,
    Chart,
    Charts,
    Heading,
    Lead,
    Legend,
    Page,
    Section,
    keep_page,
    linked,
    page_bytes,
    print_page,
    table,
)
from conf.reports.charts import Axis, Margins, Plot, Svg
from farm.comparison.run import (
    LABELS,
    MEMORY,
    STEP_TIME,
    Change,
    CompareSettings,
    Comparison,
    Environment,
    Operators,
    Result,
    RunSet,
    Side,
    error_of,
    run_comparison,
)
from warehouse.files.folder import DataFolder
from warehouse.reading.pairing import Pair, Shift
from warehouse.tables.schema import ENVIRONMENT

_MAIN = {MEMORY: "peak memory", STEP_TIME: "step time"}  # labels in the headline, charts and largest differences


def headline(result: Result) -> str:
    """Return the result as one sentence."""
    comparison = result.comparison
    if not comparison.pairs:
        return "no configuration ran on both sides"
    parts = [f"{len(comparison.pairs):,} {'pair' if len(comparison.pairs) == 1 else 'pairs'} of configurations"]
    for shift in comparison.shifts:
        if shift.label in _MAIN:
            moved = f"{percent(shift.median)} in the median, {shift.beyond:,} beyond {share(comparison.tolerance)}"
            parts.append(f"{_MAIN[shift.label]} {'equal in all' if shift.equal == shift.pairs else moved}")
    if otherwise := sum(status.configurations for status in comparison.statuses if status.before != status.after):
        parts.append(f"{otherwise:,} ended otherwise")
    if alone := sum(map(len, comparison.alone)):
        parts.append(f"{alone:,} on one side only")
    return ", ".join(parts)


def shift_row(shift: Shift) -> tuple[str, ...]:
    """Return the cells label, pairs, median, p90, largest, beyond, equal."""
    sizes = (percent(shift.median), percent(shift.p90).lstrip("+"), percent(shift.largest))
    return f"{shift.label} [{LABELS[shift.label]}]", f"{shift.pairs:,}", *sizes, f"{shift.beyond:,}", f"{shift.equal:,}"


def pair_row(pair: Pair, label: str) -> tuple[str, ...]:
    """Return the cells configuration, family, before, after, difference."""
    sides = (figure(pair.before[label]), figure(pair.after[label]))
    return pair.key["config_hash"], pair.before["family"], *sides, percent(pair.shift(label))


def share(tolerance: float) -> str:
    """Return a tolerance as text, such as `1 %`."""
    return f"{100 * tolerance:.3g} %"


def percent(difference: float | None) -> str:
    """Return a signed relative difference as text; a tiny one is never shown as 0."""
    if difference is None:
        return "-"
    if difference == 0:
        return "0 %"
    return f"{100 * difference:+.2f} %" if abs(difference) >= 5e-5 else f"{100 * difference:+.0e} %"


def figure(value: float | None) -> str:
    """Return a figure with four significant digits, integers in full, with thousands separators."""
    if value is None:
        return "-"
    if value == round(value):
        return f"{value:,.0f}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def config_words(config: Mapping[str, Any]) -> str:
    """Return a configuration's values as text, without its family and switches that are off."""
    return ", ".join(
        f"{name} {value}"
        for name, value in config.items()
        if name != "family" and value is not None and value is not False
    )


def change_row(change: Change, figures: Sequence[str]) -> tuple[str, ...]:
    """Return `before -> after` of each of these figures, or one figure if both are equal."""
    sides = ((figure(change.before[name]), figure(change.after[name])) for name in figures)
    return tuple(before if before == after else f"{before} -> {after}" for before, after in sides)


def as_json(result: Result) -> str:
    """Return the whole comparison: the contents of table and page, and every pair."""
    comparison = result.comparison
    return json.dumps(
        {
            "before": side_mapping(result.before, comparison.versions[0]),
            "after": side_mapping(result.after, comparison.versions[1]),
            "folders": [str(path) for path in result.folders],
            "job_id": result.job_id,
            "sources": comparison.sources,
            "devices": comparison.devices,
            "caveat": result.caveat,
            "headline": headline(result),
            "tolerance": comparison.tolerance,
            "labels": [shift.to_mapping() | {"unit": LABELS[shift.label]} for shift in comparison.shifts],
            "statuses": comparison.statuses,
            "alone": dict(zip(("before", "after"), comparison.alone, strict=True)),
            "operators": result.operators,
            "no_operators": result.no_operators,
            "pairs": [_pair_mapping(pair) for pair in comparison.pairs],
        },
        allow_nan=False,
        indent=1,
        default=vars,
    )


def side_mapping(side: Side, versions: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a side as a mapping; `versions` are those of its runs."""
    about: dict[str, Any] = {
        "given": side.text,
        "versions": {name: list(releases) for name, releases in versions.items()},
    }
    if isinstance(side, Environment):
        return {**about, "python": str(side.python), "environment": dict(side.versions)}
    assert isinstance(side, RunSet)
    return {**about, "folder": str(side.folder.root), "snapshot": side.snapshot}


def _pair_mapping(pair: Pair) -> dict[str, Any]:
    def side_of(side: Mapping[str, Any]) -> dict[str, Any]:
        about = {"status": side["status"], "error": error_of(side), "runs": side["runs"]}
        return about | {label: side[label] for label in LABELS}

    return {
        "config_hash": pair.key["config_hash"],
        "family": pair.before["family"],
        "config": json.loads(pair.before["config"]),
        "device_name": pair.key["device_name"],
        "source": pair.key["source"],
        "before": side_of(pair.before),
        "after": side_of(pair.after),
        "shift": {label: pair.shift(label) for label in LABELS},
    }


_ROWS_OF_PAGE = 20  # rows of a table; the JSON beside the page has all
_COLUMNS = {"calls": "calls", "moved_mib": "MiB moved", "gflops": "GFLOP", "ms": "ms", "peak_mib": "MiB at the peak"}


def write_comparison(home: DataFolder, result: Result, page: Page, report: str | None) -> Path:
    """Write the result's page and, beside it, its JSON, each atomically; return the page's path.

    They go to `comparisons/` of the data folder, or to the file `report` and one of the same name ending in `.json`.
    Raises `UsageError` where they cannot be written.
    """
    figures = as_json(result)
    if report is None:
        return keep_page(home.comparisons / f"{result.name}.html", page, figures)
    path = Path(report)
    for target, content in ((path.with_suffix(".json"), figures.encode() + b"\n"), (path, page_bytes(page))):
        write_output(target, content, key="report")
    return path


def comparison_page(result: Result) -> Page:
    """Return the page's contents."""
    comparison = result.comparison
    where = ", ".join(comparison.devices) + (f" ({', '.join(comparison.sources)})" if comparison.sources else "")
    sections = {
        "Labels": _labels(comparison),
        "Statuses": _statuses(comparison),
        "Configurations": _largest(comparison),
        "Operators": _operators(result),
        "Modules": _modules(result.operators),
        "Environments": _sides(result),
    }
    return Page(
        title=f"{result.before.label} → {result.after.label}",
        head=(Lead(where or "no pairs"), Lead(headline(result)), Callout(result.caveat)),
        sections=linked(sections),
    )


def _labels(comparison: Comparison) -> Section:
    if not comparison.shifts:
        return Section("labels", "Memory and step time", (Lead("No configuration has figures on both sides."),))
    families = dict.fromkeys(pair.before["family"] for pair in comparison.pairs)
    css = {family: f"k{k % 7 + 1}" for k, family in enumerate(families)}
    charts = [
        Chart(f"{name.capitalize()}: difference of each configuration by its size before", svg)
        for label, name in _MAIN.items()
        if (svg := shift_chart(comparison.pairs, label, css, comparison.tolerance)) is not None
    ]
    heads = ("label", "pairs", "median", "p90", "largest", f"beyond {share(comparison.tolerance)}", "equal")
    blocks = (
        Lead("Differences are relative to before; p90 is of their sizes."),
        table(heads, map(shift_row, comparison.shifts)),
        Legend(css),
        Charts(tuple(charts)),
    )
    return Section("labels", "Memory and step time", blocks)


def shift_chart(pairs: Sequence[Pair], label: str, css: Mapping[str, str], tolerance: float) -> Svg | None:
    """Draw the shift of each pair over its label before; None if no pair has figures.

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
    rows = [(s.before, s.after, s.configurations, s.error) for s in comparison.statuses]
    heads = ("before", "after", "configurations", "*error")
    return Section("statuses", "Configurations that failed, or ended otherwise", (table(heads, rows, words=2),))


def _largest(comparison: Comparison) -> Section:
    parts: list[Block] = []
    for label, name in _MAIN.items():
        largest = comparison.largest(label, _ROWS_OF_PAGE)
        if not largest:
            continue
        rows = [(*pair_row(pair, label), config_words(json.loads(pair.before["config"]))) for pair in largest]
        heads = ("config hash", "family", "before", "after", "difference", "*configuration")
        parts += [Heading(f"Largest differences of {name} [{LABELS[label]}]"), table(heads, rows, words=2)]
    if not parts:
        return Section("largest", "Configurations", (Lead("No configuration differs."),))
    return Section("largest", "Configurations that differ most", tuple(parts))


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
        parts.append(table(("config hash", "*before", "*after"), failed[:_ROWS_OF_PAGE]))
    if not operators.compared:
        return Section("operators", "By operator", tuple(parts))
    parts += _changes("operator", operators.operators)
    counts = [(name, int(old), int(new)) for name, (old, new) in operators.dtypes.items() if old != new]
    if counts:
        parts += [Heading("Operators by dtype"), table(("dtype", "before", "after"), counts)]
    return Section("operators", "By operator", tuple(parts))


def _modules(operators: Operators | None) -> Section | None:
    if operators is None or not operators.compared:
        return None
    intro = Lead("Modules whose paths differ in numbers only are one.")
    return Section("modules", "By module", (intro, *_changes("module", operators.modules)))


def _changes(noun: str, entries: tuple[Change, ...]) -> list[Block]:
    changed = [change for change in entries if change.configurations]
    if not changed:
        return [Lead(f"No {noun} differs.")]
    heads = (noun, "in", *_COLUMNS.values())
    rows: list[tuple[Cell, ...]] = [
        (c.name, c.configurations, *change_row(c, tuple(_COLUMNS))) for c in changed[:_ROWS_OF_PAGE]
    ]
    parts: list[Block] = [table(heads, rows, words=1)]
    if len(changed) > _ROWS_OF_PAGE:
        parts.append(Lead(f"And {count_of(len(changed) - _ROWS_OF_PAGE, noun)} more, in the JSON beside this page."))
    return parts


def _sides(result: Result) -> Section:
    rows: list[tuple[str, ...]] = [
        ("given as", result.before.text, result.after.text),
        ("runs in", *map(str, result.folders)),
    ]
    for name in ENVIRONMENT:
        values = [", ".join(versions.get(name, ())) or MISSING for versions in result.comparison.versions]
        rows.append((name.replace("_", " "), *values))
    return Section("sides", "Environments", (table(("", "*before", "*after"), rows),))


def entry(settings: CompareSettings) -> int:
    """Compare two sides: a table or JSON, and a page.

    Returns 1 where no configuration has figures on both sides.
    """
    if settings.report is not None:  # fail before anything runs if it is not writable
        checked_output(settings.report, key="report")
    # Progress messages are for people; with format=json standard output holds the result only.
    with contextlib.redirect_stdout(sys.stderr) if settings.format == "json" else contextlib.nullcontext():
        with StepBar("compare") as bar:
            result = run_comparison(settings, bar.update)
        page = comparison_page(result)
        path = write_comparison(DataFolder.resolve(settings.data), result, page, settings.report)
    if settings.format == "json":
        print(as_json(result))
    else:
        print_page(page)
        print(f"page: {path}")
    if not result.comparison.shifts:
        print("error: no configuration has figures on both sides", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    command("compare", entry)
