"""`python -m farm.cancel job=ID`: takes a job's waiting tasks out of the queue. Start reading at `entry`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from conf.cli import command
from farm.jobs import Queue
from farm.status import existing_queue
from warehouse.folder import DataFolder

if TYPE_CHECKING:
    from omegaconf import DictConfig


def entry(cfg: DictConfig) -> None:
    """Cancel the job and print the result. Raises `UsageError` for an unknown job."""
    job_id = str(cfg.job)
    with Queue.open(existing_queue(DataFolder.resolve(cfg.data), job_id)) as queue:
        cancelled = queue.cancel(job_id, time.time())
        counts = queue.counts(job_id)
    parts = [f"{cancelled:,} waiting tasks cancelled" if cancelled else "no task was waiting"]
    if counts.leased:
        parts.append(f"{counts.leased:,} running ones will finish")
    parts.append(f"{counts.done:,} are done and stay")
    print(f"{job_id}: {', '.join(parts)}. Submit the same job again to go on.")


def main() -> None:
    command("cancel", entry)


if __name__ == "__main__":
    main()
