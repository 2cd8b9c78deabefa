"""The service on Ray Serve, for more requests than one machine can answer.

    serve run farm.serving.ray_application:build data=/srv/farm token_file=/srv/farm/tokens processes=4

Start reading at `build`. Replicas answer on any node. One deployment stores and traces the questions, so every replica
finds every answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from conf.cli.command_line import load_settings
from conf.cli.settings import flat
from conf.errors import UsageError
from farm.serving.gate import FOLDER_VARIABLE, RequestLog
from farm.serving.server import only_service
from farm.serving.settings import ServeSettings
from farm.serving.traces import RemoteQuestions, TraceLimits, TracePool, TraceStore
from warehouse.files.folder import DataFolder

TRACES, ESTIMATIONS = "Traces", "Estimations"
_OF_RAY = ("host", "port", "certificate", "private_key")  # Ray Serve's proxies listen
_MORE_REQUESTS = 64  # more than the gate takes: the gate refuses instead of Ray queueing


def build(arguments: Mapping[str, Any]) -> Any:
    """Return the application of Ray Serve.

    Args:
        arguments: Keys of `python -m farm.serve` and their values, without those of an address. `processes` is the
            number of replicas. The data folder must have the same path on every node; only the node of `Traces`
            writes into it.

    Raises:
        UsageError: A bad key, or no token_file=: a proxy of Ray Serve may listen to other machines.
    """
    from ray import serve

    settings = settings_of(arguments)
    if not DataFolder.resolve(settings.data).root.exists():
        raise UsageError(f"data={settings.data} is not a data folder; name one that every node has")
    traces = serve.deployment(Traces).options(
        name=TRACES,
        num_replicas=1,
        max_ongoing_requests=settings.limits.concurrent * max(settings.processes, 1),
        ray_actor_options={"num_cpus": settings.traces},
    )
    estimations = serve.deployment(serve.ingress()(Estimations)).options(
        name=ESTIMATIONS,
        num_replicas=settings.processes,
        max_ongoing_requests=settings.limits.concurrent + _MORE_REQUESTS,
        ray_actor_options={"num_cpus": 1},
    )
    return estimations.bind(settings, traces.bind(settings))


class Traces(TraceStore):
    """The questions for traces, and the processes that trace them: one replica, beside the data folder."""

    def __init__(self, settings: ServeSettings) -> None:
        folder = DataFolder.resolve(settings.data).open()
        limits = TraceLimits(
            str(folder.root), settings.trust, settings.limits.trace_s, int(settings.limits.trace_gib * 2**30)
        )
        with contextlib.ExitStack() as opened:  # closed if a later step fails
            opened.enter_context(only_service(folder))
            super().__init__(folder.service, settings)
            opened.callback(self.close)
            opened.enter_context(TracePool(self, limits, settings.traces, RequestLog(settings.log).event))
            self._opened = opened.pop_all()

    def __del__(self) -> None:
        if hasattr(self, "_opened"):
            self._opened.close()


class Estimations:
    """A replica that answers requests: the application of `farm.serving.application`."""

    def __init__(self, settings: ServeSettings, traces: Any) -> None:
        # Before prometheus_client is imported; a replica's `/metrics` counts what that replica answered.
        os.environ.setdefault(FOLDER_VARIABLE, tempfile.mkdtemp(prefix="gpufarm-metrics-"))
        from farm.serving.application import make_application

        self._application = make_application(settings, RemoteQuestions(traces))

    def __serve_build_asgi_app__(self) -> Any:
        return self._application


def settings_of(arguments: Mapping[str, Any]) -> ServeSettings:
    """Return the settings that `build` is given. Raises `UsageError`."""
    if unfit := [name for name in _OF_RAY if name in arguments]:
        raise UsageError(f"{', '.join(unfit)}: Ray Serve listens; set its http_options")
    if not arguments.get("token_file"):
        raise UsageError("token_file=FILE is missing: Ray Serve's proxies may listen to other machines")
    if not arguments.get("data"):
        raise UsageError("data=FOLDER is missing: every node must have it under the same path")
    # `serve run` gives text, a YAML file typed values.
    texts = ((name, value if isinstance(value, str) else json.dumps(value)) for name, value in flat(arguments))
    return load_settings(ServeSettings, [f"{name}={text}" for name, text in texts])
