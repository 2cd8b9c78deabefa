"""Many small files at once: every row and column, whatever the files' schemas, paths and damage."""

import datetime
import threading

import pyarrow as pa
import pyarrow.parquet as pq

from warehouse.files import compaction
from warehouse.files.compaction import read_files

SCHEMA = pa.schema([("run_id", pa.string()), ("x", pa.float64()), ("at", pa.timestamp("us", tz="UTC"))])
AT = datetime.datetime(2026, 3, 4, 5, 6, 7, 891011, tzinfo=datetime.UTC)


def write(folder, name, rows, **columns):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"run_id": [f"{name}-{i}" for i in range(rows)], **columns}), path)
    return path


def read(paths, most_rows=1000, schema=SCHEMA):
    damaged = []
    return list(read_files(paths, schema, most_rows, lambda path, error: damaged.append(path))), damaged


def test_files_of_several_schemas_become_one_table_with_every_column(tmp_path):
    folder = tmp_path / "a'; echo foo [b]*? family=x" / "family=cnn"
    times = pa.array([AT, None], pa.timestamp("us", tz="UTC"))
    paths = [
        write(folder, "full.parquet", 2, x=[1.5, None], at=times),
        write(folder, "older.parquet", 1),
        write(folder, "other.parquet", 1, colour=["red"]),
        write(folder, "empty.parquet", 1, x=pa.nulls(1)),
    ]
    ((files, table),), damaged = read(paths)
    assert files == paths and not damaged
    assert table.schema.names == [*SCHEMA.names, "colour"]
    assert [table.schema.field(field.name).type for field in SCHEMA] == SCHEMA.types
    rows = {row["run_id"]: row for row in table.to_pylist()}
    assert len(rows) == 5
    assert rows["full.parquet-0"] == {"run_id": "full.parquet-0", "x": 1.5, "at": AT, "colour": None}
    assert rows["other.parquet-0"]["colour"] == "red" and rows["older.parquet-0"]["x"] is None


def test_what_is_read_at_once_is_bounded_and_no_file_is_split(tmp_path):
    paths = [write(tmp_path, f"{i:02d}.parquet", rows) for i, rows in enumerate((3, 3, 3, 20, 1))]
    parts, _ = read(paths, most_rows=6)
    assert [table.num_rows for _, table in parts] == [6, 3, 20, 1]
    assert [path for files, _ in parts for path in files] == paths


def test_columns_in_another_order_and_of_another_type_are_the_schemas(tmp_path):
    first = tmp_path / "1.parquet"
    pq.write_table(pa.table({"x": pa.array([1.5], pa.float32()), "run_id": ["a"]}), first)
    ((_, table),), _ = read([first, write(tmp_path, "2.parquet", 1, x=[2.5])])
    assert table.schema.names == SCHEMA.names and table.column("x").type == pa.float64()
    assert table.select(["run_id", "x"]).to_pylist() == [
        {"run_id": "a", "x": 1.5},
        {"run_id": "2.parquet-0", "x": 2.5},
    ]


def test_batches_that_are_read_at_the_same_time_keep_their_order(tmp_path, monkeypatch):
    paths = [write(tmp_path, f"{i:02d}.parquet", 1 + (i * 7) % 5) for i in range(40)]
    paths[20].write_bytes(b"torn")
    paths[30].unlink()
    monkeypatch.setattr(compaction, "_batches", lambda paths: (paths[i : i + 3] for i in range(0, len(paths), 3)))
    parts, damaged = read(paths, most_rows=10)
    assert damaged == [paths[20], paths[30]]
    assert [path for files, _ in parts for path in files] == [path for path in paths if path not in damaged]
    ids = [run_id for _, table in parts for run_id in table.column("run_id").to_pylist()]
    assert ids == [f"{i:02d}.parquet-{row}" for i in range(40) if i not in (20, 30) for row in range(1 + (i * 7) % 5)]
    assert all(table.num_rows <= 10 for _, table in parts)


def test_a_reader_that_stops_early_leaves_no_thread(tmp_path):
    paths = [write(tmp_path, f"{i}.parquet", 3) for i in range(6)]
    before = threading.active_count()
    reading = read_files(paths, SCHEMA, 3, print)
    next(reading)
    reading.close()
    assert threading.active_count() == before


def test_times_are_utc_whatever_the_machines_zone(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    path = write(tmp_path, "1.parquet", 1, at=pa.array([AT], pa.timestamp("us", tz="UTC")))
    ((_, table),), _ = read([path, path])
    assert table.schema.field("at").type == pa.timestamp("us", tz="UTC")
    assert table.column("at").to_pylist() == [AT, AT]
