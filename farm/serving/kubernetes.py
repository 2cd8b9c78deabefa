"""The admission webhook for Kubernetes: annotates a pod that names its job with an estimate.

Start reading at `review`. A pod is always allowed, and every problem becomes an annotation: an estimate must not keep
a pod from starting. So does a job that is not known in time; `farm.kueue` waits for its trace.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError, unknown_name
from farm.serving.bodies import EstimateRequest, request_at
from farm.serving.gate import Problem
from farm.serving.scheduling import DEVICE, JOB, PREFIX, device_of, job_of_text, value_at

if TYPE_CHECKING:
    from learn.estimation.job_estimate import Estimate

WRITE = f"{PREFIX}write"
PEAK, UPPER, FITS, PROBLEM = f"{PREFIX}peak-memory-mib", f"{PREFIX}upper-mib", f"{PREFIX}fits", f"{PREFIX}problem"
# How schedulers that share GPUs spell memory: an annotation of the pod, or a limit of its container.
KAI, HAMI, KOORDINATOR = DIALECTS = ("kai", "hami", "koordinator")
KAI_MEMORY, HAMI_MEMORY, KOORDINATOR_MEMORY = "gpu-memory", "nvidia.com/gpumem", "koordinator.sh/gpu-memory"
_GPU_LIMITS = ("nvidia.com/gpu", "koordinator.sh/gpu", "koordinator.sh/gpu-core", "koordinator.sh/gpu-shared")
_API_VERSION = "admission.k8s.io/v1"
_LONGEST = 250  # characters of a problem

Answer = Callable[[EstimateRequest], Awaitable["Estimate"]]
Patch = list[dict[str, Any]]


async def review(asked: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """Return the AdmissionReview that answers `asked`.

    Args:
        asked: The API server's review of a pod.
        answer: Returns the estimate of a request if it is known; raises `Problem`.

    Raises:
        Problem: It is not an AdmissionReview of version v1.
    """
    request = asked.get("request")
    if asked.get("apiVersion") != _API_VERSION or not isinstance(request, Mapping) or "uid" not in request:
        raise Problem(422, "invalid-request", f"an AdmissionReview of {_API_VERSION} is wanted", (("/apiVersion", ""),))
    response: dict[str, Any] = {"uid": str(request["uid"]), "allowed": True}
    pod = request.get("object")
    if isinstance(pod, Mapping) and pod.get("kind") == "Pod" and (patch := await _patch_of(pod, answer)):
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
    return {"apiVersion": _API_VERSION, "kind": "AdmissionReview", "response": response}


async def _patch_of(pod: Mapping[str, Any], answer: Answer) -> Patch:
    annotations = value_at(pod, "metadata.annotations", dict)
    text = annotations.get(JOB)
    if not isinstance(text, str):
        return []
    try:
        dialect = annotations.get(WRITE)
        if dialect is not None and dialect not in DIALECTS:
            raise unknown_name(WRITE, dialect, DIALECTS)
        estimate = await answer(request_at({"device": device_of(pod), **job_of_text(text, JOB)}, JOB))
    except UsageError as error:
        return annotation_patch(annotations, {PROBLEM: str(error)[:_LONGEST]})
    except Problem as problem:
        return annotation_patch(annotations, {PROBLEM: problem.detail[:_LONGEST]})
    fits = "unknown" if estimate.fits_device is None else str(estimate.fits_device).lower()
    needed = math.ceil(estimate.needed_mib)
    notes = {PEAK: str(math.ceil(estimate.peak_memory_mib)), UPPER: str(needed), FITS: fits, DEVICE: estimate.device}
    if dialect == KAI and KAI_MEMORY not in annotations:
        notes[KAI_MEMORY] = str(needed)
    patch = annotation_patch(annotations, notes)
    if dialect in (HAMI, KOORDINATOR):
        patch += _limit(pod, dialect, needed)
    return patch


def annotation_patch(present: Mapping[str, Any], notes: Mapping[str, str]) -> Patch:
    """Return the patch that sets annotations, replacing those copied from another pod."""
    if not present:
        return [{"op": "add", "path": "/metadata/annotations", "value": dict(notes)}]
    return [{"op": "add", "path": f"/metadata/annotations/{_escape(name)}", "value": notes[name]} for name in notes]


def _limit(pod: Mapping[str, Any], dialect: str, needed: int) -> Patch:
    """Return the patch that limits the memory of containers that request a GPU and set no limit."""
    name = HAMI_MEMORY if dialect == HAMI else KOORDINATOR_MEMORY
    value = str(needed) if dialect == HAMI else f"{needed}Mi"
    patch: Patch = []
    for place, container in enumerate(value_at(pod, "spec.containers", list)):
        limits = value_at(container, "resources.limits", dict)
        if name in limits or not any(gpu in limits for gpu in _GPU_LIMITS):
            continue
        base = f"/spec/containers/{place}/resources"
        patch.append({"op": "add", "path": f"{base}/limits/{_escape(name)}", "value": value})
        if dialect == KOORDINATOR and isinstance(value_at(container, "resources", dict).get("requests"), dict):
            patch.append({"op": "add", "path": f"{base}/requests/{_escape(name)}", "value": value})
    return patch


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
