"""The webhook on recorded AdmissionReview requests, Kueue's check on a recorded API server, and their manifests."""

from __future__ import annotations

import base64
import contextlib
import copy
import http.server
import json
import ssl
import threading
from pathlib import Path

import pytest
import yaml

from conf.cli import command_line as cli
from farm import kueue
from farm.kueue import CONTROLLER, KueueApi, configuration, decide_pending
from farm.serving.scheduling import device_of
from learn import estimate
from tests.farm.served import MLP, Served
from tests.surroundings import PATIENCE_S, await_

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


def patched(service, annotations: dict[str, str] | None) -> dict:
    """The pod after the webhook's answer."""
    asked = review(annotations)
    status, _, answer = service.post("/v1/kubernetes/mutate", asked)
    assert status == 200 and answer["response"]["uid"] == asked["request"]["uid"] and answer["response"]["allowed"]
    pod = asked["request"]["object"]
    if "patch" in answer["response"]:
        assert answer["response"]["patchType"] == "JSONPatch"
        for operation in json.loads(base64.b64decode(answer["response"]["patch"])):
            *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
            place = pod
            for part in path:
                place = place[int(part)] if isinstance(place, list) else place[part]
            assert operation["op"] == "add"
            place[last] = operation["value"]
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
    assert 0 <= int(notes["gpufarm.io/upper-mib"]) - own.upper_mib < 1 and notes["gpufarm.io/fits"] == "true"
    assert 0 <= int(notes["gpufarm.io/peak-memory-mib"]) - own.peak_memory_mib < 1
    assert notes["gpufarm.io/device"] == "A100-SXM4-40GB" and notes["gpufarm.io/job"] == JOB


@pytest.mark.parametrize("dialect", ["kai", "hami", "koordinator"])
def test_memory_is_written_as_the_scheduler_spells_it(service, dialect):
    pod = patched(service, {"gpufarm.io/job": JOB, "gpufarm.io/write": dialect})
    notes = pod["metadata"]["annotations"]
    mib = notes["gpufarm.io/upper-mib"]
    log, train = (container["resources"] for container in pod["spec"]["containers"])
    assert log == {}
    if dialect == "kai":
        assert notes["gpu-memory"] == mib
    elif dialect == "hami":
        assert train["limits"]["nvidia.com/gpumem"] == mib
    else:
        assert (
            train["limits"]["koordinator.sh/gpu-memory"] == train["requests"]["koordinator.sh/gpu-memory"] == f"{mib}Mi"
        )


def test_what_the_user_gave_the_scheduler_stays(service):
    pod = patched(service, {"gpufarm.io/job": JOB, "gpufarm.io/write": "kai", "gpu-memory": "5"})
    assert pod["metadata"]["annotations"]["gpu-memory"] == "5"


@pytest.mark.parametrize("annotations", [None, {}, {"other": "x"}])
def test_other_pods_stay_as_they_are(service, annotations):
    assert patched(service, annotations) == review(annotations)["request"]["object"]


@pytest.mark.parametrize(
    "job",
    [
        "",
        "nonsense",
        "[1]",
        "{}",
        '{"config": {"family": "nope"}}',
        '{"config": 5}',
        '{"x": 1}',
        "[" * 5000,
        '{"model": "os:system", "inputs": [1]}',
        '{"script": "print(1)"}',
        '{"config": {"family": "mlp"}}',
    ],
)
def test_a_job_that_cannot_be_answered_is_allowed_and_says_why(service, job):
    notes = patched(service, {"gpufarm.io/job": job})["metadata"]["annotations"]
    assert notes["gpufarm.io/problem"] and "gpufarm.io/upper-mib" not in notes


def test_a_job_whose_trace_takes_its_time_is_allowed_as_not_yet_known_and_known_later(service):
    job = {"config": {**MLP, "depth": 12}}
    with service.traces_held():
        notes = patched(service, {"gpufarm.io/job": json.dumps(job)})["metadata"]["annotations"]
    assert "not yet known" in notes["gpufarm.io/problem"] and "gpufarm.io/upper-mib" not in notes
    with service.client() as client:
        known = client.estimate(**job)
    notes = patched(service, {"gpufarm.io/job": json.dumps(job)})["metadata"]["annotations"]
    assert 0 <= int(notes["gpufarm.io/upper-mib"]) - known.upper_mib < 1


def test_an_unknown_dialect_or_device_is_named(service):
    notes = patched(service, {"gpufarm.io/job": JOB, "gpufarm.io/write": "volcano"})["metadata"]["annotations"]
    assert "known: hami, kai, koordinator" in notes["gpufarm.io/problem"]
    notes = patched(service, {"gpufarm.io/job": JOB, "gpufarm.io/device": "A101"})["metadata"]["annotations"]
    assert "A101" in notes["gpufarm.io/problem"]


