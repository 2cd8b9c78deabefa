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
from tests.farm.test_serving_connections import connected
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
def flood(service, method, path, bodies, **headers):
    """Send requests of the greedy client at the same time, wait for none of the answers, and close the connections at
    the end."""
    with contextlib.ExitStack() as opened:
        for body in bodies:
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
            opened.callback(connection.close)
            connection.request(method, path, json.dumps(body), {"content-type": JSON, **AS_GREEDY, **headers})
        yield


def busy_s(service, for_s):
    """CPU seconds of the processes that answer, in a time."""

    def seconds():
        return sum(sum(process.cpu_times()[:2]) for process in service.answering())

    before = seconds()
    threading.Event().wait(for_s)
    return seconds() - before


def test_batches_of_a_thousand_deep_models_leave_answers_to_others_and_end_with_their_client(service):
    jobs = [{"config": {**MLP, "depth": 128, "batch_size": size}, "method": "fast"} for size in range(1, 1001)]
    assert service.post("/v1/estimate", jobs[0], **AS_GREEDY)[0] == 200, "no deeper one is answered at once"
    with flood(service, "POST", "/v1/estimate:batch", [{"jobs": jobs}] * 6):
        require_answers(service, 3.0)
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
    slow = [{"model": "torchvision.models:regnet_y_32gf", "inputs": [size, 3, 224, 224]} for size in range(1, 561)]
    with flood(service, "POST", "/v1/estimate", slow, prefer="wait=20"):
        require_answers(service, 5.0)
        status, answer, _ = ask_as_other(service, body={"model": MODEL, "inputs": [3000, 3, 64, 64]}, prefer="wait=40")
    assert status == 200, answer


def test_queries_of_one_client_leave_pages_to_others_and_end_with_it(service):
    sql = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b"
    with flood(service, "GET", f"/sql?{urlencode({'sql': sql})}", [None] * 40):
        for _ in range(10):
            began = time.monotonic()
            assert service.send("GET", "/runs")[0] == 200 and time.monotonic() - began < SOON_S
    require_answers(service, 1.0)
    assert busy_s(service, 2.0) < 1.0


def memory_mib(service) -> float:
    return sum(one.memory_info().rss for one in service.answering()) / 2**20


def test_half_open_connections_lock_nobody_out_and_are_let_go(service):
    held = [socket.socket() for _ in range(HALF_OPEN)]
    has_opened_all, ended = threading.Event(), threading.Event()

    def attack() -> None:
        """Send a byte of each head in turn; open those anew that the service has closed."""
        for place in itertools.cycle(range(HALF_OPEN)):
            if ended.is_set():
                return
            try:
                held[place].sendall(b"a")
            except OSError:
                held[place].close()
                with contextlib.suppress(OSError):
                    held[place] = connected(service.port, HALF_A_HEAD)
            if place == HALF_OPEN - 1:
                has_opened_all.set()

    before_mib = memory_mib(service)
    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        while not has_opened_all.is_set():
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
