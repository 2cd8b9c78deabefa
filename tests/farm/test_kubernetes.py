"""The webhook on recorded AdmissionReview requests, Kueue's check on a recorded API server, and their manifests."""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import json
import math
import operator
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from fastapi import FastAPI, Query, Request

from conf.cli.commands import settings_class
from conf.cli.settings import documented_keys
from farm.kueue import CONTROLLER, KueueApi, configuration, decide_pending
from farm.serving.scheduling import device_of
from learn import estimate
from tests.farm.served import MLP
from tests.farm.test_serving_connections import listening

MANIFESTS = Path(__file__).resolve().parents[2] / "infra" / "kubernetes"
# As an API server of Kubernetes 1.31 sends it, less what no webhook of a pod looks at.
REVIEW = {
    "kind": "AdmissionReview",
    "apiVersion": "admission.k8s.io/v1",
    "request": {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "training",
        "operation": "CREATE",
        "userInfo": {"username": "system:serviceaccount:kube-system:job-controller"},
        "object": {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {"generateName": "train-", "namespace": "training", "labels": {"job-name": "train"}},
            "spec": {
                "containers": [
                    {"name": "log", "image": "busybox", "resources": {}},
                    {
                        "name": "train",
                        "image": "pytorch",
                        "resources": {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}},
                    },
                ],
                "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB"},
                "restartPolicy": "Never",
            },
        },
        "dryRun": False,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
    },
}


def review(annotations: dict[str, str] | None) -> dict:
    made = copy.deepcopy(REVIEW)
    if annotations is not None:
        made["request"]["object"]["metadata"]["annotations"] = annotations
    return made


def placed(value: object, path: str) -> tuple[object, str | int]:
    """Return the mapping or list that has the place of a JSON pointer in a value, and the key there."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]
    *outer, last = [int(part) if part.isdigit() else part for part in parts]
    return functools.reduce(operator.getitem, outer, value), last


def patched(service, annotations: dict[str, str] | None) -> dict:
    """The pod after the webhook's answer."""
    asked = review(annotations)
    status, _, answer = service.post("/v1/kubernetes/mutate", asked)
    assert status == 200 and answer["response"]["uid"] == asked["request"]["uid"] and answer["response"]["allowed"]
    pod = asked["request"]["object"]
    if "patch" in answer["response"]:
        assert answer["response"]["patchType"] == "JSONPatch"
        for change in json.loads(base64.b64decode(answer["response"]["patch"])):
            holder, key = placed(pod, change["path"].removeprefix("/"))
            assert change["op"] == "add"
            holder[key] = change["value"]
    return pod


JOB = json.dumps({"config": MLP})


@pytest.fixture(scope="module", autouse=True)
def known(service):
    """The job's trace, which the webhook waits a second for."""
    with service.client() as client:
        client.estimate(config=MLP)


def test_a_pod_that_says_its_job_gets_the_estimate_as_annotations(service):
    notes = patched(service, {"gpufarm.io/job": JOB})["metadata"]["annotations"]
    own = estimate(MLP)
    assert notes == {
        "gpufarm.io/job": JOB,
        "gpufarm.io/device": "A100-SXM4-40GB",
        "gpufarm.io/fits": "true",
        "gpufarm.io/upper-mib": str(math.ceil(own.upper_mib)),
        "gpufarm.io/peak-memory-mib": str(math.ceil(own.peak_memory_mib)),
    }


@pytest.mark.parametrize(
    ("given", "of_pod", "of_container"),
    [
        ({"gpufarm.io/write": "kai"}, {"gpu-memory": "MIB"}, {}),
        ({"gpufarm.io/write": "kai", "gpu-memory": "5"}, {"gpu-memory": "5"}, {}),
        ({"gpufarm.io/write": "hami"}, {}, {"nvidia.com/gpumem": "MIB"}),
        ({"gpufarm.io/write": "koordinator"}, {}, {"koordinator.sh/gpu-memory": "MIBMi"}),
    ],
)
def test_memory_is_written_as_the_scheduler_spells_it_and_what_the_user_gave_it_stays(
    service, given, of_pod, of_container
):
    pod = patched(service, {"gpufarm.io/job": JOB, **given})
    notes = pod["metadata"]["annotations"]
    log, train = (container["resources"] for container in pod["spec"]["containers"])
    assert log == {}
    for written, wanted in ((notes, of_pod), (train["limits"], of_container)):
        filled = {key: text.replace("MIB", notes["gpufarm.io/upper-mib"]) for key, text in wanted.items()}
        assert filled.items() <= written.items()


@pytest.mark.parametrize("annotations", [None, {}, {"other": "x"}])
def test_other_pods_stay_as_they_are(service, annotations):
    assert patched(service, annotations) == review(annotations)["request"]["object"]


