"""Monitoring of a dispatcher: events for programs, its health, Prometheus metrics in base units, a progress bar.

Start reading at `Service.open`. An event is one JSON line with `time` (ISO 8601, UTC), `event`, and where they apply
`job, task, run, attempt, worker, status`; docs/operations.md lists events and metrics. `farm.dispatch.metrics_server`
serves metrics and health.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import json
import logging
import logging.handlers
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pyarrow as pa

from conf.cli.command_line import start_bar
from conf.cli.commands import naming_the_extra
from conf.cli.settings import Checked, key
from conf.errors import UsageError, one_line
from conf.files.outputs import checked_output, folder_problems, output_problems
from farm.queue.jobs import Queue
from farm.queue.queue_file import QueueError
from warehouse.files.folder import DataFolder
from warehouse.tables.schema import STATUSES, Run
from workers.task import Lease

if TYPE_CHECKING:
    import rich.progress

_KEY = "log.file"
FORMATS = ("human", "json")
Sink = Callable[[Mapping[str, Any]], object]


@dataclass(frozen=True, kw_only=True)
class LogSettings(Checked, section="log"):
    """The `log` key. `file` gets JSON lines; at `max_mib` it is renamed to `file.1`; `keep` old files are kept."""

    file: str | None = key(
        None, "one JSON line an event; without a file, and in the human format, nothing is logged", "new path"
    )
    format: str = key("human", "json: events on standard output, and no progress bar", choices=FORMATS)
    max_mib: float = key(64, "size at which the file is renamed to FILE.1", "number > 0")
    keep: int = key(5, "renamed files to keep", "int >= 1")

    def problems(self) -> Sequence[str]:
        if self.file is None:
            return ()
        file = Path(self.file).expanduser()
        if not file.parent.is_dir():
            return folder_problems(file.parent, key=_KEY)
        return output_problems(file, key=_KEY)


class Events(contextlib.AbstractContextManager["Events"]):
    """Passes each event to every sink; a context manager. Without sinks its cost is negligible."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self._handlers: list[logging.Handler] = []
        self._has_warned = False

    @classmethod
    def open(cls, settings: LogSettings, data: Path) -> Events:
        """Open the log. Raises `CommandError` if the file cannot be written, or belongs to a data folder.

        `data` is a data folder whose own files are refused as hard links, too: lines are added to them in place.
        """
        events = cls()
        if settings.file is not None:
            events._add(_file_handler(settings.file, settings, data))
        if settings.format == "json":
            events._add(logging.StreamHandler(sys.stdout))
        return events

    def listen(self, sink: Sink) -> None:
        """Pass every event to `sink` from now on."""
        self._sinks.append(sink)

    def _add(self, handler: logging.Handler) -> None:
        handler.handleError = self._warn_of_write_error  # type: ignore[method-assign]
        self._handlers.append(handler)
        self._sinks.append(lambda event: handler.handle(logging.makeLogRecord({"msg": json.dumps(event, default=str)})))

    def _warn_of_write_error(self, record: logging.LogRecord) -> None:
        """Print once that events are lost; the work continues."""
        if not self._has_warned:
            self._has_warned = True
            print(f"note: {_KEY} cannot be written, events are lost: {sys.exc_info()[1]}", file=sys.stderr)

    def emit(self, event: str, task: Lease | None = None, **fields: Any) -> None:
        """Emit an event; fields that are None are left out."""
        if not self._sinks:
            return
        moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {"time": moment, "event": event}
        if task is not None:
            entry |= {"job": task.job_id, "task": task.task_index, "run": task.run_id, "attempt": task.attempt}
        entry |= {name: value for name, value in fields.items() if value is not None}
        for sink in self._sinks:
            sink(entry)

    def __exit__(self, *_: object) -> None:
        for handler in self._handlers:
            handler.close()


