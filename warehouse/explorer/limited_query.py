"""Runs the explorer's queries within limits: its own in this process, those of users in a child process.

Start reading at `ExplorerReader`, which limits rows and time, and at `run_limited` for users' queries.

DuckDB checks its limits only between chunks of rows: `list()` and `string_agg()` grow far beyond `memory_limit`, and
an interrupt waits for them. So the parent watches the child's resident memory, and a kernel timer ends the child.
Forking a child from a process that has imported DuckDB takes milliseconds.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa

from conf.children.containment import resident_bytes
from conf.errors import CommandError, EnvironmentProblem, UsageError, first_line
from warehouse.files.folder import DataFolder
from warehouse.reading.connection import ReadingLimits, WarehouseConnection, connect, make_views_file
from warehouse.reading.query_answer import only_statement

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_PRELOADED = ["warehouse.explorer.limited_query", "warehouse.files.folder_files"]
_THREADS = 2
_DUCKDB_SHARE = 0.75  # of the memory limit: DuckDB's limit comes first, with the clearer message
_BASE_BYTES = 2**28  # a child's memory before its query runs
_LOOK_S = 0.02
_MOST_RESERVED = 4  # multiple of the memory limit, because allocators reserve more than they use
_BATCH_ROWS = 2048
# Types that cells of CSV and pages show directly; others are shown as DuckDB's text.
_INTEGERS = {f"{sign}{name}" for sign in ("", "u") for name in ("tinyint", "smallint", "integer", "bigint", "hugeint")}
_TIMES = {"date", "time", "timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns"}
_PLAIN = {*_INTEGERS, *_TIMES, "boolean", "float", "double", "decimal", "varchar", "uuid", "enum"}
_NOT_IN_PARQUET = re.compile(r"\b(INTERVAL|UNION|VARIANT|BIGNUM|BIT|TYPE|TIME WITH TIME ZONE)\b")


class TooLong(UsageError):
    """A query reached its time limit."""


@dataclass(frozen=True)
class QueryRows:
    """Rows of a query. has_more: there are rows beyond the limit."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    has_more: bool = False