@pytest.mark.parametrize(
    ("job", "dialect", "words"),
    [
        ("", "kai", "gpufarm.io/job is not JSON"),
        ("[1]", "kai", "gpufarm.io/job is JSON, but no object"),
        ("{}", "kai", "gpufarm.io/job: give exactly one of config, "),
        ('{"config": 1}', "kai", "gpufarm.io/job/config: Input should be a valid dictionary"),
        ('{"config": {"family": "nope"}}', "kai", "unknown family 'nope'"),
        ("[" * 5000, "kai", "gpufarm.io/job is not JSON"),
        ('{"model": "os:system", "inputs": [1]}', "kai", "os:system"),
        ('{"script": "print(1)"}', "kai", "takes no scripts"),
        (JOB, "slurm", "unknown gpufarm.io/write 'slurm'; known: "),
    ],
)
def test_a_job_that_cannot_be_answered_is_allowed_and_says_why(service, job, dialect, words):
    notes = patched(service, {"gpufarm.io/job": job, "gpufarm.io/write": dialect})["metadata"]["annotations"]
    assert words in notes["gpufarm.io/problem"] and "gpufarm.io/upper-mib" not in notes


def test_a_job_whose_trace_takes_its_time_is_allowed_as_not_yet_known_and_known_later(service):
    job = {"config": {**MLP, "depth": 12}}
    with service.traces_held():
        notes = patched(service, {"gpufarm.io/job": json.dumps(job)})["metadata"]["annotations"]
    assert "not yet known" in notes["gpufarm.io/problem"] and "gpufarm.io/upper-mib" not in notes
    with service.client() as client:
        known = client.estimate(**job)
    notes = patched(service, {"gpufarm.io/job": json.dumps(job)})["metadata"]["annotations"]
    assert int(notes["gpufarm.io/upper-mib"]) == math.ceil(known.upper_mib)


@pytest.mark.parametrize(
    "body", [{}, {"apiVersion": "admission.k8s.io/v1"}, {"apiVersion": "v1", "request": {"uid": 1}}]
)
def test_what_is_no_review_is_refused(service, body):
    assert service.post("/v1/kubernetes/mutate", body)[0] == 422