@pytest.mark.parametrize(
    "body", [{}, {"apiVersion": "admission.k8s.io/v1"}, {"apiVersion": "v1", "request": {"uid": 1}}]
)
def test_what_is_no_review_is_refused(service, body):
    assert service.post("/v1/kubernetes/mutate", body)[0] == 422


@pytest.mark.parametrize(
    ("label", "device"),
    [
        ("NVIDIA-A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA-H100-80GB-HBM3", "H100-SXM5-80GB"),
        ("Tesla-T4", "T4"),
        ("NVIDIA-L40S", "L40S"),
        ("NVIDIA-L40S-SHARED", "L40S"),
        ("NVIDIA-GeForce-RTX-3090", "RTX-3090"),
    ],
)
def test_the_gpu_is_that_of_the_nodes_label(label, device):
    assert device_of({"spec": {"nodeSelector": {"nvidia.com/gpu.product": label}}}) == device


def test_the_webhook_answers_over_https_without_a_token(folder, tmp_path, tls_files):
    (certificate, private_key), tokens = tls_files, tmp_path / "tokens"
    tokens.write_text("0123456789abcdef-token\n")
    keys = [f"certificate={certificate}", f"private_key={private_key}", f"token_file={tokens}", "processes=1"]
    served = Served(folder.root, *keys)
    try:
        assert served.url.startswith("https://")
        answer = asked_over_https(served.port, certificate, "/v1/kubernetes/mutate", review({"gpufarm.io/job": JOB}))
        assert answer["response"]["allowed"]
        assert asked_over_https(served.port, certificate, "/v1/estimate", {"config": MLP})["status"] == 401
    finally:
        served.stop()


def asked_over_https(port: int, certificate: Path, path: str, body: dict) -> dict:
    import http.client

    context = ssl.create_default_context(cafile=certificate)

    def answer() -> dict | None:
        connection = http.client.HTTPSConnection("localhost", port, timeout=PATIENCE_S, context=context)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            return json.loads(connection.getresponse().read())
        return None

    return await_(answer, "an answer")


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


class RecordedApi:
    """An API server that lists recorded objects and keeps the patches of their status."""

    def __init__(self, workloads: list[dict], version: str = "v1beta1") -> None:
        self.version = version  # that it prefers
        checks = [
            {"metadata": {"name": "memory", "generation": 2}, "spec": {"controllerName": CONTROLLER}},
            {"metadata": {"name": "other"}, "spec": {"controllerName": "someone/else"}},
        ]
        self.lists = {"admissionchecks": checks, "workloads": workloads}
        self.patches: dict[str, dict] = {}
        self.of_page = 1
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/apis/kueue.x-k8s.io":
                    return self.answer({"kind": "APIGroup", "preferredVersion": {"version": outer.version}})
                assert path.startswith(f"/apis/kueue.x-k8s.io/{outer.version}/")
                kind = path.rpartition("/")[2]
                objects = outer.lists[kind]
                at = int(self.path.partition("continue=")[2] or 0)
                more = str(at + outer.of_page) if at + outer.of_page < len(objects) else ""
                self.answer({"items": objects[at : at + outer.of_page], "metadata": {"continue": more}})

            def do_PATCH(self) -> None:
                assert self.headers["content-type"] == "application/apply-patch+yaml"
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                path, _, query = self.path.partition("?")
                assert path.endswith("/status") and "fieldManager=gpufarm" in query and "force=true" in query
                assert path.startswith(f"/apis/kueue.x-k8s.io/{outer.version}/")
                assert body["apiVersion"] == f"kueue.x-k8s.io/{outer.version}"
                outer.patches[path.removesuffix("/status").rpartition("/")[2]] = body
                self.answer(body)

            def answer(self, value: dict) -> None:
                content = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def decided(service, handlers):
    def decided(*workloads: dict, version: str = "v1beta1") -> dict[str, dict]:
        api = RecordedApi(list(workloads), version)
        try:
            assert cli.run("kueue", kueue.entry, [f"server={service.url}", f"api={api.url}", "once=true"]) == 0
        finally:
            api.close()
        return api.patches

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
    states = {name: patch["status"]["admissionChecks"] for name, patch in patches.items() if name != "memory"}
    assert {name: [one["state"] for one in checks] for name, checks in states.items()} == {
        "small": ["Ready"],
        "large": ["Rejected"],
        "silent": ["Ready"],
        "odd": ["Ready"],
    }
    assert "bound" in states["small"][0]["message"] and "does not fit" in states["large"][0]["message"]
    assert "not estimated" in states["odd"][0]["message"] and states["small"][0]["name"] == "memory"
    active = patches["memory"]["status"]["conditions"][0]
    assert (active["type"], active["status"], active["observedGeneration"]) == ("Active", "True", 2)


def test_kueue_is_asked_in_the_version_that_the_server_prefers(decided):
    assert decided(workload("small", {"gpufarm.io/job": JOB}), version="v1beta2").keys() == {"small", "memory"}


