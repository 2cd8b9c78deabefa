"""Where workers live: the `cluster` key of a command. Start reading at `ClusterSettings`."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from conf.cli.settings import Checked, key
from conf.errors import EnvironmentProblem, UsageError
from conf.plain_text import error_line

if TYPE_CHECKING:
    from featurize.job.layout import Parallel

_CONNECT_TIMEOUT_S = 5.0
_ERROR_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(Checked, section="cluster"):
    """The `cluster` key: `ray` (our own, or joined by `address`) or `inline`."""

    kind: str = key("ray", choices=("ray", "inline"))
    address: str | None = key(None, 'null: a Ray of our own; "auto" or HOST:PORT joins a running cluster')
    dashboard: bool = key(False, "Ray's dashboard, on loopback")
    object_store_mib: int = key(128, "shared memory for results on their way to the writer", "int >= 80")
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the trial servers' own

    def check_address(self) -> None:
        """Raise `EnvironmentProblem` if nothing answers at `address`; Ray itself would try for minutes first."""
        if self.address is not None:
            self.place()

    def place(self) -> tuple[str, int]:
        """Return host and port of the cluster at `address`. Raises as `check_address` does."""
        address = str(self.address)
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS") or _running_cluster()
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdigit():
            raise UsageError(f"cluster.address must be auto or HOST:PORT, got {address!r}")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except (OSError, OverflowError) as error:
            raise self.nobody_answers(error) from error
        return host, int(port)

    def nobody_answers(self, error: Exception) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"cluster.address={self.address}: no Ray cluster answers there ({plain_error(error)}); "
            "start one with `ray start --head`, or leave the key out"
        )


def _running_cluster() -> str:
    """Return the address of the cluster that `ray start` last started on this machine, as Ray records it."""
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        return note.read_text().strip()
    except OSError as error:
        raise EnvironmentProblem(
            "cluster.address=auto: no Ray cluster runs on this machine; start one with `ray start --head`"
        ) from error


def plain_error(error: Exception) -> str:
    """Return the first paragraph of Ray's message, or the exception if it is a traceback."""
    if '\n  File "' in str(error):
        return error_line(str(error))[:_ERROR_CHARACTERS]
    return " ".join(str(error).split("\n\n")[0].split())[:_ERROR_CHARACTERS]


def gpu_problem(layout: Parallel, gpus: int) -> str | None:
    """Return why a trial cannot run where the largest node has this many GPUs; None if it can."""
    if layout.ranks <= gpus:
        return None
    return f"parallel={layout.text()} needs {layout.ranks} GPUs of one node, and the largest node has {gpus}"
