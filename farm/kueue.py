"""`python -m farm.kueue`: the controller of an AdmissionCheck of Kueue, which waits for full traces.

Start reading at `entry`. A workload whose pods say which job they run (`gpufarm.io/job`) is admitted when its estimate
fits the GPU model, and rejected when it does not. What cannot be estimated is admitted, with the reason in the
check's message.
"""

from __future__ import annotations

import datetime
import http.client
import json
import os
import signal
import ssl
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

from conf.cli import command
from conf.errors import EnvironmentProblem, UsageError, shown
from conf.plain_text import one_line
from conf.settings import Checked, key

if TYPE_CHECKING:
    from learn.client import Client

TOKEN_VARIABLE = "GPUFARM_TOKEN"
CONTROLLER = "gpufarm.io/memory"
PENDING, READY, REJECTED = "Pending", "Ready", "Rejected"
_API = "/apis/kueue.x-k8s.io/v1beta1"
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 30.0
_LONGEST = 1000  # characters of a message
_PAGE = 500
Decision = tuple[str, str]
Shape = TypeVar("Shape", dict[str, Any], list[Any], str, int)


@dataclass(frozen=True, kw_only=True)
class KueueSettings(Checked):
    """Which API server and which service. Raises `UsageError`.

      python -m farm.kueue server=http://gpufarm:8350
      python -m farm.kueue api=http://127.0.0.1:8001 once=true     through `kubectl proxy`

    Runs in the cluster, with a service account that may read AdmissionChecks and Workloads and patch their status
    (infra/kubernetes has the manifests), until SIGTERM.
    """

    server: str = key("http://127.0.0.1:8350", "the service's URL; $GPUFARM_TOKEN is its token")
    api: str | None = key(None, "URL of the API server; default the cluster's own, with the pod's service account")
    once: bool = key(False, "true: decide what is pending now, then leave")
    every_s: float = key(5.0, "between two looks for pending workloads", "number > 0")

    def problems(self) -> Iterator[str]:
        if self.api is not None and urlsplit(self.api).scheme not in ("http", "https"):
            yield f"api is a URL such as http://127.0.0.1:8001, got {self.api!r}"


class ApiServer:
    """Requests to the Kubernetes API. Raises `EnvironmentProblem` where it refuses or does not answer."""

    def __init__(self, url: str, token: str | None, authority: Path | None) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._secure = parts.hostname or "", parts.port, parts.scheme == "https"
        self._headers = {"accept": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
        self._context = ssl.create_default_context(cafile=authority) if self._secure else None

    @classmethod
    def of(cls, settings: KueueSettings) -> ApiServer:
        """Return the one that the settings name, or the cluster's own."""
        if settings.api is not None:
            return cls(settings.api, None, None)
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            token = (_ACCOUNT / "token").read_text().strip()
        except OSError:
            token = ""
        if not host or not token:
            raise UsageError("this is no pod with a service account; name the API server: api=http://127.0.0.1:8001")
        return cls(f"https://{host}:{port}", token, _ACCOUNT / "ca.crt")

    def get(self, path: str) -> dict[str, Any]:
        """Return an object or a list."""
        return self._asked("GET", path, None, "")

    def items(self, path: str) -> Iterator[dict[str, Any]]:
        """Return the objects of a list, page by page."""
        token = ""
        while True:
            page = self.get(f"{path}?limit={_PAGE}" + (f"&continue={quote(token)}" if token else ""))
            yield from (item for item in _get(page, "items", list) if isinstance(item, dict))
            token = _get(page, "metadata.continue", str)
            if not token:
                return

    def apply_status(self, path: str, body: Mapping[str, Any]) -> None:
        """Apply an object's status by server-side apply, as the manager `gpufarm`."""
        self._asked("PATCH", f"{path}/status?fieldManager=gpufarm&force=true", body, "application/apply-patch+yaml")

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None, kind: str) -> dict[str, Any]:
        connection = (
            http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
            if self._context is None
            else http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_S, context=self._context)
        )
        try:
            headers = self._headers | ({"content-type": kind} if kind else {})
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise EnvironmentProblem(f"the API server does not answer: {error}") from error
        finally:
            connection.close()
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            value = {}
        if answer.status >= 300 or not isinstance(value, dict):
            reason = value.get("message", "") if isinstance(value, dict) else ""
            raise EnvironmentProblem(f"{method} {path.partition('?')[0]}: {answer.status} {reason}".strip())
        return value


def entry(settings: KueueSettings) -> int:
    """Decide what is pending, again and again. Returns the exit code.

    Raises:
        EnvironmentProblem: With once=true, the API server or the service does not answer.
    """
    from learn.client import Client

    api = ApiServer.of(settings)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with Client(settings.server, token=os.environ.get(TOKEN_VARIABLE)) as service:
        while not ended.is_set():
            try:
                decide_pending(api, service)
            except EnvironmentProblem as error:
                if settings.once:
                    raise
                print(f"{error}; trying again", file=sys.stderr, flush=True)
            if settings.once:
                break
            ended.wait(settings.every_s)
    return 0


