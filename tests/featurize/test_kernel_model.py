"""The time of a step: the kernels that operators run, what bounds their time from below, how long a host launches."""

import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_configs import assert_ratios_hold, small_config
from torch import nn

from conf.errors import UsageError
from featurize.device.device_spec import DeviceSpec, device_from_mapping, device_names, device_of_user, load_device
from featurize.families import family_names
from featurize.job.training_settings import COMPILED, EAGER, GRAPHS, MEGATRON, Training
from featurize.recording.step_trace import Collective
from featurize.timing.activity import KernelLoad, load_power, under_limit
from featurize.timing.kernels import (
    FP32,
    PIPES,
    TENSOR,
    TF32,
    HostTime,
    as_calls,
    call_seconds,
    framework_of,
    host_ms,
    kernel_calls,
    kernels_on,
    product,
    stream,
)
from featurize.timing.simulation import (
    TimedStep,
    load_efficiencies,
    operator_costs,
    simulate,
    time_features,
    time_step,
    time_steps,
)
from featurize.trace.tracer import trace_config, trace_step
from tests.family_cases import FAMILIES
from tests.featurize.small_nets import dense

A100, H100 = load_device("A100-SXM4-40GB"), load_device("H100-SXM5-80GB")

LEARNED = load_efficiencies()


def traced(model, *shape, dtype=torch.float32, **settings):
    return trace_step(
        model, torch.zeros(shape, dtype=dtype, device="meta"), settings=Training(**settings), training_loop=False
    )


def kernels_of(trace, **given):
    calls = kernel_calls(trace.operators, **given)
    return {kind: calls.count[[one == kind for one in calls.kind]].sum() for kind in dict.fromkeys(calls.kind)}


@pytest.fixture(scope="module")
def small_cnn():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Conv2d(16, 64, 3, padding=1, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return traced(model, 8, 3, 32, 32)


def test_a_convolution_is_a_product_for_each_result_and_the_first_layer_has_no_input_gradient(small_cnn):
    kernels = kernels_of(small_cnn)
    assert kernels["convolution"] == kernels["convolution_weight"] == 1
    assert "convolution_data" not in kernels
    assert kernels["depthwise_convolution_data"] == kernels["depthwise_convolution_weight"] == 1
    assert kernels["grouped_general_convolution_data"] == 1
    assert kernels["batch_norm"] == kernels["batch_norm_backward"] == 1
    assert 2 * 4 * 8 * 64 * 32 * 32 in kernel_calls(small_cnn.operators).nbytes  # a bias reads and writes the output


def test_the_units_follow_the_type_and_the_settings(small_cnn):
    def pipe(trace, kind="convolution", **given):
        calls = kernel_calls(trace.operators, **given)
        return PIPES[calls.pipe[calls.kind.index(kind)]]

    assert (pipe(small_cnn), pipe(small_cnn, "product"), pipe(small_cnn, tf32_convolutions=False)) == (TF32, FP32, FP32)
    half = traced(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), 2, 3, 8, 8, precision="fp16")
    assert pipe(half) == TENSOR


@pytest.mark.spread(6)
@pytest.mark.parametrize("family", sorted(set(family_names()) - {"zoo", "timm"}))
def test_no_kernel_is_faster_than_its_arithmetic_or_its_traffic_at_the_described_rates(family):
    trace = trace_config(small_config(family, 3))
    calls = kernel_calls(trace.operators)
    for device in (A100, H100, load_device("T4")):
        kernels = kernels_on(calls, device, LEARNED.parameters.names)
        seconds = call_seconds(kernels, LEARNED.parameters)
        beyond_cache = kernels.memory_s * (calls.nbytes > 4 * device.l2_mib * 2**20)
        assert (seconds >= np.maximum(kernels.math_s, beyond_cache)).all()


def test_a_step_takes_longer_with_more_work_and_no_longer_on_a_faster_gpu():
    def seconds(batch, device):
        trace = traced(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)), batch, 1024)
        return time_step(trace, device, Training()).step_time_ms

    assert seconds(512, A100) < seconds(2048, A100) < seconds(8192, A100)
    wider = replace(A100, bandwidth_gb_s=2 * A100.bandwidth_gb_s)
    assert seconds(8192, wider) < seconds(8192, A100)


def test_a_step_takes_as_long_on_a_gpu_model_alone_as_beside_all_others(small_cnn):
    specs = [load_device(name) for name in device_names()]
    specs.append(replace(A100, power_cap_w=200.0))
    for precision in ("fp32", "tf32", "bf16"):
        # Of its own each: without a loop that runs the same, in which both would remember their times.
        together, alone = (replace(small_cnn, in_a_loop=None) for _ in range(2))
        steps = time_steps(together, specs, Training(precision=precision))
        assert steps == [time_step(alone, spec, Training(precision=precision)) for spec in specs]


def test_tensor_cores_are_busy_where_the_precision_uses_them():
    plain, tf32, half = (
        time_step(
            traced(nn.Sequential(nn.Linear(2048, 2048)), 4096, 2048, precision=precision),
            A100,
            Training(precision=precision),
        ).activity
        for precision in ("fp32", "tf32", "bf16")
    )
    assert plain.tensor == 0 < min(tf32.tensor, half.tensor)
    assert max(tf32.fp32a, half.fp32a) < plain.fp32a


A100_80GB = load_device("A100-SXM4-80GB")

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
    return trace_step(lambda: nn.Linear(512, 2048), batch, settings=Training(optimizer="sgd"), training_loop=False)


