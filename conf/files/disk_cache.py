"""Caches computed bytes by key in one SQLite file, for all processes of a machine.

Start reading at `DiskCache`; `user_cache` returns this user's. An unreadable entry counts as missing and is no error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sqlite3
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from conf.files.identity import version_of

try:
    import msgpack
except ModuleNotFoundError:  # environments of a comparison need not have it
    msgpack = None

MOST_BYTES = 256 * 2**20
_BUSY_S = 1.0
_LIBRARIES = ("torch", "timm", "torchvision", "transformers")  # libraries whose code determines a trace
PACKAGES = ("conf", "featurize", "learn")  # this project's packages that make traces and answers
_TABLE = "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, sha256 BLOB NOT NULL, content BLOB NOT NULL)"

_USED_BYTES = (
    "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
)


@functools.cache
def libraries() -> str:
    """Return the releases of the libraries, as `NAME VERSION ...`."""
    return " ".join(f"{name} {version_of(name)}" for name in _LIBRARIES)


@functools.cache
def code_version() -> str:
    """Return a digest of what an answer depends on besides the question.

    That is the releases of Python and of libraries, and the sizes and times of this project's files. An edit or another
    release starts a new cache.
    """
    digest = hashlib.sha256(f"{sys.version} {libraries()}".encode())
    specs = map(find_spec, PACKAGES)  # without importing them, which takes as long as a small trace
    folders = [folder for spec in specs if spec is not None for folder in spec.submodule_search_locations or ()]
    while folders:
        for entry in sorted(os.scandir(folders.pop()), key=lambda item: item.name):
            if entry.is_dir():
                folders += [entry.path] if entry.name != "__pycache__" else []
            else:
                digest.update(f"{entry.path} {entry.stat().st_size} {entry.stat().st_mtime_ns} ".encode())
    return digest.hexdigest()


def user_folder() -> Path:
    """Return the user's cache folder: `$XDG_CACHE_HOME/gpufarm`, else `~/.cache/gpufarm`.

    Raises `RuntimeError` for a user without a home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpufarm"


class DiskCache:
    """A file of entries. Above `most_bytes` the oldest are deleted. An entry with a wrong checksum counts as missing.

    Args:
        path: The file; its folder need not exist.
        most_bytes: Limit of the file's size; None: no limit.
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self.path, self._most_bytes = path, most_bytes
        self._here = threading.local()  # each thread's connection, with the process and file that it belongs to

    def read(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the stored contents by key."""
        contents: dict[str, bytes] = {}
        if not self.path.is_file():
            return contents
        with contextlib.suppress(sqlite3.Error, OSError, zlib.error):
            database = self._opened()
            query = "SELECT key, sha256, content FROM entries WHERE key IN (SELECT value FROM json_each(?))"
            for key, checksum, content in database.execute(query, [json.dumps(list(keys))]):
                if isinstance(content, bytes) and hashlib.sha256(key.encode() + content).digest() == checksum:
                    contents[key] = zlib.decompressobj().decompress(content, MOST_BYTES)
        return contents

    def write(self, entries: Iterable[tuple[str, bytes]]) -> None:
        """Store entries if possible. If two processes write the same entry, the later one wins."""
        contents = dict(entries)
        packed = {content: zlib.compress(content, 1) for content in set(contents.values())}  # many may be equal
        rows = [
            (key, hashlib.sha256(key.encode() + packed[content]).digest(), packed[content])
            for key, content in contents.items()
        ]
        try:
            self._write(rows)
        except (sqlite3.OperationalError, OSError):  # busy, full, or not writable
            return
        except sqlite3.DatabaseError:  # damaged, or not a database
            with contextlib.suppress(sqlite3.Error, OSError):
                self.path.unlink()
                self._write(rows)

    def _write(self, rows: list[tuple[str, bytes, bytes]]) -> None:
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        with self._opened() as database:  # one transaction
            database.execute(_TABLE)
            limit = self._most_bytes
            if (
                limit is not None
                and self.path.stat().st_size > limit
                and database.execute(_USED_BYTES).fetchone()[0] > limit
            ):
                database.execute("DELETE FROM entries WHERE rowid <= (SELECT avg(rowid) FROM entries)")
            database.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows)

    def _opened(self) -> sqlite3.Connection:
        """Return this thread's connection to the current file; keep it, because opening takes longer than a query."""
        status = self.path.stat()
        place = os.getpid(), status.st_dev, status.st_ino
        if vars(self._here).get("place") != place:
            database = sqlite3.connect(self.path, timeout=_BUSY_S)
            # Entries that a crash of the machine damages are computed again.
            database.execute("PRAGMA synchronous = OFF")
            vars(self._here).update(place=place, database=database)
        opened: sqlite3.Connection = self._here.database
        return opened


def user_cache() -> DiskCache | None:
    """Return this user's cache; None with `GPUFARM_CACHE=off`, for a user without a home, and without msgpack.

    It is `traces.sqlite` in `$GPUFARM_CACHE`, else in `$XDG_CACHE_HOME/gpufarm`, else in `~/.cache/gpufarm`.
    """
    return _cache_at(*map(os.environ.get, ("GPUFARM_CACHE", "XDG_CACHE_HOME", "HOME")))


@functools.cache
def _cache_at(given: str | None, *_: str | None) -> DiskCache | None:
    if given == "off" or msgpack is None:
        return None
    with contextlib.suppress(RuntimeError):
        folder = Path(given).expanduser() if given else user_folder()
        return DiskCache(folder / "traces.sqlite", MOST_BYTES)
    return None


def recall(*names: str) -> list[Any]:
    """Return the values that this version of the code stored in the user's cache; None for a missing name."""
    cache = user_cache() if names else None
    if cache is None:
        return [None] * len(names)
    keys = [f"{code_version()} {name}" for name in names]
    stored = cache.read(keys)
    return [_value(stored[key]) if key in stored else None for key in keys]


def _value(content: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return msgpack.unpackb(content, ext_hook=lambda _kind, digits: int(digits), unicode_errors="surrogatepass")


_waiting: ContextVar[dict[str, Any] | None] = ContextVar("values of `kept_at_once`", default=None)


@contextlib.contextmanager
def kept_at_once() -> Iterator[None]:
    """Store what is kept inside in one transaction, at the end."""
    waiting: dict[str, Any] = {}
    outer = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(outer)
        keep(waiting)


def keep(values: Mapping[str, Any]) -> None:
    """Store values, which must fit into JSON, in the user's cache; objects in them become mappings of their fields.
    MessagePack takes a third of JSON's time."""
    if (waiting := _waiting.get()) is not None:
        waiting.update(values)
    elif values and (cache := user_cache()) is not None:
        cache.write(
            (f"{code_version()} {name}", msgpack.packb(value, default=_packable, unicode_errors="surrogatepass"))
            for name, value in values.items()
        )


def _packable(value: Any) -> Any:
    """Return an object's fields; the digits of an integer beyond MessagePack's 64 bits."""
    return msgpack.ExtType(0, b"%d" % value) if isinstance(value, int) else vars(value)
