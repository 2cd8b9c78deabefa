"""The executor Protocol and its inline implementation; Ray's is in `ray_cluster.py`.

Start reading at `Executor`. An executor owns the workers; the dispatcher owns the queue and never sees Ray.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from conf.children.running import ServerLost
from conf.errors import UsageError
from workers.devices import DeviceChoice, make_device
from workers.task import RunResult, Task
from workers.worker import Worker


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A task that left its worker: with a result, or because the worker was lost (`lost` has the reason)."""

    worker: str
    task: Task
    result: RunResult | None = None
    lost: str | None = None


@runtime_checkable
class Executor(Protocol):
    """A pool of workers that take one task at a time. Used from one thread."""

    def start(self) -> None:
        """Start the workers without waiting until they are ready. Raises `UsageError` if they cannot start."""

    def idle(self) -> list[str]:
        """Return the workers that can take a task now."""

    def submit(self, worker: str, task: Task, upcoming: Task | None = None) -> None:
        """Hand a task to an idle worker; `upcoming` is its probable next task, which it may prepare."""

    def wait(self, timeout_s: float) -> list[Completion]:
        """Return the tasks that ended since the last call; wait at most `timeout_s` for one (inline: run it)."""

    def running(self) -> Mapping[str, Task]:
        """Return the tasks handed out and not yet returned by `wait`, by worker."""

    def waiting(self) -> Collection[str]:
        """Return the keys of `running` whose tasks still wait for further GPUs."""
        return ()

    def most_gpus(self) -> int | None:
        """Return the most GPUs of one node that a trial may have; None: ranks need no separate GPUs."""

    def restart(self, worker: str) -> None:
        """Kill a stuck worker; `wait` returns its task as lost (inline: no effect)."""

    def notices(self) -> list[str]:
        """Return new messages for the user, a line each."""
        return []

    def close(self) -> None:
        """End every worker and its trial immediately."""


class InlineExecutor(Executor):
    """One worker in this process, without Ray; trials still run in children of a trial server."""

    def __init__(self, choice: DeviceChoice, environment: dict[str, str]):
        slot = make_device(choice).slots()[0]  # the first usable one: index 0 may be a display's GPU
        self._choice = choice
        self._worker = Worker(choice, str(slot.index), "inline-0", environment)
        self._task: Task | None = None
        self._upcoming: Task | None = None

    def start(self) -> None:
        self._worker.server()

    def idle(self) -> list[str]:
        return [] if self._task else [self._worker.name]

    def submit(self, worker: str, task: Task, upcoming: Task | None = None) -> None:
        assert self._task is None, "one task at a time"
        self._task, self._upcoming = task, upcoming

    def wait(self, timeout_s: float) -> list[Completion]:
        if self._task is None:  # all remaining tasks wait for their next attempt
            time.sleep(timeout_s)
            return []
        try:
            self._worker.ready()
        except ServerLost as error:
            raise UsageError(f"the trial server does not start: {error}") from error
        task, result, lost = self._task, None, None
        try:
            result = self._worker.run(task, self._upcoming)
        except Exception:  # a bug of ours must cost one task, not the job
            lost = f"worker failed: {traceback.format_exc()}"
        self._task = None
        return [Completion(worker=self._worker.name, task=task, result=result, lost=lost)]

    def running(self) -> Mapping[str, Task]:
        return {self._worker.name: self._task} if self._task else {}

    def most_gpus(self) -> int | None:
        return 1 if self._choice.backend == "cuda" else None

    def restart(self, worker: str) -> None:
        """Do nothing: `wait` runs the task itself, so no caller can get here."""

    def close(self) -> None:
        self._worker.close()
