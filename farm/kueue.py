"""`python -m farm.kueue`: the controller of an AdmissionCheck of Kueue, which waits for full traces.

Start reading at `entry`. A workload whose pods say which job they run (`gpufarm.io/job`) is admitted when its estimate
fits the GPU model, and rejected when it does not. What cannot be estimated is admitted, with the reason in the
check's message.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from conf.cli.command_line import command
from conf.cli.commands import naming_the_extra
from conf.cli.settings import Checked, key
from conf.errors import EnvironmentProblem, UsageError, one_line, shown
from farm.serving.scheduling import JOB, device_of, figures_of, job_of_text, keep_asking, value_at

if TYPE_CHECKING:
    from learn.client import Client

CONTROLLER = "gpufarm.io/memory"
PENDING, READY, REJECTED = "Pending", "Ready", "Rejected"
_GROUP = "kueue.x-k8s.io"
_TIMEOUT_S = 30.0
_LONGEST = 1000  # characters of a message
_PAGE = 500
Decision = tuple[str, str]


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
    once: bool = key(False, "true: decide the pending workloads, then exit")
    every_s: float = key(5.0, "seconds between polls for pending workloads", "number > 0")

    def problems(self) -> Iterator[str]:
        if self.api is not None and urlsplit(self.api).scheme not in ("http", "https"):
            yield f"api is a URL such as http://127.0.0.1:8001, got {self.api!r}"


class KueueApi:
    """Kueue's objects of one API server, in the version that the server prefers.

    Raises `EnvironmentProblem` where the server refuses, does not answer, or has no Kueue.
    """

    def __init__(self, config: Any) -> None:
        import httpx2
        from lightkube import Client as KubernetesClient
        from lightkube.config import client_adapter
        from lightkube.generic_resource import create_global_resource, create_namespaced_resource

        parameters = client_adapter.ConnectionParams(timeout=httpx2.Timeout(_TIMEOUT_S), trust_env=False)
        with _named_failures(), client_adapter.Client(config, parameters) as discovery:
            group = discovery.get(f"/apis/{_GROUP}").raise_for_status().json()
        self._version = value_at(group, "preferredVersion.version", str)
        if not self._version:
            raise EnvironmentProblem(f"the API server names no version of {_GROUP}: is Kueue installed?")
        self._client = KubernetesClient(config, timeout=parameters.timeout, trust_env=False, field_manager="gpufarm")
        self.check = create_global_resource(_GROUP, self._version, "AdmissionCheck", "admissionchecks")
        self.workload = create_namespaced_resource(_GROUP, self._version, "Workload", "workloads")

    def objects(self, resource: Any) -> Iterator[dict[str, Any]]:
        """Yield all checks or workloads, page by page; an item that is not a JSON object becomes an empty one."""

        class Item(resource):  # type: ignore[misc]
            def __init__(self, value: object) -> None:
                super().__init__(value if isinstance(value, dict) else {})

        everywhere: dict[str, Any] = {"namespace": "*"} if resource is self.workload else {}
        with _named_failures():
            yield from self._client.list(Item, chunk_size=_PAGE, **everywhere)

    def apply_status(self, resource: Any, metadata: Mapping[str, str], status: Mapping[str, Any]) -> None:
        """Apply the status of the object that the metadata names, by server-side apply."""
        from lightkube.types import PatchType

        about = {"apiVersion": f"{_GROUP}/{self._version}", "kind": resource.__name__, "metadata": metadata}
        where: dict[str, Any] = {key: quote(value, safe="") for key, value in metadata.items()}
        with _named_failures():
            self._client.patch(
                resource.Status, obj={**about, "status": status}, patch_type=PatchType.APPLY, force=True, **where
            )


@contextlib.contextmanager
def _named_failures() -> Iterator[None]:
    import httpx2
    from lightkube import ConfigError
    from msgspec import MsgspecError

    try:
        yield
    except httpx2.HTTPStatusError as error:
        asked = f"{error.request.method} {error.request.url.path}"
        raise EnvironmentProblem(f"{asked}: {error.response.status_code} {error}") from error
    except (httpx2.HTTPError, ConfigError, MsgspecError, ValueError, KeyError) as error:
        raise EnvironmentProblem(f"the API server does not answer: {error}") from error


def entry(settings: KueueSettings) -> int:
    """Decide pending workloads until SIGTERM. Returns the exit code.

    Raises:
        EnvironmentProblem: With once=true, the API server or the service does not answer.
    """
    config = configuration(settings.api)
    api = functools.cache(lambda: KueueApi(config))  # made once, when the API server first answers
    return keep_asking(
        lambda service, _ended: decide_pending(api(), service),
        server=settings.server,
        once=settings.once,
        every_s=settings.every_s,
    )


def configuration(url: str | None) -> Any:
    """Return the client configuration of the API server at `url`; None: of the cluster's own, as the pod's account."""
    with naming_the_extra():
        from lightkube import ConfigError, KubeConfig
        from lightkube.config.models import Cluster, User
    if url is not None:
        return KubeConfig.from_one(cluster=Cluster(server=url), user=User()).get()
    try:
        return KubeConfig.from_service_account().get()
    except (ConfigError, KeyError) as error:
        advice = "this is not a pod with a service account; name the API server: api=http://127.0.0.1:8001"
        raise UsageError(advice) from error


def decide_pending(api: KueueApi, service: Client) -> None:
    """Decide every workload that waits for one of our checks. A workload whose trace is not done keeps waiting."""
    checks = set()
    for check in api.objects(api.check):
        name = value_at(check, "metadata.name", str)
        if name and value_at(check, "spec.controllerName", str) == CONTROLLER:
            checks.add(name)
            _mark_active(api, check, name)
    for workload in api.objects(api.workload) if checks else ():
        states = value_at(workload, "status.admissionChecks", list)
        waiting = [
            state["name"]
            for state in states
            if value_at(state, "name", str) in checks and state.get("state") == PENDING
        ]
        if not waiting:
            continue
        name, namespace = (value_at(workload, f"metadata.{key}", str) for key in ("name", "namespace"))
        if not name or not namespace:
            print(f"a workload without a name and a namespace is left alone: {shown(workload.get('metadata'))}")
        elif (decision := _decision(workload, service)) is not None:
            _decide(api, name, namespace, waiting, decision)


def _decision(workload: Mapping[str, Any], service: Client) -> Decision | None:
    """Return the state and the message of a workload's check; None while a trace is not done."""
    from learn.estimation.job_estimate import Estimate

    messages: list[str] = []
    for pods in value_at(workload, "spec.podSets", list):
        template = value_at(pods, "template", dict)
        text = value_at(template, "metadata.annotations", dict).get(JOB)
        if text is None:
            continue
        name = value_at(pods, "name", str) or "main"
        try:
            job = {"device": device_of(template), **job_of_text(text, JOB)}
            (result,) = service.ask("POST", "/v1/estimate:batch", {"jobs": [job]})["results"]
        except UsageError as error:
            messages.append(f"{name}: not estimated: {error}")
            continue
        if "url" in result:
            return None
        if "estimate" not in result:
            messages.append(f"{name}: not estimated: {result.get('detail')}")
            continue
        estimate = Estimate.from_mapping(result["estimate"])
        figures = f"{name}: {figures_of(estimate)}, on {estimate.device}"
        if estimate.fits_device is False:
            return REJECTED, f"{figures}, which does not fit"
        messages.append(figures)
    return READY, "; ".join(messages or ["no pod says which job it runs"])


def _mark_active(api: KueueApi, check: Mapping[str, Any], name: str) -> None:
    conditions = value_at(check, "status.conditions", list)
    if any(
        value_at(condition, "type", str) == "Active" and condition.get("status") == "True" for condition in conditions
    ):
        return
    active = {
        "type": "Active",
        "status": "True",
        "reason": "Active",
        "message": "gpufarm's controller answers",
        "lastTransitionTime": _now(),
        "observedGeneration": value_at(check, "metadata.generation", int) or 1,
    }
    api.apply_status(api.check, {"name": name}, {"conditions": [active]})


def _decide(api: KueueApi, name: str, namespace: str, checks: list[str], decision: Decision) -> None:
    state, message = decision
    states = [
        {"name": check, "state": state, "message": message[:_LONGEST], "lastTransitionTime": _now()} for check in checks
    ]
    api.apply_status(api.workload, {"name": name, "namespace": namespace}, {"admissionChecks": states})
    print(one_line(f"{namespace}/{name}: {state}: {message[:_LONGEST]}"), flush=True)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    command("kueue", entry)
