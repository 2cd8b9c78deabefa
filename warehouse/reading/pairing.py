"""Pairs equal measurements of two sets of rows, summarizes their differences, and compares snapshots.

Start reading at `paired`, which compares snapshots, kernels and releases, and measured runs with their estimates.
Canaries use `shift_of`. `diff` returns the changes of runs, labels, kernels and schema between two snapshots.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from conf.plain_text import count_of
from conf.reports.blocks import Block, Callout, Heading, Lead, table
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import NOW, find_snapshot
from warehouse.files.views import ROW_COUNTS, VIEWS
from warehouse.files.writer import RUN_RATIOS
from warehouse.reading.connection import WarehouseConnection, connect
from warehouse.tables.schema import ENVIRONMENT, LABELS, RUN_SCHEMA, TABLES

_EXAMPLES = 5  # keys of the largest shifts
_WHERE = ("device_name", *ENVIRONMENT, "memory_fraction", "mig_profile", "mps")
_BY = ("family", "device_name", "status")
_KEY = ("config_hash", "family", "source", *_WHERE)


def shift_of(label: str, before: float | None, after: float | None) -> float | None:
    """Return the difference relative to `before`; for ratios (`smact`, ...) the difference itself.

    None if a side has no figure, or `before` is 0.
    """
    if before is None or after is None:
        return None
    if label in RUN_RATIOS:
        return after - before
    return (after - before) / before if before else None


def shift_text(label: str, shift: float) -> str:
    """Return a shift as text: ratios with three digits, others in percent."""
    return f"{shift:+.3f}" if label in RUN_RATIOS else f"{shift:+.1%}"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Rows of both sides with the same key: the median of each label, and further columns of a side.

    before, after  empty if only the other side has the key
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

    group   column -> value that the pairs have in common
    beyond  pairs whose difference exceeds the tolerance; equal: pairs with the same value
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
    examples: tuple[str, ...]  # values of the key's first column, the largest differences first

    def to_mapping(self) -> dict[str, Any]:
        """Return the shift as a JSON-compatible mapping, with the group's columns at the top level."""
        values = dict(vars(self))
        return {"label": values.pop("label"), **values.pop("group"), **values}


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
        before, after: SQL after FROM for each side.
        key: Columns that identify equal measurements.
        labels: Name -> SQL of a row's value; medians over a key's rows are compared.
        about: Name -> SQL aggregate of further values of a key on a side.
        alone: Also return keys that only one side has.
    """
    columns = {name: f"median({sql})" for name, sql in labels.items()} | dict(about or {})
    shown, keys = ", ".join(f"{sql} AS {name}" for name, sql in columns.items()), ", ".join(key)
    side = f"(SELECT {keys}, true AS present, {shown} FROM {{}} GROUP BY {keys})"
    matched = " AND ".join(f"old.{name} IS NOT DISTINCT FROM new.{name}" for name in key)
    fields = [f"coalesce(old.{name}, new.{name})" for name in key]
    fields += [f"{when}.{name}" for when in ("old", "new") for name in ("present", *columns)]
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
        pairs: Pairs from `paired`.
        label: One of their labels.
        tolerance: Largest difference that does not count as beyond.
        by: Columns of the key to group by; without any there is at most one group.
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


# Key of rows that time the same work on the same GPU model and software.
_KERNEL_KEY = (
    "operator",
    "source",
    "device_name",
    "torch_version",
    "cuda_version",
    "cudnn_version",
    "phase",
    "dims",
    "dtype",
    "kernel",
    "timing",
)


@dataclass(frozen=True, kw_only=True)
class RunCount:
    """Runs of one kind that were added, removed or changed."""

    family: str
    device_name: str | None
    status: str  # of the later side, if it has the run
    runs: int


@dataclass(frozen=True, kw_only=True)
class SchemaChange:
    """Columns of a table that one side lacks, or whose types differ."""

    table: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    retyped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Changes from `before` to `after`; counts are of the view `runs`."""

    before: str
    after: str
    rows_before: Mapping[str, int]  # view -> rows
    rows_after: Mapping[str, int]
    added: tuple[RunCount, ...]
    removed: tuple[RunCount, ...]
    changed: tuple[RunCount, ...]  # same run_id, other content
    changed_columns: Mapping[str, int]  # column -> runs in which it changed
    shifts: tuple[Shift, ...]  # shifts of labels that were measured again, by family and device
    kernel_shifts: tuple[Shift, ...]  # shifts of kernels that were timed again, by operator and device
    tolerance: float
    schema: tuple[SchemaChange, ...]

    def as_json(self) -> str:
        values = dataclasses.asdict(self)
        for name in ("shifts", "kernel_shifts"):
            values[name] = [shift.to_mapping() for shift in getattr(self, name)]
        return json.dumps(values, indent=1)


