"""The service over HTTP: real processes, real traces, what is refused, and what is killed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import psutil
import pytest

from farm.serving import application
from farm.serving.bodies import EstimateRequest, Policy, estimate_question
from farm.serving.gate import Caller, Problem
from farm.serving.settings import ServeSettings
from farm.serving.traces import QUEUED, QuestionRow, TraceLimits, TracePool, TraceStore, _reply
from learn import JobProfile, estimate, estimate_many
from learn.client import Refused
from learn.job.training_job import load_factory
from learn.sharing.admitting import GpuState, admit
from tests.conf.test_children import DAEMON, WAIT
from tests.farm.served import JSON, MLP, SMALL_LLAMA, served, wait_until_ready
from tests.surroundings import ENDS_WITHIN_S, await_, await_note

MLP_TEXT = ", ".join(f"{name}: {value}" for name, value in MLP.items())
FIGURES = ("peak_memory_mib", "upper_mib", "smact", "smocc", "drama", "step_time_ms")


def problem_of(answer):
    status, headers, document = answer
    assert headers["content-type"] == "application/problem+json"
    assert document["status"] == status and document["type"].startswith("/problems/")
    return status, document


# ---- what is answered


@pytest.mark.parametrize("method", ["full", "fast"])
def test_a_trial_config_is_answered_as_the_library_answers(service, method):
    body = {"config": MLP, "method": method, "device": "L4", "machine": "eager"}
    status, headers, answer = service.post("/v1/estimate", body, prefer="wait=60")
    own = estimate(MLP, method=method, device="L4", machine="eager")
    assert status == 200 and answer["method"] == method and headers["x-request-id"]
    assert [answer["estimate"][name] for name in FIGURES] == pytest.approx([getattr(own, name) for name in FIGURES])


def test_jobs_of_one_batch_have_an_answer_or_a_problem_each(service):
    jobs = [{"config": {**MLP, "depth": depth}, "method": "fast"} for depth in range(1, 40)]
    jobs[7] = {"config": {"family": "mlp"}}
    status, _, answer = service.post("/v1/estimate:batch", {"jobs": jobs})
    own = estimate_many([job["config"] for job in jobs if job is not jobs[7]], method="fast")
    results = answer["results"]
    assert status == 200 and results[7]["status"] == 422 and "missing" in results[7]["detail"]
    given_mib = [one["estimate"]["peak_memory_mib"] for one in results if one is not results[7]]
    assert given_mib == pytest.approx([one.peak_memory_mib for one in own])


def test_a_traced_job_is_polled_and_equals_the_librarys_and_is_remembered(service):
    body = {
        "model": "torchvision.models:alexnet",
        "inputs": [4, 3, 64, 64],
        "input_dtype": "bfloat16",
        "training": {"optimizer": "sgd", "precision": "bf16-true"},
    }
    status, headers, pending = service.post("/v1/estimate", body)
    assert status == 202 and headers["location"] == pending["url"] and headers["retry-after"]
    with service.client() as client:
        done = client.estimate(**body)
    own = estimate(load_factory(body["model"]), body["inputs"], input_dtype="bfloat16", **body["training"])
    assert [getattr(done, name) for name in FIGURES] == pytest.approx([getattr(own, name) for name in FIGURES])
    status, _, again = service.post("/v1/estimate", body)
    assert status == 200 and again["id"] == pending["id"] and again["method"] == "full"
    _, _, metrics = service.send("GET", "/metrics")
    counted = re.findall(rb'gpufarm_service_estimates_total\{by="(\w+)"\} [1-9]', metrics)
    assert {b"trace", b"cache"} <= set(counted)


@pytest.fixture
def own_service(folder, monkeypatch):
    """A service in this process, with a request of `someone` in progress: a question that is deleted while it waits."""
    monkeypatch.setattr(application, "ServiceMetrics", mock.Mock)  # a process registers them once
    row = QuestionRow("key", QUEUED, wanted_at=0.0, ended_at=None, answer=None, problem=None)
    questions = mock.AsyncMock(**{"ask.return_value": row, "get.side_effect": [None]})
    service = application.EstimationService(ServeSettings(data=str(folder.root)), questions)
    service.working.hold("someone")
    return service


def test_a_trial_config_is_waited_for_unless_its_question_is_deleted_meanwhile(own_service):
    assert asyncio.run(own_service.estimate(EstimateRequest(config=MLP), Caller("someone", None))).status_code == 202
    own_service.questions.get.assert_awaited_once()
    assert not own_service.working.take("someone", own_service.working.limit // 2), "the request has its place again"


def test_a_batch_holds_more_places_than_one_until_it_is_answered(own_service):
    jobs, caller = [{}] * 40, Caller("someone", None)
    assert asyncio.run(own_service.batch(jobs, caller)).status_code == 200
    assert own_service.working.take("someone", own_service.working.limit // 2 - 1), "all are given back"
    with pytest.raises(Problem, match="share of the work in progress"):
        asyncio.run(own_service.batch(jobs, caller))


def test_devices_that_fit_and_the_largest_batch(service):
    with service.client() as client:
        fits = client.devices_that_fit(config=MLP)
        largest = client.largest_batch(config=MLP, device="T4", by="point")
    by_device, own = {one.device: one for one in fits}, estimate(MLP, device="T4")
    assert by_device["T4"].estimate.upper_mib == pytest.approx(own.upper_mib) and by_device["MI300X"].fits
    assert largest.estimate.fits_device and (largest.batch, largest.beyond) == (65_536, None) and largest.is_lower_bound
    assert largest.by == "point"


def test_an_admission_is_the_librarys(service):
    figures = {"name": "busy", "memory_mib": 30_000, "memory_bound_mib": 36_000, "smact": 0.9}
    with service.client() as client:
        given = client.admit({"config": MLP}, {"jobs": [{"figures": figures}]})
    own = admit(estimate(MLP), GpuState(memory_mib=40_326, jobs=(JobProfile(**figures),)))
    assert given.admitted == own.admitted and given.why == own.why and given.slowdowns[1][0] == "busy"
    assert given.bound_mib == pytest.approx(own.bound_mib)


def test_a_plan_is_polled(service):
    with service.client() as client:
        planned = client.plan(
            model="torchvision.models:resnet18", inputs=[4, 3, 64, 64], gpus=2, checkpointing=["full"], modes=["ddp"]
        )
    assert planned["rows"][0]["fits"] and {row["checkpointing"] for row in planned["rows"]} == {"full"}


def test_metrics_count_all_processes_requests(service):
    status, _, text = service.send("GET", "/metrics")
    counted = re.findall(rb'gpufarm_service_requests_total\{[^}]*route="/v1/estimate"[^}]*\} (\S+)', text)
    assert status == 200 and sum(map(float, counted)) >= 2 and b"gpufarm_service_questions" in text
    requests = [line for line in map(json.loads, service.log.open()) if line["event"] == "request"]
    assert {"request_id", "method", "path", "status", "ms", "bytes"} <= requests[0].keys()


# ---- what is refused


def test_a_job_whose_trace_fails_says_why(service):
    body = {"model": "torchvision.models:alexnet", "inputs": [1, 3, 8, 8]}
    status, document = problem_of(service.post("/v1/estimate", body, prefer="wait=60"))
    assert (status, document["type"]) == (422, "/problems/not-answerable") and "cannot be traced" in document["detail"]


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"config": {"family": "nope"}}, "/config"),
        ({"config": {**MLP, "depth": 10**9}}, "/config"),
        ({"config": {**MLP, "depth": 5000}, "method": "fast"}, "/method"),
        ({"config": MLP, "device": "A101"}, "/device"),
        ({"config": MLP, "colour": 1}, "/colour"),
        ({"config": MLP, "parallel": "deepspeed=/etc/passwd"}, "/parallel"),
        ({"model": "torchvision.models:resnet18", "inputs": [1], "training": {"optimizer": "x"}}, "/training"),
        ({"model": "torchvision.models:resnet18", "inputs": [1], "arguments": {"weights": "DEFAULT"}}, "/model"),
        ({"model": "os:system", "inputs": [1]}, "/model"),
        ({"model": "torchvision.io:write_file", "inputs": [1]}, "/model"),
        ({"model": "transformers.utils.hub:cached_file", "inputs": [1]}, "/model"),
        ({"config": {"family": "zoo", "model": "os:system", "inputs": "float32[1]", "batch_size": 1}}, "/config"),
        ({"hf_config": {**SMALL_LLAMA, "auto_map": {"AutoModel": "x--y"}}, "batch_size": 1}, "/hf_config"),
        ({"script": "print(1)"}, "/script"),
        ({"config": MLP, "model": "torchvision.models:resnet18", "inputs": [1]}, ""),
    ],
)
def test_a_wrong_field_is_named(service, body, pointer):
    status, document = problem_of(service.post("/v1/estimate", body))
    assert 400 <= status < 500 and document["errors"][0]["pointer"] == pointer


def test_what_is_no_json_too_large_or_not_there(service):
    for request, status in (
        (("POST", "/v1/estimate", b"{"), 400),
        (("POST", "/v1/estimate", b"{}", {"content-type": "text/plain"}), 415),
        (("POST", "/v1/estimate", b" " * 2_000_000), 413),
        (("GET", "/v1/estimates/nope"), 404),
        (("GET", "/v1/devices", None, {"host": "evil.example"}), 421),
    ):
        assert problem_of(service.send(*request))[0] == status
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)) as connection:
        with contextlib.suppress(ConnectionError):  # the service may close before all is sent
            headers = {"content-type": JSON}
            connection.request("POST", "/v1/estimate", iter([b"x" * 100_000] * 30), headers, encode_chunked=True)
        assert connection.getresponse().status == 413


def test_no_answer_names_the_servers_folders(service):
    places = [service.data, service.data.parent, sys.prefix, Path(__file__).parents[2], os.path.expanduser("~")]
    bodies = [
        {"config": MLP, "method": "full"},
        {"model": "torchvision.models:nope", "inputs": [1]},
        {"config": {**MLP, "family": "gpt"}},
    ]
    for body in bodies:
        _, headers, answer = service.post("/v1/estimate", body, prefer="wait=60")
        text = json.dumps(answer) + str(headers)
        assert not [place for place in map(str, places) if place in text], text


# ---- who may ask, and how much


LIMITS = TraceLimits("/data", (), 60, 2**33)


def test_a_question_leased_just_as_the_service_ends_is_given_back():
    pool = TracePool(mock.Mock(), LIMITS, 1)
    pool._ended.set()
    assert pool._run_question("key", "{}") == "given back"
    pool._store.interrupted.assert_called_once()


@pytest.mark.slow
def test_what_a_script_starts_counts_and_ends_with_its_trace_and_with_a_killed_service(folder, tmp_path, monkeypatch):
    temporary, notes = tmp_path / "t", [tmp_path / "large", tmp_path / "waiting"]
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    large = DAEMON.replace(WAIT, f'kept = b"x" * {2**31}; {WAIT}') + WAIT
    with (
        served(folder.root, "limits.trace_gib=1.5", "processes=1", "scripts=true") as service,
        service.client() as client,
    ):
        with pytest.raises(Refused, match=r"more memory than the limit of 1\.5 GiB"):
            client.estimate(script=large, script_arguments=[str(notes[0])])
        assert not psutil.pid_exists(int(notes[0].read_text()))
        assert not list(temporary.glob("gpufarm-child-*"))
        service.post("/v1/estimate", {"script": DAEMON + WAIT, "script_arguments": [str(notes[1])]})
        await_note(notes[1], service.process)
        processes = psutil.Process(service.process.pid).children(recursive=True)
        service.stop(signal.SIGKILL)
    assert int(notes[1].read_text()) in [process.pid for process in processes]
    assert not psutil.wait_procs(processes, timeout=ENDS_WITHIN_S)[1]
    assert not list(temporary.glob("gpufarm-child-*"))


# ---- what is killed


def test_a_killed_process_loses_no_request_of_a_client(service):
    def ask(_: int) -> list[float]:
        with service.client() as client:
            return [client.estimate(config=MLP).peak_memory_mib for _ in range(30)]

    before = service.answering()
    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask, place) for place in range(4)]
        before[0].kill()
        answers = [figure for one in asking for figure in one.result()]
    assert answers == pytest.approx([estimate(MLP).peak_memory_mib] * 120)
    with service.client() as client:
        wait_until_ready(client)
    assert before[0].pid not in [one.pid for one in service.answering()]


def kill_trace(service) -> bool:
    """Kill a child that traces, if there is one."""
    for child in [child for server in service.trace_servers() for child in server.children()]:
        with contextlib.suppress(psutil.Error):
            child.kill()
            return True
    return False


def test_a_killed_trace_is_traced_again_also_when_what_it_was_forked_from_is_killed(service):
    body = {"model": "torchvision.models:resnet18", "inputs": [8, 3, 64, 64]}
    service.post("/v1/estimate", body)
    with service.client() as client:
        await_(lambda: kill_trace(service), "a child that traces")
        assert client.estimate(**body).parameters > 0
        for server in service.trace_servers():
            server.kill()
        assert client.estimate(config={**MLP, "depth": 7}, method="full").parameters > 0


TOKEN = "0123456789abcdef-token"


def test_beyond_its_limits_a_service_says_so_and_killed_it_leaves_what_was_asked_to_the_next(folder, tmp_path):
    (tmp_path / "tokens").write_text(f"# of the scheduler\n{TOKEN}\n")
    body, other = ({"config": {**MLP, "depth": depth}, "method": "full"} for depth in (30, 31))
    limits = ("limits.queued=1", "limits.batch=2", "limits.concurrent=1", "limits.trace_s=0.05")
    options = (f"token_file={tmp_path / 'tokens'}", "processes=1", "open_metrics=true", "explorer=false")
    with served(folder.root, *limits, *options, token=TOKEN) as first:
        for wrong in ("", "Bearer x"):
            assert problem_of(first.send("GET", "/v1/devices", headers={"authorization": wrong}))[0] == 401
            answers = [first.send("GET", path, headers={"authorization": wrong}) for path in ("/healthz", "/metrics")]
            assert [status for status, *_ in answers] == [200, 200], "the operator said so"
        with first.client() as client, pytest.raises(Refused, match=r"longer than the limit of 0\.05 s"):
            client.estimate(model="torchvision.models:regnet_y_128gf", inputs=[4, 3, 224, 224])
        assert first.send("GET", "/")[0] == first.send("GET", "/runs")[0] == 404, "the API alone"
        waits = http.client.HTTPConnection("127.0.0.1", first.port)
        with contextlib.closing(waits), first.traces_held():
            headers = {"content-type": JSON, "prefer": "wait=60", "authorization": f"Bearer {TOKEN}"}
            waits.request("POST", "/v1/estimate", json.dumps(body), headers)
            while b'questions{state="running"} 1' not in first.send("GET", "/metrics")[2]:
                pass
            assert first.post("/v1/estimate", {"config": MLP, "method": "fast"})[0] == 200, "who waits is in no way"
            _, _, pending = first.post("/v1/estimate", body, prefer="wait=60")
            busy = first.post("/v1/estimate", other)
            assert problem_of(busy)[1]["type"] == "/problems/too-many-requests" and busy[1]["retry-after"]
            assert problem_of(first.post("/v1/estimate:batch", {"jobs": [{"config": MLP}] * 3}))[0] == 422
            answering = first.answering()
            first.process.kill()
        first.stop()
    assert not psutil.wait_procs(answering, timeout=ENDS_WITHIN_S)[1]
    # A pool without places: the next service's, before it traces.
    with contextlib.closing(TraceStore(folder.service, ServeSettings())) as store, TracePool(store, LIMITS, 0):
        assert store.lease(1)[0] == pending["id"]


# ---- the command and the client


def test_a_second_service_of_a_data_folder_or_of_a_port_is_refused_in_one_line(service, folder, handlers, refused):
    for port, data, words in (
        (0, service.data, "another service"),
        (service.port, folder.root, f"port={service.port}"),
    ):
        assert words in refused("serve", f"port={port}", f"data={data}")


def test_the_command_asks_a_service(service, answer, refused):
    arguments = "estimate", f"config={{{MLP_TEXT}}}", f"server={service.url}"
    assert answer(*arguments)["peak_memory_mib"] == pytest.approx(estimate(MLP).peak_memory_mib)
    assert "leave report out" in refused(*arguments, "report=x.html")


# ---- the OpenAPI description, fuzzed, and what a client may name of the operator's modules


CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


REFUSALS = ["400", "404", "405", "413", "415", "422"]  # statuses with which a request is refused for what it is


@pytest.mark.parametrize("examples", ["4", pytest.param("60", marks=pytest.mark.wide)])  # wide: more of the same
def test_no_body_that_the_description_allows_or_refuses_makes_the_service_fail(service, tmp_path, examples):
    (tmp_path / "schemathesis.toml").write_text(f"checks.negative_data_rejection.expected-statuses = {REFUSALS}\n")
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json"]
    command += ["--phases", "examples,fuzzing", "--max-examples", examples, "--seed", "1", "--request-timeout", "30"]
    command += ["--checks", ",".join(CHECKS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)  # it keeps a cache where it runs
    assert done.returncode == 0, done.stdout


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """A module that the operator trusts, `served_nets`, and a file that exists once a command was run through it."""
    own = "import os\nfrom os import system\nfrom torch import nn\ndef build(): return nn.Linear(4, 2)\n"
    (tmp_path / "served_nets.py").write_text(own)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "it ran"
    sys.modules.pop("served_nets", None)


@pytest.mark.parametrize("factory", ["os.system", "os.popen", "system", "build"])
def test_a_client_runs_nothing_that_a_trusted_module_only_imports(mark, folder, factory):
    arguments = {} if factory == "build" else {"command" if "system" in factory else "cmd": f"touch '{mark}'"}
    limits = dataclasses.replace(LIMITS, data=str(folder.root), trust=("served_nets",))
    body = {"model": f"served_nets:{factory}", "arguments": arguments, "inputs": [2, 4]}
    try:
        question = estimate_question(EstimateRequest.model_validate(body), Policy(limits.trust))
        reply = _reply(json.loads(question.text), limits)
    except Problem as problem:
        reply = {"problem": problem.detail}
    assert not mark.exists()
    assert ("answer" in reply) if factory == "build" else ("served_nets" in reply["problem"]), reply
