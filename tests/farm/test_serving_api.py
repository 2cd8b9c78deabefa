"""The service's OpenAPI description, fuzzed by schemathesis, and what a client may name of the operator's modules."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conf.children.running import ServerLost
from farm.serving import trace_pool
from farm.serving.bodies import EstimateRequest, Policy, estimate_question
from farm.serving.gate import Problem
from farm.serving.trace_pool import TraceLimits, _reply
from warehouse.files.folder import DataFolder

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


@pytest.mark.parametrize("examples", ["20", pytest.param("60", marks=pytest.mark.wide)])  # wide: more of the same
def test_no_body_that_the_description_allows_or_refuses_makes_the_service_fail(service, tmp_path, examples):
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
def test_a_client_runs_nothing_that_a_trusted_module_only_imports(mark, tmp_path, factory):
    arguments = {} if factory == "build" else {"command" if "system" in factory else "cmd": f"touch '{mark}'"}
    data = str(DataFolder(tmp_path / "data").create().root)
    body = {"model": f"served_nets:{factory}", "arguments": arguments, "inputs": [2, 4]}
    try:
        question = estimate_question(EstimateRequest.model_validate(body), Policy(("served_nets",)))
        reply = _reply(json.loads(question.text), TraceLimits(data, ("served_nets",), 60, 2**33))
    except Problem as problem:
        reply = {"problem": problem.detail}
    assert not mark.exists()
    assert ("answer" in reply) if factory == "build" else ("served_nets" in reply["problem"]), reply


def test_a_lost_server_of_children_is_no_fault_of_the_job(monkeypatch):
    def lost(*_):
        raise ServerLost("a child process was lost: its keeper was killed")

    monkeypatch.setattr(trace_pool, "_estimate", lost)
    with pytest.raises(ServerLost):
        _reply({"kind": "estimate"}, TraceLimits("/data", (), 60, 2**33))
