"""Where workers live: the `cluster` key of a command, a private Ray, the health of Ray's head, and a cluster's nodes.

Start reading at `ClusterSettings`, then at `HeadWatch`, which lets us exit before Ray aborts our process. Without its
GCS, Ray's calls wait for a minute; then Ray aborts the calling process without a message of ours (checked on Ray 2.60:
"Failed to connect to GCS within 60 seconds"). `NodeWatch` reports which nodes joined or left.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psutil

from conf.cli.command_line import EXIT_TEMPORARY
from conf.cli.settings import Checked, key
from conf.errors import EnvironmentProblem, UsageError, error_line
from conf.files.identity import alive, identity
from workers.telemetry.sampler import call_in_thread

if TYPE_CHECKING:
    from featurize.job.layout import Parallel


_ANSWER_TIMEOUT_S = 5.0
_ERROR_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(Checked, section="cluster"):
    """The `cluster` key: `ray` (a private one, or joined by `address`) or `inline`."""

    kind: str = key("ray", choices=("ray", "inline"))
    address: str | None = key(None, 'null: a private Ray; "auto" or HOST:PORT joins a running cluster')
    dashboard: bool = key(False, "Ray's dashboard, on loopback")
    object_store_mib: int = key(128, "shared memory for results before they are written", "int >= 80")
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the trial servers' environment

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
            socket.create_connection((host, int(port)), timeout=_ANSWER_TIMEOUT_S).close()
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
    """Return the first paragraph of Ray's message; of a traceback, the exception's line."""
    if '\n  File "' in str(error):
        return error_line(str(error))[:_ERROR_CHARACTERS]
    return " ".join(str(error).split("\n\n")[0].split())[:_ERROR_CHARACTERS]


def gpu_problem(layout: Parallel, gpus: int) -> str | None:
    """Return why a trial cannot run where the largest node has this many GPUs; None if it can."""
    if layout.ranks <= gpus:
        return None
    return f"parallel={layout.text()} needs {layout.ranks} GPUs of one node, and the largest node has {gpus}"


def own_session_environment() -> dict[str, str]:
    """Return environment variables of a private Ray: set before `ray.init`, inherited by its processes.

    Checked on Ray 2.60: without RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 its servers listen on every interface, whatever
    node address is asked for (`_private/services.py`, `get_node_ip_address`).
    """
    wanted = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
        "RAY_AUTH_MODE": "token",  # other users of this machine can reach loopback too
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it kills actors; each worker watches its own trial's memory
        "RAY_prestart_worker_first_driver": "0",  # a process for each CPU, while our actors hold none
        "RAY_USAGE_STATS_ENABLED": "0",
        "SPT_NOENV": "1",  # else titles of its agents overwrite their environment, which says whose they are
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


EXIT_CLUSTER_LOST = EXIT_TEMPORARY  # the same command continues
_LOOK_EVERY_S = 0.2
_REFUSED_FOR_S = 5.0  # a joined cluster's address refuses connections
_SILENT_FOR_S = 30.0  # the network to a joined cluster is gone
_PATIENCE_S = 20.0  # for the main thread to exit once Ray is lost
_PATIENCE_AT_START_S = 3.0  # nothing has been handed out yet
_CONNECT_TIMEOUT_S = 2.0
_ASK_EVERY_S = 2.0  # of a joined cluster's GCS: each check opens a network connection

Result = TypeVar("Result")


class ClusterLost(EnvironmentProblem):
    """Ray, or the joined cluster, has ended: running tasks are given back, and the same command continues."""


class Head(Protocol):
    """The processes that Ray depends on."""

    def lost(self) -> str | None:
        """Return a sentence about the process that ended; None while all run. Used from one thread."""


class OwnHead:
    """The GCS and the raylet of a Ray that this process starts: its new children of these names."""

    _NAMES = ("gcs_server", "raylet")

    def __init__(self) -> None:
        self._before = {child.pid for child in psutil.Process().children()}
        self._markers: dict[str, str] = {}  # name -> identity

    def lost(self) -> str | None:
        if len(self._markers) < len(self._NAMES):
            self._look()
        for name, marker in self._markers.items():
            if not alive(marker):
                return f"Ray's {name} (process {marker.partition('@')[0]}) has ended"
        return None

    def _look(self) -> None:
        for child in psutil.Process().children():
            try:
                name = child.name()
                if child.pid not in self._before and name in self._NAMES:
                    self._markers.setdefault(name, identity(child.pid))
            except (psutil.Error, ProcessLookupError):
                continue


class JoinedHead:
    """The GCS of a joined cluster: the process that listens at its address."""

    def __init__(self, host: str, port: int):
        self._address = (host, port)
        self._answered_at = time.monotonic()
        self._asked_at = -math.inf

    def lost(self) -> str | None:
        if time.monotonic() - self._asked_at < _ASK_EVERY_S:
            return None
        self._asked_at = time.monotonic()
        try:
            socket.create_connection(self._address, timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            limit_s = _REFUSED_FOR_S if isinstance(error, ConnectionRefusedError) else _SILENT_FOR_S
            if time.monotonic() - self._answered_at < limit_s:
                return None
            host, port = self._address
            return f"the Ray cluster at {host}:{port} no longer answers ({error.strerror or error})"
        self._answered_at = time.monotonic()
        return None


class HeadWatch:
    """Watches the head in a separate thread, since the main thread may wait inside Ray.

    `check` raises `ClusterLost`. If the main thread does not call it in time, because it waits inside `ray.init`, the
    process runs `clean_up` and exits with `EXIT_CLUSTER_LOST`, before Ray aborts it.
    """

    def __init__(
        self, head: Head, clean_up: Callable[[], None] = lambda: None, leave: Callable[[int], None] = os._exit
    ):
        self._head = head
        self._clean_up = clean_up
        self._leave = leave
        self._patience_s = _PATIENCE_AT_START_S
        self.reason: str | None = None  # a sentence about the process that ended
        self._stopped = threading.Event()
        self._noticed = threading.Event()  # by the main thread
        self._thread = threading.Thread(target=self._run, name="ray-head", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `ClusterLost` once the head is lost."""
        if self.reason is not None:
            self._noticed.set()
            raise ClusterLost(self.reason)

    def check_now(self) -> None:
        """Look at the head now, then do what `check` does.

        While `ray.init` waits for its GCS it holds the interpreter's lock, so the thread cannot look (Ray 2.60).
        """
        if self.reason is None:
            self.reason = self._head.lost()
        self.check()

    def call(self, function: Callable[[], Result]) -> Result:
        """Return the result of a Ray function that asks the head. Raises `ClusterLost` if the head is dead.

        The function runs in a separate thread, which is abandoned when the head is lost.
        """
        call = call_in_thread("ray-call", function)
        while not wait([call], _LOOK_EVERY_S).done:
            self.check()
        if call.exception() is not None:
            self.check()
        return call.result()

    def started(self) -> None:
        """Record that Ray is up; from now on the main thread may be busy for longer."""
        self._patience_s = _PATIENCE_S

    def stop(self) -> None:
        """End the thread; the head may end from now on."""
        self._stopped.set()

    def _run(self) -> None:
        while self.reason is None:
            if self._stopped.wait(_LOOK_EVERY_S):
                return
            self.reason = self._head.lost()
        if not self._noticed.wait(self._patience_s) and not self._stopped.is_set():
            print(f"error: {lost_words(self.reason)}", file=sys.stderr, flush=True)
            try:
                self._clean_up()
            finally:
                self._leave(EXIT_CLUSTER_LOST)


