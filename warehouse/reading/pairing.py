"""Pairs what two sets of rows measured alike, and sums up by how much it differs.

Start reading at `paired`. Snapshots, kernels and releases are compared with it, and measured runs with their estimates;
canaries take `shift_of`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from warehouse.files.writer import RUN_RATIOS

_EXAMPLES = 5  # keys of the largest shifts


def shift_of(label: str, before: float | None, after: float | None) -> float | None:
    """Return the difference relative to `before`, of ratios (`smact`, ...) the difference itself.

    None where a side has no figure, or there is nothing to be relative to.
    """
    if before is None or after is None:
        return None
    if label in RUN_RATIOS:
        return after - before
    return (after - before) / before if before else None


def shift_text(label: str, shift: float) -> str:
    """Return a shift as text: of ratios with three digits, of others in percent."""
    return f"{shift:+.3f}" if label in RUN_RATIOS else f"{shift:+.1%}"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Rows of both sides with the same key: the median of each label, and further columns of a side.

    before, after  empty where only the other side has the key
    """

    key: Mapping[str, Any]
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    def shift(self, label: str) -> float | None:
        """Return the difference as in `shift_of`."""
        return shift_of(label, self.before.get(label), self.after.get(label))


@dataclass(frozen=True, kw_only=True)
class Shift:
    """Differences of one label over pairs, as in `shift_of`. `median` and `largest` are signed, `median_size` and `p90`
    are of their absolute values.

    group   what the pairs have in common: column -> value
    beyond  pairs whose difference is beyond the tolerance; equal: those with the very same value
    """

    label: str
    group: Mapping[str, Any]
    pairs: int
    median: float
    median_size: float
    p90: float
    largest: float
    beyond: int
    equal: int
    examples: tuple[str, ...]  # of the first column of the key, the largest differences first

    def to_mapping(self) -> dict[str, Any]:
        """Return the shift as JSON has it, the group's columns beside the others."""
        own = dict(vars(self))
        return {"label": own.pop("label"), **own.pop("group"), **own}


def paired(
    connection: duckdb.DuckDBPyConnection,
    before: str,
    after: str,
    key: Sequence[str],
    labels: Mapping[str, str],
    about: Mapping[str, str] | None = None,
    *,
    alone: bool = False,
) -> list[Pair]:
    """Return a pair for each key that both sides have; NULL equals NULL.

    Args:
        connection: What the queries run on.
        before, after: What stands behind FROM for each side.
        key: Columns that rows have in common which measured the same.
        labels: Name -> SQL of the value of a row; the median of a key's rows is compared.
        about: Name -> SQL of what else a side has of a key, as an aggregate.
        alone: Return keys of one side alone too.
    """
    columns = {name: f"median({sql})" for name, sql in labels.items()} | dict(about or {})
    shown, keys = ", ".join(f"{sql} AS {name}" for name, sql in columns.items()), ", ".join(key)
    side = f"(SELECT {keys}, true AS present, {shown} FROM {{}} GROUP BY {keys})"
    matched = " AND ".join(f"old.{name} IS NOT DISTINCT FROM new.{name}" for name in key)
    fields = [f"coalesce(old.{name}, new.{name})" for name in key]
    fields += [f"{one}.{name}" for one in ("old", "new") for name in ("present", *columns)]
    rows = connection.execute(
        f"SELECT {', '.join(fields)} FROM {side.format(before)} AS old {'FULL ' if alone else ''}JOIN "
        f"{side.format(after)} AS new ON {matched} ORDER BY ALL"
    ).fetchall()
    pairs = []
    for row in rows:
        old, new = row[len(key) : -len(columns) - 1], row[-len(columns) - 1 :]
        values = [dict(zip(columns, of_side, strict=True)) if present else {} for present, *of_side in (old, new)]
        pairs.append(Pair(key=dict(zip(key, row, strict=False)), before=values[0], after=values[1]))
    return pairs


def summed_up(pairs: Iterable[Pair], label: str, tolerance: float, by: Sequence[str] = ()) -> list[Shift]:
    """Return the differences of a label for each group of the pairs that have it.

    Args:
        pairs: As of `paired`.
        label: One of theirs.
        tolerance: Largest difference that does not count as beyond.
        by: Columns of the key by which pairs are grouped; without any there is one group at most.
    """
    groups: dict[tuple[Any, ...], list[tuple[float, str]]] = {}
    for pair in pairs:
        if (shift := pair.shift(label)) is not None:
            names = tuple(pair.key[name] for name in by)
            groups.setdefault(names, []).append((shift, str(next(iter(pair.key.values())))))
    return [
        _summed_up(label, dict(zip(by, names, strict=True)), groups[names], tolerance)
        for names in sorted(groups, key=str)
    ]


def _summed_up(label: str, group: Mapping[str, Any], shifts: Sequence[tuple[float, str]], tolerance: float) -> Shift:
    largest_first = sorted(shifts, key=lambda shift: (-abs(shift[0]), shift[1]))
    sizes = [abs(shift) for shift, _ in reversed(largest_first)]
    return Shift(
        label=label,
        group=group,
        pairs=len(sizes),
        median=statistics.median(shift for shift, _ in shifts),
        median_size=statistics.median(sizes),
        p90=sizes[-(-9 * len(sizes) // 10) - 1],
        largest=largest_first[0][0],
        beyond=sum(size > tolerance for size in sizes),
        equal=sum(size == 0.0 for size in sizes),
        examples=tuple(name for _, name in largest_first[:_EXAMPLES]),
    )
