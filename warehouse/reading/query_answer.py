"""The answer to one read-only query: a table, CSV, JSON or Parquet, on standard output or in a file.

Start reading at `run_query`, the body of `warehouse.query`.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import io
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from conf.cli.settings import Checked, data_key, key
from conf.errors import UsageError, printable, unknown_name
from conf.files.outputs import Output, checked_output, output_file
from warehouse.files.folder import COMPRESSION, DataFolder
from warehouse.files.views import VIEWS
from warehouse.reading.connection import WarehouseConnection, WarehouseRelation, connect, is_of_the_statement

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_UNKNOWN_TABLE = re.compile(r"Table with name \"?(.*?)\"? does not exist\b")
_BATCH_ROWS = 10_000
_HELD_BYTES = 32 * 2**20  # of rows in memory; as CSV, most take a quarter of it
_WIDTH_ELSEWHERE = 200  # columns of a table in a file or pipe
_UNBOUNDED = 10**9


@dataclass(frozen=True, kw_only=True)
class QuerySettings(Checked):
    """A query, and the output for its answer.

      python -m warehouse.query "SELECT family, status, count(*) FROM runs GROUP BY ALL"
      python -m warehouse.query "DESCRIBE runs"
      python -m warehouse.query "SELECT * FROM runs WHERE status = 'ok'" format=csv out=runs.csv
      python -m warehouse.query "SELECT run_id, config FROM runs LIMIT 5" format=json data=/srv/farm

    The first argument with a space is the query. NULL is empty in csv and null in json; times are UTC.
    """

    POSITIONAL = "sql"

    sql: str = key(help="the query: one statement in DuckDB's SQL", kind="any text")
    format: str = key(
        "table",
        "a table has one line a value if rows are too wide; parquet needs out=FILE",
        choices=("table", "csv", "json", "parquet"),
    )
    out: str | None = key(None, "file to write instead of standard output", "new path")
    max_rows: int = key(100, "rows that format=table prints; the other formats write all", "int 1 to 10000000")
    snapshot: str | None = key(
        None, "snapshot to ask instead of the current folder; `warehouse.snapshot list=true` names them"
    )
    data: str | None = data_key()

    def problems(self) -> Iterator[str]:
        if self.format == "parquet" and self.out is None:
            yield "format=parquet needs out=FILE"


def run_query(settings: QuerySettings, stdout: TextIO) -> None:
    """Write the query's answer to `stdout` or the file of `settings`. Raises `UsageError` for wrong SQL."""
    folder = DataFolder.resolve(settings.data)
    with connect(folder, snapshot=settings.snapshot) as connection, _explain_errors():
        target = None if settings.out is None else checked_output(settings.out)
        relation = connection.sql(only_statement(connection, settings.sql))
        if target is None:
            _write_text(relation, stdout, settings)
        elif target.is_plain:  # a file that appears when it is whole, so that all of it can be written again
            relation.retry(lambda: _write_file(relation, target, settings))
        else:
            _write_file(relation, target, settings)


def _write_file(relation: WarehouseRelation, target: Output, settings: QuerySettings) -> None:
    with output_file(target) as file:
        if settings.format == "parquet":
            _write_parquet(_read_ahead(relation), file)
            return
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        try:
            _write_text(relation, text, settings)
            text.flush()
        finally:
            text.detach()  # its opener closes the file


def _write_text(relation: WarehouseRelation, file: TextIO, settings: QuerySettings) -> None:
    if settings.format == "table":
        _write_table(relation, file, settings.max_rows)
    elif settings.format == "csv":
        _write_csv(_read_ahead(relation), file)
    else:
        _write_json(_read_ahead(relation), file)


def _read_ahead(relation: WarehouseRelation) -> pa.RecordBatchReader:
    """Return the rows after reading their beginning, so that a damaged file in it leaves no half answer."""

    def begin() -> pa.RecordBatchReader:
        reader = relation.to_arrow_reader(_BATCH_ROWS)
        held, held_bytes = [], 0
        for batch in reader:
            held.append(batch)
            held_bytes += batch.nbytes
            if held_bytes > _HELD_BYTES:
                break
        return pa.RecordBatchReader.from_batches(reader.schema, itertools.chain(held, reader))

    return relation.retry(begin)


