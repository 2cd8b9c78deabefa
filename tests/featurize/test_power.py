"""Power of kernels, and what a power limit does to a step."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.device.device_spec import DeviceSpec, device_from_mapping, device_names, device_of_user, load_device
from featurize.job.training_settings import Training
from featurize.timing.activity import KernelLoad, load_power, under_limit
from featurize.timing.step_time import TimedStep, time_step
from featurize.trace.tracer import trace_step

A40, BOARD = load_device("A40"), "A100-SXM4-40GB"


@pytest.fixture(scope="module")
def product():
    return _trace(nn.Linear(4096, 4096), 4096)


@pytest.fixture(scope="module")
def stream():
    return _trace(nn.Sequential(nn.Linear(8, 4096), *(nn.ReLU() for _ in range(40))), 16_384)


def _trace(model, batch):
    wide = next(layer for layer in model.modules() if isinstance(layer, nn.Linear)).in_features
    return trace_step(lambda: model, torch.empty(batch, wide, device="meta"), optimizer="sgd", training_loop=False)


def _timed(trace, device: DeviceSpec, limit_w: float | None = None, **how) -> TimedStep:
    return time_step(trace, replace(device, power_cap_w=limit_w), Training(optimizer="sgd"), **how)


def test_a_busy_gpu_draws_near_its_limit_and_one_that_waits_near_its_idle_power(product):
    busy, waiting = _timed(product, A40), _timed(product, A40, input_ms=10_000)
    assert 0.7 * A40.power_limit_w < busy.activity.power_w <= 1.01 * A40.power_limit_w
    assert A40.idle_power_w < waiting.activity.power_w < 1.05 * A40.idle_power_w


def test_a_step_draws_no_more_than_the_limit_that_is_set_and_takes_longer(product):
    steps = [_timed(product, A40, limit_w) for limit_w in (None, 200, 150, 125)]
    for step, limit_w in zip(steps[1:], (200, 150, 125), strict=True):
        assert step.activity.power_w <= 1.01 * limit_w
    times = [step.step_time_ms for step in steps]
    assert times == sorted(times)
    assert 1.8 < times[-1] / times[0] < 3.5


def test_a_limit_stretches_arithmetic_more_than_memory_traffic(product, stream):
    of_product, of_stream = (_timed(one, A40, 175).busy_ms / _timed(one, A40).busy_ms for one in (product, stream))
    assert of_product > 1.1 * of_stream


@pytest.mark.parametrize("name", device_names())
def test_every_gpu_model_keeps_below_the_least_limit_that_it_takes(name):
    device, product, one = load_device(name), np.array([1.0, 0.5, 0.0]), np.ones(3)
    load = KernelLoad(sm=one, fp32=product, tensor=0 * one, dram=1 - product, arithmetic=product, work=one)
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
