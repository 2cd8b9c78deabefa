"""Identities of mappings, files, packages and processes.

Start reading at `mapping_hash`, the identity of a trial config. `own_sha256` is the checksum of a JSON file, stored in
the file itself. `identity` identifies a process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OWN_SHA256 = "own_sha256"  # key of a JSON object that holds the object's own checksum


def canonical_json(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return JSON with sorted keys and without spaces: equal mappings and equal lists give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def mapping_hash(mapping: Mapping[str, Any]) -> str:
    """Return the first 16 hex digits of the SHA-256 of the canonical JSON: the identity of a trial config."""
    return hashlib.sha256(canonical_json(mapping).encode()).hexdigest()[:16]


def own_sha256(mapping: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a mapping's canonical JSON without the key `own_sha256`, in hex digits."""
    content = {key: value for key, value in mapping.items() if key != OWN_SHA256}
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex digits. Raises `OSError`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def version_of(package: str) -> str | None:
    """Return a package's version from its metadata, also if it is kept aside; None if it is not installed."""
    import importlib.metadata

    kept_aside = importlib.metadata.distributions(name=package, path=[*sys.path, str(aside_folder())])
    for distribution in kept_aside:
        # `Distribution.version` parses the whole text, for torch in some ms.
        line = re.search("^Version: *(.+)$", distribution.read_text("METADATA") or "", re.MULTILINE)
        return distribution.version if line is None else line[1].strip()
    return None


def aside_folder() -> Path:
    """Return the folder for a torchvision that was built for another torch; it is not on the path of programs."""
    return Path(sys.prefix) / "share" / "gpufarm" / "aside"


def identity(pid: int) -> str:
    """Return `PID@START@WHERE` of a process: its number, its start in ticks since boot, its boot and PID namespace.

    The namespace distinguishes processes of different containers. psutil's `create_time` is not used, because it
    changes when the system's clock is set. Raises `ProcessLookupError`.
    """
    try:
        return f"{pid}@{process_stat(pid)[19]}@{_where()}"
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error


def process_stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, which may hold any text: state, parent, ..."""
    with open(f"/proc/{pid}/stat", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()


@functools.cache
def _where() -> str:
    """Return the boot of this machine and the process namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()[:8]}.{os.stat('/proc/self/ns/pid').st_ino}"


def alive(marker: str) -> bool:
    """Return whether the process runs. A zombie does not; a process of another boot or namespace counts as alive."""
    if not marker.endswith(f"@{_where()}"):
        return True
    try:
        pid = int(marker.partition("@")[0])
        return process_stat(pid)[0] != "Z" and identity(pid) == marker
    except (OSError, ValueError):
        return False