@pytest.mark.parametrize("framework, launches", [(EAGER, 20 + 5 * 100), (MEGATRON, 20 + 5 * 58), (GRAPHS, 0)])
def test_an_optimizers_launch_is_a_bare_operator_and_others_take_what_the_framework_takes(framework, launches):
    assert host_ms(CALLS, A100_80GB, framework, HOSTS) == pytest.approx(launches * A100_80GB.launch_overhead_us * 1e-3)


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


def test_the_longest_bounds_a_step_and_slower_hosts_widen_it_where_they_would_bound_it(layer):
    by_host, by_gpu, by_input = (
        time_step(layer, load_device(gpu), Training(optimizer="sgd", framework=framework), input_ms=waits_ms)
        for gpu, framework, waits_ms in (("H100-SXM5-80GB", MEGATRON, 0), ("K80", GRAPHS, 0), ("K80", GRAPHS, 1e6))
    )
    assert [step.bound_by for step in (by_host, by_gpu, by_input)] == ["host", "gpu", "input"]
    assert by_host.upper_ms() >= 0.99 * by_host.machines * by_host.host_ms
    assert by_gpu.upper_ms() == pytest.approx(by_gpu.error_quantiles[0.9] * by_gpu.step_time_ms)


def test_allocated_memory_is_the_live_bytes_rounded_to_512_and_two_cublas_workspaces():
    batch = torch.empty(64, 1000, device="meta"), torch.empty(64, dtype=torch.long, device="meta")
    trace = trace_step(dense((1000, 2000, 10)), *batch, training_loop=False)
    tensors = [-(-4 * elements // 512) * 512 for elements in (1000 * 2000, 2000, 2000 * 10, 10)]
    small = 64 * 1000 * 4 + 512 + 512  # inputs, targets, loss
    step = simulate(trace, A100)
    expected = 5 * sum(tensors) + small + 2 * A100.architecture.blas_workspace_bytes
    assert step.peak_allocated_mib * 2**20 == expected
    assert step.fits and step.peak_memory_mib == step.peak_reserved_mib + A100.context_mib


@pytest.mark.spread(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_figures_stay_in_their_ranges_on_every_device(family):
    config = small_config(family, 0)
    for spec in map(load_device, device_names()[::6]):
        trace = trace_config(config, device=spec)
        step, timed = simulate(trace, spec, config), time_step(trace, spec, config)
        assert_ratios_hold(step.activity, spec, ("smact", "smocc", "drama", "gpu_util"))
        assert_ratios_hold(timed.activity, spec, ("smact", "smocc", "drama", "fp32a", "tensor", "gpu_util"))
        assert 0 < step.step_time_ms < step.step_time_upper_ms and step.fits
        assert trace.peak_live_bytes / 2**20 <= step.peak_allocated_mib <= step.peak_reserved_mib
        costs = operator_costs(trace, spec, config)
        assert sum(cost.seconds for cost in costs) * 1e3 == pytest.approx(timed.busy_ms)
        assert all(cost.seconds > 0 and 0 <= cost.sm_share <= 1 and 0 <= cost.occupancy <= 1 for cost in costs)
        assert all(math.isfinite(value) for value in time_features(timed).values())


# -- the power of kernels, and what a power limit does to a step


A40, BOARD = load_device("A40"), "A100-SXM4-40GB"


@pytest.fixture(scope="module")
def large_product():
    return traced(nn.Linear(4096, 4096), 4096, 4096, optimizer="sgd")


def _timed(trace, device: DeviceSpec, limit_w: float | None = None, **how) -> TimedStep:
    return time_step(trace, replace(device, power_cap_w=limit_w), Training(optimizer="sgd"), **how)


def test_a_step_draws_no_more_than_the_limit_that_is_set_and_takes_longer(large_product):
    steps = [_timed(large_product, A40, limit_w) for limit_w in (None, 200, 150, 125)]
    for step, limit_w in zip(steps[1:], (200, 150, 125), strict=True):
        assert step.activity.power_w <= 1.01 * limit_w
    times = [step.step_time_ms for step in steps]
    assert times == sorted(times)
    assert 1.8 < times[-1] / times[0] < 3.5


@pytest.mark.parametrize("name", device_names())
def test_every_gpu_model_keeps_below_the_least_limit_that_it_takes(name):
    device, share, one = load_device(name), np.array([1.0, 0.5, 0.0]), np.ones(3)
    load = KernelLoad(sm=one, fp32=share, tensor=0 * one, dram=1 - share, arithmetic=share, work=one)
    limited = device_of_user(name, device.least_limit_w)
    watts, longer = under_limit(load, limited, load_power())
    assert (watts <= 1.001 * device.least_limit_w).all() and (longer > 1).all()


@pytest.mark.parametrize(
    "describe, message",
    [
        *(
            (lambda w=w: device_of_user("A40", w), "power_limit_w must be 98.4 to 300, got")
            for w in (20, 301, math.nan)
        ),
        (lambda: device_of_user(f"{BOARD}:3g.20gb", 90), f"device {BOARD}: power_limit_w must be 100 to 400, got 90"),
        (
            lambda: device_from_mapping({**A40.to_mapping(), "power_cap_w": 20}),
            "power_cap_w must be 98.4 to 300, got 20",
        ),
    ],
)
def test_a_limit_out_of_the_boards_range_is_refused_with_the_range_under_its_own_key(describe, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        describe()


def test_a_limit_travels_with_the_description_to_a_scripts_process():
    limited = device_of_user("A40", 150)
    assert device_from_mapping(limited.to_mapping()) == limited
    assert "power_cap_w" not in A40.to_mapping()  # identities of jobs without a limit stay
