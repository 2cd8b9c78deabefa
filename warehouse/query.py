"""`python -m warehouse.query "SELECT ..."`: one read-only query, as a table, CSV, JSON or Parquet.

Start reading at `entry`.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from conf.cli import command
from conf.errors import UsageError, unknown_name
from warehouse.connection import check_readable, connect
from warehouse.folder import COMPRESSION, DataFolder, replacing
from warehouse.views import VIEWS

READ_STATEMENTS = {
    duckdb.StatementType.SELECT,
    duckdb.StatementType.EXPLAIN,
}
_UNKNOWN_TABLE = re.compile(r"Table with name \"?(.*?)\"? does not exist\b")
_BATCH_ROWS = 10_000
_WIDTH_ELSEWHERE = 200  # columns of a table that goes into a file or pipe, which has no width of its own
_UNBOUNDED = 10**9


@dataclass(frozen=True, kw_only=True)
class QuerySettings:
    """What to ask, and where the answer goes."""

    sql: str
    format: str = "table"
    out: str | None = None
    max_rows: int = 100
    snapshot: str | None = None
    data: str | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise unknown_name("format", self.format, FORMATS)
        if self.format == "parquet" and self.out is None:
            raise UsageError("format=parquet needs out=FILE")
        if self.max_rows < 1:
            raise UsageError(f"max_rows must be >= 1, got {self.max_rows}")


def entry(cfg) -> int:
    """Run the query that `cfg` holds."""
    settings = QuerySettings(
        sql=str(cfg.sql), format=cfg.format, out=cfg.out, max_rows=cfg.max_rows, snapshot=cfg.snapshot,
        data=cfg.data,
    )  # fmt: skip
    run_query(settings, sys.stdout)
    return 0


def run_query(settings: QuerySettings, stdout: TextIO) -> None:
    """Write the query's answer to `stdout` or the file of `settings`. Raises `UsageError` for SQL that is wrong."""
    folder = DataFolder.resolve(settings.data)
    with contextlib.closing(connect(folder, snapshot=settings.snapshot)) as connection, _explained(folder):
        relation = connection.sql(_only_statement(connection, settings.sql))
        if settings.out is None:
            FORMATS[settings.format](relation, stdout, settings)
        elif settings.format == "parquet":
            with _target(settings.out) as temporary:
                _write_parquet(relation, temporary)
        else:
            with (
                _target(settings.out) as temporary,
                open(temporary, "w", newline="", encoding="utf-8") as file,
            ):
                FORMATS[settings.format](relation, file, settings)


def _only_statement(connection: duckdb.DuckDBPyConnection, sql: str) -> str:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise UsageError(f"give one SQL statement, got {len(statements)}")
    if statements[0].type not in READ_STATEMENTS:
        raise UsageError(
            f"the warehouse is read-only: {statements[0].type.name} statements are refused; "
            "to write the answer to a file, use format=csv|json|parquet out=FILE"
        )
    return statements[0].query


def _write_table(relation, file: TextIO, settings: QuerySettings) -> None:
    names = relation.columns
    rows = list(_rows(relation.limit(settings.max_rows + 1)))
    shown = rows[: settings.max_rows]
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SQUARE)
    numeric = [type_name.id in _NUMBERS for type_name in relation.types]
    for name, is_number in zip(names, numeric, strict=True):
        table.add_column(Text(name), justify="right" if is_number else "left")
    cells = [[Text("NULL", style="dim") if v is None else Text(_cell(v)) for v in row] for row in shown]
    for row in cells:
        table.add_row(*row)
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = max(_WIDTH_ELSEWHERE, console.width)
    if console.measure(table, options=console.options.update(max_width=_UNBOUNDED)).maximum <= console.width:
        console.print(table)
    else:
        _print_records(console, names, cells)
    if len(rows) > len(shown):
        console.print(f"first {len(shown)} rows; max_rows=N prints more, format=csv prints all")
    else:
        console.print(f"{len(shown)} row{'' if len(shown) == 1 else 's'}")


