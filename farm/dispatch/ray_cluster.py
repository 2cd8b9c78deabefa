"""Ray's side of the farm: the `cluster` key, the health of Ray's head, the cluster's nodes, and one actor per GPU.

Start reading at `ClusterSettings`, then at `RayExecutor`; `actor_class` has the body of an actor, which Ray pins and
restarts. Results go through Ray's object store. Defaults that Ray has changed between versions are set explicitly.

`HeadWatch` lets us exit before Ray aborts our process. Without its GCS, Ray's calls wait for a minute; then Ray aborts
the calling process without a message of ours (checked on Ray 2.60: "Failed to connect to GCS within 60 seconds").
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from conf.cli.command_line import EXIT_TEMPORARY
from conf.cli.own_packages import SAFE_PATH, searching_last, working_folder
from conf.cli.settings import Checked, key
from conf.errors import EnvironmentProblem, UsageError, error_line
from conf.files.identity import alive, identity
from conf.files.own_folders import delete_folder
from farm.dispatch.executors import Completion
from farm.queue.leftovers import end_processes, make_ray_folder
from featurize.job.layout import Parallel
from workers.devices import DeviceChoice, make_device
from workers.task import RunResult, Task
from workers.telemetry.sensors import call_in_thread

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


def gpu_problem(layout: Parallel | None, gpus: int | None) -> str | None:
    """Return why a trial cannot run where the largest node has this many GPUs; None if it can.

    A trial without a layout runs anywhere, and with `gpus` None ranks need no separate GPUs.
    """
    if layout is None or gpus is None or layout.ranks <= gpus:
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
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                name = child.name()
                if child.pid not in self._before and name in self._NAMES:
                    self._markers.setdefault(name, identity(child.pid))


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

    `lost` returns a sentence about the process that ended; None while all run that Ray depends on.
    `check` raises `ClusterLost`. If the main thread does not call it in time, because it waits inside `ray.init`, the
    process runs `clean_up` and exits with `EXIT_TEMPORARY`, before Ray aborts it.
    """

    def __init__(self, lost: Callable[[], str | None], clean_up: Callable[[], None] = lambda: None) -> None:
        self._lost = lost
        self._clean_up = clean_up
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
            self.reason = self._lost()
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
            self.reason = self._lost()
        if not self._noticed.wait(self._patience_s) and not self._stopped.is_set():
            print(f"error: {lost_words(self.reason)}", file=sys.stderr, flush=True)
            try:
                self._clean_up()
            finally:
                os._exit(EXIT_TEMPORARY)  # the same command continues


def lost_words(reason: object) -> str:
    """Return the message for the user, with what to do."""
    return f"{reason}; landed runs are safe; run the same command again to continue"


_NODES_EVERY_S = 2.0  # between looks at the nodes; each one queries the head


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """One machine (or `ray start`) of the cluster, with its resources as Ray knows them."""

    node_id: str
    host: str
    cpus: int
    gpus: int


def actor_class() -> type:
    """Return the actors' class. It is sent by value, and corrects the path before it imports our modules."""
    put_last = searching_last(working_folder())

    class RayWorker:
        """Finds the slot that Ray pinned its process to and runs tasks there. Never imports torch."""

        def __init__(
            self, choice: dict[str, Any], slot_key: str | None, environment: dict[str, str], workers: int, gpus: int = 1
        ) -> None:
            put_last()
            from workers.devices import DeviceChoice  # a global would be pickled by name, and imported too early
            from workers.worker import Worker

            name = f"ray-{slot_key}"
            if slot_key is None:  # Ray has pinned this process: it sees only its GPUs
                import ray

                name = f"ray-{'+'.join(ray.get_runtime_context().get_accelerator_ids()['GPU'])}"
                choice = {**choice, "count": None}
            self._worker = Worker(DeviceChoice(**choice), slot_key, name, environment, workers, gpus)

        def ready(self) -> None:
            """Start the trial server and wait until it is ready."""
            self._worker.ready()

        def run(self, task: Task, upcoming: Task | None = None) -> RunResult:
            return self._worker.run(task, upcoming)

    return RayWorker


_END_WITHIN_S = 5.0  # for Ray's processes after its shutdown
_SHUTDOWN_S = 10.0  # for the shutdown of a Ray that has lost its head
_READY_TRIES = 3  # failed starts of a trial server in a row that give up its worker


