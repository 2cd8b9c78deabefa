"""How much faster a grouped question is through the warehouse than from CSV with pandas, on synthetic rows.

Start reading at `run`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from timing import seconds_of, timed

import warehouse
from warehouse.files.compaction import ROW_GROUP_ROWS
from warehouse.files.counting import Listing, listing_file, new_merged_name
from warehouse.files.folder import COMPRESSION, DataFolder
from warehouse.tables.schema import RUN_SCHEMA, SCHEMA_VERSION, STATUSES, TELEMETRY_SCHEMA

FAMILIES = ("mlp", "cnn", "transformer")
FILE_ROWS = 1_000_000  # as compaction's target_rows
QUERY = """
    WITH outcome AS (
        SELECT family, status, count(*) AS runs, avg(peak_memory_mib) AS peak_memory_mib
        FROM runs GROUP BY family, status
    ), activity AS (
        SELECT family, avg(smact) AS smact FROM telemetry WHERE phase = 'window' GROUP BY family
    )
    SELECT outcome.*, activity.smact FROM outcome JOIN activity USING (family) ORDER BY family, status
"""


def run(rows_runs: int = 1_000_000, rows_telemetry: int = 20_000_000, repeats: int = 5) -> dict:
    """Write synthetic rows as the warehouse and as CSV, ask both the same, and return seconds and their ratio.

    Raises `AssertionError` if the answers differ. Takes some 10 GB of temporary disk at full size, for minutes.
    """
    with tempfile.TemporaryDirectory(prefix="bench-query-") as temporary:
        folder = DataFolder.resolve(f"{temporary}/data").create()
        runs_csv, telemetry_csv = Path(temporary, "runs.csv"), Path(temporary, "telemetry.csv")
        _write(folder, "runs", synthetic_runs(rows_runs), runs_csv)
        _write(folder, "telemetry", synthetic_telemetry(rows_runs, rows_telemetry), telemetry_csv)
        bytes_csv = runs_csv.stat().st_size + telemetry_csv.stat().st_size
        bytes_parquet = sum(path.stat().st_size for path in folder.root.rglob("*.parquet"))

        connect_s, connection = timed(warehouse.connect, folder)
        with contextlib.closing(connection):
            asked = [timed(lambda: connection.execute(QUERY).fetchall()) for _ in range(repeats)]
        pandas_s, theirs = timed(from_csv, runs_csv, telemetry_csv)
        pandas_needed_s = seconds_of(partial(from_csv, only_needed=True), runs_csv, telemetry_csv)
    ours, warehouse_s = asked[-1][1], [seconds for seconds, _ in asked]

    assert [row[:3] for row in ours] == [row[:3] for row in theirs], (ours, theirs)
    np.testing.assert_allclose([row[3:] for row in ours], [row[3:] for row in theirs], rtol=1e-9)
    typical_s = sorted(warehouse_s)[len(warehouse_s) // 2]
    return {
        "rows_runs": rows_runs,
        "rows_telemetry": rows_telemetry,
        "csv_mib": bytes_csv / 2**20,
        "parquet_mib": bytes_parquet / 2**20,
        "connect_s": connect_s,
        "warehouse_first_s": warehouse_s[0],
        "warehouse_s": typical_s,
        "pandas_s": pandas_s,
        "pandas_usecols_s": pandas_needed_s,
        "ratio": pandas_s / typical_s,
        "ratio_usecols": pandas_needed_s / typical_s,
    }


def from_csv(runs_csv: Path, telemetry_csv: Path, only_needed: bool = False) -> list[tuple]:
    """The same answer with pandas, in chunks, so that memory is no limit; `only_needed` names the columns first."""
    import pandas as pd

    def columns(*names):
        return names if only_needed else None

    runs = pd.read_csv(runs_csv, usecols=columns("family", "status", "peak_memory_mib"))
    outcome = runs.groupby(["family", "status"])["peak_memory_mib"].agg(["size", "mean"]).reset_index()
    parts = []
    for chunk in pd.read_csv(telemetry_csv, usecols=columns("family", "phase", "smact"), chunksize=2_000_000):
        parts.append(chunk[chunk["phase"] == "window"].groupby("family")["smact"].agg(["sum", "count"]))
    total = pd.concat(parts).groupby(level=0).sum()
    activity = (total["sum"] / total["count"]).rename("smact").reset_index()
    joined = outcome.merge(activity, on="family").sort_values(["family", "status"])
    return [tuple(row) for row in joined.itertuples(index=False)]


def synthetic_runs(rows: int, begin: int = 0) -> Iterator[tuple[str, pa.Table]]:
    """(family, table of `RUN_SCHEMA`), numbered from `begin`, with made-up figures and `source` simulated."""
    generator = np.random.default_rng(begin)
    for family, first, count in _pieces(rows, begin):
        ids = np.arange(first, first + count)
        memory = generator.gamma(2.0, 4000.0, count)
        values = {
            "run_id": pa.array([f"synthetic-{family}-{i:08d}" for i in ids]),
            "job_id": pa.array([f"synthetic-{family}"] * count),
            "task_index": ids,
            "attempt": np.ones(count, np.int32),
            "family": pa.array([family] * count),
            "config": pa.array([f'{{"family":"{family}","batch_size":{i % 512 + 1}}}' for i in ids]),
            "config_hash": pa.array([f"{int(i) * 2654435761 % 2**64:016x}" for i in ids]),
            "status": pa.array(generator.choice(STATUSES, count, p=(0.8, 0.1, 0.04, 0.04, 0.02))),
            "source": pa.array(["simulated"] * count),
            "device_name": pa.array(["SYNTHETIC"] * count),
            "schema_version": np.full(count, SCHEMA_VERSION, np.int32),
            "batch_size": ids % 512 + 1,
            "precision": pa.array(["fp32"] * count),
            "optimizer": pa.array(["adam"] * count),
            "peak_memory_mib": memory,
            "peak_reserved_mib": memory * 0.9,
            "peak_allocated_mib": memory * 0.8,
            "smact": generator.random(count),
            "smocc": generator.random(count),
            "drama": generator.random(count),
            "step_time_ms": generator.gamma(2.0, 20.0, count),
            "steps": np.full(count, 50),
        }
        yield family, _table(values, RUN_SCHEMA, count)


def synthetic_telemetry(runs: int, rows: int, begin: int = 0) -> Iterator[tuple[str, pa.Table]]:
    """(family, table of `TELEMETRY_SCHEMA`): consecutive samples of made-up runs, numbered from `begin`."""
    generator = np.random.default_rng(begin + 1)
    per_run = max(1, rows // runs)
    for family, first, of_runs in _pieces(runs, begin, FILE_ROWS // per_run):
        count = of_runs * per_run
        ids = np.arange(first * per_run, first * per_run + count)
        at = ids % per_run
        names = pa.array([f"synthetic-{family}-{i:08d}" for i in range(ids[0] // per_run, ids[-1] // per_run + 1)])
        values = {
            "run_id": names.take(pa.array(ids // per_run - ids[0] // per_run)),
            "t_ms": at * 100.0,
            "sensor": pa.array(["simulated"] * count),
            "phase": pa.array(np.where(at < per_run // 4, "warmup", "window")),
            **{
                name: generator.random(count).round(4)
                for name in ("gpu_util", "memory_util", "smact", "smocc", "drama")
            },
            "memory_used_mib": generator.gamma(2.0, 4000.0, count).round(1),
            "process_memory_mib": generator.gamma(2.0, 4000.0, count).round(1),
            "power_w": generator.gamma(20.0, 10.0, count).round(1),
            "step_time_ms": generator.gamma(2.0, 20.0, count).round(3),
        }
        yield family, _table(values, TELEMETRY_SCHEMA, count)


def _pieces(rows: int, begin: int, largest: int = FILE_ROWS) -> Iterator[tuple[str, int, int]]:
    """(family, first index, count): the rows in even shares, numbered from `begin`, in pieces of at most `largest`."""
    for number, family in enumerate(FAMILIES):
        share = rows // len(FAMILIES) + (number < rows % len(FAMILIES))
        for first in range(0, share, largest):
            yield family, begin + first, min(largest, share - first)


def _table(values: dict, schema: pa.Schema, rows: int) -> pa.Table:
    return pa.Table.from_arrays(
        [
            pa.array(values[field.name]).cast(field.type) if field.name in values else pa.nulls(rows, field.type)
            for field in schema
        ],
        schema=schema,
    )


def _write(folder: DataFolder, kind: str, pieces: Iterator[tuple[str, pa.Table]], csv_path: Path) -> None:
    """Each piece as a merged file that counts, and all of them as one CSV with the view's columns."""
    writer = None
    for family, table in pieces:
        path = folder.partition(kind, family) / new_merged_name()
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=ROW_GROUP_ROWS, **COMPRESSION)
        Listing(listing_file(folder, kind, path.name), f"{path.parent.name}/{path.name}", (), 0.0).write()
        if "family" not in table.column_names:
            table = table.append_column("family", pa.array([family] * table.num_rows))
        writer = writer or pacsv.CSVWriter(
            csv_path, table.schema, write_options=pacsv.WriteOptions(quoting_style="needed")
        )
        writer.write_table(table)
    writer.close()
