"""The dispatcher's memory over many tasks: a scripted executor, everything else real (queue, landing, metrics, log).

Start reading at `run`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as pa

from farm.dispatch.dispatcher import Dispatcher, Progress
from farm.dispatch.executors import Completion
from farm.dispatch.monitoring import Events, FarmMetrics, LogSettings, Service
from farm.queue.jobs import Queue
from tests.farm.test_dispatch import DEVICE, ScriptedExecutor, Stop, submit
from warehouse.files.folder import DataFolder
from warehouse.tables.schema import Run
from workers.task import RunResult

WORKERS = 4
POINTS = 50


class FourWorkers(ScriptedExecutor):
    """Workers whose trials end at once; every 97th task loses its worker the first time."""

    def __init__(self, landed) -> None:
        super().__init__(clock=None)
        self._landed = landed
        self._tasks = {}
        self._table = pa.table({"t_ms": [0.0, 100.0], "smact": [0.5, 0.6], "memory_used_mib": [1e3, 2e3]})

    def idle(self) -> list[str]:
        return [name for name in map(str, range(WORKERS)) if name not in self._tasks]

    def submit(self, worker, task, upcoming=None) -> None:
        self._tasks[worker] = task

    def wait(self, timeout_s: float) -> list[Completion]:
        tasks, self._tasks = self._tasks, {}
        if not tasks:
            time.sleep(timeout_s)
        return [self._ended(worker, task) for worker, task in tasks.items()]

    def _ended(self, worker, task) -> Completion:
        if task.task_index % 97 == 0 and task.attempt == 1:
            return Completion(worker=worker, task=task, lost="worker lost: scripted")
        self._landed()
        run = Run(
            run_id=task.run_id,
            job_id=task.job_id,
            task_index=task.task_index,
            attempt=task.attempt,
            family="mlp",
            config=task.config.to_mapping(),
            status="ok",
            source="simulated",
            wall_s=0.1,
            device_name="A100-SXM4-40GB",
            device_uuid=f"SIM-{worker}",
            peak_memory_mib=2e3,
        )
        return Completion(worker=worker, task=task, result=RunResult(run=run, telemetry=self._table))

    def running(self) -> dict:
        return dict(self._tasks)


def run(tasks: int = 100_000) -> dict[str, float]:
    """`rss_mib` after a tenth of the tasks and at the end, their difference, and tasks a second."""
    process = psutil.Process()
    points: list[tuple[int, float]] = []
    done = 0

    def landed() -> None:
        nonlocal done
        done += 1
        if done % max(1, tasks // POINTS) == 0:
            points.append((done, process.memory_info().rss / 2**20))
            if len(points) % (POINTS // 10) == 1:
                print(f"{done:>9,} tasks  {points[-1][1]:7.1f} MiB", flush=True)
            list(metrics.registry.collect())  # as a scrape would

    with tempfile.TemporaryDirectory(prefix="gpufarm-soak-") as folder:
        data = DataFolder.resolve(folder).create()
        with (
            Queue.open(data.queue, backoff_s=0.01) as queue,
            Events.open(LogSettings(file=str(Path(folder, "farm.jsonl")), max_mib=1), data.root) as events,
        ):
            submit(queue, tasks)
            service = Service(events=events, quiet=True)
            metrics = service.metrics = FarmMetrics(data.queue, service.pulse)
            events.listen(metrics.on_event)
            started = time.monotonic()
            with Progress("soak", lambda: ({"ok": done}, tasks), quiet=True) as progress:
                executor = FourWorkers(landed)
                Dispatcher(data, queue, executor, DEVICE, progress, service=service).run(Stop())
            took_s = time.monotonic() - started
            assert queue.counts().by_status == {"ok": tasks}
    early = points[len(points) // 10][1]
    return {
        "tasks": tasks,
        "rss_early_mib": early,
        "rss_end_mib": points[-1][1],
        "grown_mib": points[-1][1] - early,
        "tasks_per_s": tasks / took_s,
    }
