"""The gate of every request: its id, its token, its size, its turn and its time; its log line and its metrics.

Start reading at `Gate`, an ASGI application around another. Work on a request ends when its client is gone. `Places`
divides limited places among clients: a client is a token, or an address if there are no tokens. `Problem` is a problem
document (RFC 9457), with which the gate and the application refuse; `Scrubber` removes the server's paths from texts.

prometheus_client keeps a file for each process in the folder that `PROMETHEUS_MULTIPROC_DIR` names. `ServiceMetrics`
sums them; the variable must be set before the library is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import json
import os
import re
import sys
import tempfile
import time
import traceback
import uuid
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from conf.errors import UsageError

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from farm.serving.settings import ServeSettings


PROBLEM_TYPE = "application/problem+json"
_PROBLEM_TITLES = {  # name -> title; `type` is `/problems/NAME`, which docs/service.md lists
    "invalid-request": "The request is not valid",
    "not-answerable": "The job cannot be estimated",
    "not-yet-known": "The job is not yet known",
    "not-found": "There is no such resource",
    "method-not-allowed": "The resource does not take this method",
    "unsupported-media-type": "The body is not JSON",
    "body-too-large": "The body is too large",
    "scripts-not-allowed": "Scripts are not taken here",
    "unauthorized": "A valid token is needed",
    "host-not-allowed": "The request names another host",
    "too-many-requests": "The service is busy",
    "too-slow": "The answer took too long",
    "internal": "The service failed",
}


@dataclass(eq=False)  # not frozen: Python sets an exception's traceback
class Problem(Exception):
    """One problem document.

    status    HTTP status
    name      key of the table of types
    detail    what to change, without paths of the server
    errors    (JSON Pointer of the field, what is wrong with it)
    headers   further headers of the answer
    """

    status: int
    name: str
    detail: str
    errors: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def document(self, request_id: str | None = None) -> dict[str, Any]:
        """Return the members of the document; `instance` names the request."""
        document: dict[str, Any] = {
            "type": f"/problems/{self.name}",
            "title": _PROBLEM_TITLES[self.name],
            "status": self.status,
            "detail": self.detail,
        }
        if request_id is not None:
            document["instance"] = f"urn:request:{request_id}"
        if self.errors:
            document["errors"] = [{"pointer": pointer, "detail": detail} for pointer, detail in self.errors]
        return document


def invalid(detail: str, pointer: str) -> Problem:
    """Return the problem of one field that is wrong."""
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", detail, ((pointer, detail),))


def busy(detail: str, retry_after_s: int = 1) -> Problem:
    """Return the problem of a reached limit; the client should try again."""
    return Problem(
        HTTPStatus.TOO_MANY_REQUESTS, "too-many-requests", detail, headers={"retry-after": str(retry_after_s)}
    )


class Scrubber:
    """Takes the server's own paths out of texts that leave it.

    Args:
        data: The data folder, which becomes `the data folder`.

    labels: (path, words that take its place), the longest path first.
    """

    def __init__(self, data: Path) -> None:
        package = Path(__file__).resolve().parents[2]
        labels = {
            str(data): "the data folder",
            str(package): "the service",
            sys.prefix: "the service",
            sys.base_prefix: "the service",
            tempfile.gettempdir(): "a temporary folder",
            os.getcwd(): "the working folder",
            os.path.expanduser("~"): "the home folder",
        }
        rooted = (pair for pair in labels.items() if len(pair[0]) > 1)  # `/` itself is in every URL
        self.labels = sorted(rooted, key=lambda pair: -len(pair[0]))

    def text(self, text: str) -> str:
        """Return the text without this machine's folders."""
        for path, label in self.labels:
            text = text.replace(path, label)
        return text

    def values(self, value: Any) -> Any:
        """Return a value of JSON or Arrow, every text in it scrubbed."""
        if isinstance(value, str):
            return self.text(value) if "/" in value else value
        if isinstance(value, Mapping):
            return {name: self.values(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.values(inner) for inner in value)
        return value


def is_within_share(held: float, wanted: float, held_by_all: float, limit: float) -> bool:
    """Return whether a client that holds `held` of `limit` may hold `wanted` more.

    A client leaves as much free as it holds: a single client gets half, n busy ones get 1/(n + 1) each, and the next
    client still finds a place.
    """
    return not wanted or held + 2 * wanted <= limit - held_by_all + 1


class Places:
    """A number of places of one process. Not for threads.

    Args:
        limit: Places in all.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: Counter[str] = Counter()

    def take(self, client: str, n: int = 1, most: int | None = None) -> bool:
        """Take n places for a client, unless they exceed its share or `most`. Returns whether they were taken."""
        held = self._held[client]
        if not is_within_share(held, n, self._held.total(), self.limit) or (most is not None and held + n > most):
            return False
        self._held[client] += n
        return True

    def hold(self, client: str) -> None:
        """Take one place, even beyond the client's share: for a request that had it before."""
        self._held[client] += 1

    def give_back(self, client: str, n: int = 1) -> None:
        """Give n places back."""
        self._held[client] -= n
        if not self._held[client]:
            del self._held[client]


CALLER = "gpufarm.caller"  # key of a scope: a `Caller`

OPEN_PATHS = ("/healthz", "/readyz")  # for probes, which have no token and never wait
_API, _METRICS, _WEBHOOK = "/v1/", "/metrics", "/v1/kubernetes/mutate"
_UNCOUNTED = (*OPEN_PATHS, _METRICS)
_NO_TOKEN = "webhook"  # API servers without a token count as one client with few places
_WEBHOOK_SHARE = 16  # a webhook gets one place in 16
_CLIENT_GONE = 499  # in log and metrics, as nginx has it
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_JSON = "application/json"
_NO_ROUTE = "unmatched"


@dataclass(frozen=True)
class Caller:
    """The client, and how long its request may wait for a trace (None: unspecified)."""

    client: str
    wait_s: float | None


class _ClientGone(Exception):
    """The client has closed its connection before the answer."""


class Gate:
    """Passes requests to `inner`, and answers the others with a problem document.

    `scope[CALLER]` tells `inner` the client and its wait; the request holds one of that client's `places`. A client has
    `pages` of the explorer made at a time; its further ones wait. `limits.inline_s` excludes the time that a client
    asked to wait. Without tokens every client is let in, but the host must be one of this machine's names.
    """

    def __init__(
        self,
        inner: ASGIApp,
        settings: ServeSettings,
        pages: int,
        places: Places,
        log: RequestLog,
        metrics: ServiceMetrics,
    ) -> None:
        self._inner, self._places, self._log, self._metrics = inner, places, log, metrics
        self._limits, self._open_metrics = settings.limits, settings.open_metrics
        self._digests = [hashlib.sha256(token.encode()).digest() for token in settings.tokens]
        self._hosts = set() if self._digests else {"localhost", "127.0.0.1", "[::1]", settings.host.lower()}
        self._webhook_places = max(1, places.limit // _WEBHOOK_SHARE)
        self._page_turns: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(pages))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        began_ns = time.monotonic_ns()
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given_id = headers.get(b"x-request-id", "")
        request_id = given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        scope["request_id"] = request_id
        answer = _Answer(scope, receive, send)
        holder: str | None = None
        try:
            self._check_host(headers)
            client = self._client(scope, headers)
            wait_s = _wait_asked(headers.get(b"prefer", ""), self._limits.wait_s)
            scope[CALLER] = Caller(client, wait_s)
            if scope["path"] not in _UNCOUNTED:
                if not self._places.take(client, most=self._webhook_places if client == _NO_TOKEN else None):
                    raise busy("Your share of the requests that are worked on is used up; try again in a second.")
                holder = client
            async with asyncio.timeout(self._limits.inline_s + (wait_s or 0.0)):
                body = await _read_body(receive, 1024 * self._limits.body_kib, headers.get(b"content-length", ""))
                if body and headers.get(b"content-type", "").partition(";")[0].strip().lower() != _JSON:
                    detail = f"Send the body as {_JSON}."
                    raise Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", detail)
                await self._answer_or_stop(scope, body, receive, answer)
        except Problem as problem:
            await answer.problem(problem)
        except _ClientGone:
            answer.status = answer.status or _CLIENT_GONE
        except TimeoutError:
            advice = "; ask with method full, which is traced and polled" if scope["path"].startswith(_API) else ""
            detail = f"No answer within {self._limits.inline_s:g} s{advice}."
            await answer.problem(Problem(HTTPStatus.SERVICE_UNAVAILABLE, "too-slow", detail))
        except Exception as error:
            self._log.event("failure", request_id=request_id, traceback="".join(traceback.format_exception(error)))
            detail = "The service failed on this request; its log has the reason."
            await answer.problem(Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", detail))
        finally:
            if holder is not None:
                self._places.give_back(holder)
            seconds = (time.monotonic_ns() - began_ns) / 1e9
            route = getattr(scope.get("route"), "path", _NO_ROUTE)
            self._metrics.request(route, scope["method"], answer.status, seconds)
            self._log.event(  # neither its body nor its token
                "request",
                request_id=request_id,
                method=scope["method"],
                path=scope["path"],
                status=answer.status,
                ms=round(1e3 * seconds, 3),
                bytes=answer.sent_bytes,
            )

    async def _answer_or_stop(self, scope: Scope, body: bytes, receive: Receive, answer: _Answer) -> None:
        """Run `inner` for its answer, and stop it when the client is gone. Raises `_ClientGone`."""
        working = asyncio.current_task()
        assert working is not None

        def stop(_: object) -> None:
            if not answer.is_complete:
                working.cancel()

        gone: asyncio.Future[Message] = asyncio.ensure_future(receive())
        gone.add_done_callback(stop)
        try:
            is_page = not scope["path"].startswith(_API) and scope["path"] not in _UNCOUNTED
            async with self._page_turns[scope[CALLER].client] if is_page else contextlib.nullcontext():
                await self._inner(scope, _replay_body(body, gone), answer)
        except asyncio.CancelledError:
            if not gone.done():  # the service stops, or the time is up
                raise
            working.uncancel()
            raise _ClientGone from None
        finally:
            gone.remove_done_callback(stop)
            gone.cancel()

    def _check_host(self, headers: dict[bytes, str]) -> None:
        given = headers.get(b"host", "").lower()
        host = given[: given.rfind("]") + 1] if given.startswith("[") else given.partition(":")[0]  # without its port
        if self._hosts and host not in self._hosts:
            detail = "Without tokens, only this machine's own names are answered, as in http://localhost."
            raise Problem(HTTPStatus.MISDIRECTED_REQUEST, "host-not-allowed", detail)

    def _client(self, scope: Scope, headers: dict[bytes, str]) -> str:
        """Return the client: a token by its place in the file, without tokens an address. Raises `Problem`."""
        path, authorization = scope["path"], headers.get(b"authorization", "")
        address = (scope.get("client") or ("",))[0]
        if not self._digests or path in OPEN_PATHS or (path == _METRICS and self._open_metrics):
            return address
        if path == _WEBHOOK and not authorization:
            return _NO_TOKEN
        place = self._token_place(authorization)
        if place is None:
            challenge = 'Bearer realm="gpufarm", Basic realm="gpufarm"'
            detail = "Send `Authorization: Bearer TOKEN`; in a browser, the token is the password."
            raise Problem(HTTPStatus.UNAUTHORIZED, "unauthorized", detail, headers={"www-authenticate": challenge})
        return f"token {place}"

    def _token_place(self, authorization: str) -> int | None:
        scheme, _, given = authorization.partition(" ")
        token = given.strip()
        if scheme.lower() == "basic":
            try:
                token = b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                return None
        elif scheme.lower() != "bearer":
            return None
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        same = [hmac.compare_digest(digest, known) for known in self._digests]  # all, so the time reveals no place
        return same.index(True) if any(same) else None


class _Answer:
    """The send side of one request: adds its id, and records the status and size."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._request_id: str = scope["request_id"]
        self.status = 0
        self.sent_bytes = 0
        self.is_complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self._request_id.encode()),
                (b"x-content-type-options", b"nosniff"),
            ]
        elif message["type"] == "http.response.body":
            self.sent_bytes += len(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)
        await self._send(message)

    async def problem(self, problem: Problem) -> None:
        """Send a problem document, unless an answer has begun."""
        if not self.status:
            await problem_response(problem, self._request_id)(self._scope, self._receive, self)


def problem_response(problem: Problem, request_id: str) -> Response:
    """Return the answer that is a problem document."""
    from starlette.responses import Response  # imported here: the pool of traces uses this module without Starlette

    return Response(json.dumps(problem.document(request_id)), int(problem.status), dict(problem.headers), PROBLEM_TYPE)


async def _read_body(receive: Receive, most_bytes: int, announced: str) -> bytes:
    """Return the whole body. Raises `Problem` beyond the limit, and `_ClientGone`."""
    pieces: list[bytes] = []
    size = 0
    too_large = Problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "body-too-large",
        f"The body is larger than {most_bytes // 1024:,} KiB; divide the batch.",
    )
    if announced.isdecimal() and int(announced) > most_bytes:  # before reading any of it
        raise too_large
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise _ClientGone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most_bytes:
            raise too_large
        more = message.get("more_body", False)
    return b"".join(pieces)


def _replay_body(body: bytes, gone: asyncio.Future[Message]) -> Receive:
    """Return a `receive` that returns the body already read, then reports when the client is gone."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def hand_on() -> Message:
        return waiting.pop() if waiting else await asyncio.shield(gone)

    return hand_on


def _wait_asked(prefer: str, most_s: float) -> float | None:
    """Return the seconds of `Prefer: wait=N` (RFC 7240), at most `most_s`; None without it."""
    asked = re.search(r"(?:^|[,;\s])wait\s*=\s*(\d{1,6})", prefer)
    return None if asked is None else min(float(asked[1]), most_s)


STDERR, NONE = "stderr", "none"


class RequestLog:
    """Writes events to standard error, a file or nowhere; several processes may append to one file.

    Args:
        to: `stderr`, `none`, or a file's path.

    Raises:
        UsageError: The file cannot be written.
    """

    def __init__(self, to: str) -> None:
        self._file: IO[str] | None = None
        if to == STDERR:
            self._file = sys.stderr
        elif to != NONE:
            try:
                self._file = open(os.path.expanduser(to), "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                raise UsageError(f"log={to}: {error.strerror}") from error

    def event(self, name: str, **fields: Any) -> None:
        """Write an event; each line has `time` (ISO 8601, UTC), `event` and `pid`."""
        if self._file is None:
            return
        moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": moment, "event": name, "pid": os.getpid(), **fields})
        with contextlib.suppress(OSError, ValueError):  # a full disk must not stop answers
            self._file.write(f"{line}\n")


FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH")  # a client may invent others
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class ServiceMetrics:
    """Counts requests and answers of this process; `text` returns the figures of all."""

    def __init__(self) -> None:
        import prometheus_client

        self._requests = prometheus_client.Counter(
            "gpufarm_service_requests_total", "Requests by route, method and status", ("route", "method", "status")
        )
        self._seconds = prometheus_client.Histogram(
            "gpufarm_service_request_seconds", "Duration of requests by route", ("route",), buckets=_BUCKETS_S
        )
        self._answers = prometheus_client.Counter(
            "gpufarm_service_estimates_total", "Estimates by how they were answered: cache, fast, trace", ("by",)
        )

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request that has ended."""
        self._requests.labels(route, method if method in _METHODS else "other", str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def answered(self, by: str) -> None:
        """Count an answer. by: cache (stored before it was asked), fast, trace (waited for, or fetched by its URL)."""
        self._answers.labels(by).inc()

    def text(self, questions: Mapping[str, int], pool_age_s: float | None) -> bytes:
        """Return all processes' figures in Prometheus's text format.

        Args:
            questions: Questions for traces by state.
            pool_age_s: Seconds since the pool of traces was last alive; None if it never was.
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