def diff(data: DataFolder, before: str, after: str = NOW, *, tolerance: float = 0.05) -> Difference:
    """Compare two snapshots of the folder; `now` is the folder as it is.

    `tolerance` is the largest shift of a label that is not counted as beyond. Raises `UsageError` for a snapshot that
    does not exist or is damaged.
    """
    data.open()
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(connect(data, snapshot=None if name == NOW else name)) for name in (before, after)]
        joined = stack.enter_context(duckdb.connect())
        for name, side in zip(("before", "after"), sides, strict=True):
            joined.register(name, _runs(side))
        joined.execute(
            "CREATE TABLE pairs AS SELECT coalesce(before.run_id, after.run_id) AS run_id, "
            "before.run_id IS NOT NULL AS was, after.run_id IS NOT NULL AS is_there, "
            "before.digest IS NOT DISTINCT FROM after.digest AS same "
            "FROM before FULL JOIN after ON before.run_id = after.run_id"
        )
        rows_before, rows_after = (
            dict(zip(VIEWS, *side.execute(ROW_COUNTS).fetchall(), strict=True)) for side in sides
        )
        return Difference(
            before=before,
            after=after,
            rows_before=rows_before,
            rows_after=rows_after,
            added=_counts(joined, "after", "NOT was"),
            removed=_counts(joined, "before", "NOT is_there"),
            changed=_counts(joined, "after", "was AND is_there AND NOT same"),
            changed_columns=_changed_columns(joined, sides),
            shifts=_label_shifts(joined, tolerance),
            kernel_shifts=_kernel_shifts(joined, sides, tolerance),
            tolerance=tolerance,
            schema=tuple(_schema_changes(*(_columns(data, name) for name in (before, after)))),
        )


def _runs(connection: WarehouseConnection) -> pa.Table:
    columns = dict.fromkeys(("run_id", *_BY, *_KEY, *LABELS))
    all_columns = ", ".join(RUN_SCHEMA.names)
    return connection.sql(f"SELECT {', '.join(columns)}, hash({all_columns}) AS digest FROM runs").to_arrow_table()


