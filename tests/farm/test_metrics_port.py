"""Hostile clients of the metrics port, over real sockets: none holds a thread for ever, none keeps others out."""

import contextlib
import socket
import threading
import urllib.request

import pytest

from farm.monitoring import http_server
from farm.monitoring.health import Pulse
from farm.monitoring.http_server import CONNECTION_S, CONNECTIONS
from farm.monitoring.metrics import FarmMetrics, MetricsServer, MetricsSettings

PATIENCE_S = 30.0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(http_server.BoundedServer.__init__, "__defaults__", (clock,))
    return clock


@pytest.fixture
def server(folder, clock):
    pulse = Pulse()
    with MetricsServer(MetricsSettings(port=0), FarmMetrics(folder.queue, pulse), pulse) as server:
        yield server


@pytest.fixture
def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as held:
        yield lambda: held.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))


def await_(condition):
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("never came")


def serving_threads():
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def is_cut_off(connection):
    """Waits until the server has ended the connection."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    return True


SILENT = {
    "nothing": b"",
    "half a request": b"GET /metr",
    "half a header": b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "a body that never comes": b"POST /metrics HTTP/1.1\r\nContent-Length: 1000000\r\n",
}


@pytest.mark.parametrize("words", SILENT.values(), ids=SILENT)
def test_a_client_that_says_no_more_is_cut_off_and_its_thread_ends(server, connect, clock, words):
    clients = [connect() for _ in range(5)]
    for client in clients:
        client.sendall(words)
    await_(lambda: server.connections() == 5)
    clock.now += CONNECTION_S
    assert all(is_cut_off(client) for client in clients)
    await_(lambda: not serving_threads() and not server.connections())


def test_a_client_that_sends_a_byte_now_and_then_has_no_longer(server, connect, clock):
    client = connect()
    client.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
    await_(lambda: server.connections() == 1)
    for _ in range(20):
        clock.now += CONNECTION_S / 20
        with contextlib.suppress(OSError):
            client.sendall(b"x")
    assert is_cut_off(client)
    await_(lambda: not serving_threads())


def test_a_crowd_of_silent_clients_keeps_nobody_out_and_holds_a_bounded_number_of_threads(server, connect):
    crowd = [connect() for _ in range(3 * CONNECTIONS)]
    for _ in range(3):
        with urllib.request.urlopen(f"{server.url}/healthz", timeout=PATIENCE_S) as answer:
            assert answer.status == 200
    assert server.connections() <= CONNECTIONS
    await_(lambda: len(serving_threads()) <= CONNECTIONS)
    assert is_cut_off(crowd[0]), "the oldest goes first"


def test_a_client_that_leaves_in_the_middle_costs_no_traceback(server, connect, capsys):
    client = connect()
    client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
    client.close()
    await_(lambda: not server.connections())
    assert capsys.readouterr() == ("", "")
