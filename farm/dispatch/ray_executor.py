"""Ray's side of the farm: one actor per GPU, pinned by Ray, restarted by Ray, results through its object store.

Start reading at `RayExecutor`; `actor_class` has the body of an actor. Defaults that Ray has changed between versions
are set here explicitly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from conf.cli.own_packages import SAFE_PATH, searching_last, working_folder
from conf.errors import EnvironmentProblem
from farm.dispatch.cluster_settings import ClusterSettings, plain_error
from farm.dispatch.executors import Completion
from farm.dispatch.ray_cluster import (
    ClusterLost,
    HeadWatch,
    JoinedHead,
    NodeWatch,
    OwnHead,
    RayNode,
    own_session_environment,
)
from farm.queue.leftovers import delete_folder, descendants, end_processes, make_ray_folder, record_processes
from workers.devices import DeviceChoice, make_device
from workers.task import RunResult, Task


def actor_class() -> type:
    """Return the actors' class, which is sent by value: it corrects the path before any import of ours."""
    put_last = searching_last(working_folder())

    class RayWorker:
        """Finds the slot that Ray pinned its process to and runs tasks there. Never imports torch."""

        def __init__(
            self, choice: dict[str, Any], slot_key: str | None, environment: dict[str, str], workers: int, gpus: int = 1
        ) -> None:
            put_last()
            from workers.devices import DeviceChoice  # the module's own would be sent by its name, and imported first
            from workers.worker import Worker

            name = f"ray-{slot_key}"
            if slot_key is None:  # Ray has pinned this process: it sees its own GPUs only
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


_END_WITHIN_S = 5.0  # Ray's processes, once it was shut down
_SHUTDOWN_S = 10.0  # a Ray that has lost its head may take this long
_READY_TRIES = 3  # a worker whose trial server fails to start this often in a row is given up


@dataclass(frozen=True)
class _Seat:
    """One actor with its node; one of several GPUs has them in a placement group of their own."""

    actor: Any
    node: RayNode
    gpus: int = 1
    group: Any = None


@dataclass(frozen=True)
class _Waiting:
    """A task that waits for as many GPUs of a node as it has ranks."""

    name: str
    node: RayNode
    task: Task


