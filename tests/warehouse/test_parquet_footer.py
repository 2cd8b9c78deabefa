"""The bytes that stand for a file's columns: the same ones for the same columns only, of whatever file."""

import datetime
import itertools

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from warehouse.layout import COMPRESSION
from warehouse.parquet_footer import schema_bytes
from warehouse.schema import RUN_SCHEMA, TELEMETRY_SCHEMA
from warehouse.sql_text import sql_text

SCHEMAS = {
    "none": pa.schema([]),
    "runs": RUN_SCHEMA,
    "telemetry": TELEMETRY_SCHEMA,
    "fewer": pa.schema(list(TELEMETRY_SCHEMA)[:-1]),
    "other order": pa.schema(list(TELEMETRY_SCHEMA)[::-1]),
    "required": pa.schema([pa.field("a", pa.int64(), nullable=False)]),
    "optional": pa.schema([pa.field("a", pa.int64())]),
    "other type": pa.schema([pa.field("a", pa.int32())]),
    "small": pa.schema([pa.field("a", pa.int8())]),
    "large": pa.schema([pa.field("a", pa.uint64())]),
    "text": pa.schema([pa.field("a", pa.string())]),
    "bytes": pa.schema([pa.field("a", pa.binary())]),
    "fixed": pa.schema([pa.field("a", pa.binary(7))]),
    "decimal": pa.schema([pa.field("a", pa.decimal128(38, 9))]),
    "utc": pa.schema([pa.field("a", pa.timestamp("us", tz="UTC"))]),
    "no zone": pa.schema([pa.field("a", pa.timestamp("us"))]),
    "nested": pa.schema([pa.field("a", pa.struct({"b": pa.list_(pa.map_(pa.string(), pa.float32()))}))]),
    "many": pa.schema([pa.field(f"column {i} 'é'", pa.float64()) for i in range(1000)]),
}


def write(path, table, **options):
    pq.write_table(table, path, **(COMPRESSION | options))
    return path


@pytest.fixture
def files(tmp_path):
    return {
        name: write(tmp_path / f"{name}.parquet", schema.empty_table()) for name, schema in SCHEMAS.items()
    }  # fmt: skip


def test_different_columns_have_different_bytes_none_a_beginning_of_others(files):
    bytes_by_name = {name: schema_bytes(path) for name, path in files.items()}
    for one, other in itertools.permutations(bytes_by_name, 2):
        assert not bytes_by_name[one].startswith(bytes_by_name[other]), (one, other)


@pytest.mark.parametrize("name", SCHEMAS)
def test_same_columns_have_the_same_bytes_whatever_else_the_file_holds(files, name, tmp_path):
    wanted = schema_bytes(files[name])
    rows = pa.Table.from_arrays(
        [pa.nulls(300, field.type) if field.nullable else pa.array(range(300)) for field in SCHEMAS[name]],
        schema=SCHEMAS[name].with_metadata({"note": "x" * 100_000}),
    )
    other = write(tmp_path / "other.parquet", rows, row_group_size=10, use_dictionary=False)
    assert other.stat().st_size > 100_000
    assert schema_bytes(other) == wanted
    everything = [schema_bytes(path) for path in files.values()]
    assert schema_bytes(other, everything) is next(known for known in everything if known == wanted)


def test_files_that_duckdb_wrote_are_told_apart(tmp_path):
    def written(name, select):
        path = tmp_path / name
        duckdb.connect().execute(f"COPY ({select}) TO {sql_text(str(path))} (FORMAT parquet)")
        return schema_bytes(path)

    one = written("1.parquet", "SELECT i::INTEGER AS a, i::VARCHAR AS b, [i / 2] AS c FROM range(9) t(i)")
    assert written("2.parquet", "SELECT i::INTEGER AS a, NULL::VARCHAR AS b, [i / 3] AS c FROM range(99) t(i)") == one
    assert written("3.parquet", "SELECT i::INTEGER AS a, i::VARCHAR AS b FROM range(9) t(i)") != one


@pytest.mark.parametrize("kept", [0, 3, 11, 12, 200, -1, -9])
def test_what_is_no_parquet_file_is_told(files, kept):
    path = files["runs"]
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="Parquet"):
        schema_bytes(path)


def test_a_torn_footer_is_told_or_stands_for_itself(files):
    """Whatever byte is wrong: never an endless loop or another error than what callers expect."""
    path = files["optional"]
    content = path.read_bytes()
    for place in range(4, len(content) - 4):
        for byte in (0x00, 0x7F, 0xFF):
            path.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
            try:
                schema_bytes(path)
            except ValueError:
                continue


def test_a_file_that_is_gone_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        schema_bytes(tmp_path / f"{datetime.date.min}.parquet")
