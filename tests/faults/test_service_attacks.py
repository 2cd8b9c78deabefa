"""The whole service under attack by clients without a token: connections and memory.

Each attack is as large as those that stopped the service once. An honest client is answered all the while.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import resource
import socket
import threading
import time

import pytest

from tests.farm.served import served
from tests.surroundings import await_
from warehouse.files.folder import DataFolder

pytestmark = pytest.mark.slow
HALF_OPEN = 3000
HALF_A_HEAD = b"POST /v1/estimate HTTP/1.1\r\nhost: localhost\r\nx-slow: "
TOKEN = "0123456789abcdef-token"
WITH_TOKEN = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A service with a token."""
    place = tmp_path_factory.mktemp("attacked")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    (place / "tokens").write_text(f"{TOKEN}\n")
    data = DataFolder(place / "a'; echo foo").create().root
    with served(data, f"token_file={place / 'tokens'}") as service:
        yield service
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def answer_s(service) -> float:
    """The seconds until an honest client, which connects anew, has its answer."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/devices", headers=WITH_TOKEN)
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()
    return time.monotonic() - began


def memory_mib(service) -> float:
    return sum(one.memory_info().rss for one in service.answering()) / 2**20


def has_let_go(service) -> bool:
    return all(len(one.net_connections()) <= 20 for one in service.answering())


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
            assert answer_s(service) < 5
        waits_s = [answer_s(service) for _ in range(20)]
        connections = [len(one.net_connections()) for one in service.answering()]
    finally:
        ended.set()
        attacker.join()
    print(f"longest wait {max(waits_s):.2f} s, connections {connections}, {memory_mib(service) - before_mib:+.0f} MiB")
    assert max(waits_s) < 5 and max(connections) < 500
    assert memory_mib(service) - before_mib < 200
    await_(lambda: has_let_go(service), "the end of half-open connections", 30.0)
    for client in held:
        client.close()


def test_heads_without_end_and_answers_that_nobody_reads_take_no_memory_and_are_let_go(service):
    before_mib = memory_mib(service)
    for start in 8 * (b"GET /", HALF_A_HEAD):
        with contextlib.closing(connected(service)) as client:
            client.sendall(start)
            with pytest.raises(ConnectionError):
                for _ in range(16):
                    client.sendall(b"a" * 2**20)
    request = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
    clients = [connected(service) for _ in range(100)]
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(request * 16)
    assert answer_s(service) < 5 and memory_mib(service) - before_mib < 200
    await_(lambda: has_let_go(service), "the end of clients that read nothing", 90.0)
    for client in clients:
        client.close()
