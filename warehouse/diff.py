"""`python -m warehouse.diff A B`: changes of runs, labels, kernels and schema between two snapshots, or since one.

Start reading at `diff`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from conf.cli.command_line import command
from conf.cli.settings import Checked, data_key, format_key, key
from conf.errors import UsageError
from conf.plain_text import table_lines
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import NOW, find_snapshot
from warehouse.files.views import VIEWS
from warehouse.reading.connection import connect
from warehouse.reading.pairing import Shift, paired, shift_text, summed_up
from warehouse.reading.reader import WarehouseConnection
from warehouse.tables.disk_errors import disk_errors_named
from warehouse.tables.schema import ENVIRONMENT, LABELS, RUN_SCHEMA, TABLES

_WHERE = ("device_name", *ENVIRONMENT, "memory_fraction", "mig_profile", "mps")
_BY = ("family", "device_name", "status")
_KEY = ("config_hash", "family", "source", *_WHERE)
# What two rows have in common that time the same work on the same GPU model and software.
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
    status: str  # after, where there is an after
    runs: int


@dataclass(frozen=True, kw_only=True)
class SchemaChange:
    """Columns of a table that one side lacks, or that have another type there."""

    table: str
    added: tuple[str, ...]
    removed: tuple[str, ...]
    retyped: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Changes from `before` to `after`; counts are of the view `runs`."""

    before: str
    after: str
    rows_before: Mapping[str, int]  # of each view
    rows_after: Mapping[str, int]
    added: tuple[RunCount, ...]
    removed: tuple[RunCount, ...]
    changed: tuple[RunCount, ...]  # same run_id, other content
    changed_columns: Mapping[str, int]  # column -> runs in which it changed
    shifts: tuple[Shift, ...]  # of labels that were measured again, by family and device
    kernel_shifts: tuple[Shift, ...]  # of kernels that were timed again, by operator and device
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
        sides = [stack.enter_context(_opened(data, name)) for name in (before, after)]
        joined = stack.enter_context(contextlib.closing(duckdb.connect()))
        for name, side in zip(("before", "after"), sides, strict=True):
            joined.register(name, _runs(side))
        joined.execute(
            "CREATE TABLE pairs AS SELECT coalesce(before.run_id, after.run_id) AS run_id, "
            "before.run_id IS NOT NULL AS was, after.run_id IS NOT NULL AS is_there, "
            "before.digest IS NOT DISTINCT FROM after.digest AS same "
            "FROM before FULL JOIN after ON before.run_id = after.run_id"
        )
        rows_before, rows_after = map(_rows, sides)
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


def _opened(data: DataFolder, name: str) -> contextlib.closing[WarehouseConnection]:
    return contextlib.closing(connect(data, snapshot=None if name == NOW else name))


def _runs(connection: WarehouseConnection) -> pa.Table:
    columns = dict.fromkeys(("run_id", *_BY, *_KEY, *LABELS))
    whole = ", ".join(RUN_SCHEMA.names)
    return connection.sql(f"SELECT {', '.join(columns)}, hash({whole}) AS digest FROM runs").to_arrow_table()


def _rows(connection: WarehouseConnection) -> dict[str, int]:
    counts = ", ".join(f"(SELECT count(*) FROM {view})" for view in VIEWS)
    # All of it is fetched: a result that is left unfinished makes the connection refuse tables.
    (row_counts,) = connection.execute(f"SELECT {counts}").fetchall()
    return dict(zip(VIEWS, row_counts, strict=True))


