"""Shares of one client of the service while others ask: places, questions for traces, space on disk."""

from __future__ import annotations

import asyncio
import types

import pytest

from farm.serving.gate import CALLER, Gate, Places, RequestLog, ServiceMetrics
from farm.serving.settings import LimitSettings, ServeSettings
from farm.serving.traces import DONE, TraceStore

SETTINGS = ServeSettings(limits=LimitSettings(queued=100, stored_mib=4), cache_s=60.0)


class Clock:
    now = 1e9

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    store = TraceStore(tmp_path / "a'; echo foo.sqlite", SETTINGS, clock)
    yield store
    store.close()


def ask_many(store, client, n, text="{}", first=0):
    """The keys that were taken of n questions."""
    keys = [f"{client}{place:04}" for place in range(first, first + n)]
    return [key for key in keys if asyncio.run(store.ask(key, text, client)) is not None]


def size_of(tmp_path):
    return sum(file.stat().st_size for file in tmp_path.iterdir())


def test_a_client_leaves_as_many_places_free_as_it_holds():
    places = Places(256)
    taken = [sum(places.take(client) for _ in range(1000)) for client in ("greedy", "second", "third")]
    assert taken == [128, 64, 32] and places.take("newcomer")
    places.give_back("greedy", 128)
    assert sum(places.take("newcomer") for _ in range(1000)) > 32


def test_one_clients_questions_leave_room_and_turns_to_others(store):
    assert len(ask_many(store, "greedy", 1000)) == 50
    (single,) = ask_many(store, "other", 1)
    leased = [store.lease(9)[0] for _ in range(4)]
    assert single in leased[:2] and leased[2:] == ["greedy0001", "greedy0002"]


def test_large_questions_of_one_client_leave_space_to_others(store):
    assert len(ask_many(store, "greedy", 60, "x" * 300_000)) < 9
    assert ask_many(store, "other", 1, "x" * 300_000)


def test_answers_are_kept_for_a_while_and_their_space_is_given_back(store, clock, tmp_path):
    keys, large = ask_many(store, "someone", 40, "x" * 20_000), {"large": "y" * 80_000}
    for _ in keys:
        store.answered(store.lease(9)[0], large)
    asyncio.run(store.forget())
    assert asyncio.run(store.get(keys[0])).state == DONE and size_of(tmp_path) > 3 * 2**20
    clock.now += 700
    asyncio.run(store.get(keys[0]))
    clock.now += 500
    asyncio.run(store.forget())
    assert asyncio.run(store.get(keys[0])).answer == large and asyncio.run(store.get(keys[1])) is None
    assert (tmp_path / "a'; echo foo.sqlite").stat().st_size < 2**20


# ---- the gate


TOKENS = ("first-token-of-someone", "second-token-of-another")
WEBHOOK = "/v1/kubernetes/mutate"


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def metrics():
    return ServiceMetrics()


class Asked:
    """One request to a gate, whose work goes on until the test ends it."""

    def __init__(self, gate, token=None, path="/v1/estimate", address="10.0.0.1"):
        self._disconnected = asyncio.Event()
        self._body = [{"type": "http.request", "body": b"{}", "more_body": False}]
        self.status = None
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        headers += [(b"authorization", f"Bearer {token}".encode())] if token else []
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": (address, 1)}
        self.task = asyncio.ensure_future(gate(scope, self._receive, self._send))

    async def _receive(self):
        if self._body:
            return self._body.pop()
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.status = message.get("status", self.status)

    async def leave(self):
        self._disconnected.set()
        await self.task


class Work:
    """An application whose answers come when `ended` is set."""

    def __init__(self, metrics, tokens=TOKENS, places=64):
        limits = LimitSettings(body_kib=1, inline_s=30.0, wait_s=1.0)
        settings = types.SimpleNamespace(tokens=tokens, limits=limits, open_metrics=False, host="127.0.0.1")
        self.gate = Gate(self, settings, 3, Places(places), RequestLog("none"), metrics)
        self.running, self.stopped, self.ended = [], [], asyncio.Event()

    async def __call__(self, scope, _receive, send):
        self.running.append(scope[CALLER].client)
        try:
            await self.ended.wait()
        except asyncio.CancelledError:
            self.stopped.append(scope[CALLER].client)
            raise
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def statuses(self, *asked):
        """The statuses of requests, None where one is worked on."""
        for _ in range(10):
            await asyncio.sleep(0)
        return [one.status for one in asked]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("tokens", "greedy", "other"),
    [
        (TOKENS, {"token": TOKENS[0]}, {"token": TOKENS[1]}),
        ((), {"address": "10.0.0.1"}, {"address": "10.0.0.2"}),
    ],
)
async def test_a_token_or_an_address_beyond_its_share_is_refused_while_others_are_answered(
    metrics, tokens, greedy, other
):
    work = Work(metrics, tokens)
    flood = [Asked(work.gate, **greedy) for _ in range(100)]
    statuses = await work.statuses(*flood)
    assert (statuses.count(None), statuses.count(429)) == (32, 68)
    answered = Asked(work.gate, **other)
    assert await work.statuses(answered) == [None]
    work.ended.set()
    await answered.task
    assert answered.status == 200
    await asyncio.gather(*(one.task for one in flood))


@pytest.mark.anyio
async def test_the_webhook_without_a_token_has_few_places_and_a_wrong_token_none(metrics):
    work = Work(metrics)
    flood = [Asked(work.gate, path=WEBHOOK, address=f"10.0.0.{n}") for n in range(20)]
    statuses = await work.statuses(*flood)
    assert (statuses.count(None), statuses.count(429)) == (4, 16)
    known, wrong = Asked(work.gate, TOKENS[0], WEBHOOK), Asked(work.gate, "not-a-token", WEBHOOK)
    assert await work.statuses(known, wrong, Asked(work.gate)) == [None, 401, 401]


@pytest.mark.anyio
async def test_work_ends_when_its_client_leaves_and_its_place_is_free(metrics):
    work = Work(metrics, places=1)
    first = Asked(work.gate, TOKENS[0])
    assert await work.statuses(first, Asked(work.gate, TOKENS[1])) == [None, 429]
    await first.leave()
    assert work.stopped == ["token 0"] and first.status is None
    assert await work.statuses(Asked(work.gate, TOKENS[1])) == [None]