def _file_handler(file: str, settings: LogSettings, data: Path) -> logging.Handler:
    """Return a handler with a rotated file; a device or a pipe is not rotated."""
    try:
        Path(file).expanduser().parent.mkdir(parents=True, exist_ok=True)
        output = checked_output(file, key=_KEY, data=data)
        if not output.is_plain:
            descriptor = None if output.descriptor is None else os.dup(output.descriptor)
            return _StreamHandler(open(output.path if descriptor is None else descriptor, "w", encoding="utf-8"))
        return logging.handlers.RotatingFileHandler(
            output.path, maxBytes=int(settings.max_mib * 2**20), backupCount=settings.keep, encoding="utf-8"
        )
    except OSError as error:
        raise UsageError(f"log.file={file}: {error.strerror}") from error


class _StreamHandler(logging.StreamHandler[TextIO]):
    """A handler that closes its stream."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which has been reported
            self.stream.close()
        super().close()


PATIENCE_S = 180.0  # longest time between turns: the start of Ray, a compaction of many runs


@dataclass
class Pulse:
    """The dispatcher's health record, updated at each turn of its loop and read from other threads."""

    clock: Callable[[], float] = time.monotonic
    phase: str = "starting"  # standby, working, waiting, compacting, growing or stopping
    holds_lock: bool = False
    patience_s: float = PATIENCE_S
    busy: int = 0  # workers
    idle: int = 0
    last_turn: float = field(init=False)

    def __post_init__(self) -> None:
        self.last_turn = self.clock()

    def beat(self, phase: str, busy: int = 0, idle: int = 0) -> None:
        """Record a turn of the loop."""
        self.phase, self.busy, self.idle = phase, busy, idle
        self.last_turn = self.clock()

    @property
    def age_s(self) -> float:
        """Return the seconds since the last turn."""
        return max(0.0, self.clock() - self.last_turn)

    @property
    def live(self) -> bool:
        """Return whether the loop turns; if it does not, restart the dispatcher."""
        return self.age_s < self.patience_s

    @property
    def ready(self) -> bool:
        """Return whether it holds its data folder's lock and takes tasks."""
        return self.live and self.holds_lock and self.phase in ("working", "waiting", "compacting")

    def report(self) -> dict[str, Any]:
        """Return the answer of `/healthz`."""
        return {
            "live": self.live,
            "ready": self.ready,
            "phase": self.phase,
            "dispatcher_lock": self.holds_lock,
            "last_turn_age_s": round(self.age_s, 3),
            "patience_s": self.patience_s,
            "busy_workers": self.busy,
            "idle_workers": self.idle,
        }


_RATE_WINDOW_S = 300.0
_RATE_RUNS = 4096  # most runs to remember in the window, which bounds memory
_MIB = 2**20
# (columns of `telemetry`, metric, help, factor to Prometheus's base unit); the first column with a value counts
_GPU = (
    (("memory_used_mib", "process_memory_mib"), "memory_used_bytes", "Device memory in use.", _MIB),
    (("smact",), "sm_active_ratio", "Share of cycles in which an SM had a warp.", 1),
    (("smocc",), "sm_occupancy_ratio", "Resident warps as a share of the most that fit.", 1),
    (("drama",), "dram_active_ratio", "Share of cycles in which device memory was read or written.", 1),
    (("gpu_util",), "utilization_ratio", "Share of time in which a kernel ran.", 1),
)

_GPU_LABELS = ("node", "device", "uuid", "source")


@dataclass(frozen=True, kw_only=True)
class MetricsSettings(Checked, section="metrics"):
    """The `metrics` key. `port` None: nothing is served; 0: any free port."""

    port: int | None = key(
        None,
        "serve Prometheus metrics at /metrics and health at /healthz and /readyz; 0: any free port",
        "int 0 to 65535",
    )
    address: str = key("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines connect")