@dataclass(eq=False)
class _Seat:
    """One actor with its node and state; an actor of several GPUs holds them in a placement group.

    state     `unreached` is asked again at the next look: Ray needs seconds to declare a node dead
    ref       result of ready() while it starts, of run() while it runs
    task      the task that it runs
    failures  failed starts in a row
    """

    name: str
    actor: Any
    node: RayNode
    gpus: int
    group: Any
    state: Literal["unstarted", "starting", "unreached", "idle", "running"] = "unstarted"
    ref: Any = None
    task: Task | None = None
    failures: int = 0


@dataclass(frozen=True)
class _Waiting:
    """A task that waits for as many GPUs of a node as it has ranks.

    `asked`: the idle worker that was offered, empty if there was none. It takes no other task until then, so that
    at most as many tasks wait as there are workers.
    """

    name: str
    node: RayNode
    task: Task
    asked: str


class RayExecutor:
    """Ray actors, one per slot of every node. `address=None` starts a private Ray, on loopback only.

    A node that joins gets actors; tasks on a node that leaves return as lost. Each actor is bound to its node, since
    Ray cannot spread actors by CPUs or simulated GPUs.
    """

    def __init__(self, choice: DeviceChoice, cluster: ClusterSettings, environment: dict[str, str]):
        self._choice = choice
        self._cluster = cluster
        safe_path = {SAFE_PATH: os.environ[SAFE_PATH]} if SAFE_PATH in os.environ else {}
        self._environment = {**safe_path, **environment}  # other nodes set their own safe path
        self._seats: dict[str, _Seat] = {}  # worker -> its actor
        self._notices: list[str] = []
        self._was_ready = False  # whether any worker has ever been ready
        self._ray: Any = None  # the module, once it is imported
        self._joined = cluster.address is not None
        self._nodes: dict[str, RayNode] = {}  # at the last look, by id
        self._looked_at = -math.inf
        self._waiting: list[_Waiting] = []  # each node gathers GPUs for its first one
        self._gpus: Counter[str] = Counter()  # node -> working GPUs: at first one for each worker
        self._added = 0  # number of waiting tasks and replacement workers so far, for names
        self._head: HeadWatch | None = None
        self._folder: Path | None = None  # session folder of a private Ray
        self._before: set[int] = set()  # child processes before Ray's
        self._roots: list[psutil.Process] | None = None  # Ray's root processes, once it is up

    def start(self) -> None:
        if not self._joined:
            os.environ.update(own_session_environment())  # Ray reads some of it on import
        try:
            import ray
        except ImportError as error:
            raise EnvironmentProblem(
                f"cannot import ray ({error}): pip install 'gpufarm[farm]'; cluster=inline runs one worker without it"
            ) from error

        self._ray = ray
        pinned = self._choice.backend == "cuda"
        self._actor_class = ray.remote(
            num_cpus=0,  # an actor that holds a CPU starves a small machine
            num_gpus=1 if pinned else 0,
            max_restarts=-1,  # Ray restarts a killed actor; the queue decides which task to repeat
            max_task_retries=0,
        )(actor_class())
        if self._joined:
            self._join()
        else:
            self._start_own(pinned)
        self._watched_head.started()
        self._own_node = ray.get_runtime_context().get_node_id()
        self._follow_nodes()
        if not self._seats:
            raise EnvironmentProblem(f"cluster.address={self._cluster.address}: the cluster has no GPU")
        self._start_servers()

    @property
    def _watched_head(self) -> HeadWatch:
        assert self._head is not None, "start() comes first"
        return self._head

    def _join(self) -> None:
        self._head = HeadWatch(JoinedHead(*self._cluster.place()).lost)
        try:
            self._ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises many kinds
            self._head.check()
            raise self._cluster.nobody_answers(error) from error

    def _start_own(self, pinned: bool) -> None:
        slots = make_device(self._choice).slots()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if pinned:  # by UUID, before Ray counts: a display GPU is never a worker
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slot.device_uuid or "" for slot in slots)
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._folder = make_ray_folder()
        self._head = HeadWatch(OwnHead().lost, self._end_own)
        try:
            self._ray.init(
                address="local",
                num_cpus=os.cpu_count(),
                num_gpus=len(slots) if pinned else 0,
                include_dashboard=self._cluster.dashboard,
                dashboard_host="127.0.0.1",
                object_store_memory=self._cluster.object_store_mib * 2**20,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=None if self._folder is None else str(self._folder),
            )
        except Exception as error:  # Ray raises many kinds
            self._head.check_now()
            raise EnvironmentProblem(
                f"Ray does not start: {plain_error(error)}; cluster=inline runs one worker without it"
            ) from error
        else:  # processes that are started later are not Ray's
            self._roots = [child for child in psutil.Process().children() if child.pid not in self._before]
        finally:
            if visible is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible

    def _follow_nodes(self) -> list[Completion]:
        """Start actors on nodes that joined since the last look, and report tasks on nodes that left as lost."""
        self._looked_at = time.monotonic()
        present = {
            raw["NodeID"]: RayNode(
                node_id=raw["NodeID"],
                host=raw["NodeManagerHostname"],
                cpus=int(raw["Resources"].get("CPU", 0)),
                gpus=int(raw["Resources"].get("GPU", 0)),
            )
            for raw in self._watched_head.call(self._ray.nodes)
            if raw["Alive"]
        }
        joined = [node for key, node in present.items() if key not in self._nodes]
        departed = [node for key, node in self._nodes.items() if key not in present]
        self._nodes = present
        if any(node.node_id == self._own_node for node in departed):
            raise ClusterLost("the Ray node on this machine, which ties us to the cluster, has ended")
        lost = [completion for node in departed for completion in self._drop_node(node)]
        for node in joined:
            self._add_node(node)
            if self._was_ready:
                self._notices.append(f"node {node.host} joined; {self._gpus[node.node_id]} workers start there")
        return lost

    def _add_node(self, node: RayNode) -> None:
        """Create a node's actors. `device.count` applies to each node."""
        if self._choice.backend == "cuda":
            keys: list[str | None] = [None] * min(node.gpus, self._choice.count or node.gpus)
        else:
            keys = [str(slot.index) for slot in make_device(self._choice).slots()]
        self._gpus[node.node_id] = len(keys)
        for index, slot_key in enumerate(keys):
            name = f"worker-{node.node_id[:6]}-{index}" if self._joined else f"worker-{index}"
            self._add_worker(node, name, slot_key)

    def _add_worker(self, node: RayNode, name: str, slot_key: str | None, gpus: int = 1) -> _Seat:
        """Create an actor on a node; one of several `gpus` on those that Ray reserves for it together."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        group = None
        if gpus == 1:
            bound = self._actor_class.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
            )
        else:
            group = placement_group([{"GPU": gpus}], strategy="STRICT_PACK", _soft_target_node_id=node.node_id)
            bound = self._actor_class.options(
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
        shares = max(1, self._gpus[node.node_id] // gpus)  # shares of the host's memory
        actor = bound.remote(self._choice.to_mapping(), slot_key, self._environment, shares, gpus)
        seat = self._seats[name] = _Seat(name, actor, node, gpus, group)
        return seat

    def _end_worker(self, seat: _Seat) -> None:
        from ray.util.placement_group import remove_placement_group

        del self._seats[seat.name]
        self._ray.kill(seat.actor, no_restart=True)
        if seat.group is not None:
            remove_placement_group(seat.group)  # a joined cluster would keep its GPUs

    def _in(self, state: str) -> list[_Seat]:
        return [seat for seat in self._seats.values() if seat.state == state]

    def _free(self, node: RayNode) -> int:
        """Return the GPUs of a node that no worker has."""
        return self._gpus[node.node_id] - sum(
            seat.gpus for seat in self._seats.values() if seat.node.node_id == node.node_id
        )

    def _offered(self) -> list[_Seat]:
        """Return the idle workers that take a task, longest idle first."""
        asked = {trial.asked for trial in self._waiting}
        return [seat for seat in self._in("idle") if seat.name not in asked]

    def _run(self, seat: _Seat, task: Task, upcoming: Task | None) -> None:
        seat.state, seat.task = "running", task
        seat.ref = seat.actor.run.remote(task, upcoming)

    def _make_room(self, node: RayNode) -> None:
        """Start the node's waiting tasks in turn: on a fitting idle worker, or a new one on the GPUs of idle ones.

        Once none waits, each free GPU gets a worker.
        """
        for trial in [trial for trial in self._waiting if trial.node.node_id == node.node_id]:
            ranks = trial.task.config.ranks
            here = [seat for seat in self._in("idle") if seat.node.node_id == node.node_id]
            seat = next((seat for seat in here if seat.gpus == ranks), None)
            if seat is None:
                while here and self._free(node) < ranks:
                    self._end_worker(here.pop(0))
                if self._free(node) < ranks:
                    return
                seat = self._replace(node, ranks)
            self._waiting.remove(trial)
            self._run(seat, trial.task, None)
        for _ in range(self._free(node)):
            self._replace(node, 1)

    def _replace(self, node: RayNode, gpus: int) -> _Seat:
        """Start a worker on GPUs of workers that have ended."""
        self._added += 1
        return self._add_worker(node, f"worker-{node.node_id[:6]}-r{self._added}", None, gpus)

    def _drop_unrunnable(self) -> list[Completion]:
        """Return the waiting tasks whose node has lost GPUs as lost: they would wait forever."""
        lost = [trial for trial in self._waiting if self._gpus[trial.node.node_id] < trial.task.config.ranks]
        self._waiting = [trial for trial in self._waiting if trial not in lost]
        for trial in lost:
            self._make_room(trial.node)
        return [
            Completion(
                worker=trial.name, task=trial.task, lost=f"its node has fewer than {trial.task.config.ranks} GPUs left"
            )
            for trial in lost
        ]

    def _drop_node(self, node: RayNode) -> list[Completion]:
        gone = [seat for seat in self._seats.values() if seat.node.node_id == node.node_id]
        lost = [
            Completion(worker=seat.name, task=seat.task, lost=f"worker lost: node {node.host} left the cluster")
            for seat in gone
            if seat.task is not None
        ]
        for seat in gone:
            self._end_worker(seat)
        del self._gpus[node.node_id]
        if gone:
            remaining = "" if self._seats else "; no worker is left, waiting for a node to join"
            self._notices.append(f"node {node.host} left the cluster with {len(gone)} workers{remaining}")
        return lost

    def idle(self) -> list[str]:
        return [seat.name for seat in self._offered()]

    def submit(self, worker: str, task: Task, upcoming: Task | None = None) -> None:
        """Hand over a task as in the Protocol; another idle worker with as many GPUs as ranks may run it."""
        gpus = task.config.ranks if self._choice.backend == "cuda" else 1
        idle = sorted(self._offered(), key=lambda seat: seat.name != worker)  # the named worker first, if still there
        fitting = next((seat for seat in idle if seat.gpus == gpus), None)
        if fitting is not None:
            self._run(fitting, task, upcoming)
            return
        near = next((seat.node for seat in idle if self._gpus[seat.node.node_id] >= gpus), None)
        node = near or max(self._nodes.values(), key=lambda node: self._gpus[node.node_id])
        self._added += 1
        asked = idle[0].name if idle else ""
        self._waiting.append(_Waiting(f"waiting-{self._added}", node, task, asked))
        self._make_room(node)

    def wait(self, timeout_s: float) -> list[Completion]:
        self._watched_head.check()
        completions = []
        asked = {seat.ref: seat for seat in self._seats.values() if seat.ref is not None}
        if asked:
            finished, _ = self._ray.wait(list(asked), num_returns=1, timeout=timeout_s)
            if finished:  # take everything else that is done by now
                finished, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
            for ref in finished:
                if asked[ref].task is None:
                    self._take_ready(asked[ref])
                else:
                    completions.append(self._take_run(asked[ref]))
        else:  # all remaining tasks wait for their next attempt
            time.sleep(timeout_s)
        if time.monotonic() - self._looked_at >= _NODES_EVERY_S:
            completions += self._follow_nodes()
            for seat in self._in("unreached"):
                self._await_ready(seat)
        self._start_servers()
        return completions + self._drop_unrunnable()

    def running(self) -> Mapping[str, Task]:
        held = {seat.name: seat.task for seat in self._seats.values() if seat.task is not None}
        return held | {trial.name: trial.task for trial in self._waiting}

    def waiting(self) -> Collection[str]:
        return {trial.name for trial in self._waiting}

    def most_gpus(self) -> int | None:
        if self._choice.backend != "cuda":
            return None
        return max(self._gpus.values(), default=0) or None

    def restart(self, worker: str) -> None:
        self._ray.kill(self._seats[worker].actor, no_restart=False)  # its run() then fails as for any lost worker

    def notices(self) -> list[str]:
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        if self._head is not None:
            self._head.stop()
        lost = self._head is not None and self._head.reason is not None
        started = self._own_processes()
        if lost:
            end_processes(started)  # first: shutting down a broken Ray would wait for its dead parts
        if self._ray is not None and self._ray.is_initialized():
            if lost:
                thread = threading.Thread(target=self._ray.shutdown, daemon=True)
                thread.start()
                thread.join(_SHUTDOWN_S)
            else:
                for seat in list(self._seats.values()):
                    self._end_worker(seat)
                self._ray.shutdown()
        psutil.wait_procs(started, timeout=_END_WITHIN_S)
        self._end_own(started)

    def _end_own(self, processes: Sequence[psutil.Process] | None = None) -> None:
        """End the remaining processes of a private Ray, and delete its session folder."""
        end_processes(self._own_processes() if processes is None else processes)
        if self._folder is not None:
            delete_folder(self._folder)
            self._folder = None

    def _own_processes(self) -> list[psutil.Process]:
        """Return only the processes of a private Ray, with its actors and their trials."""
        if self._folder is None:
            return []
        if self._roots is None:  # Ray is starting, and this process starts nothing else until then
            return [child for child in psutil.Process().children(recursive=True) if child.pid not in self._before]
        processes: dict[int, psutil.Process] = {}
        for root in self._roots:
            with contextlib.suppress(psutil.Error):
                processes |= {process.pid: process for process in (root, *root.children(recursive=True))}
        return list(processes.values())

    def _start_servers(self) -> None:
        """Start a few servers at a time on each node, since importing torch takes a core for seconds."""
        busy = Counter(seat.node.node_id for seat in self._in("starting"))
        for seat in self._in("unstarted"):
            if busy[seat.node.node_id] < max(1, seat.node.cpus // 2):
                busy[seat.node.node_id] += 1
                self._await_ready(seat)

    def _await_ready(self, seat: _Seat) -> None:
        seat.state, seat.ref = "starting", seat.actor.ready.remote()

    def _take_ready(self, seat: _Seat) -> None:
        ref, seat.ref = seat.ref, None
        try:
            self._ray.get(ref)
        except (self._ray.exceptions.ActorUnavailableError, self._ray.exceptions.ActorUnschedulableError):
            seat.state = "unreached"  # its process, its node or the network is gone
        except self._ray.exceptions.RayError as error:
            self._watched_head.check()
            seat.failures += 1
            if seat.failures < _READY_TRIES:
                self._await_ready(seat)
                return
            self._notices.append(f"{seat.name} does not start and is left out: {plain_error(error)}")
            self._end_worker(seat)
            if seat.gpus == 1:
                self._gpus[seat.node.node_id] -= 1
            else:  # one GPU may be broken: each gets a separate worker
                for _ in range(seat.gpus):
                    self._replace(seat.node, 1)
            # Another node may still join a cluster that has worked.
            if not self._gpus.total() and not (self._joined and self._was_ready):
                raise EnvironmentProblem(f"no worker starts: {plain_error(error)}") from error
        else:
            seat.failures = 0
            self._was_ready = True
            self._set_idle(seat)

    def _set_idle(self, seat: _Seat) -> None:
        """Make a worker idle, behind those idle for longer; it may make room for a waiting task."""
        seat.state = "idle"
        self._seats[seat.name] = self._seats.pop(seat.name)
        self._make_room(seat.node)

    def _take_run(self, seat: _Seat) -> Completion:
        ref, task, result, lost = seat.ref, seat.task, None, None
        assert task is not None
        seat.ref = seat.task = None
        try:
            result = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:  # a bug of ours must cost one task, not the job
            lost = f"worker failed: {error}"
        except self._ray.exceptions.RayError as error:  # the process is gone; Ray restarts it unless the node is gone
            self._await_ready(seat)
            return Completion(worker=seat.name, task=task, lost=f"worker lost: {plain_error(error)}")
        except Exception as error:  # an unreadable result fails its task only
            lost = f"worker's answer cannot be read: {error!r}"
        self._set_idle(seat)
        return Completion(worker=seat.name, task=task, result=result, lost=lost)