class ExplorerReader:
    """Reads one data folder for one page; a context manager. Raises `UsageError` for wrong SQL, and `TooLong`.

    `run_limited` runs users' queries.

    Args:
        source: A connection that has a data folder's views; it is closed with the reader.
        seconds: Longest time of each query.
    """

    def __init__(self, source: WarehouseConnection | duckdb.DuckDBPyConnection, seconds: float) -> None:
        self._connection: Any = source
        self._seconds = seconds

    def __enter__(self) -> ExplorerReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def interrupt(self) -> None:
        """End the running query, from another thread; it raises `TooLong`."""
        self._connection.interrupt()

    def rows(self, sql: str, values: Sequence[Any] = (), most: int = 100_000) -> QueryRows:
        """Return the rows of a query of the explorer."""
        timer = threading.Timer(self._seconds, self._connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            self._connection.execute(sql, list(values))
            columns = tuple(column[0] for column in self._connection.description)
            rows = self._connection.fetchmany(most + 1)
        except duckdb.InterruptException as error:
            raise TooLong(f"the query took longer than the limit of {self._seconds:g} s") from error
        except duckdb.Error as error:
            raise UsageError(first_line(error)) from error
        finally:
            timer.cancel()
        return QueryRows(columns, rows[:most], len(rows) > most)


PAGE, CSV, PARQUET = "page", "csv", "parquet"


@dataclass(frozen=True)
class QueryLimits:
    """Limits of one query. answer_bytes: of its rows in Arrow's format."""

    seconds: float
    memory_bytes: int
    rows: int
    answer_bytes: int

    @property
    def share(self) -> ReadingLimits:
        """Return DuckDB's share of the limits."""
        return ReadingLimits(int(_DUCKDB_SHARE * self.memory_bytes), _THREADS)


def run_limited(
    folder: DataFolder, sql: str, kind: str, limits: QueryLimits, ends: list[Callable[[], None]]
) -> tuple[pa.Table, bool]:
    """Run a user's query, which may only read, in a child process.

    Args:
        folder: The data folder.
        sql: The query as typed.
        kind: `PAGE`, `CSV` or `PARQUET`; values that it cannot hold become DuckDB's text.
        limits: Limits at which the query ends.
        ends: Gets a function that ends the query from another thread.

    Returns:
        Rows up to the limits, and whether there are more.

    Raises:
        UsageError: The SQL is wrong, or the query takes too much memory.
        TooLong: It takes too long.
        EnvironmentProblem: The data folder cannot be read, or no process can be started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_reply, args=(folder.root, sql, kind, limits, make_views_file(), sender))
    try:
        with sender:
            child.start()
            ends.append(child.kill)
        assert child.pid is not None  # it has been started
        while not receiver.poll(_LOOK_S):
            if sum(resident_bytes([child.pid]).values()) > limits.memory_bytes + _BASE_BYTES:
                raise _too_large(limits)
        header = json.loads(receiver.recv_bytes())
        content = receiver.recv_bytes()
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGALRM:
            raise TooLong(f"the query took longer than the limit of {limits.seconds:g} s") from None
        raise _too_large(limits) from None
    except OSError as error:
        raise EnvironmentProblem(f"no process can be started for the query: {error}") from error
    finally:
        receiver.close()
        if child.pid is not None:
            child.kill()
            child.join()
    if problem := header.get("problem"):
        raise UsageError(problem) if header["is_usage"] else EnvironmentProblem(problem)
    with pa.ipc.open_stream(content) as stream:
        return stream.read_all(), header["has_more"]


def _too_large(limits: QueryLimits) -> UsageError:
    return UsageError(f"the query took more memory than the limit of {limits.memory_bytes / 2**30:g} GiB")


def _reply(
    root: Path, sql: str, kind: str, limits: QueryLimits, views_file: bytes, sender: Connection
) -> None:  # in the child
    """Send a header as JSON, then the rows as an Arrow stream."""
    header: dict[str, Any] = {}
    content = b""
    try:
        with connect(DataFolder(root), share=limits.share, views_file=views_file) as connection:
            # The kernel refuses more additional memory than that.
            data_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
            most_bytes = data_bytes + _MOST_RESERVED * limits.memory_bytes
            resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, resource.RLIM_INFINITY))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, limits.seconds)  # its default action ends the process
            content, header["has_more"] = _answer(connection, sql, kind, limits)
    except (MemoryError, duckdb.OutOfMemoryException):
        header = {"problem": str(_too_large(limits)), "is_usage": True}
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        is_memory = "Out of Memory" in str(error)  # Arrow raises DuckDB's as an OSError
        of_a_file = isinstance(error, OSError) and not is_memory
        header = {"problem": str(_too_large(limits)) if is_memory else first_line(error), "is_usage": not of_a_file}
    except CommandError as error:
        header = {"problem": str(error), "is_usage": isinstance(error, UsageError)}
    sender.send_bytes(json.dumps(header).encode())
    sender.send_bytes(content)


def _answer(connection: WarehouseConnection, sql: str, kind: str, limits: QueryLimits) -> tuple[bytes, bool]:
    statement = only_statement(connection, sql).strip().rstrip(";")
    if not statement.lstrip("( \n").upper().startswith(("SELECT", "WITH", "FROM", "VALUES")):
        raise UsageError("a query begins with SELECT, WITH, FROM or VALUES")
    statement = f"({statement}\n)"  # so that a trailing comment cannot swallow the closing parenthesis
    relation = connection.sql(f"FROM {statement}")
    places = [f"c{place}" for place in range(len(relation.columns))]
    columns = [
        f"{f'CAST({place} AS VARCHAR)' if _is_text_in(kind, type_) else place} AS {_quote(name)}"
        for place, name, type_ in zip(places, relation.columns, relation.types, strict=True)
    ]
    query = f"SELECT {', '.join(columns)} FROM {statement} AS t({', '.join(places)}) LIMIT {limits.rows + 1}"
    return connection.retry(lambda: _read(connection.sql(query).to_arrow_reader(_BATCH_ROWS), limits))


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _is_text_in(kind: str, type_: Any) -> bool:
    return _NOT_IN_PARQUET.search(str(type_)) is not None if kind == PARQUET else type_.id not in _PLAIN


def _read(reader: pa.RecordBatchReader, limits: QueryLimits) -> tuple[bytes, bool]:
    """Return the rows within the limits as an Arrow stream, and whether there are more."""
    sink, rows_left, bytes_left, has_more = pa.BufferOutputStream(), limits.rows, limits.answer_bytes, False
    with pa.ipc.new_stream(sink, reader.schema) as writer:
        for batch in reader:
            fitting = batch.slice(0, rows_left)
            while fitting.nbytes > bytes_left:
                fitting = fitting.slice(0, fitting.num_rows // 2)
            writer.write_batch(fitting)
            if has_more := fitting.num_rows < batch.num_rows:
                break
            rows_left -= fitting.num_rows
            bytes_left -= fitting.nbytes
    return sink.getvalue().to_pybytes(), has_more
