"""The data folder: makes one, opens one, and brings an older one to this schema version.

Start reading at `DataFolder`; `warehouse.files.layout` has the paths in it and how to write there atomically.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conf.errors import EnvironmentProblem, UsageError
from conf.files.outputs import DATA_FORMAT, MARKER_BYTES, read_json, write_file
from warehouse.files.layout import KINDS, FolderLayout
from warehouse.tables.schema import SCHEMA_VERSION


@dataclass(frozen=True)
class DataFolder(FolderLayout):
    """A data folder; nothing is read or written before `create` or `open`."""

    @classmethod
    def resolve(cls, data: str | os.PathLike[str] | DataFolder | None = None) -> DataFolder:
        """Return the folder that `data` names, else `$GPUFARM_DATA`, else `./data`."""
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
        """Make the folder, or bring an older one to this schema version. An existing current folder stays as it is.

        Raises `UsageError` if the path is a file, `EnvironmentProblem` without permission or for a newer schema.
        """
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"data={self.root} is a file, not a folder")
        version = self._read_version()  # before anything is written
        with self._explain_errors():
            for folder in (self.jobs, self.models, self.locks, *map(self.listings, KINDS)):
                folder.mkdir(parents=True, exist_ok=True)
            self.write_anchors()
            if version != SCHEMA_VERSION:
                text = json.dumps({"format": DATA_FORMAT, "schema_version": SCHEMA_VERSION}) + "\n"
                write_file(self.format_marker, text.encode())
            from warehouse.files.views import refresh  # needs DuckDB, which users of the paths alone may lack

            refresh(self)
        return self

    def open(self) -> DataFolder:
        """Check that the folder is there and readable by this code; `UsageError` says how to make one."""
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
            raise EnvironmentProblem(f"{self.format_marker} is damaged: {_beginning(self.format_marker)!r}") from error
        if marker.get("format") != DATA_FORMAT or not isinstance(version, int):
            raise UsageError(
                f"{self.format_marker} is not of a {DATA_FORMAT} folder: {_beginning(self.format_marker)!r}"
            )
        if version > SCHEMA_VERSION:
            raise EnvironmentProblem(
                f"data={self.root} has schema version {version}, this code knows up to {SCHEMA_VERSION}; "
                "update the code, or name another folder with data=PATH"
            )
        return version

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.root.is_dir():
                raise EnvironmentProblem(f"data={self.root} cannot be written: {error.strerror or error}") from error
            # /proc and the like say "No such file or directory" of the folder that was to be made
            why = "" if error.errno == errno.ENOENT else f": {error.strerror or error}"
            raise EnvironmentProblem(
                f"data={self.root}: the folder cannot be made there{why}; name another place with data=PATH"
            ) from error


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(80).decode(errors="replace")
