"""Many small files at once: every row and column, whatever the files' schemas, paths and damage."""

import datetime

import pyarrow as pa
import pyarrow.parquet as pq

from warehouse.small_files import read_files

SCHEMA = pa.schema([("run_id", pa.string()), ("x", pa.float64()), ("at", pa.timestamp("us", tz="UTC"))])
AT = datetime.datetime(2026, 3, 4, 5, 6, 7, 891011, tzinfo=datetime.UTC)


def write(folder, name, rows, **columns):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"run_id": [f"{name}-{i}" for i in range(rows)], **columns}), path)
    return path


def read(paths, most_rows=1000, schema=SCHEMA):
    damaged = []
    parts = list(read_files(paths, schema, most_rows, lambda path, error: damaged.append(path)))
    return parts, damaged


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


def test_a_damaged_file_is_told_and_the_others_are_read(tmp_path):
    paths = [write(tmp_path, f"{i}.parquet", 1) for i in range(4)]
    paths[2].write_bytes(b"torn")
    parts, damaged = read(paths)
    assert damaged == [paths[2]]
    assert [path for files, _ in parts for path in files] == [paths[0], paths[1], paths[3]]
    assert sum(table.num_rows for _, table in parts) == 3
