"""Ray's side of the farm: one actor per GPU, pinned by Ray, restarted by Ray, results through its object store.

Start reading at `RayExecutor`. Defaults that Ray has changed between versions are set here explicitly.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

from conf.errors import EnvironmentProblem
from conf.own_packages import SAFE_PATH
from conf.ray_session import own_session_environment
from farm.cluster_settings import ClusterSettings, plain_error
from farm.executors import Completion
from farm.gangs import Gang, Gangs
from farm.leftovers import delete_folder, make_ray_folder, record_processes
from farm.ray_head import ClusterLost, HeadWatch, JoinedHead, OwnHead
from farm.ray_nodes import NodeWatch, RayNode
from farm.ray_worker import actor_class
from farm.sweep import descendants, end_processes
from workers.devices import DeviceChoice, make_device
from workers.task import Task

_END_WITHIN_S = 5.0  # Ray's processes, once it was shut down
_SHUTDOWN_S = 10.0  # of a Ray that has lost its head
_READY_TRIES = 3  # a worker whose trial server fails to start this often in a row is given up


@dataclass(frozen=True)
class _Seat:
    """One actor with its node; that of a gang has several GPUs, in a placement group of their own."""

    actor: Any
    node: RayNode
    gang: Gang | None = None
    group: Any = None


class RayExecutor:
    """Ray actors, one per slot of every node. `address=None` starts a Ray of our own, on loopback only.

    A joined cluster is followed: a node that comes gets actors, and what ran on one that goes comes back as lost.
    Each actor is bound to its node, since CPUs and simulated GPUs are no resource that Ray could spread them by.
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
        self._was_ready = False  # some worker, at some time
        self._module: ModuleType | None = None  # Ray, once it is imported
        self._joined = cluster.address is not None
        self._idle: list[str] = []
        self._gangs = Gangs()
        self._replaced = 0  # workers that were started where a gang has ended
        self._head: HeadWatch | None = None
        self._folder: Path | None = None  # of our own Ray: its session
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
        except Exception as error:  # of many kinds, and none is a bug of ours
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
        except Exception as error:  # of many kinds, and none is a bug of ours
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
        for index, slot_key in enumerate(keys):
            name = f"worker-{node.node_id[:6]}-{index}" if self._joined else f"worker-{index}"
            self._add_worker(node, name, slot_key, len(keys))
        return len(keys)

    def _add_worker(self, node: RayNode, name: str, slot_key: str | None, workers: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        bound = self._actor_class.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)
        )
        actor = bound.remote(self._choice.to_mapping(), slot_key, self._environment, workers)
        self._seats[name] = _Seat(actor, node)
        self._unstarted.append(name)

    def _gpus_of(self, node_id: str) -> int:
        """Return the GPUs of a node that workers have, or gangs, or that are gathered for one."""
        seats = [seat for seat in self._seats.values() if seat.node.node_id == node_id]
        gathered = sum(gang.gathered for gang in self._gangs.on_node(node_id))
        return gathered + sum(1 if seat.gang is None else seat.gang.size for seat in seats)

    def _wait_for_gpus(self, worker: str, task: Task) -> None:
        """Let a task of several ranks wait for GPUs of one node: that of its worker, or the largest."""
        size, node = task.config.ranks, self._seats[worker].node
        if self._gpus_of(node.node_id) < size:  # another node's workers make room for it
            nodes = {seat.node.node_id: seat.node for seat in self._seats.values()}
            node = max(nodes.values(), key=lambda one: self._gpus_of(one.node_id))
            self._gangs.add(node.node_id, size, task, worker, abroad=True)
        else:
            self._gangs.add(node.node_id, size, task, worker)
        self._make_room(node)

    def _waits_no_more(self, gang: Gang) -> None:
        """Let the workers that a gang kept take tasks again."""
        for worker in (*gang.parked, *([] if gang.abroad is None else [gang.abroad])):
            self._now_idle(worker)
        gang.parked, gang.abroad = [], None

    def _make_room(self, node: RayNode) -> None:
        """End workers for the gang that is next on a node, and start it once it has its GPUs."""
        idle = [worker for worker in self._idle if self._seats[worker].node.node_id == node.node_id]
        move = self._gangs.advance(node.node_id, [worker for worker in idle if self._seats[worker].gang is None])
        for worker in move.retired:
            if worker in self._idle:
                self._idle.remove(worker)
            self._ray.kill(self._seats.pop(worker).actor, no_restart=True)
        if move.placed is not None:
            self._place(move.placed, node)
            self._waits_no_more(move.placed)

    def _place(self, gang: Gang, node: RayNode) -> None:
        """Start a gang's actor on its GPUs, which are one placement group."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([{"GPU": gang.size}], strategy="STRICT_PACK", _soft_target_node_id=node.node_id)
        together = self._actor_class.options(
            num_gpus=gang.size,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        shares = max(1, self._gpus_of(node.node_id) // gang.size)  # of the host's memory
        actor = together.remote(self._choice.to_mapping(), None, self._environment, shares, gang.size)
        self._seats[gang.name] = _Seat(actor, node, gang, group)
        self._running[actor.run.remote(gang.task, None)] = (gang.name, gang.task)

    def _after_gang(self, worker: str, usable: bool) -> None:
        """Give a gang's GPUs to the next gang of its size, else back to workers of one each."""
        seat = self._seats[worker]
        assert seat.gang is not None
        following = self._gangs.successor(seat.gang) if usable else None
        if following is not None:
            del self._seats[worker]
            self._seats[following.name] = dataclasses.replace(seat, gang=following)
            self._running[seat.actor.run.remote(following.task, None)] = (following.name, following.task)
            self._waits_no_more(following)
            return
        workers = self._gpus_of(seat.node.node_id)
        self._end_gang(worker)
        for _ in range(seat.gang.size):
            self._replaced += 1
            self._add_worker(seat.node, f"worker-{seat.node.node_id[:6]}-r{self._replaced}", None, workers)
        self._start_servers()

    def _end_gang(self, worker: str) -> None:
        from ray.util.placement_group import remove_placement_group

        seat = self._seats.pop(worker)
        self._ray.kill(seat.actor, no_restart=True)
        remove_placement_group(seat.group)

    def _without_gpus(self) -> list[Completion]:
        """Return the tasks whose node has lost GPUs, so that they would wait for ever."""
        lost = self._gangs.drop(lambda gang: self._gpus_of(gang.node_id) < gang.size)
        for gang in lost:
            self._waits_no_more(gang)
        return [
            Completion(worker=gang.name, task=gang.task, lost=f"its node has fewer than {gang.size} GPUs left")
            for gang in lost
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
        self._idle = [worker for worker in self._idle if worker not in gone]
        for worker in gone:
            self._gangs.forget_worker(worker)
            if self._seats[worker].gang is not None:
                self._end_gang(worker)
            else:
                self._ray.kill(self._seats.pop(worker).actor, no_restart=True)
        if gone:
            rest = "" if self._seats else "; no worker is left, waiting for a node to join"
            self._notices.append(f"node {node.host} left the cluster with {len(gone)} workers{rest}")
        return lost

    def idle(self) -> list[str]:
        return list(self._idle)

    def submit(self, worker: str, task: Task, upcoming: Task | None = None) -> None:
        self._idle.remove(worker)
        if self._choice.backend == "cuda" and task.config.ranks > 1:
            self._wait_for_gpus(worker, task)
            return
        self._running[self._seats[worker].actor.run.remote(task, upcoming)] = (worker, task)

    def wait(self, timeout_s: float) -> list[Completion]:
        import ray

        self._watched_head.check()
        completions = []
        refs = [*self._running, *self._starting]
        if refs:
            done, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
            if done:  # whatever else is done by now comes along
                done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
            for ref in done:
                if ref in self._starting:
                    self._take_ready(ref)
                else:
                    completions.append(self._take_run(ref))
        else:  # every task that is left waits for its next attempt
            time.sleep(timeout_s)
        if self._joined and self._watch.due:
            completions += self._follow_nodes()
            unreached, self._unreached = self._unreached, []
            for worker in unreached:
                self._await_ready(worker)
        self._start_servers()
        return completions + self._without_gpus()

    def running(self) -> Mapping[str, Task]:
        return {**dict(self._running.values()), **{gang.name: gang.task for gang in self._gangs.waiting()}}

    def waiting(self) -> Collection[str]:
        return {gang.name for gang in self._gangs.waiting()}

    def most_gpus(self) -> int | None:
        if self._choice.backend != "cuda":
            return None
        return max((self._gpus_of(seat.node.node_id) for seat in self._seats.values()), default=None)

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
                for worker, seat in list(self._seats.items()):
                    if seat.gang is not None:
                        self._end_gang(worker)  # a joined cluster would keep its GPUs
                    else:
                        self._ray.kill(seat.actor, no_restart=True)
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
        if self._roots is None:  # it is starting: this process does nothing else meanwhile
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
            self._ray.kill(self._seats.pop(worker).actor, no_restart=True)
            # Of a cluster that did work, another node may still join.
            if not self._seats and not (self._joined and self._was_ready):
                raise EnvironmentProblem(f"no worker starts: {plain_error(error)}") from error
        else:
            self._failures[worker] = 0
            if self._folder is not None and not self._was_ready:
                record_processes(self._folder, descendants())
            self._was_ready = True
            self._now_idle(worker)

    def _now_idle(self, worker: str) -> None:
        """A worker can take a task, or make room for a gang that waits."""
        self._idle.append(worker)
        self._make_room(self._seats[worker].node)

    def _take_run(self, ref: Any) -> Completion:
        import ray

        worker, task = self._running.pop(ref)
        try:
            result = ray.get(ref)
        except ray.exceptions.RayTaskError as error:  # our own bug: it must cost one task, not the job
            self._free(worker)
            return Completion(worker=worker, task=task, lost=f"worker failed: {error}")
        except ray.exceptions.RayError as error:  # the process is gone; Ray starts another, unless the node is gone
            if self._seats[worker].gang is not None:
                self._after_gang(worker, usable=False)
            else:
                self._await_ready(worker)
            return Completion(worker=worker, task=task, lost=f"worker lost: {plain_error(error)}")
        except Exception as error:  # what it sent cannot be read: again one task's business
            self._free(worker)
            return Completion(worker=worker, task=task, lost=f"worker's answer cannot be read: {error!r}")
        self._free(worker)
        return Completion(worker=worker, task=task, result=result)

    def _free(self, worker: str) -> None:
        """A worker has given back its task."""
        if self._seats[worker].gang is not None:
            self._after_gang(worker, usable=True)
        else:
            self._now_idle(worker)
