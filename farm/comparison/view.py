"""A comparison as a table in the terminal, and as JSON. Start reading at `lines`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from conf.plain_text import table_lines
from farm.comparison.operators import Change, Operators
from farm.comparison.pairs import LABELS, MEMORY, STEP_TIME, error_of
from farm.comparison.run import Result
from farm.comparison.sides import Environment, Recorded, Side
from warehouse.reading.pairing import Pair, Shift

_SHOWN = 5  # configurations, operators and modules of each table


def lines(result: Result) -> list[str]:
    """Return the terminal's lines: labels, statuses, largest differences, operators, modules, runs without partner."""
    comparison = result.comparison
    text = [f"{result.before.label} -> {result.after.label}: {headline(result)}", ""]
    heads = ("label", "pairs", "median", "p90", "largest", f"beyond {share(comparison.tolerance)}", "equal")
    text += table_lines(heads, [shift_row(shift) for shift in comparison.shifts])
    if comparison.statuses:
        text += ["", "configurations that failed, or ended otherwise:"]
        rows = [(s.before, s.after, f"{s.configurations:,}", s.error or "") for s in comparison.statuses]
        text += table_lines(("before", "after", "configurations", "error"), rows)
    for label, name in ((MEMORY, "peak memory"), (STEP_TIME, "step time")):
        largest = comparison.largest(label, _SHOWN)
        if largest:
            text += ["", f"largest differences of {name}:"]
            pair_heads = ("configuration", "family", "before", "after", "difference")
            text += table_lines(pair_heads, [pair_row(pair, label) for pair in largest])
    families = [family for family in comparison.families if family.largest][:_SHOWN]
    if families:
        text += ["", "by the operator families of the configurations' layers, medians:"]
        rows = [(f.name, f"{f.pairs:,}", percent(f.memory), percent(f.step_time)) for f in families]
        text += table_lines(("operator family", "pairs", "peak memory", "step time"), rows)
    text += ["", *_operator_lines(result)]
    for side, alone in zip((result.before, result.after), comparison.alone, strict=True):
        if alone:
            examples = ", ".join(alone[:3]) + (", ..." if len(alone) > 3 else "")
            text.append(f"without a partner: {len(alone):,} configurations of {side.label} ({examples})")
    for side, count in zip((result.before, result.after), comparison.unhashed, strict=True):
        if count:
            text.append(f"left out: {count:,} rows of {side.label} that name no configuration")
    return [*text, "", result.caveat]


def headline(result: Result) -> str:
    """Return the result as one sentence."""
    comparison = result.comparison
    if not comparison.pairs:
        return "no configuration ran on both sides"
    parts = [f"{len(comparison.pairs):,} {'pair' if len(comparison.pairs) == 1 else 'pairs'} of configurations"]
    for shift in comparison.shifts:
        if shift.label in (MEMORY, STEP_TIME):
            name = "peak memory" if shift.label == MEMORY else "step time"
            if shift.equal == shift.pairs:
                parts.append(f"{name} equal in all")
            else:
                parts.append(
                    f"{name} {percent(shift.median)} in the median, {shift.beyond:,} beyond "
                    f"{share(comparison.tolerance)}"
                )
    changed = sum(s.configurations for s in comparison.statuses if s.before != s.after)
    if changed:
        parts.append(f"{changed:,} ended otherwise")
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
    return tuple(_arrow(change.before[name], change.after[name]) for name in figures)


def _arrow(old: float, new: float) -> str:
    before, after = figure(old), figure(new)
    return before if before == after else f"{before} -> {after}"


def _operator_lines(result: Result) -> list[str]:
    operators = result.operators
    if operators is None:
        return [f"operators: not compared: {result.no_operators}"]
    text = [f"operators of one traced step of {operators.compared:,} configurations, priced on {operators.device}:"]
    if operators.failed:
        error = next(error for pair in operators.failed.values() for error in reversed(pair) if error)
        text.append(f"  {len(operators.failed):,} more cannot be traced on a side: {error}")
    if not operators.compared:
        return text
    columns = ("calls", "moved_mib", "ms", "peak_mib")
    for name, entries in (("operator", operators.operators), ("module", operators.modules)):
        changed = [change for change in entries if change.changed]
        if not changed:
            text.append(f"  no {name} differs ({len(entries):,} {name}s)")
            continue
        rows = [
            (change.name, f"{change.configurations:,}", *change_row(change, columns)) for change in changed[:_SHOWN]
        ]
        text += table_lines((name, "in", "calls", "moved MiB", "ms", "MiB at the peak"), rows)
        if len(changed) > _SHOWN:
            text.append(f"  {len(changed) - _SHOWN:,} more {name}s differ: see the page")
    dtypes = changed_dtypes(operators)
    if dtypes:
        text.append(
            "  operators by dtype: " + ", ".join(f"{name} {_arrow(*counts)}" for name, counts in dtypes.items())
        )
    return text


def changed_dtypes(operators: Operators) -> dict[str, tuple[float, float]]:
    """Return the operators before and after of each dtype where these differ."""
    return {name: counts for name, counts in operators.dtypes.items() if counts[0] != counts[1]}


def as_json(result: Result) -> str:
    """Return the whole comparison: the contents of table and page, and every pair."""
    comparison, operators = result.comparison, result.operators
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
            "statuses": [vars(status) for status in comparison.statuses],
            "operator_families": [vars(family) for family in comparison.families],
            "alone": dict(zip(("before", "after"), comparison.alone, strict=True)),
            "rows_without_configuration": dict(zip(("before", "after"), comparison.unhashed, strict=True)),
            "operators": None if operators is None else _operators_mapping(operators),
            "no_operators": result.no_operators,
            "pairs": [_pair_mapping(pair) for pair in comparison.pairs],
        },
        allow_nan=False,
        indent=1,
    )


def side_mapping(side: Side, versions: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a side as a mapping; `versions` are those of its runs."""
    about: dict[str, Any] = {
        "given": side.text,
        "versions": {name: list(releases) for name, releases in versions.items()},
    }
    if isinstance(side, Environment):
        return {**about, "python": str(side.python), "environment": dict(side.versions)}
    assert isinstance(side, Recorded)
    return {**about, "folder": str(side.folder.root), "snapshot": side.snapshot}


def _operators_mapping(operators: Operators) -> dict[str, Any]:
    return {
        **vars(operators),
        "operators": [vars(change) for change in operators.operators],
        "modules": [vars(change) for change in operators.modules],
    }


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
