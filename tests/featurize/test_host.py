"""How long a host takes to launch a step's kernels, by what runs the job."""

from collections import Counter

import pytest

from conf.errors import UsageError
from featurize.device_spec import load_device
from featurize.kernel_model.calls import as_calls, stream
from featurize.kernel_model.host import HostTime, host_ms
from featurize.training_settings import EAGER, GRAPHS, MEGATRON, Training

A100 = load_device("A100-SXM4-80GB")
HOSTS = {name: HostTime(factor=5.0, machines=2.0) for name in (EAGER, MEGATRON)}
CALLS = as_calls(Counter({stream("cast", 8.0, 1.0): 30, stream("binary", 8.0, 1.0): 70}), 100.0, 20.0)


def test_an_optimizers_launch_is_a_bare_operator_and_others_take_what_the_framework_takes():
    assert host_ms(CALLS, A100, EAGER, HOSTS) == pytest.approx((20 + 5 * 100) * A100.launch_overhead_us * 1e-3)


def test_megatron_launches_no_casts_and_graphs_launch_nothing():
    assert host_ms(CALLS, A100, MEGATRON, HOSTS) == pytest.approx((20 + 5 * 70) * A100.launch_overhead_us * 1e-3)
    assert host_ms(CALLS, A100, GRAPHS, HOSTS) == 0.0


def test_an_unknown_framework_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="eager, graphs, megatron"):
        Training(framework="jax")
