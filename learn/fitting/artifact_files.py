"""The files of an artifact: their checksums, and that they are whole before anything parses them. Pure Python.

Start reading at `checked`. The artifact's JSON (`meta.json`) has the key `"files"`:
`{relative path: {"sha256": hex, "bytes": n}}` for every other file of the version, and `"own_sha256"`, of the JSON
itself without that key, as `json.dumps(..., sort_keys=True, separators=(",", ":"))` writes it. Anybody can verify a
version with a JSON parser and a SHA-256.

What is refused: a named file that is absent, of another size or content; a file below `model/` that the JSON does not
name (others are ignored: nothing reads them); links that lead out of the version's folder; files beyond `MOST_BYTES`.
Versions from before there were checksums have no `"files"`; whoever loads arrays checks that they make a model.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.errors import EnvironmentProblem
from conf.files.identity import OWN_SHA256, own_sha256, sha256_of
from featurize.configs.row_config import printable

FILES = "files"
MODEL = "model"  # folder of what `Estimator.load` reads
MOST_BYTES = 256 * 2**20
MOST_UNPACKED_BYTES = 2**30
MOST_JSON_BYTES = 32 * 2**20
_verified: dict[tuple, str | None] = {}  # (path, size, time, ...) of every file -> what is wrong
_said: set[str] = set()


class DamagedArtifact(EnvironmentProblem):
    """A version that is not what was written; the message names it and what is wrong."""


def stamped(folder: Path, meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`meta` with the checksums of every file of the folder but `name`, which is to hold it, and with its own."""
    files = {
        path.relative_to(folder).as_posix(): {"sha256": sha256_of(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / name
    }
    kept = {**{key: value for key, value in meta.items() if key != OWN_SHA256}, FILES: files}
    kept = json.loads(json.dumps(kept))  # as whoever reads it has it
    return {**kept, OWN_SHA256: own_sha256(kept)}


def read_json(path: Path) -> dict[str, Any]:
    """The artifact's JSON, its own checksum verified where it has one. Raises `DamagedArtifact`."""
    try:
        size = path.stat().st_size
        if size > MOST_JSON_BYTES:
            raise DamagedArtifact(f"{_shown(path)} has {size:,} bytes, more than {MOST_JSON_BYTES:,}")
        described = json.loads(path.read_bytes())
        if not isinstance(described, dict):
            raise DamagedArtifact(f"{_shown(path)} is no JSON object")
        own = own_sha256(described)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedArtifact(f"{_shown(path)} cannot be read: {printable(str(error))}") from error
    if described.get(OWN_SHA256, own) != own:
        raise DamagedArtifact(f"{_shown(path)} is not what was written: its checksum is another")
    return described


def checked(folder: Path, meta: Mapping[str, Any], name: str = "meta.json") -> None:
    """Verify a version's files before anything parses them; `DamagedArtifact` says what is wrong.

    Files that have not changed since are not read again.
    """
    try:
        named = _files(folder, meta, name)
        state = [path.stat() for path in named]
    except OSError as error:
        raise DamagedArtifact(f"{_shown(folder)}: {printable(str(error))}") from error
    key = (str(folder), str(meta.get(OWN_SHA256)), *((s.st_size, s.st_mtime_ns, s.st_ino) for s in state))
    if key not in _verified:
        _verified[key] = _problem(folder, meta.get(FILES), named)
    if (problem := _verified[key]) is not None:
        raise DamagedArtifact(f"{_shown(folder)} is damaged: {problem}")
    if FILES not in meta:
        older = "no checksum: it was written by an older version, so only what can be seen is checked"
        _say_once(f"{_shown(folder)}: {older}")


def say_damaged(error: DamagedArtifact, instead: str) -> None:
    """Name a damaged version in one line on standard error, once a process, and what is taken instead."""
    _say_once(f"{error}; {instead}")


def _say_once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        print(line, file=sys.stderr)


def _files(folder: Path, meta: Mapping[str, Any], name: str) -> list[Path]:
    """Those that are to be verified: the ones that the JSON names, and all below `model/`."""
    inside = folder.resolve(strict=True)
    named = meta.get(FILES, {})
    if not isinstance(named, Mapping):
        raise DamagedArtifact(f"{_shown(folder)} is damaged: {FILES} is no mapping")
    paths = {folder / MODEL / path.relative_to(folder / MODEL) for path in (folder / MODEL).rglob("*")}
    paths |= {folder / str(relative) for relative in named}
    for path in paths:
        if ".." in path.parts or not path.resolve().is_relative_to(inside):
            raise DamagedArtifact(f"{_shown(folder)} is damaged: {_inside(folder, path)} lies outside of it")
    files = sorted(path for path in paths if not path.is_dir())
    for path in files:
        if not path.is_file():
            raise DamagedArtifact(f"{_shown(folder)} is damaged: {_inside(folder, path)} is not there")
        if FILES in meta and path.relative_to(folder).as_posix() not in named:
            raise DamagedArtifact(
                f"{_shown(folder)} is damaged: {_inside(folder, path)} is not among the files that {name} names"
            )
    return files


def _problem(folder: Path, named: Mapping[str, Any] | None, files: list[Path]) -> str | None:
    for path in files:
        relative = path.relative_to(folder).as_posix()
        size = path.stat().st_size
        if size > MOST_BYTES:
            return f"{_inside(folder, path)} has {size:,} bytes, more than {MOST_BYTES:,}"
        if named is not None:
            about = named[relative]
            if not isinstance(about, Mapping) or about.get("bytes") != size or about.get("sha256") != sha256_of(path):
                return f"{_inside(folder, path)} is not what was written: its checksum or size is another"
        if relative.startswith(f"{MODEL}/") and (problem := _structure(path)) is not None:
            return f"{_inside(folder, path)}: {problem}"
    return None


def _structure(path: Path) -> str | None:
    """Return why a file of a model must not be parsed, or None."""
    if path.suffix == ".npz":
        try:
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
        except (OSError, zipfile.BadZipFile, ValueError) as error:
            return f"it is no archive of arrays ({printable(str(error))})"
        return None if unpacked <= MOST_UNPACKED_BYTES else f"it unpacks to {unpacked:,} bytes"
    return None if path.suffix in (".json", ".txt") else "a model has no such file"


def _shown(path: Path) -> str:
    return printable(str(path), 300)


def _inside(folder: Path, path: Path) -> str:
    return printable(path.relative_to(folder).as_posix())
