"""The modelled device: memory on paper, monotonicity, and ratios that stay ratios."""

import dataclasses
from itertools import pairwise

import torch
from torch import nn

from featurize.device.device_spec import load_device
from featurize.timing.overlap import simulate
from featurize.trace.tracer import trace_step
from featurize.training.training_step import Training

A100 = load_device("A100-SXM4-40GB")
RATIOS = ("smact", "smocc", "drama", "gpu_util")


def mlp_trace(batch=64, settings=None, widths=(1000, 2000, 10)):
    def model():
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        return nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))

    def data(device):
        targets = torch.randint(widths[-1], (batch,), device=device)
        return (torch.randn(batch, widths[0], device=device),), targets

    return trace_step(model, data, settings=settings, training_loop=False)


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
    assert step.fits and step.parameters == 2022010


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
    assert tiny.gpu_util < 0.8 and tiny.smact < 0.1
    assert large.gpu_util > 0.95 and large.smact > 0.9
    assert tiny.power_w < large.power_w
