"""A dispatcher's record of the processes that it started, in a folder that only its user can write to.

Start reading at `SessionRecord`. Ray's agents overwrite their environment with their title, so the marker that other
processes carry (`farm.sweep`) is lost on them, and they outlive a killed Ray by up to a minute. The record stands
outside of the data folder: a data folder may come from anybody, and what it says must not end a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conf.own_files import open_own_file, open_own_folder
from farm.process_marker import has_ended, parse_marker, session_marker

_SUFFIX = ".json"
_LIMIT_BYTES = 1 << 20  # of a record that is read: some ten thousand processes


class SessionRecord:
    """The record of one running dispatcher, named by its identity; `close` removes it.

    Without a folder for it (`state_folders`) nothing is recorded: then Ray's agents end by themselves after a minute.
    """

    def __init__(self, folder: int | None):
        self._folder = folder  # descriptor of a trusted folder
        self._name = session_marker() + _SUFFIX

    @classmethod
    def open(cls) -> SessionRecord:
        """Use the first available one of `state_folders`; there is no record before the first `write`."""
        for path in state_folders():
            with contextlib.suppress(OSError):
                path.mkdir(mode=0o700)
            folder = open_own_folder(path, private=True)
            if folder is not None:
                return cls(folder)
        return cls(None)

    def write(self, processes: list[str]) -> None:
        """Replace the recorded identities. A full disk is no error: the record is only a help."""
        if self._folder is None:
            return
        temporary = f".{self._name}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with contextlib.suppress(OSError):
            with os.fdopen(open_own_file(self._folder, temporary, flags), "w") as file:
                json.dump({"processes": processes}, file)
            os.replace(temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def close(self) -> None:
        """Remove the record."""
        if self._folder is None:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._folder)
        os.close(self._folder)
        self._folder = None


def state_folders() -> list[Path]:
    """Return the possible folders of a record, the preferred first: the runtime folder, then the temporary folder."""
    user = os.geteuid()
    runtime = [Path(given, "gpufarm")] if (given := os.environ.get("XDG_RUNTIME_DIR")) else []
    folders = [*runtime, Path(f"/run/user/{user}/gpufarm"), Path(tempfile.gettempdir(), f"gpufarm-{user}")]
    return list(dict.fromkeys(folders))


def dead_sessions() -> list[list[str]]:
    """Return the identities recorded by each ended dispatcher, and remove these records.

    A record counts only in a folder that this user alone may write to, as a plain file of this user.
    """
    recorded = []
    for path in state_folders():
        folder = open_own_folder(path, private=True)
        if folder is None:
            continue
        try:
            for name in sorted(os.listdir(folder)):
                if name.endswith(_SUFFIX) and has_ended(name.removesuffix(_SUFFIX)):
                    recorded.append(_read(folder, name))
                    with contextlib.suppress(FileNotFoundError):  # another dispatcher was quicker
                        os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
    return recorded


def _read(folder: int, name: str) -> list[str]:
    """Return a record's identities that began after its dispatcher; empty if the record is not ours."""
    try:
        with os.fdopen(open_own_file(folder, name), "rb") as file:
            content = json.loads(file.read(_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    processes = content.get("processes") if isinstance(content, dict) else None
    return list(_later(processes, name.removesuffix(_SUFFIX))) if isinstance(processes, list) else []


def _later(processes: list[object], dispatcher: str) -> Iterator[str]:
    begun = parse_marker(dispatcher)
    for text in processes:
        marker = parse_marker(text)
        if marker is not None and begun is not None and marker.start_ticks >= begun.start_ticks:
            yield str(text)