def _counts(joined: duckdb.DuckDBPyConnection, side: str, which: str) -> tuple[RunCount, ...]:
    groups = joined.execute(
        f"SELECT {', '.join(_BY)}, count(*) FROM {side} JOIN pairs USING (run_id) WHERE {which} "
        "GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    return tuple(RunCount(family=f, device_name=d, status=s, runs=n) for f, d, s, n in groups)


def _changed_columns(joined: duckdb.DuckDBPyConnection, sides: Sequence[WarehouseConnection]) -> dict[str, int]:
    """Return column -> number of common runs in which it differs, the most frequent first."""
    ids = joined.sql("SELECT run_id FROM pairs WHERE was AND is_there AND NOT same").to_arrow_table()
    if not ids.num_rows:
        return {}
    for name, side in zip(("old", "new"), sides, strict=True):
        side.register("wanted", ids)
        changed = f"SELECT {', '.join(RUN_SCHEMA.names)} FROM runs JOIN wanted USING (run_id)"
        joined.register(name, side.sql(changed).to_arrow_table())
        side.unregister("wanted")
    counts = ", ".join(f"count(*) FILTER (old.{name} IS DISTINCT FROM new.{name})" for name in RUN_SCHEMA.names)
    (runs,) = joined.execute(f"SELECT {counts} FROM old JOIN new USING (run_id)").fetchall()
    return dict((+Counter(dict(zip(RUN_SCHEMA.names, runs, strict=True)))).most_common())


def _label_shifts(joined: duckdb.DuckDBPyConnection, tolerance: float) -> tuple[Shift, ...]:
    """Compare new or changed runs of `after` with runs of `before` that have the same key."""
    measured = "(SELECT * FROM {} WHERE status = 'ok' AND config_hash IS NOT NULL)"
    again = "(SELECT * FROM {} SEMI JOIN (SELECT run_id FROM pairs WHERE NOT same) USING (run_id))"
    pairs = paired(
        joined, measured.format("before"), again.format(measured.format("after")), _KEY, {name: name for name in LABELS}
    )
    return tuple(shift for label in LABELS for shift in summed_up(pairs, label, tolerance, ("family", "device_name")))


def _kernel_shifts(
    joined: duckdb.DuckDBPyConnection, sides: Sequence[WarehouseConnection], tolerance: float
) -> tuple[Shift, ...]:
    """Compare new rows of `kernels` in `after` with rows of `before` that time the same kernel."""
    columns = ", ".join(("kernel_row", "duration_us", *_KERNEL_KEY))
    for name, side in zip(("kernels_before", "kernels_after"), sides, strict=True):
        joined.register(name, side.sql(f"SELECT {columns} FROM kernels WHERE duration_us > 0").to_arrow_table())
    new = "(FROM kernels_after ANTI JOIN kernels_before USING (kernel_row))"
    pairs = paired(joined, "kernels_before", new, _KERNEL_KEY, {"duration_us": "duration_us"})
    return tuple(summed_up(pairs, "duration_us", tolerance, ("operator", "device_name")))


def _columns(data: DataFolder, name: str) -> Mapping[str, Mapping[str, str]]:
    if name != NOW:
        return find_snapshot(data, name).columns
    return {table: {field.name: str(field.type) for field in schema} for table, schema in TABLES.items()}


def _schema_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[SchemaChange]:
    for name in sorted({*before, *after}):
        old, new = before.get(name, {}), after.get(name, {})
        change = SchemaChange(
            table=name,
            added=tuple(column for column in new if column not in old),
            removed=tuple(column for column in old if column not in new),
            retyped=tuple(
                f"{column}: {old[column]} -> {kind}" for column, kind in new.items() if old.get(column, kind) != kind
            ),
        )
        if change.added or change.removed or change.retyped:
            yield change


def difference_blocks(difference: Difference) -> list[Block]:
    """Return the blocks that the terminal shows of the difference."""
    rows = [
        (view, difference.rows_before.get(view, 0), now, f"{now - difference.rows_before.get(view, 0):+,}")
        for view, now in difference.rows_after.items()
    ]
    after = "the folder as it is" if difference.after == NOW else difference.after
    groups = {"added": difference.added, "removed": difference.removed, "changed": difference.changed}
    counts = [
        (name, count.family, count.device_name, count.status, count.runs)
        for name, of_group in groups.items()
        for count in of_group
    ]
    summary = ", ".join(f"{name} {sum(count.runs for count in of_group):,}" for name, of_group in groups.items())
    blocks: list[Block] = [
        Lead(f"From {difference.before} to {after}."),
        table(("view", "rows before", "rows now", "change"), rows),
        Lead(f"Runs: {summary}."),
    ]
    if counts:
        blocks.append(table(("", "family", "device", "status", "runs"), counts, words=4))
    if difference.changed_columns:
        named = ", ".join(f"{name} ({count_of(n, 'run')})" for name, n in difference.changed_columns.items())
        blocks.append(Lead(f"Changed in: {named}."))
    title = "Labels of the same configuration and environment"
    blocks += _shift_blocks(title, ("family", "device", "configurations"), difference.shifts)
    blocks += _shift_blocks("Kernels", ("operator", "device", "kernels"), difference.kernel_shifts)
    for change in difference.schema:
        kinds = {kind: getattr(change, kind) for kind in ("added", "removed", "retyped")}
        changes = "; ".join(f"{kind}: {', '.join(columns)}" for kind, columns in kinds.items() if columns)
        blocks.append(Callout(f"Columns of {change.table}: {changes}"))
    return blocks


def _shift_blocks(title: str, heads: Sequence[str], shifts: Sequence[Shift]) -> Iterator[Block]:
    """Yield the shifts of repeated measurements; those with a pair beyond the tolerance are marked."""
    if not shifts:
        yield Lead(f"{title}, measured again: none.")
        return
    shown = sorted(shifts, key=lambda shift: -abs(shift.largest))
    rows = [
        (
            shift.label,
            *shift.group.values(),
            shift.pairs,
            shift.beyond,
            shift_text(shift.label, shift.median),
            shift_text(shift.label, shift.largest),
            ", ".join(shift.examples),
        )
        for shift in shown
    ]
    beyond = [place for place, shift in enumerate(shown) if shift.beyond]
    yield Heading(f"{title}, measured again")
    yield table(("label", *heads, "moved", "median", "largest", "*the furthest"), rows, words=3, marked=beyond)