@pytest.mark.parametrize(
    ("label", "device"),
    [
        ("NVIDIA-A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("Tesla-T4", "T4"),
        ("NVIDIA-L40S-SHARED", "L40S"),
        ("NVIDIA-GeForce-RTX-3090", "RTX-3090"),
    ],
)
def test_the_gpu_is_that_of_the_nodes_label(label, device):
    assert device_of({"spec": {"nodeSelector": {"nvidia.com/gpu.product": label}}}) == device


# ---- Kueue


def workload(name: str, annotations: dict[str, str], state: str = "Pending") -> dict:
    template = {"metadata": {"annotations": annotations}, "spec": {"containers": []}}
    return {
        "metadata": {"name": name, "namespace": "training"},
        "spec": {"podSets": [{"name": "main", "count": 1, "template": template}]},
        "status": {
            "admissionChecks": [
                {"name": "memory", "state": state, "message": "", "lastTransitionTime": "2026-11-24T00:00:00Z"},
                {"name": "other", "state": "Pending", "message": "", "lastTransitionTime": "2026-11-24T00:00:00Z"},
            ]
        },
    }


CHECKS = (
    {"metadata": {"name": "memory", "generation": 2}, "spec": {"controllerName": CONTROLLER}},
    {"metadata": {"name": "other"}, "spec": {"controllerName": "someone/else"}},
)


@contextlib.contextmanager
def recorded_api(workloads, version="v1beta1", checks=CHECKS, of_page=1):
    """An API server that prefers a version and lists recorded objects; yields its URL, and the patches of their status
    by name."""
    lists, patches = {"admissionchecks": checks, "workloads": workloads}, {}
    api, group = FastAPI(), "/apis/kueue.x-k8s.io"

    @api.get(group)
    def preferred():
        return {"kind": "APIGroup", "preferredVersion": {"version": version}}

    @api.get(f"{group}/{version}/{{kind}}")
    def listed(kind: str, start: Annotated[int, Query(alias="continue")] = 0):
        after = start + of_page
        more = str(after) if after < len(lists[kind]) else ""
        return {"items": lists[kind][start:after], "metadata": {"continue": more}}

    @api.patch(f"{group}/{version}/{{path:path}}/status")
    async def patched(path: str, request: Request):
        assert request.headers["content-type"] == "application/apply-patch+yaml"
        assert {"fieldManager": "gpufarm", "force": "true"}.items() <= request.query_params.items()
        body = patches[path.rpartition("/")[2]] = await request.json()
        assert body["apiVersion"] == f"kueue.x-k8s.io/{version}"
        return body

    with listening(application=api) as (port, _):
        yield f"http://127.0.0.1:{port}", patches


@pytest.fixture
def decided(service, handlers, shown):
    def decided(*workloads: dict, version: str = "v1beta1") -> dict[str, dict]:
        with recorded_api(workloads, version) as (url, patches):
            shown("kueue", f"server={service.url}", f"api={url}", "once=true")
        return patches

    return decided


def test_workloads_are_admitted_where_their_job_fits(service, decided):
    large = json.dumps({"config": {**MLP, "input_size": 40_000, "classes": 40_000, "batch_size": 4096}})
    with service.client() as client:
        client.estimate(**json.loads(large))
    patches = decided(
        workload("small", {"gpufarm.io/job": JOB}),
        workload("large", {"gpufarm.io/job": large}),
        workload("silent", {}),
        workload("odd", {"gpufarm.io/job": "{}"}),
        workload("decided", {"gpufarm.io/job": JOB}, state="Ready"),
    )
    active = patches.pop("memory")["status"]["conditions"][0]
    assert (active["type"], active["status"], active["observedGeneration"]) == ("Active", "True", 2)
    checks = {name: patch["status"]["admissionChecks"] for name, patch in patches.items()}
    states = {name: [one["state"] for one in own] for name, own in checks.items()}
    assert states == {"small": ["Ready"], "large": ["Rejected"], "silent": ["Ready"], "odd": ["Ready"]}
    assert "does not fit" in checks["large"][0]["message"] and "not estimated" in checks["odd"][0]["message"]


def test_a_workload_waits_until_its_trace_is_done(service, decided):
    job = {"model": "torchvision.models:alexnet", "inputs": [2, 3, 64, 64]}
    waiting = workload("traced", {"gpufarm.io/job": json.dumps(job)})
    with service.traces_held():
        assert "traced" not in decided(waiting)
    with service.client() as client:
        client.estimate(**job)
    assert decided(waiting)["traced"]["status"]["admissionChecks"][0]["state"] == "Ready"


def test_kueue_is_asked_in_the_version_that_the_server_prefers(decided):
    assert decided(workload("small", {"gpufarm.io/job": JOB}), version="v1beta2").keys() == {"small", "memory"}


WRONG_SHAPES = (None, [], {}, 5, "text", [None], [5], {"x": None}, True)


PLACES = (
    "spec",
    "spec/podSets",
    "spec/podSets/0",
    "spec/podSets/0/template/metadata",
    "spec/podSets/0/template/metadata/annotations",
    "metadata",
    "metadata/name",
    "status",
    "status/admissionChecks",
    "status/admissionChecks/0",
    "status/admissionChecks/0/state",
)


def with_shape(dotted: str, shape: object) -> dict:
    """A workload that waits, with a value of another shape at a place."""
    made = workload("odd", {"gpufarm.io/job": "{}"})
    holder, key = placed(made, dotted)
    holder[key] = shape
    return made


def test_a_workload_of_any_shape_keeps_no_other_from_its_decision(service, capsys):
    odd = [with_shape(dotted, shape) for dotted in PLACES for shape in WRONG_SHAPES]
    workloads = [*odd, *WRONG_SHAPES, workload("ü /?", {}), workload("last", {"gpufarm.io/job": JOB})]
    checks = list(CHECKS)
    for shape in WRONG_SHAPES:
        named = {"metadata": {"name": "memory", "generation": shape}, "spec": {"controllerName": CONTROLLER}}
        unnamed = {"metadata": shape, "spec": {"controllerName": CONTROLLER}}
        nobodys = {"metadata": {"name": "x"}, "spec": shape}
        checks += [shape, unnamed, nobodys, named | {"status": {"conditions": shape}}]
    with recorded_api(workloads, checks=checks, of_page=50) as (url, patches), service.client() as client:
        decide_pending(KueueApi(configuration(url)), client)
    assert patches["last"]["status"]["admissionChecks"][0]["state"] == "Ready"
    assert "training/odd: Ready: no pod says which job it runs" in capsys.readouterr().out.splitlines()


# ---- manifests


def manifests() -> dict[tuple[str, str], dict]:
    documents = [one for path in sorted(MANIFESTS.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]
    return {(one["kind"], one.get("metadata", {}).get("name", "")): one for one in documents}


def test_the_manifests_name_what_the_service_and_its_commands_have():
    known = manifests()
    resources = [*known["Kustomization", ""]["resources"], "kustomization.yaml"]
    assert sorted(resources) == sorted(path.name for path in MANIFESTS.glob("*.yaml"))
    (webhook,) = known["MutatingWebhookConfiguration", "gpufarm"]["webhooks"]
    assert (webhook["failurePolicy"], webhook["timeoutSeconds"]) == ("Ignore", 2)
    assert webhook["clientConfig"]["service"]["path"] == "/v1/kubernetes/mutate"
    assert known["AdmissionCheck", "gpufarm"]["spec"]["controllerName"] == CONTROLLER
    for name, command in (("gpufarm", "serve"), ("gpufarm-kueue", "kueue")):
        container = known["Deployment", name]["spec"]["template"]["spec"]["containers"][0]
        assert container["command"] == ["gpufarm", command]
        given = {argument.partition("=")[0] for argument in container["args"]}
        assert given <= {key.name for key in documented_keys(settings_class(command))}
