"""How many tasks a second the durable queue takes in and gives out, as the dispatcher uses it: one at a time.

Start reading at `run`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from farm.queue.jobs import Job, Queue, device_key, text_of_settings, text_of_task
from featurize.families import get_family
from workers.devices import DeviceChoice, TrialSettings, WindowSettings


def run(tasks: int = 100_000, batch: int = 1) -> dict[str, float]:
    """Enqueue, then lease `batch` and finish each, on the disk under TMPDIR; prints and returns tasks per second."""
    config = text_of_task(
        get_family("cnn").Config(
            batch_size=32, image_size=64, channels=3, classes=10, base_filters=32, depth=4, kernel_size=3
        )
    )
    job = Job(
        job_id="cnn-00000000",
        family="cnn",
        space_json="{}",
        n=tasks,
        seed=0,
        policy="stratified",
        settings_json=text_of_settings(TrialSettings(window=WindowSettings(kind="fixed", seconds=1.0))),
        device=device_key(DeviceChoice(backend="simulated", count=1)),
        submitted_at=0.0,
    )
    with tempfile.TemporaryDirectory() as folder, Queue.open(Path(folder) / "queue.sqlite") as queue:
        start = time.perf_counter()
        queue.submit(job, ((i, config) for i in range(tasks)))
        enqueued = time.perf_counter()
        done, now = 0, 0.0
        while leased := queue.lease("worker", batch, now, lease_s=60.0):
            for task in leased:
                now += 0.001
                done += queue.finish(task, "ok", now)
        finished = time.perf_counter()
        queue.counts()
        counted = time.perf_counter()
    assert done == tasks, f"{done} of {tasks} tasks finished"
    return {
        "tasks": tasks,
        "enqueue_per_s": tasks / (enqueued - start),
        "lease_finish_per_s": tasks / (finished - enqueued),
        "overall_per_s": tasks / (finished - start),
        "counts_ms": (counted - finished) * 1e3,
    }
