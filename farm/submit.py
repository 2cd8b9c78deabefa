"""`python -m farm.submit`: samples, queues, runs and lands trials. Start reading at `entry`."""

from __future__ import annotations

import dataclasses

from conf.cli.command_line import command
from farm.dispatch.dispatcher import follow_hint, work
from farm.dispatch.monitoring import Service
from farm.queue.jobs import Queue
from farm.submission.model_check import require_models
from farm.submission.submitting import (
    SubmitSettings,
    require_consent,
    require_gpus,
    require_optimizers,
    submit,
    task_texts,
)
from warehouse.files.folder import DataFolder
from workers.devices import choose_device


def entry(settings: SubmitSettings) -> int:
    """Queue the job and run it; return 130 if interrupted."""
    choice, device_line = choose_device(settings.device)
    settings = dataclasses.replace(settings, device=choice)
    # The first sample also finds a space that has no valid configuration, before anything is written.
    next(task_texts(settings, 0, 1))
    for space in settings.spaces:
        require_gpus(space, choice, settings.cluster)
        require_optimizers(space, choice)
    require_models(settings.spaces)
    if not settings.detach:
        settings.cluster.check_address()
    folder = DataFolder.resolve(settings.data)
    require_consent(folder, settings)
    folder.create()
    with Service.open(folder, settings.log, settings.metrics) as service, Queue.open(folder.queue) as queue:
        job_id = submit(folder, queue, settings, quiet=service.quiet)
        if settings.detach:
            print(f"{job_id}: queued. {follow_hint(folder, job_id)}")
            return 0
        print(device_line + ("; one worker (cluster=inline)" if settings.cluster.kind == "inline" else ""))
        return work(folder, queue, settings.cluster, job_id=job_id, service=service)


if __name__ == "__main__":
    command("submit", entry)
