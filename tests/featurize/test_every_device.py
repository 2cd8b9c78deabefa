"""On every described GPU, small steps of every family have figures that lie in their ranges: simulated and priced."""

import math

import pytest
from small_configs import assert_ratios_hold, small_config

from featurize.device_spec import device_names, load_device
from featurize.kernels import KINDS
from featurize.roofline import BOUNDS, features, price
from featurize.simulate import simulate
from featurize.trace import trace_config
from tests.family_cases import FAMILIES


@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_figures_stay_in_their_ranges_on_every_device(family, index):
    config = small_config(family, index)
    traces = {}
    for spec in map(load_device, device_names()):
        if spec.compute_capability not in traces:  # all of a GPU that a trace depends on
            traces[spec.compute_capability] = trace_config(config, device=spec)
        trace = traces[spec.compute_capability]
        step = simulate(trace, spec, config)
        assert_ratios_hold(step, spec, ("smact", "smocc", "drama", "gpu_util"))
        assert step.step_time_ms > 0 and step.fits
        assert trace.peak_live_bytes / 2**20 <= step.peak_allocated_mib <= step.peak_reserved_mib

        cost = price(trace, spec, config)
        assert_ratios_hold(cost, spec, ("smact", "smocc", "drama", "fp32a", "gpu_util"))
        assert len(cost.operators) == len(trace.operators)
        for line in cost.operators:
            assert line.seconds > 0 and 0 <= line.sm_share <= 1 and 0 <= line.occupancy <= 1
            assert line.bound in BOUNDS and line.kind in KINDS
        assert cost.busy_ms >= sum(line.seconds for line in cost.operators) * 1e3
        values = features(cost)
        assert all(math.isfinite(value) for value in values.values())
        for group in ("time_", "bound_"):
            assert sum(v for k, v in values.items() if k.startswith(group)) == pytest.approx(1)
