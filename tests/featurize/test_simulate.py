"""The modelled device: memory on paper, monotonicity, and ratios that stay ratios on every described GPU."""

import dataclasses
import math

import pytest
import torch
from small_configs import assert_ratios_hold, small_config

from featurize.device.device_spec import device_names, load_device
from featurize.timing.overlap import simulate
from featurize.timing.step_time import features, operator_costs, time_step
from featurize.trace.tracer import trace_config, trace_step
from featurize.training.training_step import Training
from tests.family_cases import FAMILIES
from tests.featurize.small_nets import dense

A100 = load_device("A100-SXM4-40GB")


def mlp_trace(batch=64, settings=None, widths=(1000, 2000, 10)):
    given = torch.empty(batch, widths[0], device="meta"), torch.empty(batch, dtype=torch.long, device="meta")
    return trace_step(lambda: dense(widths), *given, settings=settings, training_loop=False)


def test_allocated_memory_is_the_live_bytes_rounded_to_512_and_two_cublas_workspaces():
    trace = mlp_trace(settings=Training(optimizer="adam"))
    rounded = lambda elements: -(-4 * elements // 512) * 512  # noqa: E731
    tensors = [rounded(n) for n in (1000 * 2000, 2000, 2000 * 10, 10)]
    small = 64 * 1000 * 4 + 512 + 512  # inputs, targets, loss
    expected = 5 * sum(tensors) + small + 2 * A100.architecture.blas_workspace_bytes
    assert simulate(trace, A100).peak_allocated_mib * 2**20 == expected


def test_memory_is_allocated_within_reserved_within_charged():
    step = simulate(mlp_trace(), A100)
    assert 0 < step.peak_allocated_mib <= step.peak_reserved_mib
    assert step.peak_reserved_mib % 2 == 0  # whole segments
    assert step.peak_memory_mib == step.peak_reserved_mib + A100.context_mib
    assert step.fits and step.trace.parameters == 2022010


def test_a_card_too_small_does_not_fit_and_the_need_is_still_told():
    trace = mlp_trace(widths=(4096, 8192, 8192, 10))
    need = simulate(trace, A100)
    small = dataclasses.replace(A100, memory_mib=A100.context_mib + need.peak_allocated_mib - 1)
    refused = simulate(trace, small)
    assert not refused.fits
    assert refused.peak_memory_mib == need.peak_memory_mib


def test_a_larger_batch_never_takes_less_memory_or_time():
    steps = [simulate(mlp_trace(batch=batch), A100) for batch in (1, 8, 64, 512, 4096, 32768)]
    for key in ("peak_allocated_mib", "step_time_ms"):
        values = [getattr(step, key) for step in steps]
        assert values == sorted(values), key


def test_a_faster_card_takes_no_longer_and_lower_precision_is_faster_on_large_products():
    widths = (4096, 8192, 8192, 4096)
    trace = mlp_trace(batch=8192, widths=widths)
    times = [
        simulate(trace, load_device(n)).step_time_ms for n in ("V100-SXM2-32GB", "A100-SXM4-40GB", "H200-SXM-141GB")
    ]
    assert times == sorted(times, reverse=True)
    tf32 = simulate(trace, A100, Training(precision="tf32"))
    bf16 = simulate(mlp_trace(batch=8192, widths=widths, settings=Training(precision="bf16")), A100)
    assert bf16.step_time_ms < tf32.step_time_ms < simulate(trace, A100).step_time_ms


def test_tiny_work_leaves_the_gpu_idle_and_large_work_fills_it():
    tiny = simulate(mlp_trace(batch=1, widths=(8, 8, 8)), A100)
    large = simulate(mlp_trace(batch=16384, widths=(4096, 4096, 4096)), A100)
    assert tiny.activity.gpu_util < 0.8 and tiny.activity.smact < 0.1
    assert large.activity.gpu_util > 0.95 and large.activity.smact > 0.9
    assert tiny.activity.power_w < large.activity.power_w


@pytest.mark.spread(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_figures_stay_in_their_ranges_on_every_device(family):
    config = small_config(family, 0)
    traces = {}
    for spec in map(load_device, device_names()):
        kernels = spec.architecture.attention  # all of a GPU that a trace depends on
        if kernels not in traces:
            traces[kernels] = trace_config(config, device=spec)
        trace = traces[kernels]
        step = simulate(trace, spec, config)
        assert_ratios_hold(step.activity, spec, ("smact", "smocc", "drama", "gpu_util"))
        assert 0 < step.step_time_ms < step.step_time_upper_ms and step.fits
        assert trace.peak_live_bytes / 2**20 <= step.peak_allocated_mib <= step.peak_reserved_mib

        timed = time_step(trace, spec, config)
        assert_ratios_hold(timed.activity, spec, ("smact", "smocc", "drama", "fp32a", "tensor", "gpu_util"))
        costs = operator_costs(trace, spec, config)
        assert len(costs) == len(trace.operators)
        assert all(cost.seconds > 0 and 0 <= cost.sm_share <= 1 and 0 <= cost.occupancy <= 1 for cost in costs)
        assert sum(cost.seconds for cost in costs) * 1e3 == pytest.approx(timed.busy_ms)
        values = features(timed)
        assert all(math.isfinite(value) for value in values.values())
        for group in ("time_", "bound_"):
            assert sum(v for k, v in values.items() if k.startswith(group)) == pytest.approx(1)
