"""Ray's side of the farm: one actor per GPU, pinned by Ray, restarted by Ray, results through its object store.

Start reading at `RayExecutor`. Settings that Ray has changed between versions are set here and not relied on.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import UsageError
from conf.ray_session import own_session_environment
from farm.executors import Completion
from workers.devices import DeviceChoice, make_device
from workers.worker import RunResult, TaskSpec, Worker

_CONNECT_TIMEOUT_S = 5.0
_READY_TRIES = 3  # a worker whose trial server fails to start this often in a row is given up


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The `cluster` key: `ray` (our own, or joined by `address`) or `inline`."""

    kind: str
    address: str | None = None
    dashboard: bool = False
    object_store_mib: int = 128

    def __post_init__(self) -> None:
        if self.kind not in ("ray", "inline"):
            raise UsageError(f"cluster.kind must be one of ray, inline, got {self.kind!r}")
        if (
            isinstance(self.object_store_mib, bool)
            or not isinstance(self.object_store_mib, int)
            or self.object_store_mib < 80
        ):
            raise UsageError(f"cluster.object_store_mib must be an integer >= 80, got {self.object_store_mib!r}")

    def check_address(self) -> None:
        """`UsageError` when nobody answers at `address`; Ray itself tries for minutes before it says so."""
        if self.address is None:
            return
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

    def nobody_answers(self, error: Exception) -> UsageError:
        return UsageError(
            f"cluster.address={self.address}: no Ray cluster answers there ({_plain(error)}); "
            "start one with `ray start --head`, or leave the key out"
        )


def _running_cluster() -> str:
    """Where Ray notes the cluster that was started last on this machine (`ray start`)."""
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        return note.read_text().strip()
    except OSError as error:
        raise UsageError(
            "cluster.address=auto: no Ray cluster runs on this machine; start one with `ray start --head`"
        ) from error


class RayWorker:
    """The actor: finds the slot that Ray pinned it to and runs tasks there. Never imports torch."""

    def __init__(self, choice: dict[str, Any], slot_key: str | None, environment: dict[str, str], workers: int):
        name = f"ray-{slot_key}"
        if slot_key is None:  # Ray has pinned this process: it sees one GPU only
            import ray

            name = f"ray-{ray.get_runtime_context().get_accelerator_ids()['GPU'][0]}"
        self._worker = Worker(DeviceChoice(**choice), slot_key, name, environment, workers)

    def ready(self) -> None:
        """Start the trial server and wait for it."""
        self._worker.ready()

    def run(self, task: TaskSpec, upcoming: TaskSpec | None = None) -> RunResult:
        return self._worker.run(task, upcoming)


