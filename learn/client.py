"""A client of the service (`gpufarm serve`): the calls of `learn` over HTTP, with the standard library alone.

Start reading at `Client`. A request that a connection loses, or that a busy service refuses, is sent again; a question
that is traced is polled.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from conf.errors import CommandError, EnvironmentProblem, UsageError
from featurize.device.device_spec import DEFAULT_DEVICE
from learn.estimation.estimating import BOUND, DeviceFit, LargestBatch
from learn.estimation.job_estimate import Estimate
from learn.sharing.admitting import Admission
from learn.sharing.slowdowns import Slowdown

_WAIT_S = 20  # how long the service may hold a question back while it is traced
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0
_CONNECT_S = 10.0
_RECONNECT_S = 10.0  # a restarted service answers within seconds
_OK, _ACCEPTED, _BUSY = 200, 202, 429
_AGAIN = (_BUSY, 409, 503)  # busy, a job not yet known, a service that is starting
_FAILURES = 500  # from this status on, an answer without the service's media types is a proxy's
_OURS = ("application/json", "application/problem+json")
_BATCH = 500


class Refused(UsageError):
    """A request that the service refused. `errors` holds (JSON Pointer, detail) of each invalid field."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(str(document.get("detail") or document.get("title") or "the service refused the request"))
        self.document = dict(document)
        self.errors = tuple((problem["pointer"], problem["detail"]) for problem in document.get("errors") or ())


class _ProxyFailed(http.client.HTTPException):
    """A proxy answered because it did not reach the service."""


