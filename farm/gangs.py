"""Trials that need several GPUs of one node: whose turn it is, and which one-GPU workers make room for it.

Start reading at `Gangs`. Knows no Ray: `farm.ray_executor` ends and starts the workers. On each node one gang gathers
GPUs at a time, in the order in which tasks came, so that two that each hold a part cannot wait for each other. A worker
that becomes idle goes to that gang before it gets another task, so that trials on one GPU cannot keep it waiting;
workers that it does not need go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workers.task import Task


@dataclass
class Gang:
    """A task that needs `size` GPUs of a node."""

    name: str  # as a worker has one
    node_id: str
    size: int
    task: Task
    gathered: int = 0  # GPUs whose workers have made room
    parked: list[str] = field(default_factory=list)  # the worker that the task was handed to
    abroad: str | None = None  # that worker, where it is of another node


@dataclass(frozen=True)
class Move:
    """What is to be done on a node: workers to end, and the gang that then has its GPUs, if there is one."""

    retired: tuple[str, ...] = ()
    placed: Gang | None = None


class Gangs:
    """The gangs that wait for GPUs, by node."""

    def __init__(self) -> None:
        self._waiting: list[Gang] = []
        self._count = 0

    def add(self, node_id: str, size: int, task: Task, worker: str, *, abroad: bool = False) -> Gang:
        """Let a task wait. The `worker` that it was handed to takes no other one meanwhile, so that no more tasks wait
        than there are workers; where it is `abroad`, on another node, it makes no room."""
        self._count += 1
        gang = Gang(f"gang-{self._count}", node_id, size, task)
        if abroad:
            gang.abroad = worker
        else:
            gang.parked.append(worker)
        self._waiting.append(gang)
        return gang

    def waiting(self) -> tuple[Gang, ...]:
        """Return the gangs without their GPUs, the first one first."""
        return tuple(self._waiting)

    def on_node(self, node_id: str) -> list[Gang]:
        """Return the gangs that wait on a node."""
        return [gang for gang in self._waiting if gang.node_id == node_id]

    def advance(self, node_id: str, idle: Sequence[str]) -> Move:
        """Return what the first gang of a node takes now: parked workers first, then idle ones.

        Args:
            idle: The node's idle workers.
        """
        waiting = self.on_node(node_id)
        if not waiting:
            return Move()
        first = waiting[0]
        available = [*first.parked, *(worker for gang in waiting[1:] for worker in gang.parked), *idle]
        retired = tuple(available[: first.size - first.gathered])
        for gang in waiting:
            gang.parked = [worker for worker in gang.parked if worker not in retired]
        first.gathered += len(retired)
        if first.gathered < first.size:
            return Move(retired)
        self._waiting.remove(first)
        return Move(retired, first)

    def successor(self, gang: Gang) -> Gang | None:
        """Return the next gang of a node if it fits the GPUs that `gang` gives up as they are; it waits no more."""
        waiting = self.on_node(gang.node_id)
        if not waiting or waiting[0].size != gang.size or waiting[0].gathered:
            return None
        self._waiting.remove(waiting[0])
        return waiting[0]

    def drop(self, is_lost: Callable[[Gang], bool]) -> list[Gang]:
        """Let go of gangs that get their GPUs no more, and return them."""
        lost = [gang for gang in self._waiting if is_lost(gang)]
        self._waiting = [gang for gang in self._waiting if gang not in lost]
        return lost

    def forget_worker(self, worker: str) -> None:
        """A parked worker is gone."""
        for gang in self._waiting:
            gang.parked = [one for one in gang.parked if one != worker]
            gang.abroad = None if gang.abroad == worker else gang.abroad
