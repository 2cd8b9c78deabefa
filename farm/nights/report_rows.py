"""Counts rows for a cycle's report with DuckDB: rows by kind, coverage, failures, runs in doubt.

Start reading at `read_rows`; a heat map is drawn from a `Grid`.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb

from conf.plain_text import OUTPUT_STARTS
from conf.reports.charts import Grid
from conf.reports.page_text import short
from featurize.device.device_spec import same_device
from featurize.families import family_names
from learn.rows.data import LEVELS, UTILIZATION_EDGES, get_target, utilization_bins
from warehouse.reading.connection import WarehouseConnection
from warehouse.reading.coverage import COUNTED, USABLE, Execute, filled_grid, memory_grid, place_of_family
from warehouse.tables.sql_text import sql_text

if TYPE_CHECKING:
    import pyarrow

FAILED = ("crashed", "timeout", "invalid")
GROUPS_SHOWN = 12  # groups of failures; the rest is counted
LOG_CHARACTERS = 4000
SAID_CHARACTERS = 300
EXAMPLES = 3
DOUBTS_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class RowCount:
    """Runs of one kind: in total, and those that finished in this cycle."""

    family: str
    device_name: str | None
    source: str
    status: str
    rows: int
    tonight: int


@dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """Runs of this cycle with the same status, error type and message, apart from figures in it."""

    status: str
    error_type: str | None
    said: str
    runs: int
    families: tuple[str, ...]
    run_ids: tuple[str, ...]  # a few
    log: str  # the end of one's message, traceback and output


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """Executions of this cycle whose labels are not trusted, by reason."""

    reason: str
    runs: int
    example: str  # run_id: what was seen


@dataclass(frozen=True, kw_only=True)
class ReportRows:
    """`device_names`, `source`: what coverage is of, empty where there is no row at all."""

    counts: tuple[RowCount, ...]
    device_names: tuple[str, ...]
    source: str
    memory: Grid
    levels: tuple[Grid, ...]
    regions: tuple[Grid, ...]  # one a family: batch size by parameters
    no_place: int  # usable rows in no region, as they lack batch size or parameters
    unusable: int
    absent_families: tuple[str, ...]
    failures: tuple[FailureGroup, ...]
    failed_tonight: int
    failed_groups: int
    failed_before: int
    doubts: tuple[Doubt, ...]
    doubted_tonight: int

    @property
    def sources_tonight(self) -> frozenset[str]:
        """Return the label sources of the runs that finished in this cycle."""
        return frozenset(count.source for count in self.counts if count.tonight)


def read_rows(
    connection: WarehouseConnection,
    since: datetime.datetime,
    device_name: str | None = None,
    source: str | None = None,
) -> ReportRows:
    """Read a report's facts about rows. `since`: the cycle's start; runs that finished later are tonight's.

    Coverage is of the device and source named, else of those with the most rows tonight, or at all.
    """
    began = since.astimezone(datetime.UTC).replace(tzinfo=None) if since.tzinfo else since
    tonight = f"coalesce(finished_at >= TIMESTAMP {sql_text(f'{began:%Y-%m-%d %H:%M:%S.%f}')}, false)"
    with duckdb.connect() as counted:
        counted.execute("SET threads = 1")
        counted.register("source_rows", _columns(connection, tonight))
        counted.execute("CREATE TABLE rows AS SELECT * FROM source_rows")
        counted.unregister("source_rows")
        return _read(connection, counted, tonight, device_name, source)


def _columns(connection: WarehouseConnection, tonight: str) -> pyarrow.Table:
    """Return the columns needed for counting, of every run, as Arrow. Files are read once, without error texts."""
    return connection.sql(
        f"""SELECT family, device_name, source, status, {USABLE} AS usable, {tonight} AS tonight, batch_size,
            parameters, peak_memory_mib, smact, smocc, drama,
            CASE WHEN device_uuid IS NOT NULL THEN device_memory_mib END AS device_memory_mib FROM runs"""
    ).to_arrow_table()


def _read(
    connection: WarehouseConnection,
    counted: duckdb.DuckDBPyConnection,
    tonight: str,
    device_name: str | None,
    source: str | None,
) -> ReportRows:
    counts = tuple(
        RowCount(family=f, device_name=d, source=s, status=status, rows=n, tonight=new)
        for f, d, s, status, n, new in counted.execute(
            "SELECT family, device_name, source, status, count(*), count(*) FILTER (tonight) FROM rows "
            "GROUP BY ALL ORDER BY ALL"
        ).fetchall()
    )
    names, source = _device(counts, device_name, source)
    counted.execute(
        f"CREATE VIEW here AS SELECT * FROM rows WHERE device_name IN ({', '.join(map(sql_text, names)) or 'NULL'}) "
        f"AND source = {sql_text(source)}"
    )
    ((unusable, no_place),) = counted.execute(
        "SELECT count(*) FILTER (NOT usable), count(*) FILTER (usable AND NOT coalesce(batch_size > 0 AND "
        "parameters > 0, false)) FROM here"
    ).fetchall()
    families = [name for (name,) in counted.execute("SELECT DISTINCT family FROM here ORDER BY family").fetchall()]
    failed = [count for count in counts if count.status in FAILED]
    failed_tonight = sum(count.tonight for count in failed)
    groups, kinds = _failure_groups(connection, tonight) if failed_tonight else ((), 0)
    doubts, doubted = _doubts(connection, tonight)

    def execute(sql: str) -> Sequence[tuple[Any, ...]]:
        return counted.execute(sql).fetchall()

    return ReportRows(
        counts=counts,
        device_names=names,
        source=source,
        memory=memory_grid(execute, "here", families),
        levels=tuple(_levels(execute, families, name) for name in UTILIZATION_EDGES),
        regions=tuple(filter(None, (_region(counted, family) for family in families))),
        no_place=no_place,
        unusable=unusable,
        absent_families=tuple(name for name in family_names() if name not in families),
        failures=groups,
        failed_tonight=failed_tonight,
        failed_groups=kinds,
        failed_before=sum(count.rows for count in failed) - failed_tonight,
        doubts=doubts,
        doubted_tonight=doubted,
    )


def _device(counts: Sequence[RowCount], device_name: str | None, source: str | None) -> tuple[tuple[str, ...], str]:
    """Return every spelling of the device, and the source."""
    of_source = [count for count in counts if count.device_name and (source is None or count.source == source)]
    if device_name is None:
        sums: dict[tuple[str, str], list[int]] = {}
        for count in of_source:
            of_device = sums.setdefault((count.device_name or "", count.source), [0, 0])
            of_device[0] += count.tonight
            of_device[1] += count.rows
        if not sums:
            return (), source or ""
        device_name, source = max(sorted(sums), key=sums.__getitem__)
    spelled = {
        count.device_name for count in counts if count.device_name and same_device(count.device_name, device_name)
    }
    if source is None:
        here = [count for count in of_source if count.device_name in spelled]
        source = max(here, key=lambda count: (count.tonight, count.rows)).source if here else ""
    return tuple(sorted(spelled | {device_name})), source


def _levels(execute: Execute, families: Sequence[str], label: str) -> Grid:
    """Return the grid of published low / medium / high levels of each family."""
    edges = utilization_bins(get_target(label)).edges_of(families)
    cases = " ".join(
        f"WHEN {sql_text(family)} THEN ({label} >= {low!r})::INT + ({label} >= {high!r})::INT"
        for family, (low, high) in zip(families, edges.tolist(), strict=True)
    )
    level = f"CASE family {cases} END" if cases else "0"
    where = f"usable AND {label} IS NOT NULL"
    query = f"SELECT {place_of_family(families)}, {level}, {COUNTED} FROM here WHERE {where} GROUP BY ALL"
    return filled_grid(execute, label, families, LEVELS, query)


def _region(counted: duckdb.DuckDBPyConnection, family: str) -> Grid | None:
    """Return the grid of batch size (by doubling, largest first) and parameters (two cells a decade)."""
    batch, size = "floor(log2(batch_size) + 1e-9)::INT", "floor(2 * log10(parameters) + 1e-9)::INT"
    counts = counted.execute(
        f"SELECT {batch}, {size}, {COUNTED} FROM here "
        "WHERE usable AND family = ? AND batch_size > 0 AND parameters > 0 GROUP BY ALL",
        [family],
    ).fetchall()
    if not counts:
        return None
    batches = range(max(row[0] for row in counts), min(row[0] for row in counts) - 1, -1)
    sizes = range(min(row[1] for row in counts), max(row[1] for row in counts) + 1)
    cells = {(row[0], row[1]): (row[2], row[3]) for row in counts}
    return Grid(
        name=family,
        rows=tuple(str(2**k) if k == 0 else f"{2**k}–{2 ** (k + 1) - 1}" for k in batches),
        columns=tuple(short(10 ** (k / 2)) for k in sizes),
        counts=tuple(tuple(cells.get((b, s), (0, 0))[0] for s in sizes) for b in batches),
        tonight=tuple(tuple(cells.get((b, s), (0, 0))[1] for s in sizes) for b in batches),
    )


def _failure_groups(connection: WarehouseConnection, tonight: str) -> tuple[tuple[FailureGroup, ...], int]:
    """Return the most frequent kinds of tonight's failures, and the number of kinds."""
    failed = f"status IN ({', '.join(map(sql_text, FAILED))})"
    # A traceback has its message in the last line that is not indented, other texts in the first.
    groups_found = connection.execute(
        f"""WITH failed AS (
            SELECT run_id, family, status, error_type, coalesce(error, '') AS error,
                trim(split_part(left(coalesce(error, ''), 100000), {sql_text(OUTPUT_STARTS)}, 1), {sql_text(chr(10))})
                AS message
            FROM runs WHERE {failed} AND {tonight}
        ), sentences AS (
            SELECT *, left(CASE WHEN starts_with(message, 'Traceback')
                THEN coalesce(regexp_extract_all(right(message, 20000), '(?m)^[^\\s].*$')[-1], '')
                ELSE split_part(message, {sql_text(chr(10))}, 1) END, {SAID_CHARACTERS}) AS said
            FROM failed
        )
        SELECT status, error_type, min(said), count(*), list(DISTINCT family ORDER BY family),
            list(run_id ORDER BY run_id)[:{EXAMPLES}], right(arg_min(error, run_id), {LOG_CHARACTERS}),
            count(*) OVER ()
        FROM sentences GROUP BY status, error_type, regexp_replace(said, '0x[0-9a-f]+|[0-9]+', '#', 'g')
        ORDER BY count(*) DESC, status, min(run_id) LIMIT {GROUPS_SHOWN}"""
    ).fetchall()
    groups = tuple(
        FailureGroup(
            status=status,
            error_type=kind,
            said=sentence or "no message",
            runs=runs,
            families=tuple(families),
            run_ids=tuple(ids),
            log=log,
        )
        for status, kind, sentence, runs, families, ids, log, _ in groups_found
    )
    return groups, groups_found[0][-1] if groups_found else 0