def _counts(joined: duckdb.DuckDBPyConnection, side: str, which: str) -> tuple[RunCount, ...]:
    groups = joined.execute(
        f"SELECT {', '.join(_BY)}, count(*) FROM {side} JOIN pairs USING (run_id) WHERE {which} "
        "GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    return tuple(RunCount(family=f, device_name=d, status=s, runs=n) for f, d, s, n in groups)


def _changed_columns(joined: duckdb.DuckDBPyConnection, sides: Sequence[WarehouseConnection]) -> dict[str, int]:
    """Return how many runs of both sides differ in each column, the most frequent first."""
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
    """Compare runs of `after` that are new or changed with those of `before` of the same key."""
    measured = "(SELECT * FROM {} WHERE status = 'ok' AND config_hash IS NOT NULL)"
    again = "(SELECT * FROM {} SEMI JOIN (SELECT run_id FROM pairs WHERE NOT same) USING (run_id))"
    pairs = paired(
        joined, measured.format("before"), again.format(measured.format("after")), _KEY, {name: name for name in LABELS}
    )
    return tuple(shift for label in LABELS for shift in summed_up(pairs, label, tolerance, ("family", "device_name")))


def _kernel_shifts(
    joined: duckdb.DuckDBPyConnection, sides: Sequence[WarehouseConnection], tolerance: float
) -> tuple[Shift, ...]:
    """Compare rows of `kernels` that are new in `after` with those of `before` that time the same kernel."""
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
    for table in sorted({*before, *after}):
        old, new = before.get(table, {}), after.get(table, {})
        change = SchemaChange(
            table=table,
            added=tuple(name for name in new if name not in old),
            removed=tuple(name for name in old if name not in new),
            retyped=tuple(
                f"{name}: {old[name]} -> {kind}" for name, kind in new.items() if old.get(name, kind) != kind
            ),
        )
        if change.added or change.removed or change.retyped:
            yield change


def lines(difference: Difference) -> list[str]:
    """Return the difference as tables."""
    text_lines = [f"from {difference.before} to {difference.after}"]
    for view in difference.rows_before:
        old, new = difference.rows_before[view], difference.rows_after[view]
        text_lines.append(f"  {view}: {old:,} -> {new:,} ({new - old:+,})")
    for change_kind in ("added", "removed", "changed"):
        counts: tuple[RunCount, ...] = getattr(difference, change_kind)
        text_lines.append(f"runs {change_kind}: {sum(count.runs for count in counts):,}")
        text_lines += table_lines(
            ("family", "device", "status", "runs"),
            [(c.family, c.device_name or "-", c.status, f"{c.runs:,}") for c in counts],
        )
    if difference.changed_columns:
        text_lines.append(
            "changed in: " + ", ".join(f"{name} ({n:,} runs)" for name, n in difference.changed_columns.items())
        )
    text_lines.append(
        "labels of the same configuration and environment, measured again:" + ("" if difference.shifts else " none")
    )
    beyond = f"beyond {difference.tolerance:g}"
    text_lines += table_lines(
        ("label", "family", "device", "configurations", "median", "largest", beyond),
        [(shift.label, *_shift_cells(shift)) for shift in difference.shifts],
    )
    text_lines.append("kernels, timed again:" + ("" if difference.kernel_shifts else " none"))
    text_lines += table_lines(
        ("operator", "device", "kernels", "median", "largest", beyond),
        [_shift_cells(shift) for shift in difference.kernel_shifts],
    )
    for change in difference.schema:
        changed = {kind: getattr(change, kind) for kind in ("added", "removed", "retyped")}
        parts = [f"{kind} {', '.join(columns)}" for kind, columns in changed.items() if columns]
        text_lines.append(f"schema of {change.table}: {'; '.join(parts)}")
    return text_lines


def _shift_cells(shift: Shift) -> tuple[str, ...]:
    """Return the group, the number of pairs, the median and the largest shift, and how many are beyond."""
    shown = (shift_text(shift.label, value) for value in (shift.median, shift.largest))
    return *(name or "-" for name in shift.group.values()), f"{shift.pairs:,}", *shown, f"{shift.beyond:,}"


def named_arguments(argv: Sequence[str]) -> list[str]:
    """Turn `A B` into `before=A after=B`; keep arguments with `=` or a leading `-`. A third name is a `UsageError`."""
    keys, arguments = iter(("before", "after")), []
    for item in argv:
        if re.match(r"-|[+~]*[\w.@/]+=", item):
            arguments.append(item)
            continue
        key = next(keys, None)
        if key is None:
            raise UsageError(f"two snapshots are compared, got a third name {item!r}")
        arguments.append(f"{key}={item}")
    return arguments


@dataclass(frozen=True, kw_only=True)
class DiffSettings(Checked):
    """Which two sides to compare.

      python -m warehouse.diff 2026-11-19 2026-11-20
      python -m warehouse.diff 2026-11-20 now
      python -m warehouse.diff 2026-11-20 format=json

    A label has moved where the same configuration in the same environment (device, torch, CUDA, cuDNN, driver,
    allocator) was measured again: medians, relative to before; for ratios such as smact, the difference. A
    kernel's time has moved where it ran again on inputs of the same shapes, on the same GPU model and software.
    """

    before: str = key(help="snapshot that is compared; the first name of the command line")
    after: str = key("now", "snapshot that it is compared with, or now for the folder as it is; the second name")
    tolerance: float = key(0.05, "shift above which a configuration or kernel counts as beyond", "number >= 0")
    format: str = format_key()
    data: str | None = data_key()


def entry(settings: DiffSettings) -> int:
    """Compare the two sides and print the difference."""
    with disk_errors_named():
        difference = diff(
            DataFolder.resolve(settings.data), settings.before, settings.after, tolerance=settings.tolerance
        )
    print(difference.as_json() if settings.format == "json" else "\n".join(lines(difference)))
    return 0


if __name__ == "__main__":
    command("diff", entry, rewrite=named_arguments)