class FarmMetrics:
    """Figures from events and samples, and the queue's state at each scrape.

    registry: `prometheus_client`'s, from which a scrape is answered. Events come from the dispatcher's thread, scrapes
    from the server's.
    """

    def __init__(self, queue: Path, pulse: Pulse) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, disable_created_metrics

        disable_created_metrics()
        self._queue = queue
        self._guard = threading.Lock()
        self._landed_at: collections.deque[float] = collections.deque(maxlen=_RATE_RUNS)
        self._last_wall_s: float | None = None
        self._handed_out: dict[str, float] = {}  # run -> when its task was handed to a worker
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"gpufarm_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"gpufarm_{name}", text, labels, registry=registry)

        self._runs = counter("runs", "Runs landed since this dispatcher started.", ("family", "status"))
        self._lost = counter("attempts_lost", "Attempts that lost their worker and were queued again.")
        self._repeated = counter("attempts_repeated", "Attempts whose labels were not trusted.")
        states = gauge("workers", "Workers by what they do.", ("state",))
        states.labels("busy").set_function(lambda: pulse.busy)
        states.labels("idle").set_function(lambda: pulse.idle)
        ready = gauge("dispatcher_ready", "1 when it holds its data folder and takes on tasks.")
        ready.set_function(lambda: pulse.ready)
        gauge("dispatcher_turn_age_seconds", "Since the dispatcher's loop turned.").set_function(lambda: pulse.age_s)
        self._gpu_gauges = {
            metric: gauge(f"gpu_{metric}", f"{text} Last sample of its last run.", _GPU_LABELS)
            for _, metric, text, _ in _GPU
        }
        self._sampled_at = gauge("gpu_sample_timestamp_seconds", "When that run landed.", _GPU_LABELS)

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Count an event; a sink for `Events`."""
        name, now = event["event"], time.time()
        with self._guard:
            if name == "handed_out":
                self._handed_out[event["run"]] = now
            elif name in ("landed", "retried", "repeated"):
                self._handed_out.pop(event["run"], None)
            elif name == "device_left":  # tasks that were handed out have been given back
                self._handed_out.clear()
            if name == "landed":
                self._runs.labels(event["family"], event["status"]).inc()
                self._landed_at.append(now)
                self._last_wall_s = event.get("wall_s")
        self._lost.inc(name == "retried")
        self._repeated.inc(name == "repeated")

    def on_samples(self, run: Run, telemetry: pa.Table) -> None:
        """Publish the last sample of a run's GPU; metrics that it did not measure are removed."""
        figures = {}
        for columns, metric, _, factor in _GPU:
            values = (_last_value(telemetry, column) for column in columns)
            value = next((value for value in values if value is not None), None)
            if value is not None:
                figures[metric] = value * factor
        if not figures:
            return
        labels = tuple(str(getattr(run, name) or "") for name in ("node", "device_name", "device_uuid", "source"))
        for metric, gauge in self._gpu_gauges.items():
            if metric in figures:
                gauge.labels(*labels).set(figures[metric])
            else:
                with contextlib.suppress(KeyError):
                    gauge.remove(*labels)
        self._sampled_at.labels(*labels).set(time.time())

    def collect(self) -> Iterator[Any]:
        """Yield the queue's tasks, and figures of runs that are absent before the first."""
        from prometheus_client.core import GaugeMetricFamily

        # If another process holds the queue for too long, the other figures are still served.
        with contextlib.suppress(QueueError, UsageError), Queue.open(self._queue, busy_timeout_s=2.0) as queue:
            counts = queue.counts()
            states = {
                "queued": counts.queued - counts.waiting,
                "waiting": counts.waiting,
                "leased": counts.leased,
                "done": counts.done,
                "cancelled": counts.cancelled,
            }
            tasks = GaugeMetricFamily("gpufarm_tasks", "Tasks of every job in the queue.", labels=["state"])
            for state, count in states.items():
                tasks.add_metric([state], count)
            yield tasks
        with self._guard:
            now, out = time.time(), list(self._handed_out.values())
            recent = sum(landed_s > now - _RATE_WINDOW_S for landed_s in self._landed_at)
            last, wall_s = self._landed_at[-1] if self._landed_at else None, self._last_wall_s
        for name, text, value in (
            ("runs_per_second", "Runs landed a second, over five minutes.", recent / _RATE_WINDOW_S),
            ("last_run_timestamp_seconds", "When the last run landed.", last),
            ("last_run_duration_seconds", "How long the last run took.", wall_s),
            ("oldest_lease_seconds", "Age of the oldest task that a worker has.", now - min(out, default=now)),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"gpufarm_{name}", text, value=value)


