"""`python -m farm.cancel job=ID`: takes a job's waiting tasks out of the queue. Start reading at `entry`."""

from __future__ import annotations

import time
from dataclasses import dataclass

from conf.cli.command_line import command
from conf.cli.settings import Checked, data_key, key
from farm.queue.jobs import Queue, existing_queue
from warehouse.files.folder import DataFolder


@dataclass(frozen=True, kw_only=True)
class CancelSettings(Checked):
    """Which job to cancel.

      python -m farm.cancel job=cnn-3f2a9c1b

    Submitting the same job again puts the cancelled tasks back.
    """

    job: str = key(help="the job, as `python -m farm.status` names it")
    data: str | None = data_key()


def entry(settings: CancelSettings) -> None:
    """Cancel the job and print the result. Raises `UsageError` for an unknown job."""
    job_id = settings.job
    with Queue.open(existing_queue(DataFolder.resolve(settings.data), job_id)) as queue:
        cancelled = queue.cancel(job_id, time.time())
        counts = queue.counts(job_id)
    print(
        f"{job_id}: {cancelled:,} waiting tasks cancelled; {counts.leased:,} running ones will finish, {counts.done:,} "
        "are done and stay. Submit the same job again to go on."
    )


if __name__ == "__main__":
    command("cancel", entry)
