"""Limits on a client that makes no request: of connections, memory and time, over real sockets."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import ssl
import threading

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from farm.serving.server import GuardedServer, peer_of
from farm.serving.settings import LimitSettings
from tests.surroundings import PATIENCE_S, await_

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
LARGE = 8 << 20  # bytes of the answer of /large, more than sockets buffer


application = FastAPI()


@application.post("/large")
def answer_much():
    return Response(bytes(LARGE))


@application.api_route("/", methods=["GET", "POST"])
async def answer_with_sizes(request: Request):
    body = await request.body()
    return Response(b"%d %d" % (len(body), len(request.scope["headers"])))


@contextlib.contextmanager
def listening(loop="uvloop", certificate=None, key=None, application=application, **limits):
    """A server in a thread of this process, whose clients may take an hour unless a limit says less; yields its port
    and the server."""
    limits = {"head_s": 3600.0, "body_s": 3600.0, "unread_s": 3600.0, **limits}
    taken = socket.create_server(("127.0.0.1", 0), backlog=1024)
    quiet = {"lifespan": "off", "log_config": None, "log_level": "critical", "ws": "none"}
    tls = {"ssl_certfile": certificate, "ssl_keyfile": key}
    config = uvicorn.Config(application, loop=loop, timeout_graceful_shutdown=1, **quiet, **tls)
    server = GuardedServer(config, taken, LimitSettings(**limits))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield taken.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def connected(port, sent=b"", receive_buffer=None):
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(PATIENCE_S)
    client.connect(("127.0.0.1", port))
    client.sendall(sent)
    return client


def ended(client):
    """Read what the server sends until it closes the connection, which fails where it takes too long."""
    with contextlib.suppress(ConnectionError):
        while client.recv(1 << 20):
            pass
    return True


def asked(port, path="/", **options):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("POST", path, b"four", options)
        return connection.getresponse().read()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HT",
        HEAD,
        HEAD + b"content-length: 9\r\n\r\nab",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ",
    ],
    ids=["half a line", "half a head", "half a body", "half a trailer"],
)
def test_a_client_that_does_not_go_on_is_let_go(loop, sent):
    with listening(loop, head_s=0.2, body_s=0.2) as (port, _):
        late = connected(port, sent)
        assert asked(port) == b"4 3"
        assert ended(late)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_client_that_never_reads_its_answer_is_let_go(loop):
    with listening(loop, unread_s=0.2) as (port, server):
        request = b"POST /large HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
        with connected(port, request, receive_buffer=4096), connected(port, request, receive_buffer=4096):
            assert len(asked(port, "/large")) == LARGE
            await_(lambda: not server.server_state.connections, "the end of both connections")


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /", b"a"),
        (HEAD, b"x: a\r\n"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ", b"a"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"a"),
        (HEAD + b"content-length: 4\r\n\r\nfour", HEAD + b"content-length: 0\r\n\r\n"),
    ],
    ids=["a URL", "headers", "a trailer", "a chunk's extension", "pipelined requests"],
)
def test_what_never_ends_is_refused_before_it_takes_memory(start, piece):
    with listening(head_kib=64) as (port, _):
        client = connected(port, start)
        with pytest.raises(ConnectionError):
            for _ in range(64):
                client.sendall(piece * (65_536 // len(piece)))
        assert ended(client) and asked(port) == b"4 3"


@pytest.mark.parametrize("limits", [{"peer_connections": 20, "connections": 30}, {"connections": 20}])
def test_many_half_open_connections_lock_nobody_out_and_idle_ones_make_room_first(limits):
    with listening(**limits) as (port, server):
        half_open = connected(port, HEAD)
        idle = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        idle.request("GET", "/")
        assert idle.getresponse().read() == b"0 2"
        held = [connected(port, HEAD) for _ in range(18)]
        assert asked(port) == b"4 3"
        assert ended(idle.sock)
        half_open.sendall(b"content-length: 0\r\nconnection: close\r\n\r\n")
        assert half_open.recv(12) == b"HTTP/1.1 200"
        held += [connected(port, HEAD) for _ in range(200)]
        assert [asked(port) for _ in range(3)] == [b"4 3"] * 3
        assert len(server.server_state.connections) <= 20
        for client in held:
            client.close()


def test_no_file_descriptor_left_is_a_pause_and_no_end(monkeypatch):
    failures = [OSError(errno.EMFILE, "Too many open files")] * 3

    def accept(listening_socket, really=socket.socket.accept):
        if failures:
            raise failures.pop()
        return really(listening_socket)

    with listening() as (port, _):
        monkeypatch.setattr(socket.socket, "accept", accept)
        assert asked(port) == b"4 3" and not failures


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_tls_handshake_that_never_ends_is_let_go_and_counts_as_a_connection(loop, tls_files):
    certificate, key = tls_files
    context = ssl.create_default_context(cafile=certificate)
    with listening(loop, certificate, key, head_s=0.4, peer_connections=20) as (port, _):
        silent = [connected(port) for _ in range(60)]
        with context.wrap_socket(connected(port), server_hostname="localhost") as client:
            client.sendall(HEAD + b"content-length: 0\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
            client.sendall(b"GET / HT")
            assert all(map(ended, silent)) and ended(client)


def test_a_peer_is_an_address_of_ipv4_or_a_network_of_ipv6():
    assert peer_of("2001:db8:1:2:3::4") == peer_of("2001:db8:1:2:ffff::1") != peer_of("2001:db8:1:3::4")
    assert peer_of("::ffff:192.0.2.1") == peer_of("192.0.2.1") != peer_of("192.0.2.2")
