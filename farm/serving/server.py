"""The processes of the service, and their HTTP server with limits on what a client may open, send and leave unread.

Start reading at `serve`: one process watches and traces, the others answer. `GuardedServer` is uvicorn's server, which
accepts connections itself and ends late ones; `GuardedConnection` is uvicorn's protocol, which also tracks what its
client has yet to send. These limits apply before a request reaches the application.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from enum import Enum
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from conf.cli.command_line import EXIT_INTERRUPTED
from conf.errors import EnvironmentProblem, UsageError
from farm.serving.gate import FOLDER_VARIABLE, RequestLog
from farm.serving.settings import LimitSettings, ServeSettings
from farm.serving.traces import TraceLimits, TracePool, TraceStore
from warehouse.files.folder import DataFolder
from warehouse.files.plain_file import locked

_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 64
_LOOK_EVERY_S = 1.0
_NO_DESCRIPTOR_S = 0.1  # pause of accepting when no file descriptor is left
_OTHER_FILES = 256  # open files of a process beside its connections
_MOST_HEADERS = 100
_MOST_PIPELINED = 16
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _Awaited(Enum):
    """The part of a request that a client has yet to send."""

    REQUEST = 0  # no byte of it has arrived
    HEAD = 1
    BODY = 2


class GuardedServer(uvicorn.Server):
    """uvicorn's server, which accepts the connections of `listening` itself: up to a limit in all and from one peer."""

    def __init__(self, config: uvicorn.Config, listening: socket.socket, limits: LimitSettings) -> None:
        super().__init__(config)
        self.limits = limits
        self._listening = listening
        self._most = min(limits.connections, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES))
        self._open: dict[GuardedConnection, None] = {}  # in the order in which they were accepted
        self._opening: set[asyncio.Task[Any]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start without uvicorn's listener, then accept."""
        await super().startup(sockets=[])
        if not self.started:
            return
        self._loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._accept)
        self._end_late_ones()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, then finish the requests in progress; open connections are no longer watched."""
        self._timer.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        await super().shutdown(sockets=[])

    def forget(self, connection: GuardedConnection) -> None:
        """Stop counting a connection."""
        self._open.pop(connection, None)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor or memory is left; the kernel queues those that wait
                self._loop.remove_reader(self._listening)
                self._loop.call_later(_NO_DESCRIPTOR_S, self._accept_again)
                return
            self._take(accepted, peer_of(address[0]))

    def _accept_again(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    def _take(self, accepted: socket.socket, peer: str) -> None:
        of_peer = [connection for connection in self._open if connection.peer == peer]
        if not _has_room(of_peer, self.limits.peer_connections) or not _has_room(self._open, self._most):
            accepted.close()
            return
        accepted.setblocking(False)
        connection = GuardedConnection(self, accepted, peer)
        self._open[connection] = None
        tls = self.config.ssl
        connecting = self._loop.connect_accepted_socket(
            lambda: connection,
            accepted,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.limits.head_s,
        )
        opening = self._loop.create_task(connecting)
        self._opening.add(opening)
        opening.add_done_callback(lambda task: self._opened(task, connection))

    def _opened(self, opening: asyncio.Task[Any], connection: GuardedConnection) -> None:
        self._opening.discard(opening)
        if opening.cancelled() or opening.exception() is not None:  # the handshake failed, or the client has gone
            self.forget(connection)

    def _end_late_ones(self) -> None:
        now = self._loop.time()
        for connection in [connection for connection in self._open if connection.is_late(now)]:
            connection.end()
        self._timer = self._loop.call_later(_LOOK_EVERY_S, self._end_late_ones)


def _has_room(group: Collection[GuardedConnection], most: int) -> bool:
    """Return whether another connection fits; if the group is full, end the one that has waited longest."""
    if len(group) < most:
        return True
    waiting = [connection for connection in group if not connection.is_answering]
    if not waiting:
        return False
    max(waiting, key=GuardedConnection.dispensability).end()
    return True


class GuardedConnection(HttpToolsProtocol):
    """One connection, which knows what its client has yet to send and since when."""

    def __init__(self, server: GuardedServer, accepted: socket.socket, peer: str) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server.config, server.server_state, server.lifespan.state, loop)
        self.peer = peer
        self._guard, self._accepted, self._limits = server, accepted, server.limits
        self._awaited = _Awaited.HEAD  # so a connection that never sends anything becomes late
        self._since = self._read_since = loop.time()
        self._unparsed = 0  # bytes since the parser last passed on a head, a piece of a body or its end
        self._unsent = 0  # bytes of answers at the last look

    @property
    def is_answering(self) -> bool:
        """Return whether a request is being worked on."""
        return self.cycle is not None and not self.cycle.response_complete

    def dispensability(self) -> tuple[bool, float]:
        """Return a sort key, largest for the connection that is cheapest to drop: idle first, then longest waiting."""
        return self._awaited is _Awaited.REQUEST, -self._since

    def is_late(self, now: float) -> bool:
        """Return whether the client takes too long, at the loop's time `now`: with a head, with a body, or to read."""
        limits, waited_s = self._limits, now - self._since
        if self.transport is None:  # the TLS handshake
            return waited_s > limits.head_s
        unsent = self.transport.get_write_buffer_size()
        if unsent < self._unsent or not (unsent or self.transport.is_closing()):
            self._read_since = now
        self._unsent = unsent
        if now - self._read_since > limits.unread_s:
            return True
        if self._awaited is _Awaited.BODY:
            return waited_s > limits.body_s and not self.pipeline
        return self._awaited is _Awaited.HEAD and waited_s > limits.head_s and not self.is_answering

    def end(self) -> None:
        """Close the connection immediately and stop counting it."""
        self._guard.forget(self)
        if self.transport is not None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):
                self._accepted.shutdown(socket.SHUT_RDWR)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        self._guard.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data. Refuse a head, a trailer or a chunk's size that exceeds the limit."""
        if self._awaited is _Awaited.REQUEST:
            self._await(_Awaited.HEAD)
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > 1024 * self._limits.head_kib and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        if self._awaited is not _Awaited.HEAD:
            self._await(_Awaited.HEAD)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, up to the limit; ignore trailers after a body."""
        if self._awaited is _Awaited.HEAD:
            if len(self.headers) >= _MOST_HEADERS:
                raise ValueError(f"more than {_MOST_HEADERS} headers")  # which the parser turns into a 400
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise ValueError(f"more than {_MOST_PIPELINED} requests at once")
        self._await(_Awaited.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        self._await(_Awaited.REQUEST)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Restart the client's time: it may have waited for the answer."""
        self._since = self.loop.time()
        super().on_response_complete()

    def _await(self, awaited: _Awaited) -> None:
        self._awaited, self._since, self._unparsed = awaited, self.loop.time(), 0