def test_a_server_without_kueue_is_one_line(service, handlers, capsys):
    api = RecordedApi([], version="")
    assert cli.run("kueue", kueue.entry, [f"server={service.url}", f"api={api.url}", "once=true"]) == 2
    api.close()
    error_text = capsys.readouterr().err
    assert error_text.count("\n") == 1 and "is Kueue installed?" in error_text


def test_a_workload_waits_until_its_trace_is_done(service, decided):
    job = {"model": "torchvision.models:resnet34", "inputs": [4, 3, 64, 64]}
    waiting = workload("traced", {"gpufarm.io/job": json.dumps(job)})
    with service.traces_held():
        assert "traced" not in decided(waiting)
    with service.client() as client:
        client.estimate(**job)
    assert decided(waiting)["traced"]["status"]["admissionChecks"][0]["state"] == "Ready"


WRONG_SHAPES = (None, [], {}, 5, "text", [None], [5], {"x": None}, True)


def with_shape(place: str, shape: object, number: int) -> dict:
    """A workload that waits, with a value of another shape at a dotted place."""
    made = workload(f"odd-{number}", {"gpufarm.io/job": "{}"})
    *path, last = place.split("/")
    owner = made
    for name in path:
        owner = owner[int(name)] if isinstance(owner, list) else owner[name]
    owner[int(last) if isinstance(owner, list) else last] = shape
    return made


def test_a_workload_of_any_shape_keeps_no_other_from_its_decision(service, capsys):
    places = (
        "spec",
        "spec/podSets",
        "spec/podSets/0",
        "spec/podSets/0/name",
        "spec/podSets/0/template",
        "spec/podSets/0/template/metadata",
        "spec/podSets/0/template/spec",
        "spec/podSets/0/template/metadata/annotations",
        "metadata",
        "metadata/name",
        "metadata/namespace",
        "status",
        "status/admissionChecks",
        "status/admissionChecks/0",
        "status/admissionChecks/0/name",
        "status/admissionChecks/1",
        "status/admissionChecks/0/state",
    )
    odd = [with_shape(place, shape, 0) for place in places for shape in WRONG_SHAPES]
    odd += [workload("odd", {"gpufarm.io/job": shape}) for shape in WRONG_SHAPES]
    api = RecordedApi([*odd, *WRONG_SHAPES, workload("ü /?", {}), workload("last", {"gpufarm.io/job": JOB})])
    api.lists["admissionchecks"] += [
        *WRONG_SHAPES,
        *({"metadata": shape, "spec": {"controllerName": CONTROLLER}} for shape in WRONG_SHAPES),
        *({"metadata": {"name": "x"}, "spec": shape} for shape in WRONG_SHAPES),
    ]
    api.of_page = 50
    for shape in WRONG_SHAPES:
        api.lists["admissionchecks"].append(
            {
                "metadata": {"name": "memory", "generation": shape},
                "spec": {"controllerName": CONTROLLER},
                "status": {"conditions": shape},
            }
        )
    try:
        with service.client() as client:
            decide_pending(KueueApi(configuration(api.url)), client)
    finally:
        api.close()
    assert api.patches["last"]["status"]["admissionChecks"][0]["state"] == "Ready"
    lines = capsys.readouterr().out.splitlines()
    assert "training/odd-0: Ready: no pod says which job it runs; spec.podSets has an unknown shape" in lines
    assert any(line.startswith("a workload without a name and a namespace is left alone") for line in lines)


# ---- manifests


def manifests() -> dict[tuple[str, str], dict]:
    documents = [one for path in sorted(MANIFESTS.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())]
    return {(one["kind"], one.get("metadata", {}).get("name", "")): one for one in documents}


def test_the_manifests_name_what_the_service_has():
    known = manifests()
    resources = known["Kustomization", ""]["resources"]
    assert sorted(resources) == sorted(
        path.name for path in MANIFESTS.glob("*.yaml") if path.name != "kustomization.yaml"
    )
    (webhook,) = known["MutatingWebhookConfiguration", "gpufarm"]["webhooks"]
    assert (webhook["failurePolicy"], webhook["timeoutSeconds"]) == ("Ignore", 2)
    assert webhook["clientConfig"]["service"]["path"] == "/v1/kubernetes/mutate"
    container = known["Deployment", "gpufarm"]["spec"]["template"]["spec"]["containers"][0]
    assert container["ports"][0]["containerPort"] == 8350 and "port=8350" in container["args"]
    assert known["AdmissionCheck", "gpufarm"]["spec"]["controllerName"] == CONTROLLER


def test_the_manifests_arguments_are_keys_of_the_commands():
    from conf.cli.overrides import documented_keys

    for name, command in (("gpufarm", "serve"), ("gpufarm-kueue", "kueue")):
        container = manifests()["Deployment", name]["spec"]["template"]["spec"]["containers"][0]
        assert container["command"] == ["gpufarm", command]
        given = {argument.partition("=")[0] for argument in container["args"]}
        assert given <= {key for key, _default, _text in documented_keys(command)}
