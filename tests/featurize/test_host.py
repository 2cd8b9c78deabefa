"""How long a host takes to launch a step's kernels, by what runs the job."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from conf.errors import EnvironmentProblem, UsageError
from featurize.device.device_spec import load_device
from featurize.job.training_settings import COMPILED, EAGER, GRAPHS, MEGATRON, Training
from featurize.recording.step_trace import GATHERED, Block, Collective
from featurize.timing import packaged
from featurize.timing.activity import load_power
from featurize.timing.calls import as_calls, product, stream
from featurize.timing.collectives import packaged_links
from featurize.timing.step_time import time_step
from featurize.timing.times import HostTime, framework_of, host_ms, packaged_hosts
from featurize.trace.tracer import trace_step

A100 = load_device("A100-SXM4-80GB")
HOSTS = {name: HostTime(factor=5.0, machines=2.0) for name in (EAGER, MEGATRON)}
LINEAR = product(8, 8, 8, 1, "tensor", 8.0)
CALLS = as_calls(
    Counter(
        {stream("cast", 8.0, 1.0): 30, LINEAR: 50, LINEAR._replace(batch=16.0): 12, stream("layer_norm", 8.0, 1.0): 8}
    ),
    100.0,
    20.0,
)


@pytest.fixture(scope="module")
def layer():
    batch = torch.empty(2048, 512, device="meta")
    return trace_step(lambda: nn.Linear(512, 2048), batch, optimizer="sgd", training_loop=False)


@pytest.mark.parametrize("framework, launches", [(EAGER, 20 + 5 * 100), (MEGATRON, 20 + 5 * 58), (GRAPHS, 0)])
def test_an_optimizers_launch_is_a_bare_operator_and_others_take_what_the_framework_takes(framework, launches):
    assert host_ms(CALLS, A100, framework, HOSTS) == pytest.approx(launches * A100.launch_overhead_us * 1e-3)


@pytest.mark.parametrize(
    "settings, axes, framework",
    [
        ({}, (), EAGER),
        ({}, ("tp",), MEGATRON),
        ({}, ("fsdp",), EAGER),
        ({"compile": True}, ("tp",), COMPILED),
        ({"compile": True, "framework": EAGER}, ("tp",), EAGER),
    ],
)
def test_the_framework_follows_the_settings_and_the_layout(layer, settings, axes, framework):
    sent = tuple(Collective("all_reduce", 8, 0, 1, axis) for axis in axes)
    assert framework_of(replace(layer, collectives=sent), Training(**settings)) == framework


def test_a_named_framework_leaves_fitted_models_what_they_speak_of():
    assert Training(framework=MEGATRON).beyond_trials() == () == Training(framework=EAGER).beyond_fits()


def test_the_longest_bounds_a_step_and_slower_hosts_widen_it_where_they_would_bound_it(layer):
    by_host, by_gpu, by_input = (
        time_step(layer, load_device(gpu), Training(optimizer="sgd", framework=framework), input_ms=waits_ms)
        for gpu, framework, waits_ms in (("H100-SXM5-80GB", MEGATRON, 0), ("K80", GRAPHS, 0), ("K80", GRAPHS, 1e6))
    )
    assert [step.bound_by for step in (by_host, by_gpu, by_input)] == ["host", "gpu", "input"]
    assert by_host.upper_ms() >= 0.99 * by_host.machines * by_host.host_ms
    assert by_gpu.upper_ms() == pytest.approx(by_gpu.error_quantiles[0.9] * by_gpu.step_time_ms)


def test_kernels_beside_gathered_weights_take_longer_but_for_megatrons_and_are_busy_as_long(layer):
    beside = replace(layer, blocks=(*layer.blocks, Block(nbytes=8, kind=GATHERED)))
    graphs, megatron = (
        [time_step(one, A100, Training(optimizer="sgd", framework=framework)) for one in (layer, beside)]
        for framework in (GRAPHS, MEGATRON)
    )
    assert graphs[1].busy_ms > 1.1 * graphs[0].busy_ms
    assert graphs[1].activity.gpu_util == pytest.approx(graphs[0].activity.gpu_util)
    assert graphs[1].activity.power_w == pytest.approx(graphs[0].activity.power_w)
    assert megatron[1].busy_ms == megatron[0].busy_ms


def test_an_unknown_framework_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="compiled, eager, graphs, megatron"):
        Training(framework="jax")


@pytest.mark.parametrize("section, load", [("host", packaged_hosts), ("links", packaged_links), ("power", load_power)])
def test_a_file_of_parameters_without_a_section_is_damaged(monkeypatch, section, load):
    content = {name: part for name, part in json.loads(packaged.packaged_text()).items() if name != section}
    monkeypatch.setattr(packaged, "packaged_text", lambda: json.dumps(content))
    with pytest.raises(EnvironmentProblem, match="install gpufarm again"):
        load.__wrapped__()
