"""The farm's own Prometheus metrics, and its health, over HTTP. Start reading at `FarmMetrics` and `MetricsServer`.

What there is stands in `FarmMetrics.collect`, in Prometheus's base units; docs/operations.md has a table.
"""

from __future__ import annotations

import collections
import contextlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf.errors import UsageError
from conf.settings import Checked, key
from farm.jobs import Queue, QueueError
from farm.monitoring.health import Pulse
from farm.monitoring.http_server import CONNECTION_S, BoundedServer
from warehouse.run import Run

_RATE_WINDOW_S = 300.0
_RATE_RUNS = 4096  # at most so many of the window's runs are remembered: memory stays bounded at any rate
_MIB = 2**20
# column of `telemetry` -> (metric, help, factor to Prometheus's base unit); the first column with a value counts
_GPU = (
    (("memory_used_mib", "process_memory_mib"), "memory_used_bytes", "Device memory in use.", _MIB),
    (("smact",), "sm_active_ratio", "Share of cycles in which an SM had a warp.", 1),
    (("smocc",), "sm_occupancy_ratio", "Resident warps as a share of the most that fit.", 1),
    (("drama",), "dram_active_ratio", "Share of cycles in which device memory was read or written.", 1),
    (("gpu_util",), "utilization_ratio", "Share of time in which a kernel ran.", 1),
)


@dataclass(frozen=True, kw_only=True)
class MetricsSettings(Checked, section="metrics"):
    """The `metrics` key. `port` None: nothing is served; 0: any free port."""

    port: int | None = key(
        None,
        "serve Prometheus metrics at /metrics and health at /healthz and /readyz; 0: any free port",
        "int 0 to 65535",
    )
    address: str = key("127.0.0.1", "who may ask: this machine; 0.0.0.0 lets everybody")


