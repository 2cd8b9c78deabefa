"""The time of a compiled step: kernels that Inductor fuses are launched once, and CUDA graphs cost one launch each."""

from collections import Counter

import pytest
import torch
from test_compiled import ROWS, WIDTH, chain, net, traced, traced_net
from torch import nn

from featurize.device.device_spec import load_device
from featurize.job.training_settings import Training
from featurize.recording.block_record import AUTOTUNED, GRAPHED
from featurize.recording.compiled_graph import MAX_FUSED, Work, fused_groups
from featurize.timing.kernels import packaged_hosts
from featurize.timing.simulation import time_step
from learn import estimate
from learn.estimation.bounds import GRAPHS

DEVICE = load_device("A100-SXM4-40GB")


def launched(trace, phase):
    return [op.name for op in trace.operators if op.phase == phase and not op.graphed]


def test_the_host_launches_each_graph_once_and_what_is_outside_kernel_by_kernel():
    compiled, graphed = traced_net(compile=True), traced_net(compile="reduce-overhead")
    # The batch is copied into the graph, the graph is launched; then the loss.
    assert launched(graphed, "forward") == ["aten::copy_", "aten::var_mean", "aten::pow", "aten::sum"]
    # The output's gradient comes from the eager loss; what the forward graph saved lies in its pool already.
    assert launched(graphed, "backward")[-2:] == ["aten::copy_", "aten::mm"] and len(launched(graphed, "backward")) == 6
    assert launched(graphed, "optimizer") == launched(compiled, "optimizer")
    steps = [time_step(trace, DEVICE, Training(compile=True)) for trace in (compiled, graphed)]
    saved = len(compiled.operators) + 2 - sum(not op.graphed for op in graphed.operators)
    launch_ms = packaged_hosts()["compiled"].factor * DEVICE.launch_overhead_us * 1e-3
    assert steps[0].host_ms - steps[1].host_ms == pytest.approx((saved - 2) * launch_ms)
    assert steps[1].step_time_ms < steps[0].step_time_ms
    assert steps[1].busy_ms >= steps[0].busy_ms, "the kernels are the same, and inputs are copied"


@pytest.mark.parametrize(
    ("mode", "notes"),
    [
        ("default", set()),
        ("max-autotune-no-cudagraphs", {AUTOTUNED}),
        ("reduce-overhead", {GRAPHED}),
        ("max-autotune", {GRAPHED, AUTOTUNED}),
    ],
)
def test_modes_say_what_they_add_and_without_graphs_give_the_figures_of_true(mode, notes):
    plain, trace = (traced(chain(), compile=one) for one in (True, mode))
    assert {GRAPHED, AUTOTUNED} & {*trace.notes} == notes
    assert (trace.operators == plain.operators and trace.events == plain.events) is (GRAPHED not in notes)
    assert (trace.graph_pool_bytes > 0) is (GRAPHED in notes)


def test_the_pool_of_the_graphs_widens_the_bound_and_not_the_figure():
    def factory():
        return nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))

    plain, graphed = (estimate(factory, [[4096, 4096]], compile=mode) for mode in (True, "reduce-overhead"))
    assert graphed.peak_memory_mib == plain.peak_memory_mib and GRAPHED in graphed.warnings
    assert graphed.upper_mib > plain.upper_mib + 64
    assert any(GRAPHS in text for text in graphed.warnings)


# Of three blocks, forward and backward, by the scheduler of Inductor (PyTorch 2.13, on a CPU): what it fuses, and
# products.
INDUCTOR = {"forward": 7 + 9, "backward": 16 + 18}

LOSS = {"forward": 2, "backward": 4}  # which is not compiled


def test_as_many_kernels_run_as_inductor_schedules():
    launches = Counter()
    for op in traced(net(3), compile=True).operators:
        launches[op.phase] += op.launches
    assert {phase: launches[phase] - LOSS[phase] for phase in INDUCTOR} == INDUCTOR


@pytest.mark.parametrize("model", [net, chain])
def test_a_compiled_step_takes_less_of_the_host_and_of_the_gpu(model):
    eager, compiled = (time_step(traced(model(), compile=on), DEVICE, Training()) for on in (False, True))
    assert compiled.host_ms < eager.host_ms and compiled.busy_ms < eager.busy_ms


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
    torch.compile(net(3))(torch.randn(ROWS, WIDTH)).pow(2).sum().backward()
    assert scheduled == list(INDUCTOR.values())


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