def listen(host: str, port: int, named: str) -> socket.socket:
    """Return a socket that listens at an address. Raises `UsageError` that begins with `named`."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        listening.close()
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise UsageError(f"{named}: {reason}") from error
    return listening


def url_of(listening: socket.socket, scheme: str = "http") -> str:
    """Return the URL at which a socket listens."""
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def peer_of(host: str) -> str:
    """Return the identity of a peer: an IPv4 address, or the network of 64 bits of an IPv6 address."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


_STOP_S = 10  # for requests in progress
_KEEP_ALIVE_S = 30
_SWITCH_S = 0.001  # switch interval of the computing and the answering thread
_SETTLED_S = 30.0  # a process that ends sooner has failed to start
_FAILED_STARTS = 5  # failed starts in a row that end the service


def serve(settings: ServeSettings) -> int:
    """Serve until a signal ends it. Returns the exit code.

    Raises:
        UsageError: The address is taken or not this machine's, or the log cannot be written.
        EnvironmentProblem: Another service has the data folder, or the answering processes keep ending.
    """
    folder = DataFolder.resolve(settings.data)
    if settings.data is None and not folder.root.exists():
        folder.create()  # a service that only estimates needs no runs
    folder.open()
    with only_service(folder):
        log = RequestLog(settings.log)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):  # each connection is a file
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        limits = TraceLimits(
            str(folder.root), settings.trust, settings.limits.trace_s, int(settings.limits.trace_gib * 2**30)
        )
        with (
            listen(settings.host, settings.port, named=f"host={settings.host} port={settings.port}") as listening,
            contextlib.closing(TraceStore(folder.service, settings)) as store,
            tempfile.TemporaryDirectory(prefix="gpufarm-metrics-", ignore_cleanup_errors=True) as metrics_folder,
            TracePool(store, limits, settings.traces, log.event),
        ):
            os.environ[FOLDER_VARIABLE] = metrics_folder
            url = url_of(listening, "http" if settings.certificate is None else "https")
            print(f"serving {folder.root} on {url}", flush=True)
            return _AnsweringProcesses(settings, listening, log).run()


