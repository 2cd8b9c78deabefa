"""An HTTP server that clients cannot block: the number and the duration of connections are limited.

Start reading at `BoundedServer`.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

CONNECTIONS = 32  # at once; a further one takes the place of the oldest
CONNECTION_S = 10.0  # from accepting a connection to its end, whatever the client sends or reads meanwhile


class BoundedServer(http.server.ThreadingHTTPServer):
    """A thread for each connection, which ends when the connection does.

    A client that says nothing, a byte now and then, or does not read its answer is cut off after `CONNECTION_S`. When
    all places are taken, the oldest connection is cut off: a scrape gets through beside any number of silent clients.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = (
        2 * CONNECTIONS
    )  # a client that finds the queue full tries again only after a second, then three

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[http.server.BaseHTTPRequestHandler],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self._guard = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # connection -> when it is cut off; oldest first
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            crowd = list(self._open)[: max(0, len(self._open) + 1 - CONNECTIONS)]
            self._open[request] = self._clock() + CONNECTION_S
        for connection in crowd:
            self._cut_off(connection)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the machine has no thread to spare
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, from its own thread; nobody reads the rest of what the client sends."""
        with self._guard:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off connections whose time is up; `serve_forever` calls it twice a second."""
        super().service_actions()
        now = self._clock()
        with self._guard:
            late = [connection for connection, until in self._open.items() if now >= until]
        for connection in late:
            self._cut_off(connection)

    def connections(self) -> int:
        """Return how many connections are open."""
        with self._guard:
            return len(self._open)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback for a client that disconnected or was cut off."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _cut_off(self, connection: socket.socket) -> None:
        """Shut the connection down, so that its waiting thread ends and closes it."""
        with self._guard:
            self._open.pop(connection, None)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