def only_statement(connection: WarehouseConnection, sql: str) -> str:
    """Return the single read-only statement of a text. Raises `UsageError` for several, or for another kind."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise UsageError(f"give one SQL statement, got {len(statements)}")
    (statement,) = statements
    # The connection cannot write in any case. This check gives a clear message before anything runs.
    if statement.type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise UsageError(
            f"the warehouse is read-only: {statement.type.name} statements are refused; "
            "to write the answer to a file, use format=csv|json|parquet out=FILE"
        )
    return str(statement.query)


def _write_table(relation: WarehouseRelation, file: TextIO, max_rows: int) -> None:
    # Escape stored texts, which could contain terminal commands; csv and json are exact.
    names = [printable(name) for name in relation.columns]
    rows = list(_rows(relation.limit(max_rows + 1).to_arrow_table().to_batches()))
    shown = rows[:max_rows]
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SQUARE)
    numeric = [type_name.id in _NUMBERS for type_name in relation.types]
    for name, is_number in zip(names, numeric, strict=True):
        table.add_column(Text(name), justify="right" if is_number else "left")
    cells = [[Text("NULL", style="dim") if v is None else Text(printable(_cell(v))) for v in row] for row in shown]
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


def _print_records(console: Console, names: list[str], rows: list[list[Text]]) -> None:
    """Print a line for each value, like `psql` with \\x; further lines of a value are below its first."""
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
    "tinyint",
    "smallint",
    "integer",
    "bigint",
    "hugeint",
    "utinyint",
    "usmallint",
    "uinteger",
    "ubigint",
    "uhugeint",
    "float",
    "double",
    "decimal",
    "bignum",
}


def _write_csv(reader: pa.RecordBatchReader, file: TextIO) -> None:
    """Write RFC 4180 with \\n; NULL is an empty field, an empty text is quoted."""
    file.write(",".join(map(_csv_text, reader.schema.names)) + "\n")
    for row in _rows(reader):
        file.write(",".join("" if value is None else _csv_text(_cell(value)) for value in row) + "\n")


def _write_json(reader: pa.RecordBatchReader, file: TextIO) -> None:
    """Write a list of objects, one line each."""
    names, separator = reader.schema.names, "[\n"
    for row in _rows(reader):
        record = dict(zip(names, map(_json_value, row), strict=True))
        file.write(separator + _json(record))
        separator = ",\n"
    file.write("[]\n" if separator == "[\n" else "\n]\n")


def _write_parquet(reader: pa.RecordBatchReader, file: BinaryIO) -> None:
    with pq.ParquetWriter(file, reader.schema, **COMPRESSION) as writer:
        for batch in reader:
            writer.write_batch(batch)


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    # Through Arrow, which needs no other package for timestamps with a time zone.
    for batch in batches:
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
    """Return a value that JSON can hold; NaN, infinity and intervals become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, pa.MonthDayNano):
        return str(value)
    if isinstance(value, decimal.Decimal):
        exponent = value.as_tuple().exponent
        return int(value) if isinstance(exponent, int) and exponent >= 0 else float(value)
    if isinstance(value, dict):
        return {str(key): _json_value(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):  # not an interval, which is a named tuple
        return [_json_value(entry) for entry in value]
    return value


@contextlib.contextmanager
def _explain_errors() -> Iterator[None]:
    """Raise `UsageError` with DuckDB's full message, which has the position and a suggestion.

    For an unknown table the message lists the views, because DuckDB would suggest internal tables.
    """
    try:
        yield
    except duckdb.CatalogException as error:
        if unknown := _UNKNOWN_TABLE.search(str(error)):
            raise unknown_name("table", unknown[1], VIEWS) from error
        raise UsageError(str(error).strip(), keep_lines=True) from error
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the answer could not be written
            raise
        text = str(error).strip()
        if isinstance(error, OSError) and not is_of_the_statement(error):  # from the stream of rows
            text += "\nThe answer breaks off at a damaged file; out=FILE writes the rows of the other files."
        raise UsageError(text, keep_lines=True) from error
