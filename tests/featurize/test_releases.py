"""Older releases of torch: a process whose torch is made to lack it traces as one that has it."""

import subprocess
import sys

import pytest
import torch

from conf.errors import EnvironmentProblem
from featurize.operators.torch_releases import require_torch

# An older release's torch has no meta kernel of `aten::_convolution`: its registration is skipped here.
TRACE = """
import sys
import torch
from torch.library import Library

if sys.argv[1] == "older":
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    torch._C._dispatch_has_kernel_for_dispatch_key = lambda name, key: name != "aten::_convolution" and has(name, key)
    library = Library("aten", "IMPL", "Meta")
    # As these releases do: the backend is chosen by the device, and meta tensors have none.
    library.m.impl("_convolution", "Meta", lambda *args: torch.ops.aten.convolution_overrideable(*args[:9]), False)
from featurize.trace.light_imports import without_compiler
from featurize.trace.tracer import trace_config
from featurize.configs.trial import config_from_mapping

without_compiler()
config = config_from_mapping({"family": "cnn", "batch_size": 4, "optimizer": "sgd", "image_size": 16, "channels": 3,
                              "classes": 10, "base_filters": 8, "depth": 2, "topology": "uniform"})
trace = trace_config(config)
print(len(trace.operators), trace.peak_live_bytes, trace.flops)
"""


def traced(release):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", TRACE, release], capture_output=True, text=True)
    return done.stdout.split(), done.stderr


@pytest.mark.slow
def test_a_convolution_is_traced_alike_on_every_release():
    expected, errors = traced("this")
    assert len(expected) == 3, errors
    figures, errors = traced("older")
    assert figures == expected, errors


def test_what_needs_a_newer_release_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    with pytest.raises(
        EnvironmentProblem, match=r"^context parallelism needs torch 2\.11 or newer; 2\.8\.0 is installed$"
    ):
        require_torch("2.11", "context parallelism")
    require_torch("2.8", "context parallelism")
    monkeypatch.setattr(torch, "__version__", "2.11.0a0+1234.nv26.01")  # as NVIDIA's containers name theirs
    require_torch("2.11", "context parallelism")