def _doubts(connection: WarehouseConnection, tonight: str) -> tuple[tuple[Doubt, ...], int]:
    """Return tonight's doubts, including attempts after which a task ran again, and the number of reasons."""
    rows = connection.execute(
        f"""WITH doubted AS (
            SELECT run_id,
                CASE WHEN json_valid(quality_reasons) THEN quality_reasons::JSON ELSE '{{}}'::JSON END AS reasons
            FROM attempts WHERE quality = 'untrusted' AND {tonight}
        ), each AS (
            SELECT run_id, reasons,
                unnest(CASE WHEN len(json_keys(reasons)) > 0 THEN json_keys(reasons) ELSE ['no reason given'] END)
                AS reason
            FROM doubted
        )
        SELECT reason, count(*), min(run_id),
            left(arg_min(json_extract_string(reasons, '$."' || replace(reason, '"', '') || '"'), run_id), 300),
            (SELECT count(*) FROM doubted)
        FROM each GROUP BY reason ORDER BY count(*) DESC, reason LIMIT {DOUBTS_SHOWN}"""
    ).fetchall()
    doubts = tuple(
        Doubt(reason=reason, runs=runs, example=f"{run_id}: {text}" if text else run_id)
        for reason, runs, run_id, text, _ in rows
    )
    return doubts, rows[0][-1] if rows else 0
