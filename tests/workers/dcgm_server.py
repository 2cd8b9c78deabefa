"""A real HTTP server on the loopback that serves a dcgm-exporter page; the page can be changed while it runs."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGE = Path(__file__).parent / "data" / "dcgm_exporter_metrics.txt"


class DcgmServer:
    """Use as a context manager; `url` is where it listens, `page` and `status` what it answers.

    Connections are kept, as dcgm-exporter keeps them, unless `hang_up` is set.
    """

    def __init__(self, page: Path = PAGE) -> None:
        self.page = page.read_text()
        self.status = 200
        self.hang_up = False
        self.ended = threading.Event()
        self.dripping = False  # the page comes a byte at a time, for ever
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5  # a handler ends with its test
            disable_nagle_algorithm = True  # as Go does

            def do_GET(self) -> None:
                self.close_connection = self.close_connection or owner.hang_up  # without saying so beforehand
                body = owner.page.encode()
                self.send_response(owner.status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                while owner.dripping and not owner.ended.wait(0.05):
                    try:
                        self.wfile.write(b"#")
                    except OSError:
                        return
                self.wfile.write(body)

            def log_message(self, *arguments) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def replace(self, old: str, new: str) -> None:
        assert old in self.page
        self.page = self.page.replace(old, new)

    def __enter__(self) -> DcgmServer:
        self._thread.start()
        return self

    def __exit__(self, *_exception) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