class FarmMetrics:
    """A collector of `prometheus_client`: figures from events, and the queue's state at each scrape.

    Events come from the dispatcher's thread, scrapes from the server's.
    """

    def __init__(self, queue: Path, pulse: Pulse, clock: Callable[[], float] = time.time) -> None:
        self._queue = queue
        self._pulse = pulse
        self._clock = clock
        self._guard = threading.Lock()
        self._runs: collections.Counter[tuple[str, str]] = collections.Counter()  # (family, status)
        self._lost = self._repeated = 0
        self._landed_at: collections.deque[float] = collections.deque(maxlen=_RATE_RUNS)
        self._last_wall_s: float | None = None
        self._out: dict[str, float] = {}  # run -> when its task was handed to a worker
        self._gpus: dict[tuple[str, ...], tuple[float, dict[str, float]]] = {}

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Count an event; a sink for `Events`."""
        name, now = event["event"], self._clock()
        with self._guard:
            if name == "handed_out":
                self._out[event["run"]] = now
            elif name in ("landed", "retried", "repeated"):
                self._out.pop(event["run"], None)
            elif name == "device_left":  # what was handed out has been given back
                self._out.clear()
            if name == "landed":
                self._runs[event["family"], event["status"]] += 1
                self._landed_at.append(now)
                self._last_wall_s = event.get("wall_s")
            self._lost += name == "retried"
            self._repeated += name == "repeated"

    def on_samples(self, run: Run, telemetry: pa.Table) -> None:
        """Store the last sample of the GPU that a run came from."""
        figures = {}
        for columns, metric, _, factor in _GPU:
            values = (_last_value(telemetry, column) for column in columns)
            value = next((value for value in values if value is not None), None)
            if value is not None:
                figures[metric] = value * factor
        if figures:
            labels = tuple(str(getattr(run, name) or "") for name in ("node", "device_name", "device_uuid", "source"))
            with self._guard:
                self._gpus[labels] = (self._clock(), figures)

    def collect(self) -> Iterator[Any]:
        """Yield every metric family."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def gauge(name: str, text: str, value: float | None) -> Iterator[Any]:
            if value is not None:
                yield GaugeMetricFamily(f"gpufarm_{name}", text, value=value)

        with contextlib.suppress(
            QueueError, UsageError
        ):  # held by somebody for too long: the other figures still count
            yield self._tasks()
        with self._guard:
            now = self._clock()
            runs = CounterMetricFamily(
                "gpufarm_runs", "Runs landed since this dispatcher started.", labels=["family", "status"]
            )
            for labels, count in sorted(self._runs.items()):
                runs.add_metric(labels, count)
            yield runs
            yield CounterMetricFamily(
                "gpufarm_attempts_lost", "Attempts that lost their worker and were queued again.", value=self._lost
            )
            yield CounterMetricFamily(
                "gpufarm_attempts_repeated", "Attempts whose labels were not trusted.", value=self._repeated
            )
            recent = sum(at > now - _RATE_WINDOW_S for at in self._landed_at)
            yield from gauge("runs_per_second", "Runs landed a second, over five minutes.", recent / _RATE_WINDOW_S)
            last = self._landed_at[-1] if self._landed_at else None
            yield from gauge("last_run_timestamp_seconds", "When the last run landed.", last)
            yield from gauge("last_run_duration_seconds", "How long the last run took.", self._last_wall_s)
            oldest = now - min(self._out.values()) if self._out else 0.0
            yield from gauge("oldest_lease_seconds", "Age of the oldest task that a worker has.", oldest)
            yield from self._gpu_families()
        workers = GaugeMetricFamily("gpufarm_workers", "Workers by what they do.", labels=["state"])
        workers.add_metric(["busy"], self._pulse.busy)
        workers.add_metric(["idle"], self._pulse.idle)
        yield workers
        yield from gauge("dispatcher_ready", "1 when it holds its data folder and takes on tasks.", self._pulse.ready)
        yield from gauge("dispatcher_turn_age_seconds", "Since the dispatcher's loop turned.", self._pulse.age_s)

    def _tasks(self) -> Any:
        from prometheus_client.core import GaugeMetricFamily

        with Queue.open(self._queue, busy_timeout_s=2.0) as queue:
            counts = queue.counts()
        tasks = GaugeMetricFamily("gpufarm_tasks", "Tasks of every job in the queue.", labels=["state"])
        ready = counts.queued - counts.waiting
        for state, count in (
            ("queued", ready),
            ("waiting", counts.waiting),
            ("leased", counts.leased),
            ("done", counts.done),
            ("cancelled", counts.cancelled),
        ):
            tasks.add_metric([state], count)
        return tasks

    def _gpu_families(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        names = ["node", "device", "uuid", "source"]
        for _, metric, text, _ in _GPU:
            family = GaugeMetricFamily(f"gpufarm_gpu_{metric}", f"{text} Last sample of its last run.", labels=names)
            for labels, (_, figures) in sorted(self._gpus.items()):
                if metric in figures:
                    family.add_metric(labels, figures[metric])
            yield family
        at = GaugeMetricFamily("gpufarm_gpu_sample_timestamp_seconds", "When that run landed.", labels=names)
        for labels, (landed_at, _) in sorted(self._gpus.items()):
            at.add_metric(labels, landed_at)
        yield at


def _last_value(telemetry: pa.Table, column: str) -> float | None:
    if column not in telemetry.column_names:
        return None
    values = telemetry.column(column).drop_null()
    return None if not len(values) else float(values[-1].as_py())


class MetricsServer:
    """`/metrics`, `/healthz` (503 unless the loop turns) and `/readyz` (503 unless it takes on tasks), in a thread."""

    def __init__(self, settings: MetricsSettings, metrics: FarmMetrics, pulse: Pulse) -> None:
        """Start serving. Raises `UsageError` if the address is taken or prometheus_client is missing."""
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector
        except ImportError as error:
            raise UsageError(
                f"metrics.port needs the package prometheus_client ({error}): pip install 'gpufarm[serve]'"
            ) from error
        registry = CollectorRegistry()
        registry.register(metrics)
        ProcessCollector(registry=registry)

        class Handler(_Handler):
            pass

        Handler.registry, Handler.pulse = registry, pulse
        try:
            self._server = BoundedServer((settings.address, settings.port or 0), Handler)
        except OSError as error:
            raise UsageError(f"metrics.port={settings.port} at {settings.address}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    @property
    def url(self) -> str:
        """Return the server's URL."""
        host, port = self._server.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}"

    def connections(self) -> int:
        """Return how many clients are connected."""
        return self._server.connections()

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    registry: Any
    pulse: Pulse
    timeout = CONNECTION_S  # of each read and write

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            from prometheus_client.exposition import choose_encoder

            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, encode(self.registry), content_type)
        elif path in ("/healthz", "/readyz"):
            report = self.pulse.report()
            good = report["live" if path == "/healthz" else "ready"]
            self._answer(200 if good else 503, json.dumps(report).encode() + b"\n", "application/json")
        else:
            self._answer(404, b"there are /metrics, /healthz and /readyz\n", "text/plain; charset=utf-8")

    def _answer(self, code: int, body: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Suppress a line for every scrape."""
