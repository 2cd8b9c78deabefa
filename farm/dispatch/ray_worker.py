"""The body of a Ray actor: a worker, on the GPUs that Ray gave its process. Start reading at `PinnedWorker`."""

from __future__ import annotations

from typing import Any

from conf.cli.own_packages import searching_last, working_folder
from workers.devices import DeviceChoice
from workers.task import RunResult, Task
from workers.worker import Worker


class PinnedWorker:
    """The body of an actor: finds the slot that Ray pinned its process to and runs tasks there. Never imports torch."""

    def __init__(
        self, choice: dict[str, Any], slot_key: str | None, environment: dict[str, str], workers: int, gpus: int = 1
    ):
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


def actor_class() -> type:
    """Return the actors' class, which is sent by value and corrects the path before any import of ours."""
    put_last = searching_last(working_folder())

    class RayWorker:
        def __init__(self, *arguments: Any) -> None:
            put_last()
            from farm.dispatch.ray_worker import PinnedWorker

            self._pinned = PinnedWorker(*arguments)

        def ready(self) -> None:
            self._pinned.ready()

        def run(self, task: Task, upcoming: Task | None = None) -> RunResult:
            return self._pinned.run(task, upcoming)

    return RayWorker
