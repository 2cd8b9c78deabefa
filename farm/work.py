"""`python -m farm.work`: runs the queue without a submission. Start reading at `entry`."""

from __future__ import annotations

from dataclasses import dataclass

from conf.cli.command_line import command
from conf.cli.settings import Checked, data_key, group, key, section
from farm.dispatch.dispatcher import work
from farm.dispatch.monitoring import LogSettings, MetricsSettings, Service
from farm.dispatch.ray_cluster import ClusterSettings
from farm.queue.jobs import Queue
from featurize.job.code_names import trust_key
from warehouse.files.folder import DataFolder


@dataclass(frozen=True, kw_only=True)
class WorkSettings(Checked):
    """Settings of the dispatcher.

    usage: python -m farm.work [KEY=VALUE ...]

      python -m farm.work             run what is queued, then exit
      python -m farm.work wait=true   stay, and run what others submit with detach=true
      python -m farm.work wait=true metrics.port=9108 log.file=farm.jsonl     as a service

    SIGTERM or Ctrl-C once: running trials finish, the others stay queued, exit code 130. Twice: stop immediately.
    """

    cluster: ClusterSettings = group("local", "where the workers live", schema=ClusterSettings)
    data: str | None = data_key()
    wait: bool = key(False, "true: stay when the queue is empty, and look again")
    trust: tuple[str, ...] = trust_key(
        "modules whose code may run although this user did not submit the job, as in [mypackage]"
    )
    log: LogSettings = section(LogSettings)
    metrics: MetricsSettings = section(MetricsSettings)


def entry(settings: WorkSettings) -> int:
    """Run the whole queue; return 130 if interrupted, 1 if every trial of a job failed."""
    folder = DataFolder.resolve(settings.data).open()
    with Service.open(folder, settings.log, settings.metrics) as service, Queue.open(folder.queue) as queue:
        return work(folder, queue, settings.cluster, wait=settings.wait, service=service, trust=settings.trust)


if __name__ == "__main__":
    command("work", entry)