def lost_words(reason: object) -> str:
    """Return the message for the user, with what to do."""
    return f"{reason}; landed runs are safe; run the same command again to continue"


_NODES_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """One machine (or `ray start`) of the cluster, with its resources as Ray knows them."""

    node_id: str
    host: str
    cpus: int
    gpus: int


class NodeWatch:
    """Reports joining and leaving nodes of a cluster. `nodes`: those of the last look, by id; `ask`: `ray.nodes`."""

    def __init__(self, ask: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._ask = ask
        self.nodes: dict[str, RayNode] = {}
        self._looked_at = -math.inf

    @property
    def due(self) -> bool:
        """Return whether it is time for another look; each one queries the head."""
        return time.monotonic() - self._looked_at >= _NODES_EVERY_S

    def look(self) -> tuple[list[RayNode], list[RayNode]]:
        """Return the nodes that joined and those that left since the last look; at first all have joined."""
        self._looked_at = time.monotonic()
        present = {
            raw["NodeID"]: RayNode(
                node_id=raw["NodeID"],
                host=raw["NodeManagerHostname"],
                cpus=int(raw["Resources"].get("CPU", 0)),
                gpus=int(raw["Resources"].get("GPU", 0)),
            )
            for raw in self._ask()
            if raw["Alive"]
        }
        joined = [node for key, node in present.items() if key not in self.nodes]
        departed = [node for key, node in self.nodes.items() if key not in present]
        self.nodes = present
        return joined, departed
