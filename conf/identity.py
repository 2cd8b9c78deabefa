"""By what a mapping is known, wherever in the project it is made, by what version a package, and by what a process.

Start reading at `mapping_hash`, the identity of a trial config, at `own_sha256`, the checksum that a JSON file holds of
itself, or at `identity`, that of a process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OWN_SHA256 = "own_sha256"  # the key of a JSON object under which it holds its own checksum
OWNER_FILE = "owner"  # in each temporary folder of ours: the `identity` of the process that made it


def canonical_json(mapping: Mapping[str, Any]) -> str:
    """Same mapping, same text: keys sorted, no spaces."""
    return json.dumps(mapping, sort_keys=True, separators=(",", ":"))


def mapping_hash(mapping: Mapping[str, Any]) -> str:
    """The identity of a trial config in mapping form: 16 hex digits of the SHA-256 of its canonical JSON."""
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
    """The installed version, from the package's metadata, also of one that is kept aside; None where it is not here."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        kept_aside = importlib.metadata.distributions(name=package, path=[str(aside_folder())])
        return next((distribution.version for distribution in kept_aside), None)


def aside_folder() -> Path:
    """Where an environment keeps a torchvision that was built for another torch: not on the path of its programs."""
    return Path(sys.prefix) / "share" / "gpufarm" / "aside"


def identity(pid: int) -> str:
    """`PID@START@WHERE`: a process number, when its process started in the kernel's own ticks since boot, and in which
    boot and namespace: a container's processes are not ours to judge.

    Not psutil's `create_time`, which moves when the system's clock is set. Raises `ProcessLookupError`.
    """
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as stat:  # a process may have any name
            return f"{pid}@{stat.read().rpartition(')')[2].split()[19]}@{_where()}"
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error


@functools.cache
def _where() -> str:
    """This boot of this machine, and this process namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()[:8]}.{os.stat('/proc/self/ns/pid').st_ino}"


def alive(marker: str) -> bool:
    """Whether the process with this identity runs (a zombie does not). One of elsewhere counts as alive."""
    if not marker.endswith(f"@{_where()}"):
        return True
    try:
        pid = int(marker.partition("@")[0])
        with open(f"/proc/{pid}/stat", errors="replace") as stat:  # a process may have any name
            state = stat.read().rpartition(")")[2].split()[0]
        return state != "Z" and identity(pid) == marker
    except (OSError, ValueError):
        return False
