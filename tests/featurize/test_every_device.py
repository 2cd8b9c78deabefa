"""On every described GPU, small steps of every family have figures that lie in their ranges: simulated and priced."""

import math

import pytest
from small_configs import assert_ratios_hold, small_config

from featurize.device.device_spec import device_names, load_device
from featurize.timing.overlap import simulate
from featurize.timing.step_time import features, operator_costs, time_step
from featurize.trace.tracer import trace_config
from tests.family_cases import FAMILIES


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
        assert_ratios_hold(step, spec, ("smact", "smocc", "drama", "gpu_util"))
        assert step.step_time_ms > 0 and step.fits
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
