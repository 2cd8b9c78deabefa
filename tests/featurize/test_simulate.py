"""The modelled device: memory on paper, monotonicity, and ratios that stay ratios on every described GPU."""

import math
from dataclasses import replace

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
    step = simulate(trace, A100)
    assert step.peak_allocated_mib * 2**20 == expected
    assert step.fits and step.peak_memory_mib == step.peak_reserved_mib + A100.context_mib
    refused = simulate(trace, replace(A100, memory_mib=A100.context_mib + step.peak_allocated_mib - 1))
    assert not refused.fits and refused.peak_memory_mib == step.peak_memory_mib, "the need is still told"


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