def _print_records(console, names: list[str], rows: list[list]) -> None:
    """A line for each value, as `psql` does with \\x; a value's further lines stand below its first."""
    from rich.cells import cell_len
    from rich.text import Text

    width = max(map(cell_len, names))
    for number, row in enumerate(rows, 1):
        console.print(Text(f"-- row {number} --"))
        for name, value in zip(names, row, strict=True):
            first, *more = value.split(allow_blank=True)
            console.print(Text(name + " " * (width - cell_len(name) + 2)) + first, soft_wrap=True)
            for line in more:
                console.print(Text(" " * (width + 2)) + line, soft_wrap=True)


_NUMBERS = {
    "tinyint", "smallint", "integer", "bigint", "hugeint", "utinyint", "usmallint", "uinteger", "ubigint",
    "uhugeint", "float", "double", "decimal", "bignum",
}  # fmt: skip


def _write_csv(relation, file: TextIO, settings: QuerySettings) -> None:
    """RFC 4180 with \\n; NULL is an empty field, an empty text is quoted."""
    file.write(",".join(map(_csv_text, relation.columns)) + "\n")
    for row in _rows(relation):
        file.write(",".join("" if value is None else _csv_text(_cell(value)) for value in row) + "\n")


def _write_json(relation, file: TextIO, settings: QuerySettings) -> None:
    """A list of objects, one line each."""
    names, separator = relation.columns, "[\n"
    for row in _rows(relation):
        record = dict(zip(names, map(_json_value, row), strict=True))
        file.write(separator + _json(record))
        separator = ",\n"
    file.write("[]\n" if separator == "[\n" else "\n]\n")


def _write_parquet(relation, path: Path) -> None:
    reader = _reader(relation)
    with pq.ParquetWriter(path, reader.schema, **COMPRESSION) as writer:
        for batch in reader:
            writer.write_batch(batch)


FORMATS: dict[str, Callable] = {
    "table": _write_table, "csv": _write_csv, "json": _write_json, "parquet": _write_parquet
}  # fmt: skip


def _reader(relation) -> pa.RecordBatchReader:
    """The answer in batches; DuckDB renamed the method in 2.0."""
    start = getattr(type(relation), "to_arrow_reader", None) or type(relation).fetch_arrow_reader
    return start(relation, _BATCH_ROWS)


def _rows(relation) -> Iterator[tuple]:
    # By way of Arrow, which needs no further package for timestamps with a zone.
    for batch in _reader(relation):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat(" ") if isinstance(value, datetime.datetime) else value.isoformat()
    if type(value) in (dict, list, tuple):
        return _json(_json_value(value))
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def _csv_text(text: str) -> str:
    if text == "" or any(character in text for character in ',"\n\r'):
        return '"' + text.replace('"', '""') + '"'
    return text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_cell)


def _json_value(value: Any) -> Any:
    """JSON has no NaN, infinity or interval: they are written as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, pa.MonthDayNano):
        return str(value)
    if isinstance(value, decimal.Decimal):
        return int(value) if value.as_tuple().exponent >= 0 else float(value)
    if isinstance(value, dict):
        return {str(key): _json_value(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):  # an interval is a named tuple, and stays what it is
        return [_json_value(entry) for entry in value]
    return value


@contextlib.contextmanager
def _target(out: str) -> Iterator[Path]:
    path = Path(out).expanduser()
    if path.is_dir():
        raise UsageError(f"out={out} cannot be written: it is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"out={out} cannot be written: there is no folder {path.parent}")
    try:
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        # By its number, as Arrow's own text names the temporary file.
        why = os.strerror(error.errno) if error.errno else str(error).replace(temporary.name, path.name)
        raise UsageError(f"out={out} cannot be written: {why}") from error


@contextlib.contextmanager
def _explained(folder: DataFolder) -> Iterator[None]:
    """DuckDB's message as a whole (it has the position and what was probably meant), in our error.

    Not for an unknown table: DuckDB then proposes tables of its own.
    """
    try:
        yield
    except duckdb.CatalogException as error:
        unknown = _UNKNOWN_TABLE.search(str(error))
        if unknown:
            raise unknown_name("table", unknown[1], VIEWS) from error
        raise UsageError(str(error).strip(), keep_lines=True) from error
    except duckdb.Error as error:
        raise check_readable(error, folder) or UsageError(str(error).strip(), keep_lines=True) from error


def main() -> None:
    command("query", entry, positional="sql")


if __name__ == "__main__":
    main()
