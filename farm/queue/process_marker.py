"""Parses and judges the identity of a process, `PID@START@BOOT.NAMESPACE`.

Start reading at `parse_marker`; `conf.files.identity.identity` makes the text. It is read from files and environments
that anybody may have written, so only what has exactly this form counts.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from conf.files.identity import alive, identity

_MARKER = re.compile(r"([1-9][0-9]{0,9})@([0-9]{1,20})@([0-9a-f]{8})\.([0-9]{1,20})")


@dataclass(frozen=True, kw_only=True)
class Marker:
    """A process: id, start in kernel ticks since boot, boot id and process namespace."""

    pid: int
    start_ticks: int
    boot: str
    namespace: str

    @property
    def is_here(self) -> bool:
        """Return whether the process started in this boot and namespace, so that it can be judged."""
        return (self.boot, self.namespace) == (_ours().boot, _ours().namespace)

    @property
    def of_this_boot(self) -> bool:
        """Return whether the machine has not rebooted since."""
        return self.boot == _ours().boot


def parse_marker(text: object) -> Marker | None:
    """Parse a process's identity; return None for any other text."""
    match = _MARKER.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    pid, start_ticks, boot, namespace = match.groups()
    return Marker(pid=int(pid), start_ticks=int(start_ticks), boot=boot, namespace=namespace)


def session_marker() -> str:
    """Return the identity of this process."""
    return identity(os.getpid())


def has_ended(text: object) -> bool:
    """Return whether the text identifies a process of this boot and namespace that has ended."""
    marker = parse_marker(text)
    return marker is not None and marker.is_here and not alive(str(text))


def _ours() -> Marker:
    marker = parse_marker(session_marker())
    assert marker is not None
    return marker
