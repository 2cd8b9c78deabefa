"""The farm's own Prometheus metrics, in Prometheus's base units; docs/operations.md lists them.

Start reading at `FarmMetrics`; `farm.monitoring.server` serves them.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf.cli.settings import Checked, key
from conf.errors import UsageError
from farm.monitoring.health import Pulse
from farm.queue.jobs import Queue, QueueError
from warehouse.tables.run import Run

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

_GPU_LABELS = ("node", "device", "uuid", "source")


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
    """Figures from events and samples, and the queue's state at each scrape.

    registry: of `prometheus_client`; what a scrape is answered from. Events come from the dispatcher's thread, scrapes
    from the server's.
    """

    def __init__(self, queue: Path, pulse: Pulse, clock: Callable[[], float] = time.time) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, disable_created_metrics

        disable_created_metrics()
        self._queue, self._clock = queue, clock
        self._guard = threading.Lock()
        self._landed_at: collections.deque[float] = collections.deque(maxlen=_RATE_RUNS)
        self._last_wall_s: float | None = None
        self._out: dict[str, float] = {}  # run -> when its task was handed to a worker
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
        self._of_gpu = {
            metric: gauge(f"gpu_{metric}", f"{text} Last sample of its last run.", _GPU_LABELS)
            for _, metric, text, _ in _GPU
        }
        self._sampled_at = gauge("gpu_sample_timestamp_seconds", "When that run landed.", _GPU_LABELS)

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
                self._runs.labels(event["family"], event["status"]).inc()
                self._landed_at.append(now)
                self._last_wall_s = event.get("wall_s")
        self._lost.inc(name == "retried")
        self._repeated.inc(name == "repeated")

    def on_samples(self, run: Run, telemetry: pa.Table) -> None:
        """Store the last sample of the GPU that a run came from; what it did not measure is absent."""
        figures = {}
        for columns, metric, _, factor in _GPU:
            values = (_last_value(telemetry, column) for column in columns)
            value = next((value for value in values if value is not None), None)
            if value is not None:
                figures[metric] = value * factor
        if not figures:
            return
        labels = tuple(str(getattr(run, name) or "") for name in ("node", "device_name", "device_uuid", "source"))
        for metric, gauge in self._of_gpu.items():
            if metric in figures:
                gauge.labels(*labels).set(figures[metric])
            else:
                with contextlib.suppress(KeyError):
                    gauge.remove(*labels)
        self._sampled_at.labels(*labels).set(self._clock())

    def collect(self) -> Iterator[Any]:
        """Yield the queue's tasks, and figures of runs that are absent before the first."""
        from prometheus_client.core import GaugeMetricFamily

        # Held by somebody for too long: the other figures still count.
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
            now, out = self._clock(), list(self._out.values())
            recent = sum(at > now - _RATE_WINDOW_S for at in self._landed_at)
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
