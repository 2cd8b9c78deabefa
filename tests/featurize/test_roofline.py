"""The roofline: what bounds an operator, what a step's figures follow, and that they stay what they say they are."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from small_configs import small_config
from torch import nn

from featurize.device_spec import load_device
from featurize.families import family_names
from featurize.kernels import BANDWIDTH_EFFICIENCY, FP32_EFFICIENCY, TENSOR_EFFICIENCY
from featurize.roofline import features, price, python_loader_ms
from featurize.trace import Operator, StepTrace, trace_config, trace_step
from featurize.training import Training

A100 = load_device("A100-SXM4-40GB")
RATIOS = ("smact", "smocc", "drama", "fp32a", "gpu_util")


def trace_of(*operators):
    return StepTrace(tuple(operators), (), (), 0, 0, (8, 0))


def operator(name, inputs, outputs, flops, nbytes, dtype="float32", phase="forward"):
    return Operator(
        name=name, phase=phase, dtype=dtype, input_shapes=inputs, output_shapes=outputs,
        flops=flops, bytes_read=nbytes // 2, bytes_written=nbytes - nbytes // 2, launches=1,
    )  # fmt: skip


def product(n, dtype="float32"):
    size = 4 if dtype == "float32" else 2
    return operator("aten::mm", ((n, n), (n, n)), ((n, n),), 2 * n**3, 3 * size * n * n, dtype)


def pointwise(n):
    return operator("aten::relu", ((n,),), ((n,),), n, 8 * n)


def convolution(side, channels, groups=1):
    x, weight = (32, channels, side, side), (channels, channels // groups, 3, 3)
    nbytes = 4 * (2 * math.prod(x) + math.prod(weight))
    return operator("aten::convolution", (x, weight), (x,), 2 * math.prod(x) * channels // groups * 9, nbytes)


def mlp_trace(batch=64, settings=None, widths=(1000, 2000, 10)):
    def model():
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        return nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))

    def data(device):
        return (torch.randn(batch, widths[0], device=device),), torch.randint(widths[-1], (batch,), device=device)

    return trace_step(model, data, settings=settings, training_loop=False)


@pytest.mark.parametrize(
    ("dtype", "precision", "rate", "efficiency"),
    [
        ("float32", "fp32", 19.5e12, FP32_EFFICIENCY[0]),
        ("float32", "tf32", 156e12, TENSOR_EFFICIENCY[0]),
        ("bfloat16", "bf16", 312e12, TENSOR_EFFICIENCY[0]),
    ],
)
def test_a_large_product_runs_at_the_data_sheets_rate_times_the_efficiency(dtype, precision, rate, efficiency):
    op = product(16384, dtype)
    cost = price(trace_of(op), A100, Training(precision=precision))
    (line,) = cost.operators
    assert line.bound == "compute" and line.kind == "matmul"
    assert op.flops / line.seconds == pytest.approx(rate * efficiency, rel=0.02)
    assert cost.smact > 0.97


def test_a_large_pointwise_operator_runs_at_the_bandwidth_times_the_efficiency():
    op = pointwise(2**28)
    cost = price(trace_of(op), A100)
    (line,) = cost.operators
    assert line.bound == "memory" and line.kind == "elementwise"
    assert 8 * 2**28 / line.seconds == pytest.approx(1555e9 * BANDWIDTH_EFFICIENCY, rel=0.01)
    assert cost.drama == pytest.approx(BANDWIDTH_EFFICIENCY, rel=0.01)


def test_a_tiny_model_is_bound_by_launches_and_leaves_the_gpu_idle():
    cost = price(mlp_trace(batch=1, widths=(8, 8, 8)), A100)
    assert {line.bound for line in cost.operators} == {"launch"}
    assert cost.step_time_ms == cost.host_ms > cost.busy_ms
    assert cost.smact < 0.05 and cost.gpu_util < 0.9


def test_a_product_too_small_for_the_gpu_takes_a_share_of_it():
    small, large = (price(trace_of(product(n)), A100).operators[0] for n in (128, 8192))
    assert small.sm_share < 0.2 < 0.9 < large.sm_share
    assert small.occupancy < large.occupancy
    assert small.waves < 1 < large.waves


def test_one_tile_more_than_a_full_wave_costs_a_second_wave():
    shape = lambda tiles: ((128 * tiles, 4096), (4096, 128))  # noqa: E731
    seconds = []
    for tiles in (9 * A100.sm_count, 9 * A100.sm_count + 1):
        rows = 128 * tiles
        op = operator("aten::mm", shape(tiles), ((rows, 128),), 2 * rows * 128 * 4096, 4 * rows * 4096)
        seconds.append(price(trace_of(op), A100).operators[0].seconds)
    assert 1.08 < seconds[1] / seconds[0] < 1.13  # ten waves instead of nine


def test_what_stays_in_the_l2_cache_costs_less_than_what_does_not():
    per_byte = [price(trace_of(pointwise(n)), A100).operators[0].seconds / n for n in (2**21, 2**26)]
    assert per_byte[0] < 0.7 * per_byte[1]
    small_cache = dataclasses.replace(A100, l2_mib=1)
    assert price(trace_of(pointwise(2**21)), small_cache).drama > price(trace_of(pointwise(2**21)), A100).drama


def test_convolutions_may_use_tf32_where_products_do_not():
    op = convolution(56, 512)
    assert price(trace_of(op), A100).fp32a == 0
    assert price(trace_of(product(4096)), A100).fp32a > 0.8
    on_v100 = price(trace_of(op), load_device("V100-SXM2-32GB"))  # has no TF32
    assert on_v100.fp32a > 0.8
    assert on_v100.step_time_ms > 3 * price(trace_of(op), A100).step_time_ms


def test_channels_last_saves_the_copies_of_the_layout():
    trace = trace_of(convolution(56, 64))
    plain, last = price(trace, A100), price(trace, A100, Training(channels_last=True))
    assert last.step_time_ms < plain.step_time_ms and last.kernels == plain.kernels - 1


def test_a_depthwise_convolution_is_no_matrix_product():
    whole, depthwise = (price(trace_of(convolution(56, 256, groups)), A100) for groups in (1, 256))
    assert whole.operators[0].bound == "compute"
    assert depthwise.operators[0].bound == "memory"
    assert depthwise.step_time_ms < whole.step_time_ms


def test_gradients_of_a_convolution_are_priced_one_by_one():
    flops, seconds = 2 * 32 * 64 * 56 * 56 * 64 * 9, []
    x, weight = (32, 64, 56, 56), (64, 64, 3, 3)
    for outputs, number in (((weight,), 1), ((x, weight), 2), ((x, weight, (64,)), 2)):
        nbytes = 4 * 3 * math.prod(x)
        op = operator("aten::convolution_backward", (x, x, weight), outputs, number * flops, nbytes, phase="backward")
        seconds.append(price(trace_of(op), A100).operators[0].seconds)
    assert 1.6 * seconds[0] < seconds[1] < seconds[2] < 3 * seconds[0]


def test_attention_is_faster_in_half_precision():
    shape = (8, 16, 1024, 64)
    flops, nbytes = 4 * 8 * 16 * 1024 * 1024 * 64, 4 * 4 * math.prod(shape)
    name = "aten::_scaled_dot_product_efficient_attention"
    fp32 = price(trace_of(operator(name, (shape,) * 3, (shape,), flops, nbytes)), A100)
    bf16 = price(trace_of(operator(name, (shape,) * 3, (shape,), flops, nbytes // 2, "bfloat16")), A100)
    assert fp32.operators[0].kind == "attention"
    assert bf16.step_time_ms < fp32.step_time_ms / 3


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_larger_batch_never_takes_less_time(precision):
    settings = Training(precision=precision)
    batches = (1, 2, 3, 8, 31, 64, 65, 127, 128, 129, 200, 512, 777, 1024, 4096, 9999, 32768)
    times = [price(mlp_trace(batch, settings), A100, settings).busy_ms for batch in batches]
    # A reduction over few rows writes as much as over one and has more blocks to do it: parts of a nanosecond.
    assert all(later >= earlier * (1 - 1e-3) for earlier, later in pairwise(times))


def test_every_operator_takes_longer_the_larger_it_is():
    for make in (product, pointwise, lambda n: convolution(n // 16 + 1, 64)):
        times = [price(trace_of(make(n)), A100).operators[0].seconds for n in range(16, 4096, 37)]
        assert times == sorted(times)


def test_faster_cards_take_less_time_and_precision_orders_products():
    widths = (4096, 8192, 8192, 4096)
    trace = mlp_trace(8192, widths=widths)
    names = ("V100-SXM2-32GB", "A100-SXM4-40GB", "H200-SXM-141GB")
    times = [price(trace, load_device(name)).step_time_ms for name in names]
    assert times == sorted(times, reverse=True)
    tf32 = price(trace, A100, Training(precision="tf32")).step_time_ms
    assert tf32 < 0.4 * times[1]


def test_more_sms_at_the_same_peak_leave_more_of_them_idle():
    wide = dataclasses.replace(A100, sm_count=432)
    trace = mlp_trace(256)
    assert price(trace, wide).smact < price(trace, A100).smact
    fast_memory = dataclasses.replace(A100, bandwidth_gb_s=2 * A100.bandwidth_gb_s)
    assert (
        price(trace_of(pointwise(2**26)), fast_memory).busy_ms < 0.6 * price(trace_of(pointwise(2**26)), A100).busy_ms
    )
    slow_host = dataclasses.replace(A100, launch_overhead_us=60)
    assert price(trace, slow_host).gpu_util < price(trace, A100).gpu_util


def test_an_input_pipeline_adds_its_time_and_thins_every_ratio():
    trace = mlp_trace(1024)
    without = price(trace, A100)
    loaded = price(trace, A100, input_ms=python_loader_ms(1024, 4 * 1024 * 1000))
    assert loaded.step_time_ms == pytest.approx(without.step_time_ms + loaded.input_ms)
    assert loaded.busy_ms == without.busy_ms
    for ratio in RATIOS:
        assert getattr(loaded, ratio) < getattr(without, ratio)
    assert loaded.power_w < without.power_w


def test_a_trace_without_operators_takes_a_launch():
    cost = price(trace_of(), A100)
    assert cost.step_time_ms > 0 and cost.operators == ()
    assert cost.power_w == A100.idle_power_w
    assert all(math.isfinite(value) for value in features(cost).values())


def test_empty_tensors_have_a_price():
    empty = operator("aten::mm", ((0, 4), (4, 4)), ((0, 4),), 0, 64)
    hollow = operator("aten::relu", ((0,),), ((0,),), 0, 0)
    cost = price(trace_of(empty, hollow), A100)
    assert {line.bound for line in cost.operators} == {"launch"}


def test_features_have_the_same_names_for_every_model():
    names = [tuple(features(price(trace_config(small_config(f, 0)), A100))) for f in family_names()]
    assert len(set(names)) == 1
    assert names[0] == tuple(features(price(trace_of(), A100)))