def decide_pending(api: ApiServer, service: Client) -> None:
    """Decide every workload that waits for one of our checks; one whose trace is not done yet goes on waiting."""
    checks = set()
    for check in api.items(f"{_API}/admissionchecks"):
        name = _get(check, "metadata.name", str)
        if name and _get(check, "spec.controllerName", str) == CONTROLLER:
            checks.add(name)
            _mark_active(api, check, name)
    for workload in api.items(f"{_API}/workloads") if checks else ():
        states = _get(workload, "status.admissionChecks", list)
        waiting = [one["name"] for one in states if _get(one, "name", str) in checks and one.get("state") == PENDING]
        if not waiting:
            continue
        name, namespace = (_get(workload, f"metadata.{one}", str) for one in ("name", "namespace"))
        if not name or not namespace:
            print(f"a workload without a name and a namespace is left alone: {shown(workload.get('metadata'))}")
        elif (decision := _decision(workload, service)) is not None:
            _decided(api, name, namespace, waiting, decision)


def _get(owner: object, path: str, kind: type[Shape], odd: list[str] | None = None) -> Shape:
    """Return an API object's value at a dotted path; an empty `kind` where it is absent, null or of another type.

    Appends to `odd` the path of a value of another type.
    """
    value = owner
    for name in path.split("."):
        if not isinstance(value, dict):
            break
        value = value.get(name)
        if value is None:
            return kind()
    else:
        if isinstance(value, kind):
            return value
    if odd is not None:
        odd.append(path)
    return kind()


def _decision(workload: Mapping[str, Any], service: Client) -> Decision | None:
    """Return the state and the message of a workload's check; None while a trace is not done."""
    from farm.serving.kubernetes import JOB, device_of
    from learn.client import Refused

    messages: list[str] = []
    odd: list[str] = []
    for pods in _get(workload, "spec.podSets", list, odd):
        template = _get(pods, "template", dict, odd)
        text = _get(template, "metadata.annotations", dict, odd).get(JOB)
        if text is None:
            continue
        name = _get(pods, "name", str, odd) or "main"
        try:
            body = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            body = None
        if not isinstance(body, dict):
            messages.append(f"{name}: {JOB} is not a JSON object")
            continue
        try:
            job = {"device": device_of(template), **body}
            (result,) = service.ask("POST", "/v1/estimate:batch", {"jobs": [job]})["results"]
        except Refused as error:
            messages.append(f"{name}: not estimated: {error}")
            continue
        if "url" in result:
            return None
        if "estimate" not in result:
            messages.append(f"{name}: not estimated: {result.get('detail')}")
            continue
        done = result["estimate"]
        needed_mib = done["upper_mib"] or done["peak_memory_mib"]
        figures = f"{name}: {done['peak_memory_mib']:,.0f} MiB, bound {needed_mib:,.0f} MiB, on {done['device']}"
        if done["fits"] is False:
            return REJECTED, f"{figures}, which does not fit"
        messages.append(figures)
    messages = messages or ["no pod says which job it runs"]
    return READY, "; ".join([*messages, *(f"{path} has an unknown shape" for path in odd)])


def _mark_active(api: ApiServer, check: Mapping[str, Any], name: str) -> None:
    conditions = _get(check, "status.conditions", list)
    if any(_get(one, "type", str) == "Active" and one.get("status") == "True" for one in conditions):
        return
    active = {
        "type": "Active", "status": "True", "reason": "Active", "message": "gpufarm's controller answers",
        "lastTransitionTime": _now(), "observedGeneration": _get(check, "metadata.generation", int) or 1,
    }  # fmt: skip
    status = {"conditions": [active]}
    api.apply_status(f"{_API}/admissionchecks/{quote(name)}", _applied("AdmissionCheck", {"name": name}, status))


def _decided(api: ApiServer, name: str, namespace: str, checks: list[str], decision: Decision) -> None:
    state, message = decision
    states = [
        {"name": check, "state": state, "message": message[:_LONGEST], "lastTransitionTime": _now()} for check in checks
    ]
    metadata = {"name": name, "namespace": namespace}
    path = f"{_API}/namespaces/{quote(namespace)}/workloads/{quote(name)}"
    api.apply_status(path, _applied("Workload", metadata, {"admissionChecks": states}))
    print(one_line(f"{namespace}/{name}: {state}: {message[:_LONGEST]}"), flush=True)


def _applied(kind: str, metadata: Mapping[str, str], status: Mapping[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": kind, "metadata": metadata, "status": status}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    command("kueue", entry)
