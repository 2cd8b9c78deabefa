"""One client of the service asks for all that it can; the other one is answered, and nothing is left behind.

Each attack is as large as those that stopped the service once.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import resource
import socket
import threading
import time
from urllib.parse import urlencode

import pytest

from tests.farm.served import JSON, MLP, served
from tests.surroundings import await_
from warehouse.files.folder import DataFolder

pytestmark = pytest.mark.slow
GREEDY, OTHER = "the-greedy-clients-token", "the-other-clients-token"
SOON_S = 10.0  # for one answer on a busy machine
AS_GREEDY = {"authorization": f"Bearer {GREEDY}"}
MODEL = "torchvision.models:resnet18"
HALF_OPEN = 3000
HALF_A_HEAD = b"POST /v1/estimate HTTP/1.1\r\nhost: localhost\r\nx-slow: "


@pytest.fixture
def service(tmp_path):
    (tmp_path / "tokens").write_text(f"{GREEDY}\n{OTHER}\n")
    data = DataFolder(tmp_path / "a'; echo foo").create().root
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with served(data, f"token_file={tmp_path / 'tokens'}", token=OTHER) as service:
        yield service
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ask_as_other(service, body=None, **headers):
    """The answer and how long it took; its token is what the service's requests have by themselves."""
    began = time.monotonic()
    status, _, answer = service.post("/v1/estimate", body or {"config": {**MLP, "batch_size": next(SIZES)}}, **headers)
    return status, answer, time.monotonic() - began


SIZES = iter(range(1, 10**6))  # each question is a new one


def require_answers(service, while_s):
    """Ask for a while; every answer comes, and soon. Returns the longest time."""
    ends, longest = time.monotonic() + while_s, 0.0
    while time.monotonic() < ends:
        status, answer, seconds = ask_as_other(service)
        assert status == 200 and seconds < SOON_S, (status, answer, seconds)
        longest = max(longest, seconds)
    return longest


@contextlib.contextmanager
def flood(service, n, path, body_of, headers):
    """Send n requests at the same time, wait for none of the answers, and close the connections at the end."""
    connections = [http.client.HTTPConnection("127.0.0.1", service.port, timeout=120) for _ in range(n)]
    with contextlib.ExitStack() as opened:
        for place, connection in enumerate(connections):
            opened.callback(connection.close)
            connection.request("POST", path, json.dumps(body_of(place)), {"content-type": JSON, **headers})
        yield connections


def busy_s(service, for_s):
    """CPU seconds of the processes that answer, in a time."""

    def seconds():
        return sum(sum(process.cpu_times()[:2]) for process in service.answering())

    before = seconds()
    threading.Event().wait(for_s)
    return seconds() - before


def test_batches_of_a_thousand_deep_models_leave_answers_to_others_and_end_with_their_client(service):
    def jobs(place):
        sizes = range(1000 * place + 1, 1000 * place + 1001)
        return {"jobs": [{"config": {**MLP, "depth": 10_000, "batch_size": size}, "method": "auto"} for size in sizes]}

    with flood(service, 2, "/v1/estimate:batch", jobs, AS_GREEDY):
        require_answers(service, 8.0)
    require_answers(service, 1.0)
    assert busy_s(service, 2.0) < 1.0


def test_one_clients_thousand_models_do_not_delay_anothers_single_one(service):
    jobs = [{"model": MODEL, "inputs": [size, 3, 64, 64]} for size in range(1, 1001)]
    status, _, answer = service.post("/v1/estimate:batch", {"jobs": jobs}, **AS_GREEDY)
    results = [one["status"] for one in answer["results"]]
    assert status == 200 and results.count(429) >= 400 and results.count("queued") >= 400
    status, answer, seconds = ask_as_other(
        service, body={"model": MODEL, "inputs": [2000, 3, 64, 64]}, prefer="wait=40"
    )
    assert status == 200 and seconds < 60


def test_requests_that_wait_for_traces_hold_no_place_of_others(service):
    def body(place):
        return {"model": "torchvision.models:regnet_y_32gf", "inputs": [place + 1, 3, 224, 224]}

    with flood(service, 560, "/v1/estimate", body, {**AS_GREEDY, "prefer": "wait=20"}):
        require_answers(service, 5.0)
        status, answer, _ = ask_as_other(service, body={"model": MODEL, "inputs": [3000, 3, 64, 64]}, prefer="wait=40")
    assert status == 200, answer


def test_queries_of_one_client_leave_pages_to_others_and_end_with_it(service):
    sql = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b"
    path = f"/sql?{urlencode({'sql': sql})}"
    with contextlib.ExitStack() as opened:
        for _ in range(40):
            connection = http.client.HTTPConnection("127.0.0.1", service.port)
            opened.callback(connection.close)
            connection.request("GET", path, headers=AS_GREEDY)
        for _ in range(10):
            began = time.monotonic()
            assert service.send("GET", "/runs")[0] == 200 and time.monotonic() - began < SOON_S
    require_answers(service, 1.0)
    assert busy_s(service, 2.0) < 1.0


def memory_mib(service) -> float:
    return sum(one.memory_info().rss for one in service.answering()) / 2**20


def connected(service) -> socket.socket:
    client = socket.socket()
    client.settimeout(5)
    client.connect(("127.0.0.1", service.port))
    return client


def test_half_open_connections_lock_nobody_out_and_are_let_go(service):
    held: list[socket.socket] = []
    ended = threading.Event()

    def attack() -> None:
        """Keep so many connections open, a byte of a head at a time; open those anew that the service has closed."""
        for place in itertools.cycle(range(HALF_OPEN)):
            if ended.is_set():
                return
            try:
                if place < len(held):
                    held[place].sendall(b"a")
                    continue
                held.append(connected(service))
            except OSError:
                held[place].close()
                with contextlib.suppress(OSError):
                    held[place] = connected(service)
            with contextlib.suppress(OSError):
                held[place].sendall(HALF_A_HEAD)

    before_mib = memory_mib(service)
    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        while len(held) < HALF_OPEN:
            assert require_answers(service, 0.1) < 5
        longest = require_answers(service, 2.0)
        connections = [len(one.net_connections()) for one in service.answering()]
    finally:
        ended.set()
        attacker.join()
    assert longest < 5 and max(connections) < 500
    assert memory_mib(service) - before_mib < 200

    def has_let_go() -> bool:
        return all(len(one.net_connections()) <= 20 for one in service.answering())

    await_(has_let_go, "the end of half-open connections", 30.0)
    for client in held:
        client.close()
