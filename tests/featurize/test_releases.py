"""Releases of torch: layouts that the installed one is too old for are refused by name, and a plan leaves them out."""

import re

import pytest
import torch

from conf.errors import EnvironmentProblem
from featurize.job.layout import Parallel
from featurize.operators import torch_releases
from featurize.operators.torch_releases import require_torch
from featurize.trace.tracer import trace_step
from learn.planning.meshes import meshes_of, modes_of


def test_a_container_of_nvidias_has_the_release_that_it_names(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0a0+1234.nv26.01")
    require_torch("2.11", "context parallelism")


@pytest.fixture
def release(monkeypatch):
    def install(version):
        monkeypatch.setattr(torch, "__version__", version)
        torch_releases.refused_modes.cache_clear()

    yield install
    monkeypatch.undo()
    torch_releases.refused_modes.cache_clear()


@pytest.mark.parametrize(
    ("version", "layout", "refusal"),
    [
        ("2.6.0+cu124", {"fsdp": 2}, "parallel: fsdp needs torch 2.11 or newer; 2.6.0 is installed"),
        ("2.8.0", {"fsdp": 2, "fsdp_version": 1}, "parallel: fsdp needs torch 2.11 or newer; 2.8.0 is installed"),
        ("2.8.0", {"cp": 2}, "parallel: cp needs torch 2.11 or newer; 2.8.0 is installed"),
        ("2.8.0", {"own": 2}, "parallel: own needs torch 2.11 or newer; 2.8.0 is installed"),
        ("2.8.0", {"tp": 2}, "parallel: tp needs torch 2.11 or newer; 2.8.0 is installed"),
        ("2.15.0", {"pp": 2}, "parallel: pp is not traced under torch 2.15 or newer yet; use 2.13"),
        ("2.11.0", {"pp": 2, "fsdp": 2}, "parallel: pp needs torch 2.13 or newer; 2.11.0 is installed"),
    ],
)
def test_a_layout_that_an_older_release_does_not_trace_is_refused_before_the_model_is_built(
    release, version, layout, refusal
):
    release(version)
    with pytest.raises(EnvironmentProblem, match=f"^{re.escape(refusal)}$"):
        # No retry catches a failure of the test.
        trace_step(lambda: pytest.fail("the model is built"), torch.zeros(2, 4), parallel=Parallel(**layout))


def test_a_plan_leaves_out_the_modes_that_it_cannot_trace_and_says_so(release):
    release("2.8.0")
    layouts, notes = meshes_of(8, {}, modes_of(None))
    assert [layout.text() for layout in layouts] == ["ddp=8"]
    assert notes == ["torch 2.8.0 does not trace pp (2.13) and fsdp, cp, tp (2.11 or newer)"]
    with pytest.raises(EnvironmentProblem, match=r"fsdp needs torch 2\.11"):
        modes_of(["ddp", "fsdp"])