class RayExecutor:
    """Ray actors, one per slot. `address=None` starts a Ray of our own that listens on loopback only."""

    def __init__(self, choice: DeviceChoice, cluster: ClusterSettings, environment: dict[str, str]):
        self._choice = choice
        self._cluster = cluster
        self._environment = environment
        self._actors: dict[str, Any] = {}
        self._starting: dict[Any, str] = {}  # ref of ready() -> worker
        self._running: dict[Any, tuple[str, TaskSpec]] = {}  # ref of run() -> (worker, task)
        self._failures: dict[str, int] = {}
        self._unstarted: list[str] = []
        self._notices: list[str] = []
        self._ray = None
        self._idle: list[str] = []

    def start(self) -> None:
        if self._cluster.address is None:
            os.environ.update(own_session_environment())  # Ray reads some of it when it is imported
        try:
            import ray
        except ImportError as error:
            raise UsageError(f"cannot import ray ({error}); cluster=inline runs one worker without it") from error

        self._ray = ray
        pinned = self._connect(ray)
        actor = ray.remote(
            num_cpus=0,  # an actor that holds a CPU starves a small machine
            num_gpus=1 if pinned else 0,
            max_restarts=-1,  # Ray restarts a killed actor; which task to repeat is the queue's to say
            max_task_retries=0,
        )(RayWorker)
        keys = [None] * self._count if pinned else [str(index) for index in range(self._count)]
        for index, key in enumerate(keys):
            name = f"worker-{index}"
            self._actors[name] = actor.remote(self._choice.to_mapping(), key, self._environment, self._count)
            self._unstarted.append(name)
        self._start_servers()

    def _connect(self, ray) -> bool:
        """Start or join Ray, set `self._count`; whether Ray pins the actors to GPUs."""
        if self._cluster.address is not None:
            self._cluster.check_address()
            try:
                ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise self._cluster.nobody_answers(error) from error
            pinned = self._choice.backend == "cuda"
            gpus = int(ray.cluster_resources().get("GPU", 0))
            self._count = min(gpus, self._choice.count or gpus) if pinned else len(make_device(self._choice).slots())
            if not self._count:
                raise UsageError(f"cluster.address={self._cluster.address}: the cluster has no GPU")
            return pinned
        pinned = self._choice.backend == "cuda"  # CPUs and simulated GPUs are no resource that Ray could count
        slots = make_device(self._choice).slots()
        self._count = len(slots)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if pinned:  # by UUID, before Ray counts: a display GPU is never a worker
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slot.device_uuid for slot in slots)
        try:
            ray.init(
                address="local",
                num_cpus=os.cpu_count(),
                num_gpus=self._count if pinned else 0,
                include_dashboard=self._cluster.dashboard,
                dashboard_host="127.0.0.1",
                object_store_memory=self._cluster.object_store_mib * 2**20,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise UsageError(
                f"Ray does not start: {_plain(error)}; cluster=inline runs one worker without it"
            ) from error
        finally:
            if visible is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible
        return pinned

    def idle(self) -> list[str]:
        return list(self._idle)

    def submit(self, worker: str, task: TaskSpec, upcoming: TaskSpec | None = None) -> None:
        self._idle.remove(worker)
        self._running[self._actors[worker].run.remote(task, upcoming)] = (worker, task)

    def wait(self, timeout_s: float) -> list[Completion]:
        import ray

        refs = [*self._running, *self._starting]
        if not refs:  # every task that is left waits for its next attempt
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        if done:  # whatever else is done by now comes along
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        completions = []
        for ref in done:
            if ref in self._starting:
                self._take_ready(ref)
            else:
                completions.append(self._take_run(ref))
        return completions

    def running(self) -> Mapping[str, TaskSpec]:
        return dict(self._running.values())

    def restart(self, worker: str) -> None:
        self._ray.kill(self._actors[worker], no_restart=False)  # its run() then fails, as any lost worker's does

    def notices(self) -> list[str]:
        said, self._notices = self._notices, []
        return said

    def close(self) -> None:
        if self._ray is not None and self._ray.is_initialized():
            for actor in self._actors.values():
                self._ray.kill(actor, no_restart=True)
            self._ray.shutdown()

    def _start_servers(self) -> None:
        """Importing torch keeps a core busy for seconds: a few at a time, so that the first worker is ready early."""
        while self._unstarted and len(self._starting) < max(1, (os.cpu_count() or 1) // 2):
            self._await_ready(self._unstarted.pop(0))

    def _await_ready(self, worker: str) -> None:
        self._starting[self._actors[worker].ready.remote()] = worker

    def _take_ready(self, ref) -> None:
        import ray

        worker = self._starting.pop(ref)
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            self._failures[worker] = self._failures.get(worker, 0) + 1
            if self._failures[worker] < _READY_TRIES:
                self._await_ready(worker)
                return
            self._notices.append(f"{worker} does not start and is left out: {_plain(error)}")
            del self._actors[worker]
            if not self._actors:
                raise UsageError(f"no worker starts: {_plain(error)}") from error
        else:
            self._failures[worker] = 0
            self._idle.append(worker)
        self._start_servers()

    def _take_run(self, ref) -> Completion:
        import ray

        worker, task = self._running.pop(ref)
        try:
            result = ray.get(ref)
        except ray.exceptions.RayTaskError as error:  # a mistake of ours: one task's business, not the job's
            self._idle.append(worker)
            return Completion(worker=worker, task=task, lost=f"worker failed: {error}")
        except ray.exceptions.RayError as error:  # the process is gone; Ray is starting another
            self._await_ready(worker)
            return Completion(worker=worker, task=task, lost=f"worker lost: {_plain(error)}")
        self._idle.append(worker)
        return Completion(worker=worker, task=task, result=result)


def _plain(error: Exception) -> str:
    """The first paragraph of Ray's many-paragraph messages."""
    return " ".join(str(error).split("\n\n")[0].split())[:400]
