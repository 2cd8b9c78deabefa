"""Parts shared by the programs beside a scheduler: their polling loop, parsers and texts.

Start reading at `keep_asking`. `farm.slurm`, `farm.sbatch` and `farm.kueue` are these programs; the service's webhook
reads pods as `farm.kueue` does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from conf.cli.settings import key
from conf.device_names import resolve_device
from conf.errors import EnvironmentProblem, UsageError, collected, refuse
from featurize.device.device_spec import DEFAULT_DEVICE, device_names, known_device

if TYPE_CHECKING:
    from learn.client import Client
    from learn.estimation.job_estimate import Estimate

TOKEN_VARIABLE = "GPUFARM_TOKEN"
PREFIX = "gpufarm.io/"  # of a pod's annotations
JOB, DEVICE = f"{PREFIX}job", f"{PREFIX}device"
_PRODUCT_LABEL = "nvidia.com/gpu.product"  # label that GPU feature discovery sets
Shape = TypeVar("Shape", dict[str, Any], list[Any], str, int)


def keep_asking(look: Callable[[Client, threading.Event], None], *, server: str, once: bool, every_s: float) -> int:
    """Call `look` with a client of the service and the end event, every `every_s` until SIGTERM or Ctrl-C.

    Returns the exit code. An `EnvironmentProblem` of `look` is raised with `once`, otherwise printed.
    """
    from learn.client import Client

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with Client(server, token=os.environ.get(TOKEN_VARIABLE)) as service:
        while not ended.is_set():
            try:
                look(service, ended)
            except EnvironmentProblem as error:
                if once:
                    raise
                print(f"{error}; trying again", file=sys.stderr, flush=True)
            if once:
                break
            ended.wait(every_s)
    return 0


def figures_of(estimate: Estimate) -> str:
    """Return an estimate's memory in words, such as `7,196 MiB, bound 8,664 MiB`."""
    return f"{estimate.peak_memory_mib:,.0f} MiB, bound {estimate.needed_mib:,.0f} MiB"


def features_by_device(devices: Mapping[str, Any]) -> dict[str, str]:
    """Return Slurm's feature of each GPU model, by its full name. Raises `UsageError` that names what is wrong."""
    problems = [] if devices else ["devices must name the cluster's GPU models, as in '{L4: l4}'"]
    features: dict[str, str] = {}
    for name, feature in devices.items():
        with collected(problems):
            features[resolve_device(name, device_names())] = str(feature)
        if not str(feature).replace("_", "").replace("-", "").replace(".", "").isalnum():
            problems.append(f"devices: the feature of {name} is a name that Slurm's nodes have, got {feature!r}")
    refuse(problems)
    return features


def devices_key() -> Any:
    """Return the field `devices` of commands that know a cluster's GPU models."""
    return key(
        help="the cluster's GPU models, each with the feature that Slurm's nodes have for it: '{L4: l4, T4: t4}'",
        build=features_by_device,
    )


def job_of_text(text: Any, place: str) -> dict[str, Any]:
    """Parse a job's request from a job script or a pod. Raises `UsageError`, which begins with `place`."""
    try:
        body = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{place} is not JSON") from error
    if not isinstance(body, dict):
        raise UsageError(f"{place} is JSON, but no object")
    return body


def device_of(pod: Mapping[str, Any]) -> str:
    """Return the GPU model of a pod: by annotation, or by GPU feature discovery's label; else the default."""
    if isinstance(named := value_at(pod, "metadata.annotations", dict).get(DEVICE), str):
        return named
    product = value_at(pod, "spec.nodeSelector", dict).get(_PRODUCT_LABEL)
    if not isinstance(product, str):
        return DEFAULT_DEVICE
    plain = product.removeprefix("NVIDIA-").removesuffix("-SHARED")  # the label has dashes for spaces
    return known_device(plain) or known_device(plain.replace("-", " ")) or product


def value_at(owner: object, path: str, kind: type[Shape]) -> Shape:
    """Return an API object's value at a dotted path; an empty `kind` if it is absent, null or of another type."""
    value = owner
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, kind) else kind()