class RayExecutor:
    """Ray actors, one per slot of every node. `address=None` starts a Ray of our own, on loopback only.

    The cluster is followed: a node that comes gets actors, and what ran on one that goes comes back as lost.
    Each actor is bound to its node, since CPUs and simulated GPUs are not a resource that Ray could spread them by.
    """

    def __init__(self, choice: DeviceChoice, cluster: ClusterSettings, environment: dict[str, str]):
        self._choice = choice
        self._cluster = cluster
        safe_path = {SAFE_PATH: os.environ[SAFE_PATH]} if SAFE_PATH in os.environ else {}
        self._environment = {**safe_path, **environment}  # other nodes have their own
        self._seats: dict[str, _Seat] = {}  # worker -> its actor
        self._starting: dict[Any, str] = {}  # ref of ready() -> worker
        self._running: dict[Any, tuple[str, Task]] = {}  # ref of run() -> (worker, task)
        self._failures: dict[str, int] = {}
        self._unstarted: list[str] = []
        self._notices: list[str] = []
        self._unreached: list[str] = []  # asked again at the next look: Ray needs seconds to call a node dead
        self._was_ready = False  # whether any worker has ever been ready
        self._module: ModuleType | None = None  # Ray, once it is imported
        self._joined = cluster.address is not None
        self._idle: list[str] = []
        self._waiting: list[_Waiting] = []  # on each node GPUs are gathered for the first one
        self._free: Counter[str] = Counter()  # node -> GPUs whose workers have made room
        self._nodes: dict[str, RayNode] = {}
        self._workers_of: dict[str, int] = {}  # node -> its workers, while each has one GPU
        self._added = 0  # tasks that waited, and workers that took the place of others
        self._head: HeadWatch | None = None
        self._folder: Path | None = None  # session folder of our own Ray
        self._before: set[int] = set()  # child processes of ours that are not Ray's
        self._roots: list[psutil.Process] | None = None  # what Ray has started from this process, once it is up

    def start(self) -> None:
        if not self._joined:
            os.environ.update(own_session_environment())  # Ray reads some of it when it is imported
        try:
            import ray
        except ImportError as error:
            raise EnvironmentProblem(
                f"cannot import ray ({error}): pip install 'gpufarm[farm]'; cluster=inline runs one worker without it"
            ) from error

        self._module = ray
        pinned = self._choice.backend == "cuda"
        self._actor_class = ray.remote(
            num_cpus=0,  # an actor that holds a CPU starves a small machine
            num_gpus=1 if pinned else 0,
            max_restarts=-1,  # Ray restarts a killed actor; which task to repeat is the queue's to say
            max_task_retries=0,
        )(actor_class())
        if self._joined:
            self._join()
        else:
            self._start_own(pinned)
        head = self._watched_head
        head.started()
        self._own_node = ray.get_runtime_context().get_node_id()
        self._watch = NodeWatch(lambda: head.call(ray.nodes))
        self._follow_nodes()
        if not self._seats:
            raise EnvironmentProblem(f"cluster.address={self._cluster.address}: the cluster has no GPU")
        self._start_servers()

    @property
    def _ray(self) -> ModuleType:
        assert self._module is not None, "start() comes first"
        return self._module

    @property
    def _watched_head(self) -> HeadWatch:
        assert self._head is not None, "start() comes first"
        return self._head

    def _join(self) -> None:
        self._head = HeadWatch(JoinedHead(*self._cluster.place()))
        try:
            self._ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # many kinds, and none is a bug of ours
            self._head.check()
            raise self._cluster.nobody_answers(error) from error

    def _start_own(self, pinned: bool) -> None:
        ray = self._ray
        slots = make_device(self._choice).slots()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if pinned:  # by UUID, before Ray counts: a display GPU is never a worker
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slot.device_uuid or "" for slot in slots)
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._folder = make_ray_folder()
        self._head = HeadWatch(OwnHead(), self._end_own)
        try:
            ray.init(
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
        except Exception as error:  # many kinds, and none is a bug of ours
            self._head.check_now()
            raise EnvironmentProblem(
                f"Ray does not start: {plain_error(error)}; cluster=inline runs one worker without it"
            ) from error
        else:
            self._note_roots()
        finally:
            if visible is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible

    def _follow_nodes(self) -> list[Completion]:
        """Start actors on nodes that joined, and report tasks on nodes that left as lost."""
        joined, left = self._watch.look()
        if any(node.node_id == self._own_node for node in left):
            raise ClusterLost("the Ray node on this machine, which ties us to the cluster, has ended")
        lost = [completion for node in left for completion in self._drop_node(node)]
        for node in joined:
            count = self._add_node(node)
            if self._was_ready:
                self._notices.append(f"node {node.host} joined; {count} workers start there")
        return lost

    def _add_node(self, node: RayNode) -> int:
        """Create a node's actors; return their number. `device.count` applies to each node."""
        if self._choice.backend == "cuda":
            keys: list[str | None] = [None] * min(node.gpus, self._choice.count or node.gpus)
        else:
            keys = [str(slot.index) for slot in make_device(self._choice).slots()]
        self._nodes[node.node_id] = node
        self._workers_of[node.node_id] = len(keys)
        for index, slot_key in enumerate(keys):
            name = f"worker-{node.node_id[:6]}-{index}" if self._joined else f"worker-{index}"
            self._add_worker(node, name, slot_key)
            self._unstarted.append(name)
        return len(keys)

    def _add_worker(self, node: RayNode, name: str, slot_key: str | None, gpus: int = 1) -> None:
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
        shares = max(1, self._workers_of[node.node_id] // gpus)  # shares of the host's memory
        actor = bound.remote(self._choice.to_mapping(), slot_key, self._environment, shares, gpus)
        self._seats[name] = _Seat(actor, node, gpus, group)

    def _end_worker(self, worker: str) -> _Seat:
        from ray.util.placement_group import remove_placement_group

        seat = self._seats.pop(worker)
        self._ray.kill(seat.actor, no_restart=True)
        if seat.group is not None:
            remove_placement_group(seat.group)  # a joined cluster would keep its GPUs
        if worker in self._idle:
            self._idle.remove(worker)
        return seat

    def _gpus_of(self, node: RayNode) -> int:
        """Return the GPUs of a node that workers have, or that are gathered for a task."""
        held = sum(seat.gpus for seat in self._seats.values() if seat.node.node_id == node.node_id)
        return held + self._free[node.node_id]

    def _run(self, worker: str, task: Task, upcoming: Task | None) -> None:
        self._running[self._seats[worker].actor.run.remote(task, upcoming)] = (worker, task)

    def _make_room(self, node: RayNode) -> None:
        """Start the tasks that wait on a node, in turn, on an idle worker of as many GPUs or on those of idle ones.

        Once none waits, GPUs that are left get a worker each.
        """
        while waiting := [trial for trial in self._waiting if trial.node.node_id == node.node_id]:
            task = waiting[0].task
            here = [name for name in self._idle if self._seats[name].node.node_id == node.node_id]
            worker = next((name for name in here if self._seats[name].gpus == task.config.ranks), None)
            if worker is not None:
                self._idle.remove(worker)
            else:
                for name in here:
                    if self._free[node.node_id] < task.config.ranks:
                        self._free[node.node_id] += self._end_worker(name).gpus
                if self._free[node.node_id] < task.config.ranks:
                    return
                self._free[node.node_id] -= task.config.ranks
                worker = self._replace(node, task.config.ranks)
            self._waiting.remove(waiting[0])
            self._run(worker, task, None)
        self._add_single_workers(node, self._free.pop(node.node_id, 0))

    def _replace(self, node: RayNode, gpus: int) -> str:
        """Start a worker where others have ended; return its name."""
        self._added += 1
        name = f"worker-{node.node_id[:6]}-r{self._added}"
        self._add_worker(node, name, None, gpus)
        return name

    def _add_single_workers(self, node: RayNode, gpus: int) -> None:
        """Give this many GPUs of a node a worker each."""
        self._unstarted += [self._replace(node, 1) for _ in range(gpus)]

    def _without_gpus(self) -> list[Completion]:
        """Return the tasks whose node has lost GPUs, so that they would wait forever."""
        lost = [trial for trial in self._waiting if self._gpus_of(trial.node) < trial.task.config.ranks]
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
        gone = {worker for worker, seat in self._seats.items() if seat.node.node_id == node.node_id}
        lost = [
            Completion(worker=worker, task=task, lost=f"worker lost: node {node.host} left the cluster")
            for worker, task in self._running.values()
            if worker in gone
        ]
        self._running = {ref: value for ref, value in self._running.items() if value[0] not in gone}
        self._starting = {ref: worker for ref, worker in self._starting.items() if worker not in gone}
        self._unstarted = [worker for worker in self._unstarted if worker not in gone]
        self._unreached = [worker for worker in self._unreached if worker not in gone]
        for worker in gone:
            self._end_worker(worker)
        del self._free[node.node_id], self._nodes[node.node_id]
        if gone:
            rest = "" if self._seats else "; no worker is left, waiting for a node to join"
            self._notices.append(f"node {node.host} left the cluster with {len(gone)} workers{rest}")
        return lost

    def idle(self) -> list[str]:
        return list(self._idle)

    def submit(self, worker: str, task: Task, upcoming: Task | None = None) -> None:
        """As in the Protocol, but that another idle worker may run it, which has as many GPUs as the task has ranks."""
        gpus = task.config.ranks if self._choice.backend == "cuda" else 1
        idle = sorted(self._idle, key=lambda name: name != worker)  # itself first, unless it has made room since
        fitting = next((name for name in idle if self._seats[name].gpus == gpus), None)
        if fitting is not None:
            self._idle.remove(fitting)
            self._run(fitting, task, upcoming)
            return
        near = [self._seats[name].node for name in idle]
        node = next((node for node in near if self._gpus_of(node) >= gpus), None)
        self._added += 1
        node = node or max(self._nodes.values(), key=self._gpus_of)
        self._waiting.append(_Waiting(f"waiting-{self._added}", node, task))
        self._make_room(node)

    def wait(self, timeout_s: float) -> list[Completion]:
        import ray

        self._watched_head.check()
        completions = []
        refs = [*self._running, *self._starting]
        if refs:
            finished, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
            if finished:  # whatever else is done by now is taken, too
                finished, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
            for ref in finished:
                if ref in self._starting:
                    self._take_ready(ref)
                else:
                    completions.append(self._take_run(ref))
        else:  # every task that is left waits for its next attempt
            time.sleep(timeout_s)
        if self._watch.due:
            completions += self._follow_nodes()
            unreached, self._unreached = self._unreached, []
            for worker in unreached:
                self._await_ready(worker)
        self._start_servers()
        return completions + self._without_gpus()

    def running(self) -> Mapping[str, Task]:
        return {**dict(self._running.values()), **{trial.name: trial.task for trial in self._waiting}}

    def waiting(self) -> Collection[str]:
        return {trial.name for trial in self._waiting}

    def most_gpus(self) -> int | None:
        if self._choice.backend != "cuda":
            return None
        return max(map(self._gpus_of, self._nodes.values()), default=None)

    def restart(self, worker: str) -> None:
        self._ray.kill(self._seats[worker].actor, no_restart=False)  # its run() then fails, as any lost worker's does

    def notices(self) -> list[str]:
        notices, self._notices = self._notices, []
        return notices

    def close(self) -> None:
        if self._head is not None:
            self._head.stop()
        lost = self._head is not None and self._head.reason is not None
        started = self._own_processes()
        if lost:
            end_processes(started)  # first: the end of what is left of a Ray waits for what is gone
        if self._module is not None and self._module.is_initialized():
            self._shut_down(lost)
        psutil.wait_procs(started, timeout=_END_WITHIN_S)
        self._end_own(started)

    def _shut_down(self, lost: bool) -> None:
        def shut_down() -> None:
            if not lost:
                for worker in list(self._seats):
                    self._end_worker(worker)
            self._ray.shutdown()

        if not lost:
            shut_down()
            return
        thread = threading.Thread(target=shut_down, daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_S)

    def _end_own(self, processes: Sequence[psutil.Process] | None = None) -> None:
        """End the remaining processes of our own Ray, and delete its session."""
        end_processes(self._own_processes() if processes is None else processes)
        if self._folder is not None:
            delete_folder(self._folder)
            self._folder = None

    def _own_processes(self) -> list[psutil.Process]:
        """Return the processes that our own Ray started, with its actors and their trials, and no other ones."""
        if self._folder is None:
            return []
        if self._roots is None:  # it is starting: this process does nothing else until then
            return [child for child in psutil.Process().children(recursive=True) if child.pid not in self._before]
        processes: dict[int, psutil.Process] = {}
        for root in self._roots:
            with contextlib.suppress(psutil.Error):
                processes |= {process.pid: process for process in (root, *root.children(recursive=True))}
        return list(processes.values())

    def _note_roots(self) -> None:
        """Record Ray's root processes once it is up; processes started later are not Ray's."""
        self._roots = [child for child in psutil.Process().children() if child.pid not in self._before]

    def _start_servers(self) -> None:
        """Start a few servers at a time on each node, since importing torch takes a core for seconds."""
        busy = Counter(self._seats[worker].node.node_id for worker in self._starting.values())
        for worker in list(self._unstarted):
            node = self._seats[worker].node
            if busy[node.node_id] < max(1, node.cpus // 2):
                busy[node.node_id] += 1
                self._unstarted.remove(worker)
                self._await_ready(worker)

    def _await_ready(self, worker: str) -> None:
        self._starting[self._seats[worker].actor.ready.remote()] = worker

    def _take_ready(self, ref: Any) -> None:
        import ray

        worker = self._starting.pop(ref)
        try:
            ray.get(ref)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorUnschedulableError):
            self._unreached.append(worker)  # its process or its node is gone, or the network for a moment
        except ray.exceptions.RayError as error:
            self._watched_head.check()
            self._failures[worker] = self._failures.get(worker, 0) + 1
            if self._failures[worker] < _READY_TRIES:
                self._await_ready(worker)
                return
            self._notices.append(f"{worker} does not start and is left out: {plain_error(error)}")
            seat = self._end_worker(worker)
            if seat.gpus > 1:  # one of them may be broken: the others continue as workers of one GPU
                self._add_single_workers(seat.node, seat.gpus)
            # Of a cluster that did work, another node may still join.
            held = bool(self._seats) or bool(self._free.total())
            if not held and not (self._joined and self._was_ready):
                raise EnvironmentProblem(f"no worker starts: {plain_error(error)}") from error
        else:
            self._failures[worker] = 0
            if self._folder is not None and not self._was_ready:
                record_processes(self._folder, descendants())
            self._was_ready = True
            self._now_idle(worker)

    def _now_idle(self, worker: str) -> None:
        """A worker can take a task, or make room for one that waits."""
        self._idle.append(worker)
        self._make_room(self._seats[worker].node)

    def _take_run(self, ref: Any) -> Completion:
        import ray

        worker, task = self._running.pop(ref)
        try:
            result = ray.get(ref)
        except ray.exceptions.RayTaskError as error:  # our own bug: it must cost one task, not the job
            self._now_idle(worker)
            return Completion(worker=worker, task=task, lost=f"worker failed: {error}")
        except ray.exceptions.RayError as error:  # the process is gone; Ray starts another, unless the node is gone
            self._await_ready(worker)
            return Completion(worker=worker, task=task, lost=f"worker lost: {plain_error(error)}")
        except Exception as error:  # what it sent cannot be read: again one task's business
            self._now_idle(worker)
            return Completion(worker=worker, task=task, lost=f"worker's answer cannot be read: {error!r}")
        self._now_idle(worker)
        return Completion(worker=worker, task=task, result=result)
