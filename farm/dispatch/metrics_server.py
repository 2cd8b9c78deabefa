"""The dispatcher's HTTP server: metrics and health, with limits for each client.

Start reading at `MetricsServer`. It is the service's server (`farm.serving.server`), in a thread.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI, Header, Response
from fastapi.responses import JSONResponse
from prometheus_client.exposition import choose_encoder

from farm.serving.server import GuardedServer, listen, url_of
from farm.serving.settings import LimitSettings

if TYPE_CHECKING:
    from farm.dispatch.monitoring import FarmMetrics, MetricsSettings, Pulse

LIMITS = LimitSettings(connections=32, peer_connections=32, head_s=10, body_s=10, unread_s=10)


class MetricsServer:
    """`/metrics`, `/healthz` (503 unless the loop turns) and `/readyz` (503 unless it takes tasks), in a thread."""

    def __init__(
        self, settings: MetricsSettings, metrics: FarmMetrics, pulse: Pulse, limits: LimitSettings = LIMITS
    ) -> None:
        """Listen, and serve within the context. Raises `UsageError` if the address is taken."""
        port = settings.port or 0
        listening = listen(settings.address, port, named=f"metrics.port={port} at {settings.address}")
        self.url = url_of(listening)
        config = uvicorn.Config(
            _application(metrics, pulse),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            server_header=False,
            ws="none",
        )
        self._server = GuardedServer(config, listening, limits)
        self._thread = threading.Thread(target=self._server.run, name="metrics", daemon=True)

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


def _application(metrics: FarmMetrics, pulse: Pulse) -> FastAPI:
    app = FastAPI(openapi_url=None)

    @app.get("/metrics")
    def scrape(accept: str = Header("")) -> Response:
        encode, content_type = choose_encoder(accept)
        return Response(encode(metrics.registry), media_type=content_type)

    @app.get("/healthz")
    def is_live() -> Response:
        return JSONResponse(pulse.report(), 200 if pulse.live else 503)

    @app.get("/readyz")
    def is_ready() -> Response:
        return JSONResponse(pulse.report(), 200 if pulse.ready else 503)

    return app
