"""Publishes a dispatcher's events, health and metrics. Start reading at `Service.open`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from conf.cli.commands import naming_the_extra
from farm.monitoring.events import Events, LogSettings
from farm.monitoring.health import Pulse
from farm.monitoring.metrics import FarmMetrics, MetricsSettings
from warehouse.files.folder import DataFolder
from warehouse.tables.run import Run


@dataclass
class Service:
    """Log, pulse and metrics of a dispatcher; the defaults report nothing. `quiet` shows no progress bar."""

    events: Events = field(default_factory=Events)
    pulse: Pulse = field(default_factory=Pulse)
    metrics: FarmMetrics | None = None
    quiet: bool = False

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: DataFolder, log: LogSettings, metrics: MetricsSettings) -> Iterator[Service]:
        """Open the log and serve the metrics, where the settings ask for them. Raises `UsageError`."""
        with contextlib.ExitStack() as held:
            service = cls(events=held.enter_context(Events.open(log, [folder.root])), quiet=log.format == "json")
            if service.quiet:  # what is meant for people
                held.enter_context(contextlib.redirect_stdout(sys.stderr))
            if metrics.port is not None:
                with naming_the_extra():
                    from farm.monitoring.server import MetricsServer
                service.metrics = FarmMetrics(folder.queue, service.pulse)
                service.events.listen(service.metrics.on_event)
                server = held.enter_context(MetricsServer(metrics, service.metrics, service.pulse))
                print(f"metrics: {server.url}/metrics, health: {server.url}/healthz")
            yield service

    def samples(self, run: Run, telemetry: pa.Table) -> None:
        """Publish the samples of a run that has landed."""
        if self.metrics is not None:
            self.metrics.on_samples(run, telemetry)
