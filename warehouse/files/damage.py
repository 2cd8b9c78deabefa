"""Detects damaged Parquet files, lists those of a data folder, and moves them out of the way.

Start reading at `damage_of`; `warehouse.reading.connection` leaves these files out and reads the rest. `set_aside`
moves a file into `damaged/` of the data folder, with the reason beside it. Nothing is deleted, so a user can move a
file back.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import first_line, one_line
from conf.files.outputs import sync, write_file
from conf.plain_text import escaped_glob, sql_text
from warehouse.files.folder import LISTING_SCHEMA, DataFolder, frame_problem, verify
from warehouse.files.plain_file import NoPlainFile, identity, is_out_of_descriptors, is_passing, open_binary
from warehouse.tables.schema import KINDS, TABLES

_BATCH_ROWS = 64 * 2**10

# Table -> the column that a file must have, and the types of its columns.
_NEEDED = {
    **{table: ("job_id" if table == "jobs" else "run_id", schema) for table, schema in TABLES.items()},
    "compactions": ("path", LISTING_SCHEMA),
}
_warned: set[tuple[Path, tuple[int, ...] | None, str]] = set()
_warned_lock = threading.Lock()
REASON_SUFFIX = ".reason.txt"


@dataclass(frozen=True)
class DamagedFile:
    """An unreadable file of a data folder, with the reason."""

    path: Path
    reason: str

    def line(self) -> str:
        """Return the line that commands print: the file and the reason."""
        return one_line(f"{self.path} cannot be read ({self.reason}): its rows are left out")


def damage_of(path: Path, *, pages: bool = False) -> str | None:
    """Return why a Parquet file of the folder cannot be read, or None.

    Size, magic, footer and column types are checked, which takes well under a millisecond for a run's file. With
    `pages`, every page is decoded too. Raises `OSError` for a file that does not exist or cannot be read now.
    """
    try:
        with open_binary(path) as file:
            reason = frame_problem(file)
        if reason is not None:
            return reason
        with pq.ParquetFile(path) as file:
            reason = _schema_damage(path, file.schema_arrow) or None
            if reason is None and pages:
                for _ in file.iter_batches(_BATCH_ROWS):
                    pass
            return reason
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # Arrow raises all three for garbage
        if is_passing(error):
            raise
        return first_line(error)


def damage_now(judge: Callable[[], str | None]) -> str | None:
    """Return the damage that `judge` finds, or the disk's error, which may have passed at the next look.

    Raises `FileNotFoundError` as `judge` does, and `OSError` if too many files are open.
    """
    try:
        return judge()
    except FileNotFoundError:
        raise
    except OSError as error:
        if is_out_of_descriptors(error):
            raise
        return first_line(error)


def file_problem(path: Path) -> tuple[bool, str | None]:
    """Return whether a Parquet file has a checksum, and its problem or None. Without a checksum it is decoded in full.

    Anything but a plain file is a problem. Raises `FileNotFoundError` if there is no file, another `OSError` if the
    disk cannot read it.
    """
    try:
        has_checksum, problem = verify(path)
    except NoPlainFile as error:
        return False, str(error)
    return has_checksum, problem or damage_of(path, pages=not has_checksum)


def damage_for_duckdb(path: Path) -> str | None:
    """Return why DuckDB cannot read a file, or None. DuckDB rejects some flipped bits that Arrow ignores."""
    import duckdb  # imported here: farm.status uses this module without DuckDB

    try:
        with duckdb.connect(config={"threads": 1}) as connection:
            files = f"read_parquet({sql_text(escaped_glob(path))}, hive_partitioning=false)"
            connection.execute(f"SELECT count(*) FROM (SELECT DISTINCT * FROM {files})").fetchall()
    except duckdb.Error as error:
        if not path.exists():
            raise FileNotFoundError(path) from error
        if os.strerror(errno.EMFILE) in str(error):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path)) from error
        return first_line(error)
    return None


def find_damaged(paths: Iterable[Path], judge: Callable[[Path], str | None] = damage_of) -> list[DamagedFile]:
    """Return the unreadable files of `paths`, in order, without files that vanish meanwhile.

    `judge` returns why a file cannot be read, or None.
    """

    def check(path: Path) -> DamagedFile | None:
        try:
            reason = damage_now(lambda: judge(path))
        except FileNotFoundError:
            return None
        return None if reason is None else DamagedFile(path, reason)

    with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1))) as pool:
        return [damaged for damaged in pool.map(check, paths) if damaged is not None]


def parquet_files(folder: DataFolder) -> Iterator[Path]:
    """Yield all Parquet files of a folder, including those whose rows do not count."""
    for kind in _NEEDED:
        pattern = "family=*/*.parquet" if kind in KINDS else "*/*.parquet" if kind == "compactions" else "*.parquet"
        yield from sorted((folder.root / kind).glob(pattern))


def report(damaged: Iterable[DamagedFile]) -> None:
    """Print a line on stderr for each file, once in a process while the file is unchanged."""
    for file in damaged:
        warn_once(file.path, file.line(), "damage")  # each reader words the reason differently


def warn_once(path: Path, line: str, about: str | None = None) -> None:
    """Print a line about a file on stderr, once in a process while the file is unchanged.

    Lines with the same `about` count as equal: only the first is printed.
    """
    known = identity(path)
    with _warned_lock:
        key = (path, known, about or line)
        if known is None or key in _warned:
            return
        _warned.add(key)
    print(one_line(f"warning: {line}"), file=sys.stderr, flush=True)


def _schema_damage(path: Path, schema: pa.Schema) -> str:
    """Return why a view cannot use the schema (unreadable types, or rows without an id); empty if it can."""
    parent, above = path.parent.name, path.parent.parent.name
    kind = above if parent.startswith("family=") or above == "compactions" else parent
    return "; ".join(column_problems(kind, schema)) if kind in _NEEDED else ""


def column_problems(kind: str, schema: pa.Schema) -> list[str]:
    """Return why a file with these columns cannot be read as rows of a table, or as a listing (`compactions`)."""
    needed, known = _NEEDED[kind]
    missing = [] if needed in schema.names else [f"it has no column {needed}"]
    return missing + [
        f"{field.name} is {field.type}, not {known.field(field.name).type}"
        for field in schema
        if field.name in known.names and not _fits(field.type, known.field(field.name).type)
    ]


def _fits(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a column of an older or foreign writer can be read as `wanted`."""
    if pa.types.is_dictionary(stored):
        stored = stored.value_type
    if pa.types.is_null(stored) or stored == wanted:
        return True
    if pa.types.is_floating(wanted):
        return bool(pa.types.is_floating(stored) or pa.types.is_integer(stored))
    for is_alike in (pa.types.is_integer, pa.types.is_timestamp, pa.types.is_boolean):
        if is_alike(wanted):
            return bool(is_alike(stored))
    return bool(pa.types.is_string(stored) or pa.types.is_large_string(stored) or pa.types.is_string_view(stored))


def set_aside(folder: DataFolder, path: Path, reason: str) -> Path:
    """Move a file of the folder to the same place below `damaged/`; return its new path.

    If the target exists, a number is appended. The reason is durable before the file moves, so a kill in
    between leaves the file in place.
    """
    target = folder.damaged / path.relative_to(folder.root)
    target.parent.mkdir(parents=True, exist_ok=True)
    chosen = next(
        place
        for place in itertools.chain([target], (target.with_name(f"{target.name}.{n}") for n in itertools.count(2)))
        if not os.path.lexists(place)
    )
    write_file(chosen.with_name(chosen.name + REASON_SUFFIX), f"{reason}\n".encode(errors="backslashreplace"))
    os.replace(path, chosen)
    sync(chosen.parent)
    sync(path.parent)
    return chosen
