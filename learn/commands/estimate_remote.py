"""The key `server=` of the command `learn.estimate`: a service answers in place of this machine.

Start reading at `entry_of_server`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from conf.errors import UsageError
from learn.cases import DEFAULT_DEVICE
from learn.client import Client
from learn.commands.estimate import DEFAULT_DTYPE, SETTINGS, EstimateSettings, config_mapping

TOKEN_VARIABLE = "GPUFARM_TOKEN"
# Keys of this machine: its data folder, its files, and what the service decides itself.
_HERE = (
    "configs", "run", "batches", "estimator", "power_limit_w", "torch_version", "known", "find", "by", "report", "data",
    "memory_limit_gib",
)  # fmt: skip
_SAME = ("coverage", "machine", "loop", "allocator", "workspaces")


def entry_of_server(settings: EstimateSettings) -> int:
    """Ask the service for one estimate and print it. Returns the exit code."""
    given = [name for name in _HERE if getattr(settings, name) is not None]
    given += [name for name in ("trust", "devices") if getattr(settings, name)]
    if given:
        raise UsageError(f"server= answers for model= and config=; leave {', '.join(given)} out")
    settings.require_one_job()
    settings.require_format()
    body = request_of(settings)
    title = settings.model or f"{body['config'].get('family')}, batch {body['config'].get('batch_size')}"
    with Client(settings.server or "", token=os.environ.get(TOKEN_VARIABLE)) as service:
        done = service.estimate(**body)
    settings.print_answer(title, done)
    return 0


def request_of(settings: EstimateSettings) -> dict[str, Any]:
    """Return the fields of the request, as `Client.estimate` takes them."""
    training = {name: value for name in SETTINGS if (value := getattr(settings, name)) is not None}
    how = {name: value for name in _SAME if (value := getattr(settings, name)) is not None}
    body: dict[str, Any] = {"device": DEFAULT_DEVICE if settings.device is None else settings.device.name, **how}
    if settings.method != "full":
        body["method"] = settings.method
    if settings.parallel is not None:
        layout = settings.parallel
        body["parallel"] = layout if isinstance(layout, str | Mapping) else layout.text()
    if settings.config is not None:
        if training:
            raise UsageError(f"a trial config has its own training settings; leave {', '.join(training)} out")
        return {**body, "config": dict(config_mapping(settings.config))}
    arguments = settings.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise UsageError(f"arguments is neither a mapping nor JSON: {error}") from error
    of_model = {"arguments": arguments, "batch_size": settings.batch}
    if settings.input_dtype != DEFAULT_DTYPE:
        of_model["input_dtype"] = settings.input_dtype
    given = {name: value for name, value in of_model.items() if value is not None}
    return {**body, **given, "model": settings.model, "inputs": settings.input, "training": training}