def _last_value(telemetry: pa.Table, column: str) -> float | None:
    if column not in telemetry.column_names:
        return None
    values = telemetry.column(column).drop_null()
    return None if not len(values) else float(values[-1].as_py())


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
        with contextlib.ExitStack() as stack:
            service = cls(events=stack.enter_context(Events.open(log, folder.root)), quiet=log.format == "json")
            if service.quiet:  # standard output holds events only
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            if metrics.port is not None:
                with naming_the_extra():
                    from farm.dispatch.metrics_server import MetricsServer
                service.metrics = FarmMetrics(folder.queue, service.pulse)
                service.events.listen(service.metrics.on_event)
                server = stack.enter_context(MetricsServer(metrics, service.metrics, service.pulse))
                print(f"metrics: {server.url}/metrics, health: {server.url}/healthz")
            yield service

    def samples(self, run: Run, telemetry: pa.Table) -> None:
        """Publish the samples of a run that has landed."""
        if self.metrics is not None:
            self.metrics.on_samples(run, telemetry)


_PLAIN_EVERY_S = 10.0


class Progress:
    """A progress bar, or a line now and then without a terminal. Use as a context manager.

    totals  returns (ended tasks by status, all tasks), also those that ended before; the rate counts runs landed here
    quiet   print nothing, because a program reads the events
    """

    def __init__(self, label: str, totals: Callable[[], tuple[Mapping[str, int], int]], quiet: bool) -> None:
        from rich.console import Console

        self._label = one_line(label)
        self._totals = totals
        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        self._landed = 0
        self._first_landed_at = 0.0
        self._printed_at = time.monotonic()
        self._bar: tuple[rich.progress.Progress, rich.progress.TaskID] | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.quiet:
            from rich.progress import TextColumn

            self._bar = start_bar(
                self._console, self._label, TextColumn("{task.fields[note]}"), note="starting workers"
            )
        else:
            self.say(f"{self._label}: starting workers")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None or self._landed:
            self._show()
        if self._bar is not None:
            self._bar[0].stop()

    def say(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        self._console.print(one_line(text), markup=False)

    def landed(self, _run: Run) -> None:
        """Count one run that has landed."""
        if not self._landed:
            self._first_landed_at = time.monotonic()
        self._landed += 1

    def update(self) -> None:
        """Redraw the bar; cheap enough for every turn of the dispatcher's loop."""
        if self._bar is not None or (self._landed and time.monotonic() - self._printed_at >= _PLAIN_EVERY_S):
            self._show()

    def _show(self) -> None:
        by_status, total = self._totals()
        completed = sum(by_status.values())
        parts = [f"{status} {by_status[status]}" for status in STATUSES if by_status.get(status)]
        if not self._landed:
            parts = ["starting workers"]
        elif self._landed > 1:  # a rate without the start-up
            rate = (self._landed - 1) / max(time.monotonic() - self._first_landed_at, 1e-3)
            parts.append(f"{rate:.1f}/s" if rate >= 1 else f"{rate * 60:.1f}/min")
            parts.append(f"{datetime.timedelta(seconds=round((total - completed) / rate))} left")
        note = "  ".join(parts)
        if self._bar is None:
            self._printed_at = time.monotonic()
            self.say(f"{self._label}: {completed}/{total}  {note}")
        else:
            bar, task = self._bar
            bar.update(task, completed=completed, total=total, note=note)
