"""The data folder: its paths, creating, opening and upgrading it; checksums of its files, and their damage.

Start reading at `DataFolder`, then at `write_parquet`. `sealed_bytes` writes the checksum of a Parquet file into its
footer, and `checksum_problem` verifies it. The checksum covers every byte, including the footer and its statistics:
the file is written with zeros in place of the digest and hashed, then the digest replaces the zeros. Verification
hashes it with zeros again. A checksum detects damage by disks, cables and copies; it does not prove authorship.

`damage_of` says why a file cannot be read; `warehouse.reading.connection` leaves these files out and reads the rest.
`set_aside` moves a file into `damaged/`, with the reason beside it. Nothing is deleted, so a user can move a file back.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem, UsageError, first_line, one_line
from conf.files.outputs import DATA_FORMAT, MARKER_BYTES, OWN_FILES, OWN_FOLDERS, read_json, sync, write_file
from conf.plain_text import escaped_glob, sql_text
from warehouse.files.plain_file import NoPlainFile, identity, is_out_of_descriptors, is_passing, names_in, open_binary
from warehouse.tables.schema import JOB_SCHEMA, KINDS, SCHEMA_VERSION, STALE_SCHEMA, TABLES

COMPRESSION: dict[str, Any] = {"compression": "zstd", "compression_level": 3}
# For at most one row: compression or dictionaries would make it larger and three times as slow to write.
_PLAIN: dict[str, Any] = {"compression": "none", "use_dictionary": False}

# One small file per merged file, see `warehouse.files.compaction`: the merged file (hidden=false) and its sources.
LISTING_SCHEMA = pa.schema([("path", pa.string()), ("hidden", pa.bool_())])

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_ANCHOR_FAMILY = "_schema"  # not a valid family name: those start with a letter or digit
CHECKSUM_KEY = "gpufarm_checksum"
_PREFIX = "sha256:"
_DIGEST_CHARACTERS = 64
_PLACEHOLDER = "0" * _DIGEST_CHARACTERS
# A key-value pair of the footer in Thrift's compact protocol: a binary field is 0x18, its length, its bytes.
_VALUE_HEAD = b"\x18" + bytes([len(_PREFIX) + _DIGEST_CHARACTERS]) + _PREFIX.encode()
_KEY = CHECKSUM_KEY.encode()
_VALUE = re.compile(re.escape(_VALUE_HEAD) + rb"[0-9a-f]{%d}" % _DIGEST_CHARACTERS)
_MAGIC = b"PAR1"
_ENDING_BYTES = 8  # 4 bytes of the footer's length, and the magic
_LEAST_BYTES = len(_MAGIC) + _ENDING_BYTES
_TAIL_BYTES = 64 * 2**10  # holds the whole footer of most files
_CHUNK_BYTES = 2**20


class FolderPlace:
    """The path of a file or folder of a data folder. `conf.files.outputs` keeps commands from overwriting it."""

    def __init__(self, *names: str) -> None:
        assert names[0] in (*OWN_FOLDERS, *OWN_FILES), f"{names[0]} is missing in conf.files.outputs"
        self._names = names

    def __get__(self, folder: DataFolder, owner: type[DataFolder]) -> Path:
        return folder.root.joinpath(*self._names)


@dataclass(frozen=True)
class DataFolder:
    """A data folder and the paths in it; nothing is read or written before `create` or `open`."""

    root: Path  # absolute

    format_marker = FolderPlace("format.json")
    queue = FolderPlace("queue.sqlite")  # SQLite: jobs and tasks
    warehouse = FolderPlace("warehouse.duckdb")  # DuckDB file of views only
    runs = FolderPlace("runs")
    jobs = FolderPlace("jobs")
    stale = FolderPlace("stale")  # marks of labels that no longer hold, see `warehouse.files.writer`
    models = FolderPlace("models")
    features = FolderPlace("features")  # computed features, by their version: a cache that may be deleted
    snapshots = FolderPlace("snapshots")  # a folder for each snapshot, see `warehouse.snapshot`
    growth = FolderPlace("growth")  # the growth cycles' journal and plans, see `farm.nights`
    reports = FolderPlace("reports")  # pages of the growth cycles and their JSON, and `latest` of both
    replays = FolderPlace("replays")  # pages of replayed traces and their JSON, see `farm.replaying`
    environments = FolderPlace("environments")  # a data folder for each compared environment, see `farm.comparison`
    comparisons = FolderPlace("comparisons")  # pages of comparisons and their JSON, see `farm.comparison`
    machines = FolderPlace("machines")  # profiles of machines, by GPU model, see `learn.calibrate`
    locks = FolderPlace("locks")
    damaged = FolderPlace("damaged")  # damaged files that were set aside, with the reasons; see `farm.queue.repair`
    dispatcher_lock = FolderPlace("locks", "dispatcher.lock")
    compaction_lock = FolderPlace("locks", "compaction.lock")
    growth_lock = FolderPlace("locks", "growth.lock")
    ingest_lock = FolderPlace("locks", "ingest.lock")
    service_lock = FolderPlace("locks", "service.lock")
    service = FolderPlace("service.sqlite")  # SQLite: the service's questions; may be deleted, see `farm.serving`

    @classmethod
    def resolve(cls, data: str | os.PathLike[str] | DataFolder | None = None) -> DataFolder:
        """Return the folder that `data` names, else `$GPUFARM_DATA`, else `./data`.

        Raises `UsageError` for a path that DuckDB or Parquet cannot take.
        """
        if isinstance(data, DataFolder):
            return data
        chosen = data or os.environ.get("GPUFARM_DATA") or "data"
        path = os.path.abspath(os.path.expanduser(os.fspath(chosen)))
        if "\0" in path:
            raise UsageError(f"data={path!r} is not a path")
        if "\\" in path:
            raise UsageError(f"data={path} holds a backslash, which DuckDB takes for a separator of folders; rename it")
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"data={path} is not valid UTF-8, which DuckDB and Parquet need; rename it") from error
        return cls(Path(path))

    def create(self) -> DataFolder:
        """Make the folder, or upgrade an older one to this schema version. A current folder stays as it is.

        Raises `UsageError` if the path is a file, `EnvironmentProblem` without permission or for a newer schema.
        """
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"data={self.root} is a file, not a folder")
        version = self._read_version()  # before anything is written
        try:
            for folder in (self.jobs, self.models, self.locks, *map(self.listings, KINDS)):
                folder.mkdir(parents=True, exist_ok=True)
            self.write_anchors()
            if version != SCHEMA_VERSION:
                text = json.dumps({"format": DATA_FORMAT, "schema_version": SCHEMA_VERSION}) + "\n"
                write_file(self.format_marker, text.encode())
            from warehouse.files.views import refresh  # needs DuckDB, which users of only the paths may lack

            refresh(self)
        except OSError as error:
            if self.root.is_dir():
                raise EnvironmentProblem(f"data={self.root} cannot be written: {error.strerror or error}") from error
            # /proc and the like report "No such file or directory" for the new folder
            why = "" if error.errno == errno.ENOENT else f": {error.strerror or error}"
            raise EnvironmentProblem(
                f"data={self.root}: the folder cannot be made there{why}; name another place with data=PATH"
            ) from error
        return self

    def open(self) -> DataFolder:
        """Check that the folder exists and this code can read it. Raises `UsageError` that says how to make one."""
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"data={self.root} is a file, not a folder")
        if self._read_version() is None:
            problem = "has no format.json, so it is not a data folder" if self.root.exists() else "does not exist"
            raise UsageError(
                f"data={self.root} {problem}; make one with `python -m farm.submit +arch=cnn n=10 data=PATH`, "
                "or name another with data=PATH or $GPUFARM_DATA"
            )
        return self

    def _read_version(self) -> int | None:
        """Return the schema version, None without a marker. Raises `EnvironmentProblem` if newer than this code's."""
        try:
            marker = read_json(self.format_marker, MARKER_BYTES)
            version = marker["schema_version"]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise EnvironmentProblem(f"data={self.root} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise EnvironmentProblem(f"{self.format_marker} is damaged") from error
        if marker.get("format") != DATA_FORMAT or not isinstance(version, int):
            raise UsageError(f"{self.format_marker} is not of a {DATA_FORMAT} folder")
        if version > SCHEMA_VERSION:
            raise EnvironmentProblem(
                f"data={self.root} has schema version {version}, this code knows up to {SCHEMA_VERSION}; "
                "update the code, or name another folder with data=PATH"
            )
        return version

    def listings(self, kind: str) -> Path:
        """Return the folder of the listings of merged files of one of `KINDS`."""
        return self.root / "compactions" / kind

    def partition(self, kind: str, family: str) -> Path:
        """Return the folder of one family's part of one of `KINDS`. Raises `ValueError` for an invalid folder name."""
        return self.root / kind / f"family={check_name('family', family)}"

    def families(self, kind: str) -> list[str]:
        """Return the families that have a partition."""
        prefix = "family="
        families = [name.removeprefix(prefix) for name in names_in(self.root / kind) if name.startswith(prefix)]
        return [family for family in families if family != _ANCHOR_FAMILY]

    def write_anchors(self) -> None:
        """Write missing files without rows, so every glob of the views matches a file.

        Those of older versions work too, since views add columns.
        """
        name, partition = f"anchor-v{SCHEMA_VERSION}.parquet", f"family={_ANCHOR_FAMILY}"
        anchors = {
            **{self.root / kind / partition / name: TABLES[kind] for kind in KINDS},
            self.jobs / f"_{name}": JOB_SCHEMA,
            self.stale / f"_{name}": STALE_SCHEMA,
            **{self.listings(kind) / f"_{name}": LISTING_SCHEMA for kind in KINDS},
        }
        for path, schema in anchors.items():
            if not path.exists():
                write_file(path, _without_rows(schema))


def check_name(kind: str, name: object) -> str:
    """Return `name` if it can be part of a path and of a hive partition unchanged, else raise `ValueError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > 180:
        raise ValueError(
            f"{kind} must be of letters, digits and _ . + - and start with a letter or digit, got {name!r}"
        )
    return name


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a small table atomically and durably, with its checksum in the footer; make its folder if missing."""
    write_file(path, sealed_bytes(table, **(COMPRESSION if table.num_rows > 1 else _PLAIN)))


@functools.cache
def _without_rows(schema: pa.Schema) -> bytes:
    """Return a file without rows. Cached: it is the same in every folder."""
    return sealed_bytes(schema.empty_table(), **_PLAIN)


@contextlib.contextmanager
def _writer(target: Any, schema: pa.Schema, **options: Any) -> Iterator[pq.ParquetWriter]:
    with pq.ParquetWriter(target, schema, **options) as writer:
        yield writer
        # Not as schema metadata, which pyarrow stores twice, once in base64.
        writer.add_key_value_metadata({CHECKSUM_KEY: _PREFIX + _PLACEHOLDER})


def sealed_bytes(table: pa.Table, **options: Any) -> bytes:
    """Return the table as a Parquet file with its checksum; `options` are `ParquetWriter`'s."""
    buffer = pa.BufferOutputStream()
    with _writer(buffer, table.schema, **options) as writer:
        writer.write_table(table)
    file = io.BytesIO(buffer.getvalue())
    _seal(file)
    return file.getvalue()


def write_sealed(table: pa.Table, path: Path, *, row_group_size: int | None = None, **options: Any) -> str:
    """Write a table of any size with its checksum, and return the checksum. The write is neither atomic nor synced."""
    with _writer(path, table.schema, **options) as writer:
        writer.write_table(table, row_group_size=row_group_size)
    with open(path, "r+b") as file:
        return _seal(file)


def _seal(file: BinaryIO) -> str:
    """Replace a file's zeros by its digest, and return the digest."""
    place = _place(file)
    assert place is not None
    digest = _digest(file, place)
    file.seek(place)
    file.write(digest.encode())
    return digest


def checksum_problem(path: Path) -> str | None:
    """Return the problem of a Parquet file; None if its checksum is right, or it has none.

    An empty file, or one without a footer, has a problem. Raises `OSError` as reading does.
    """
    return verify(path)[1]


def require_intact(path: Path) -> None:
    """Raise `ValueError` with the problem of a Parquet file, if it has one. Raises `OSError` as reading does."""
    if (problem := checksum_problem(path)) is not None:
        raise ValueError(problem)


def verify(path: Path) -> tuple[bool, str | None]:
    """Return whether the file has a checksum, and the file's problem or None."""
    with open_binary(path) as file:
        return _verify(file)


def content_problem(content: bytes) -> str | None:
    """Return the problem of a Parquet file in memory, as `checksum_problem` does."""
    return _verify(io.BytesIO(content))[1]


def _verify(file: BinaryIO) -> tuple[bool, str | None]:
    try:
        place = _place(file)
    except ValueError as error:
        return False, str(error)
    if place is None:
        return False, None
    return True, None if _read_recorded(file, place) == _digest(
        file, place
    ) else "its content does not match its checksum"


def recorded_checksum(path: Path) -> str | None:
    """Return the checksum in a file's footer, unverified; None if there is none.

    Raises `ValueError` for a damaged checksum entry, and for a file without a footer.
    """
    with open_binary(path) as file:
        place = _place(file)
        return None if place is None else _read_recorded(file, place)


def _read_recorded(file: BinaryIO, place: int) -> str:
    file.seek(place)
    return file.read(_DIGEST_CHARACTERS).decode("latin-1")


def _digest(file: BinaryIO, place: int) -> str:
    """Return the SHA-256 of a file with zeros in place of its digest."""
    digest = hashlib.sha256()
    file.seek(0)
    for start in range(0, place, _CHUNK_BYTES):
        digest.update(file.read(min(_CHUNK_BYTES, place - start)))
    digest.update(_PLACEHOLDER.encode())
    file.seek(place + _DIGEST_CHARACTERS)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def frame_problem(file: BinaryIO) -> str | None:
    """Return the damage visible in a file's size and first and last bytes, or None."""
    file_bytes = file.seek(0, os.SEEK_END)
    if file_bytes < _LEAST_BYTES:
        return f"it is cut short, {file_bytes} bytes are left"
    file.seek(0)
    head = file.read(len(_MAGIC))
    file.seek(-_ENDING_BYTES, os.SEEK_END)
    footer_bytes = int.from_bytes(file.read(4), "little")
    tail = file.read(len(_MAGIC))
    if head != _MAGIC or tail != _MAGIC or footer_bytes + _LEAST_BYTES > file_bytes:
        return "it is cut short, or no Parquet file"
    return None


def _place(file: BinaryIO) -> int | None:
    """Return the offset of the digest, None if there is none. Raises `ValueError` if the entry is damaged.

    Searched from the end: statistics, which contain texts of runs, precede the key-value pairs. Searched also before
    the footer, since a flipped bit in the footer's length moves its start.
    """
    if (problem := frame_problem(file)) is not None:
        raise ValueError(problem)
    size = file.seek(0, os.SEEK_END)
    file.seek(size - _ENDING_BYTES)
    footer_at = size - _ENDING_BYTES - int.from_bytes(file.read(4), "little")
    tail_at = max(0, min(footer_at, size - _TAIL_BYTES))
    file.seek(tail_at)
    tail = file.read()
    key_at = tail.rfind(_KEY)
    if key_at < 0 and _VALUE.search(tail) is None:
        return None
    value_at = key_at + len(_KEY)
    if tail_at + key_at < footer_at or not tail.startswith(_VALUE_HEAD, value_at):
        raise ValueError("its checksum entry is damaged")
    return tail_at + value_at + len(_VALUE_HEAD)


# ---- damaged files

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
    except (pa.ArrowException, OSError, ValueError) as error:  # Arrow raises all three for garbage
        if isinstance(error, FileNotFoundError) or is_passing(error):
            raise
        return first_line(error)


def damage_now(judge: Callable[[], str | None]) -> str | None:
    """Return the damage that `judge` finds, or the disk's error, which may have passed at the next look.

    Raises `FileNotFoundError` as `judge` does, and `OSError` if too many files are open.
    """
    try:
        return judge()
    except OSError as error:
        if isinstance(error, FileNotFoundError) or is_out_of_descriptors(error):
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


def report_damage(damaged: Iterable[DamagedFile]) -> None:
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