def only_service(folder: DataFolder) -> contextlib.AbstractContextManager[object]:
    """Hold the lock of the data folder's one service: two would trace each other's questions."""
    problem = f"another service answers from data={folder.root}; name another folder"
    return locked(folder.service_lock, lambda: EnvironmentProblem(problem))


class _AnsweringProcesses:
    """The answering processes, each restarted when it ends."""

    def __init__(self, settings: ServeSettings, listening: socket.socket, log: RequestLog) -> None:
        self._settings, self._listening, self._log = settings, listening, log
        self._processes: dict[SpawnProcess, float] = {}  # -> start time
        self._woken, self._wakes = os.pipe()
        self._signal: int | None = None
        self._failed_starts = 0

    def run(self) -> int:
        """Watch them until a signal arrives. Returns the exit code."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for _ in range(self._settings.processes):
                self._start()
            while self._signal is None:
                wait([self._woken, *(process.sentinel for process in self._processes)])
                if self._signal is None:
                    self._replace_ended()
        finally:
            self._stop()
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._woken)
            os.close(self._wakes)
        return EXIT_INTERRUPTED if self._signal == signal.SIGINT else 0

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        os.write(self._wakes, b".")

    def _start(self) -> None:
        process = multiprocessing.get_context("spawn").Process(
            target=_answer_requests, args=(self._settings, self._listening), name="answers"
        )
        process.start()
        self._processes[process] = time.monotonic()

    def _replace_ended(self) -> None:
        for process in [process for process in self._processes if not process.is_alive()]:
            lived_s = time.monotonic() - self._processes.pop(process)
            self._log.event("process_ended", ended=process.pid, exit_code=process.exitcode, lived_s=round(lived_s, 1))
            self._failed_starts = (
                0 if lived_s > _SETTLED_S or process.exitcode == -signal.SIGKILL else (self._failed_starts + 1)
            )
            if self._failed_starts >= _FAILED_STARTS:
                raise EnvironmentProblem(
                    f"the processes that answer ended {_FAILED_STARTS} times in a row, the last with exit code "
                    f"{process.exitcode}; the log has the reasons"
                )
            self._start()

    def _stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_STOP_S + 2)
            process.kill()
            process.join()


def _answer_requests(settings: ServeSettings, listening: socket.socket) -> None:
    """Answer requests until SIGTERM, or until the parent process ends. The main function of a process."""
    from farm.serving.application import make_application

    sys.setswitchinterval(_SWITCH_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent passes it on
    config = uvicorn.Config(
        make_application(settings),
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_STOP_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.private_key,
        ws="none",
    )
    server = GuardedServer(config, listening, settings.limits)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    server.run()


def _end_with_parent(server: uvicorn.Server) -> None:
    parent: Any = multiprocessing.parent_process()
    wait([parent.sentinel])
    server.should_exit = True