class Client:
    """A client of one service, and a context manager. It is not thread-safe: use one client per thread.

    Args:
        url: The service's URL, as in `http://127.0.0.1:8350`.
        token: A token of the service's `token_file`, if it has one.
        timeout_s: Seconds that one call may take, traces included.

    Raises:
        UsageError: The URL is invalid. Calls raise `Refused`, and `EnvironmentProblem` where no answer comes in time.

    Example:
        >>> with Client("http://127.0.0.1:8350") as service:
        ...     service.estimate(model="torchvision.models:resnet50", inputs=[64, 3, 224, 224]).fits_device
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise UsageError(f"server is a URL such as http://127.0.0.1:8350, got {url!r}")
        try:
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"server={url}: {error}") from error
        self._secure, self._url, self._timeout_s = parts.scheme == "https", url.rstrip("/"), timeout_s
        self._headers = {"content-type": "application/json", "prefer": f"wait={_WAIT_S}"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a further call opens another."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def estimate(self, *, device: str = DEFAULT_DEVICE, method: str = "full", **job: Any) -> Estimate:
        """Return the estimate of one job.

        Args:
            device: A GPU model.
            method: `full`, or `fast`: from a trial config's features alone.
            **job: Further fields of a request: `config`; `model` with `inputs` and `arguments`; `hf_config` with
                `batch_size` and `sequence_length`; `training`, `parallel`, `coverage`, ...
        """
        answer = self.ask("POST", "/v1/estimate", {"device": device, "method": method, **job})
        return Estimate.from_mapping(answer["estimate"])

    def estimate_many(
        self, configs: Sequence[Mapping[str, Any]], *, device: str = DEFAULT_DEVICE, method: str = "full"
    ) -> list[Estimate]:
        """Return an estimate of each trial config, in order. Raises `Refused` for the first that is refused."""
        estimates = []
        for start in range(0, len(configs), _BATCH):
            jobs = [
                {"config": dict(config), "device": device, "method": method}
                for config in configs[start : start + _BATCH]
            ]
            results = self.ask("POST", "/v1/estimate:batch", {"jobs": jobs})["results"]
            for place, result in enumerate(results, start):
                if result["status"] == _BUSY:  # beyond this client's share; the answers before it have made room
                    answer = self.ask("POST", "/v1/estimate", jobs[place - start])
                elif "estimate" not in result and "url" not in result:
                    raise Refused({**result, "detail": f"configs[{place}]: {result.get('detail')}"})
                else:
                    answer = result if "estimate" in result else self.ask("GET", result["url"])
                estimates.append(Estimate.from_mapping(answer["estimate"]))
        return estimates

    def devices_that_fit(
        self, *, devices: Sequence[str] | None = None, by: str = BOUND, **job: Any
    ) -> tuple[DeviceFit, ...]:
        """Return for each GPU model whether the job fits it, as `learn.devices_that_fit` does."""
        answer = self.ask("POST", "/v1/fit", {"find": "devices", "devices": devices, "by": by, **job})
        return tuple(
            DeviceFit(**{**device_fit, "estimate": _estimate_or_none(device_fit["estimate"])})
            for device_fit in answer["fit"]["devices"]
        )

    def largest_batch(self, *, device: str = DEFAULT_DEVICE, by: str = BOUND, **job: Any) -> LargestBatch:
        """Return the largest batch that fits a GPU model, as `learn.largest_batch` does."""
        fit = self.ask("POST", "/v1/fit", {"find": "largest_batch", "device": device, "by": by, **job})["fit"]
        return LargestBatch(
            batch=fit["batch"],
            estimate=_estimate_or_none(fit["estimate"]),
            by=fit["by"],
            beyond=_estimate_or_none(fit["beyond"]),
            tried={int(size): mib for size, mib in fit["tried"].items()},
        )

    def admit(
        self,
        job: Mapping[str, Any],
        gpu: Mapping[str, Any],
        *,
        risk: float = 0.01,
        max_slowdown: float | None = 2.0,
    ) -> Admission:
        """Say whether a job may join the jobs of a GPU, as `learn.admit` does.

        Args:
            job: `{"config": {...}}` or `{"figures": {...}}`.
            gpu: `device`, `memory_mib`, `used_mib`, and `jobs`, each as `job`.
        """
        body = {"job": job, "gpu": gpu, "risk": risk, "max_slowdown": max_slowdown}
        answer = self.ask("POST", "/v1/admit", body)
        slowdowns = tuple(
            (slowdown["name"], None if slowdown["median"] is None else Slowdown(slowdown["median"], slowdown["p90"]))
            for slowdown in answer["slowdowns"]
        )
        return Admission(**{**answer, "slowdowns": slowdowns})

    def plan(self, *, gpus: int, device: str = DEFAULT_DEVICE, **job: Any) -> dict[str, Any]:
        """Return the layouts of a job on several GPUs, as `learn.LayoutPlan.to_mapping` has them."""
        answer: dict[str, Any] = self.ask("POST", "/v1/plan", {"gpus": gpus, "device": device, **job})["plan"]
        return answer

    def devices(self) -> list[dict[str, Any]]:
        """Return the GPU models that the service knows: `name`, `memory_mib`, `vendor`."""
        answer: list[dict[str, Any]] = self.ask("GET", "/v1/devices")["devices"]
        return answer

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, again while the service is busy or computes. Returns the answer as JSON."""
        ends = time.monotonic() + self._timeout_s
        content = None if body is None else json.dumps(body).encode()
        for pause_s in _pauses():
            asked_at = time.monotonic()
            status, headers, text = self._sent(method, path, content, ends)
            if status == _OK:
                return _parse(text)
            if status == _ACCEPTED:
                method, path, content = "GET", _parse(text)["url"], None
            elif status not in _AGAIN:
                raise Refused(_parse(text))
            if time.monotonic() > ends:
                raise EnvironmentProblem(f"{self._url} gave no answer within {self._timeout_s:g} s")
            back_at = asked_at + float(headers.get("retry-after", 0))
            time.sleep(max(back_at - time.monotonic(), pause_s if status in _AGAIN else 0.0))
        raise AssertionError("pauses never end")

    def _sent(
        self, method: str, path: str, content: bytes | None, ends: float
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send the request once; reconnect for some seconds if the connection is lost."""
        ends = min(ends, time.monotonic() + _RECONNECT_S)
        for pause_s in _pauses():
            try:
                connection = self._open()
                connection.request(method, path, content, self._headers)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status < _FAILURES or answer.headers.get_content_type() in _OURS:
                    return answer.status, answer.headers, text
                raise _ProxyFailed(f"status {answer.status}")
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if time.monotonic() + pause_s > ends or isinstance(error, ssl.SSLError):
                    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
                    reason = str(error) if isinstance(error, _ProxyFailed) else reason
                    raise EnvironmentProblem(f"{self._url} does not answer: {reason}") from error
                time.sleep(pause_s)
        raise AssertionError("pauses never end")

    def _open(self) -> http.client.HTTPConnection:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            self._connection = kind(self._host, self._port, timeout=_CONNECT_S)
            self._connection.connect()
            self._connection.sock.settimeout(_WAIT_S + _CONNECT_S)
        return self._connection


def _pauses() -> Iterator[float]:
    pause_s = _PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _parse(text: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise EnvironmentProblem("what answers there is not a gpufarm service")


def _estimate_or_none(value: Mapping[str, Any] | None) -> Estimate | None:
    return None if value is None else Estimate.from_mapping(value)


__all__ = ["Client", "CommandError", "Refused"]
