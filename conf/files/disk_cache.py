"""Bytes by key in one SQLite file, for all processes of a machine: what can be computed again, and is not.

Start reading at `DiskCache`; `user_cache` is the one of this user. What cannot be read is missing, never an error.
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
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from conf.files.identity import version_of

MOST_BYTES = 256 * 2**20
_BUSY_S = 1.0
_AT_ONCE = 500  # parameters of one statement; SQLite allows at least 999
_LIBRARIES = ("torch", "timm", "torchvision", "transformers")  # libraries whose code determines a trace
PACKAGES = ("conf", "featurize", "learn")  # this project's packages, whose code makes traces and answers
_TABLE = "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, sha256 BLOB NOT NULL, content BLOB NOT NULL)"


@functools.cache
def libraries() -> str:
    """Return the releases of the libraries, as `NAME VERSION ...`."""
    return " ".join(f"{name} {version_of(name)}" for name in _LIBRARIES)


@functools.cache
def code_version() -> str:
    """Return a digest of everything besides the question that an answer depends on: the releases of Python and of
    libraries, and the sizes and times of this project's files. An edit or another release starts a new cache."""
    digest = hashlib.sha256(f"{sys.version} {libraries()}".encode())
    folders = [str(resources.files(package)) for package in PACKAGES]
    while folders:
        for entry in sorted(os.scandir(folders.pop()), key=lambda item: item.name):
            if entry.is_dir():
                folders += [entry.path] if entry.name != "__pycache__" else []
            else:
                digest.update(f"{entry.path} {entry.stat().st_size} {entry.stat().st_mtime_ns} ".encode())
    return digest.hexdigest()


def user_folder() -> Path:
    """Return the user's own folder: `$XDG_CACHE_HOME/gpufarm`, else `~/.cache/gpufarm`. Raises `RuntimeError` of a user
    without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpufarm"


class DiskCache:
    """A file of entries. Above `most_bytes` the oldest ones go. An entry with a wrong checksum counts as missing.

    Args:
        path: The file; its folder need not exist.
        most_bytes: None: without limit.
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self.path, self._most_bytes = path, most_bytes
        self._here = threading.local()  # a thread's connection, and the process and file that it is of

    def read(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the contents that are there, by key."""
        wanted = list(keys)
        there: dict[str, bytes] = {}
        if not self.path.is_file():
            return there
        with contextlib.suppress(sqlite3.Error, OSError, zlib.error):
            database = self._opened()
            for start in range(0, len(wanted), _AT_ONCE):
                some = wanted[start : start + _AT_ONCE]
                query = f"SELECT key, sha256, content FROM entries WHERE key IN ({','.join('?' * len(some))})"
                for key, checksum, content in database.execute(query, some):
                    if isinstance(content, bytes) and hashlib.sha256(key.encode() + content).digest() == checksum:
                        there[key] = zlib.decompress(content)
        return there

    def write(self, entries: Iterable[tuple[str, bytes]]) -> None:
        """Keep entries, where that is possible. Of two processes that write the same one, the later one's stays."""
        packed = ((key, zlib.compress(content, 1)) for key, content in entries)
        rows = [(key, hashlib.sha256(key.encode() + content).digest(), content) for key, content in packed]
        try:
            self._write(rows)
        except (sqlite3.OperationalError, OSError):  # busy, full, or not ours to write
            return
        except sqlite3.DatabaseError:  # no database, or a damaged one
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
            if limit is not None and self.path.stat().st_size > limit and self._used_bytes(database) > limit:
                database.execute("DELETE FROM entries WHERE rowid <= (SELECT avg(rowid) FROM entries)")
            database.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows)

    @staticmethod
    def _used_bytes(database: sqlite3.Connection) -> int:
        query = "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, "
        used: int = database.execute(f"{query} pragma_page_size").fetchone()[0]
        return used

    def _opened(self) -> sqlite3.Connection:
        """Return this thread's connection to the file that lies there now: opening one takes longer than a query."""
        status = self.path.stat()
        place = os.getpid(), status.st_dev, status.st_ino
        if vars(self._here).get("place") != place:
            database = sqlite3.connect(self.path, timeout=_BUSY_S)
            database.execute("PRAGMA synchronous = OFF")  # what a crash of the machine damages is computed again
            vars(self._here).update(place=place, database=database)
        opened: sqlite3.Connection = self._here.database
        return opened


def user_cache() -> DiskCache | None:
    """Return the cache of this user: `traces.sqlite` in `$GPUFARM_CACHE`, else in `$XDG_CACHE_HOME/gpufarm`, else in
    `~/.cache/gpufarm`. None with `GPUFARM_CACHE=off`, and for a user without a home."""
    return _cache_at(*map(os.environ.get, ("GPUFARM_CACHE", "XDG_CACHE_HOME", "HOME")))


@functools.cache
def _cache_at(given: str | None, *_: str | None) -> DiskCache | None:
    if given == "off":
        return None
    with contextlib.suppress(RuntimeError):
        folder = Path(given).expanduser() if given else user_folder()
        return DiskCache(folder / "traces.sqlite", MOST_BYTES)
    return None


def recall(*names: str) -> list[Any]:
    """Return the values that this code left in the user's cache under these names; None where there is none."""
    keys, cache = [f"{code_version()} {name}" for name in names], user_cache() if names else None
    stored = {} if cache is None else cache.read(keys)
    return [_value(stored.get(key, b"null")) for key in keys]


def _value(content: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(content)


def keep(values: Mapping[str, Any]) -> None:
    """Leave values, of which JSON can be made, in the user's cache."""
    if values and (cache := user_cache()) is not None:
        cache.write(
            (f"{code_version()} {name}", json.dumps(value, check_circular=False).encode())
            for name, value in values.items()
        )
