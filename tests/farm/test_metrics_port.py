"""Hostile clients of the metrics port, over real sockets: none stays for ever, none keeps others out."""

import contextlib
import dataclasses
import socket
import urllib.request

import pytest

from farm.dispatch.metrics_server import LIMITS, MetricsServer
from farm.dispatch.monitoring import FarmMetrics, MetricsSettings, Pulse

PATIENCE_S = 30.0


@contextlib.contextmanager
def serving(folder, **limits):
    """Yield the server's URL, and a function that connects to it."""
    pulse = Pulse()
    limits = dataclasses.replace(LIMITS, **limits)
    with (
        MetricsServer(MetricsSettings(port=0), FarmMetrics(folder.queue, pulse), pulse, limits) as server,
        contextlib.ExitStack() as held,
    ):
        host, port = server.url.removeprefix("http://").split(":")
        yield server.url, lambda: held.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE_S))


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
    "a body that never comes": b"POST /metrics HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n",
}


@pytest.mark.parametrize("words", SILENT.values(), ids=SILENT)
def test_a_client_that_says_no_more_is_cut_off(folder, words):
    with serving(folder, head_s=0.2, body_s=0.2) as (_, connect):
        clients = [connect() for _ in range(5)]
        for client in clients:
            client.sendall(words)
        assert all(is_cut_off(client) for client in clients)


def test_a_crowd_of_silent_clients_keeps_nobody_out(folder):
    with serving(folder) as (url, connect):
        crowd = [connect() for _ in range(3 * LIMITS.connections)]
        for _ in range(3):
            with urllib.request.urlopen(f"{url}/healthz", timeout=PATIENCE_S) as answer:
                assert answer.status == 200
        assert all(is_cut_off(client) for client in crowd[: -LIMITS.connections]), "the oldest go first"


def test_a_client_that_leaves_in_the_middle_costs_no_traceback(folder, capsys):
    with serving(folder) as (url, connect):
        client = connect()
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
        client.close()
        with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
            assert answer.status == 200
    assert capsys.readouterr() == ("", "")
