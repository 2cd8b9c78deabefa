"""Kernels of a compiled step: what Inductor writes as one is launched once and reads each buffer once."""

from collections import Counter

import pytest
import torch
from test_compiled import ROWS, WIDTH, Chain, Net, traced

from featurize.device.device_spec import load_device
from featurize.recording.compiled_graph import MAX_FUSED, Work, fused_groups
from featurize.timing.step_time import time_step
from featurize.trace.tracer import trace_step
from featurize.training.training_step import Training

# Of `Net`, forward and backward, by the scheduler of Inductor (PyTorch 2.13, on a CPU): what it fuses, and products.
INDUCTOR = {"forward": 7 + 9, "backward": 16 + 18}
LOSS = {"forward": 2, "backward": 4}  # which is not compiled


def launches(trace):
    counts = Counter()
    for op in trace.operators:
        counts[op.phase] += op.launches
    return counts


def traffic(trace):
    return sum(op.bytes_read + op.bytes_written for op in trace.operators if op.phase != "optimizer")


def test_as_many_kernels_run_as_inductor_schedules():
    of_phase = launches(traced(Net(), compile=True))
    assert {phase: of_phase[phase] - LOSS[phase] for phase in INDUCTOR} == INDUCTOR


@pytest.mark.slow
def test_inductor_schedules_so_many_kernels(monkeypatch):
    """The figures above, asked of Inductor itself."""
    from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler

    scheduled, codegen = [], Scheduler.codegen

    def noting(self):
        scheduled.append(sum(not isinstance(node, NopKernelSchedulerNode) for node in self.nodes))
        return codegen(self)

    monkeypatch.setattr(Scheduler, "codegen", noting)
    monkeypatch.setattr("torch._inductor.config.fx_graph_cache", False)
    torch.manual_seed(0)
    torch.compile(Net())(torch.randn(ROWS, WIDTH)).pow(2).sum().backward()
    assert scheduled == list(INDUCTOR.values())


@pytest.mark.parametrize("net", [Net, Chain])
def test_a_compiled_step_launches_less_moves_less_and_takes_no_longer(net):
    eager, compiled = traced(net()), traced(net(), compile=True)
    assert sum(launches(compiled).values()) < sum(launches(eager).values())
    assert traffic(compiled) < traffic(eager)
    products = [sum(op.flops for op in trace.operators if "mm" in op.name) for trace in (eager, compiled)]
    assert products[0] == products[1]
    for name in ("A100-SXM4-40GB", "H100-SXM5-80GB"):
        device = load_device(name)
        steps = [time_step(trace, device, Training()) for trace in (eager, compiled)]
        assert steps[1].host_ms < steps[0].host_ms and steps[1].busy_ms < steps[0].busy_ms
    assert all(source < place for place, op in enumerate(compiled.operators) for source in op.sources)


def test_running_statistics_are_updated_in_the_kernels_of_their_normalization():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten())
    given = torch.empty(4, 3, 8, 8, device="meta"), torch.empty(4, dtype=torch.long, device="meta")
    eager, compiled = (trace_step(model, *given, settings=Training(compile=on)) for on in (False, True))
    assert launches(compiled)["forward"] <= launches(eager)["forward"] + 1
    assert traffic(compiled) < traffic(eager)


def pointwise(places, reads, makes, **changes):
    return Work(places=places, reads=tuple(reads), makes=tuple(makes), **changes)


MEAN = Work(places=8, depth=16, reads=("a",), makes=("m",))
OF_COLUMNS = Work(places=8, depth=16, trailing=False, reads=("a",), makes=("m",))
PRODUCT = pointwise(0, "a", "p", fusible=False)
WEIGHED = pointwise(0, "wa", "p", fusible=False)


@pytest.mark.parametrize(
    "kernels, groups",
    [
        # Pointwise work joins a reduction of the same rows before and after it.
        ([pointwise(128, "x", "a"), MEAN, pointwise(128, "am", "y"), pointwise(8, "m", "z")], [(0, 1, 2, 3)]),
        ([pointwise(128, "x", "a"), OF_COLUMNS], [(0,), (1,)]),
        # Other sizes, and kernels without a common buffer, run alone.
        ([pointwise(8, "x", "a"), pointwise(16, "a", "b")], [(0,), (1,)]),
        ([pointwise(8, "x", "a"), pointwise(8, "y", "b")], [(0,), (1,)]),
        ([pointwise(8, "x", "a"), pointwise(8, "x", "b")], [(0, 1)]),
        # What waits for a product of a kernel does not join that kernel, nor what waits for what waits.
        (
            [pointwise(8, "x", "a"), PRODUCT, pointwise(8, "xp", "b"), pointwise(8, "a", "c")],
            [(0, 3), (1,), (2,)],
        ),
        (
            [pointwise(8, "x", "a"), PRODUCT, pointwise(4, "p", "q"), pointwise(8, "xq", "b")],
            [(0,), (1,), (2,), (3,)],
        ),
        # What is overwritten is read before.
        ([pointwise(8, "w", "a"), WEIGHED, pointwise(8, "w", "w")], [(0,), (1,), (2,)]),
        ([pointwise(8, "w", "a"), pointwise(8, "w", "w")], [(0, 1)]),
        # A kernel holds so many values at most.
        (
            [pointwise(8, "x", [f"a{index}"]) for index in range(MAX_FUSED + 1)],
            [tuple(range(MAX_FUSED)), (MAX_FUSED,)],
        ),
    ],
)
def test_kernels_are_fused_by_inductors_rules(kernels, groups):
    assert fused_groups(kernels) == groups
