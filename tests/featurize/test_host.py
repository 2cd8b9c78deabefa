"""How long a host takes to launch a step's kernels, by what runs the job."""

from collections import Counter

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.device_spec import load_device
from featurize.kernel_model.calls import as_calls, product, stream
from featurize.kernel_model.host import HostTime, framework_of, host_ms
from featurize.kernel_model.step_time import time_step
from featurize.step_trace import Collective, StepTrace
from featurize.trace import trace_step
from featurize.training_settings import EAGER, GRAPHS, MEGATRON, Training

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


def test_an_optimizers_launch_is_a_bare_operator_and_others_take_what_the_framework_takes():
    assert host_ms(CALLS, A100, EAGER, HOSTS) == pytest.approx((20 + 5 * 100) * A100.launch_overhead_us * 1e-3)


def test_megatrons_host_takes_its_time_in_linear_layers_and_norms_and_graphs_launch_nothing():
    assert host_ms(CALLS, A100, MEGATRON, HOSTS) == pytest.approx((20 + 5 * 58) * A100.launch_overhead_us * 1e-3)
    assert host_ms(CALLS, A100, GRAPHS, HOSTS) == 0.0


def test_an_unknown_framework_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="eager, graphs, megatron"):
        Training(framework="jax")


def traced(*, split_over):
    collectives = tuple(Collective("all_reduce", 8, 0, 0, axis) for axis in split_over)
    return StepTrace(
        operators=(),
        events=(),
        blocks=(),
        parameters=0,
        parameter_bytes=0,
        compute_capability=None,
        collectives=collectives,
    )


def test_a_job_that_splits_layers_is_taken_to_run_under_megatron_unless_its_settings_say_otherwise():
    assert framework_of(traced(split_over=["tp", "dp"]), Training()) == MEGATRON
    assert framework_of(traced(split_over=["tp"]), Training(compile=True)) == EAGER
    assert framework_of(traced(split_over=["tp"]), Training(framework=GRAPHS)) == GRAPHS
    assert framework_of(traced(split_over=["dp"]), Training()) == EAGER


@pytest.mark.parametrize(
    "features, batch, framework, bound_by",
    [(8, 2, None, "host"), (8192, 8192, None, "gpu"), (8, 2, GRAPHS, "gpu")],
)
def test_small_layers_wait_for_the_host_and_large_ones_and_graphs_for_the_gpu(features, batch, framework, bound_by):
    settings = Training(framework=framework)
    trace = trace_step(
        lambda: nn.Linear(features, features), torch.empty(batch, features, device="meta"),
        torch.empty(batch, features, device="meta"), loss=nn.functional.mse_loss, settings=settings, device=A100,
        training_loop=False,
    )  # fmt: skip
    step = time_step(trace, A100, settings)
    assert step.bound_by == bound_by
    assert step.step_time_ms >= max(step.busy_ms, step.host_ms)
    slower_host_ms = step.host_ms * step.machines
    assert step.upper_ms() >= slower_host_ms * (1 - 1e-9)


def test_a_step_whose_input_takes_longest_is_bound_by_it():
    settings = Training()
    trace = trace_step(
        lambda: nn.Linear(8, 8), torch.empty(2, 8, device="meta"), torch.empty(2, 8, device="meta"),
        loss=nn.functional.mse_loss, settings=settings, device=A100, training_loop=False,
    )  # fmt: skip
    assert time_step(trace, A100, settings, input_ms=1e3).bound_by == "input"
