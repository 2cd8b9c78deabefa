"""What every request passes first: its id, its token, its size, its turn and its time; and what is recorded of it.

Start reading at `Gate`, an ASGI application around another.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import time
import traceback
import uuid
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from farm.serving.problems import PROBLEM_TYPE, Problem, busy
from farm.serving.request_log import RequestLog
from farm.serving.service_metrics import ServiceMetrics

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/healthz", "/readyz")  # for probes, which have no token and never wait
_WITHOUT_TOKEN = (*OPEN_PATHS, "/v1/kubernetes/mutate")  # the API server has none, either
_UNCOUNTED = (*OPEN_PATHS, "/metrics")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_JSON = "application/json"
_NO_ROUTE = "unmatched"


@dataclass(frozen=True)
class GateRules:
    """tokens: none lets everybody in. hosts: names that requests may give the service; none takes any. inline_s: does
    not count what a client asked to wait for. open_metrics: /metrics needs no token."""

    tokens: tuple[str, ...]
    hosts: frozenset[str]
    body_bytes: int
    concurrent: int
    inline_s: float
    wait_s: float
    open_metrics: bool = False


class Gate:
    """Lets requests through to `inner`, and answers with a problem document what may not pass."""

    def __init__(self, inner: Application, rules: GateRules, log: RequestLog, metrics: ServiceMetrics) -> None:
        self._inner, self._rules, self._log, self._metrics = inner, rules, log, metrics
        self._digests = [hashlib.sha256(token.encode()).digest() for token in rules.tokens]
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        began_ns = time.monotonic_ns()
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given_id = headers.get(b"x-request-id", "")
        request_id = given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        scope["request_id"] = request_id
        answer = _Answer(send, request_id)
        counted = scope["path"] not in _UNCOUNTED
        self._inside += counted
        try:
            self._let_in(scope, headers, counted)
            async with asyncio.timeout(self._rules.inline_s + _wait_asked(headers, self._rules.wait_s)):
                body = await _whole_body(receive, self._rules.body_bytes)
                if body and headers.get(b"content-type", "").partition(";")[0].strip().lower() != _JSON:
                    detail = f"Send the body as {_JSON}."
                    raise Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", detail)
                await self._inner(scope, _handing_on(body, receive), answer)
        except Problem as problem:
            await answer.problem(problem)
        except TimeoutError:
            detail = f"No answer within {self._rules.inline_s:g} s; ask with method full, which is traced and polled."
            await answer.problem(Problem(HTTPStatus.SERVICE_UNAVAILABLE, "too-slow", detail))
        except Exception as error:
            self._log.failure(request_id, "".join(traceback.format_exception(error)))
            detail = "The service failed on this request; its log has the reason."
            await answer.problem(Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", detail))
        finally:
            self._inside -= counted
            seconds = (time.monotonic_ns() - began_ns) / 1e9
            route = getattr(scope.get("route"), "path", _NO_ROUTE)
            self._metrics.request(route, scope["method"], answer.status, seconds)
            self._log.request(request_id, scope, answer.status, seconds, answer.sent_bytes)

    def _let_in(self, scope: Scope, headers: dict[bytes, str], counted: bool) -> None:
        rules, path = self._rules, scope["path"]
        host = _host_name(headers.get(b"host", ""))
        if rules.hosts and host not in rules.hosts:
            detail = "Without tokens, only this machine's own names are answered, as in http://localhost."
            raise Problem(HTTPStatus.MISDIRECTED_REQUEST, "host-not-allowed", detail)
        is_open = path in _WITHOUT_TOKEN or (path == "/metrics" and self._rules.open_metrics)
        if self._digests and not is_open and not self._is_known(headers.get(b"authorization", "")):
            challenge = 'Bearer realm="gpufarm", Basic realm="gpufarm"'
            detail = "Send `Authorization: Bearer TOKEN`; in a browser, the token is the password."
            raise Problem(
                HTTPStatus.UNAUTHORIZED, "unauthorized", detail, headers={"www-authenticate": challenge}
            )  # fmt: skip
        if counted and self._inside > rules.concurrent:
            raise busy(f"{rules.concurrent} requests are being worked on; try again in a second.")
        if scope["method"] == "POST":
            length = headers.get(b"content-length", "0")
            if length.isdigit() and int(length) > rules.body_bytes:
                raise _too_large(rules.body_bytes)

    def _is_known(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        token = given.strip()
        if scheme.lower() == "basic":
            try:
                token = b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        elif scheme.lower() != "bearer":
            return False
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        return any([hmac.compare_digest(digest, known) for known in self._digests])  # all are compared, always


class _Answer:
    """The send side of one request: adds its id, and knows what was sent."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._request_id = send, request_id
        self.status = 0
        self.sent_bytes = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", ()), (b"x-request-id", self._request_id.encode()),
                (b"x-content-type-options", b"nosniff"),
            ]  # fmt: skip
        elif message["type"] == "http.response.body":
            self.sent_bytes += len(message.get("body", b""))
        await self._send(message)

    async def problem(self, problem: Problem) -> None:
        """Send a problem document, unless an answer has begun."""
        if self.status:
            return
        body = json.dumps(problem.document(self._request_id)).encode()
        headers = [(b"content-type", PROBLEM_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        headers += [(name.encode(), value.encode()) for name, value in problem.headers.items()]
        await self({"type": "http.response.start", "status": int(problem.status), "headers": headers})
        await self({"type": "http.response.body", "body": body})


async def _whole_body(receive: Receive, most_bytes: int) -> bytes:
    """Return the body, also one that is sent in pieces. Raises `Problem` beyond the limit."""
    pieces: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":  # the client has gone
            break
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most_bytes:
            raise _too_large(most_bytes)
        more = message.get("more_body", False)
    return b"".join(pieces)


def _handing_on(body: bytes, receive: Receive) -> Receive:
    """Return what gives the application the body that was read."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def hand_on() -> Message:
        return waiting.pop() if waiting else await receive()

    return hand_on


def wait_asked(prefer: str, most_s: float) -> float:
    """Return the seconds of `Prefer: wait=N` (RFC 7240), at most `most_s`; 0 where it asks for none."""
    asked = re.search(r"(?:^|[,;\s])wait\s*=\s*(\d{1,6})", prefer)
    return 0.0 if asked is None else min(float(asked[1]), most_s)


def _wait_asked(headers: dict[bytes, str], most_s: float) -> float:
    return wait_asked(headers.get(b"prefer", ""), most_s)


def _too_large(limit: int) -> Problem:
    detail = f"The body is larger than {limit // 1024:,} KiB; divide the batch."
    return Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body-too-large", detail)


def _host_name(host: str) -> str:
    """Return the name of a Host header, without its port."""
    return (host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]).lower()
