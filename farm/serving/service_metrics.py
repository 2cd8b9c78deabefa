"""Metrics of the service for Prometheus, summed over its processes. Start reading at `ServiceMetrics`.

prometheus_client keeps a file for each process in the folder that `PROMETHEUS_MULTIPROC_DIR` names; it must be set
before the library is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH")  # a client may make others up
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class ServiceMetrics:
    """Counts requests and answers of this process; `text` gives the figures of all."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram

        self._requests = Counter(
            "gpufarm_service_requests_total", "Requests by route, method and status", ("route", "method", "status")
        )
        self._seconds = Histogram(
            "gpufarm_service_request_seconds", "Duration of requests by route", ("route",), buckets=_BUCKETS_S
        )
        self._answers = Counter(
            "gpufarm_service_estimates_total", "Estimates by how they were answered: cache, fast, trace", ("by",)
        )

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        self._requests.labels(route, method if method in _METHODS else "other", str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def answered(self, by: str, n: int = 1) -> None:
        """Count estimates. by: cache, fast or trace."""
        self._answers.labels(by).inc(n)

    def text(self, questions: Mapping[str, int], pool_age_s: float | None) -> bytes:
        """Return all processes' figures in Prometheus's text format.

        Args:
            questions: Questions for traces by state.
            pool_age_s: Since the pool of traces was last alive; None where it never was.
        """
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        registry.register(_Questions(questions, pool_age_s))
        return generate_latest(registry)


class _Questions:
    """The state of the questions that are traced."""

    def __init__(self, counts: Mapping[str, int], pool_age_s: float | None) -> None:
        self._counts, self._pool_age_s = counts, pool_age_s

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily("gpufarm_service_questions", "Questions for traces by state", labels=("state",))
        for state, count in self._counts.items():
            family.add_metric((state,), count)
        yield family
        if self._pool_age_s is not None:
            name, text = "gpufarm_service_trace_pool_age_seconds", "Seconds since the pool of traces was last alive"
            yield GaugeMetricFamily(name, text, value=self._pool_age_s)
