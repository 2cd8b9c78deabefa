"""`compile=reduce-overhead`: graphs cost one launch each, and their memory pool widens the bound."""

import pytest
import torch
from test_compiled import ROWS, WIDTH, Net, traced
from torch import nn

from conf.errors import UsageError
from featurize.device.device_spec import load_device
from featurize.recording.block_record import AUTOTUNED, GRAPHED
from featurize.timing.step_time import time_step
from featurize.timing.times import packaged_hosts
from featurize.trace.tracer import trace_step
from featurize.training.training_step import Training
from learn import estimate
from learn.estimation.job_estimate import GRAPHS

DEVICE = load_device("A100-SXM4-40GB")


def timed(trace):
    return time_step(trace, DEVICE, Training(compile=True))


def launched(trace, phase):
    return [op.name for op in trace.operators if op.phase == phase and not op.graphed]


def test_the_host_launches_each_graph_once_and_what_is_outside_kernel_by_kernel():
    compiled, graphed = traced(Net(), compile=True), traced(Net(), compile="reduce-overhead")
    # The batch is copied into the graph, the graph is launched; then the loss.
    assert launched(graphed, "forward") == ["aten::copy_", "aten::var_mean", "aten::pow", "aten::sum"]
    # The output's gradient comes from the eager loss; what the forward graph saved lies in its pool already.
    assert launched(graphed, "backward")[-2:] == ["aten::copy_", "aten::mm"] and len(launched(graphed, "backward")) == 6
    assert launched(graphed, "optimizer") == launched(compiled, "optimizer")
    steps = [timed(trace) for trace in (compiled, graphed)]
    saved = len(compiled.operators) + 2 - sum(not op.graphed for op in graphed.operators)
    launch_ms = packaged_hosts()["compiled"].factor * DEVICE.launch_overhead_us * 1e-3
    assert steps[0].host_ms - steps[1].host_ms == pytest.approx((saved - 2) * launch_ms)
    assert steps[1].step_time_ms < steps[0].step_time_ms
    assert steps[1].busy_ms >= steps[0].busy_ms, "the kernels are the same, and inputs are copied"


def test_modes_without_graphs_give_the_figures_of_true():
    plain = traced(Net(), compile=True)
    for mode in ("default", "max-autotune-no-cudagraphs"):
        trace = traced(Net(), compile=mode)
        assert trace.operators == plain.operators and trace.events == plain.events and GRAPHED not in trace.notes
        assert (AUTOTUNED in trace.notes) == mode.startswith("max-autotune")
    assert {GRAPHED, AUTOTUNED} <= set(traced(Net(), compile="max-autotune").notes)
    assert plain.graph_pool_bytes == 0


def test_a_model_that_cannot_be_captured_runs_no_graph():
    class Reading(Net):
        def forward(self, x):
            return super().forward(x) if x.isfinite().all().item() else x

    class Opaque(nn.Linear):
        def forward(self, x):
            return super().forward(x) if bool(x.isfinite().all()) else x

    trace = traced(Opaque(WIDTH, WIDTH), compile="reduce-overhead")
    assert GRAPHED not in trace.notes and not any(op.graphed for op in trace.operators)
    # The repeated blocks of this one are captured, each as a graph.
    trace = traced(Reading(), compile="reduce-overhead")
    assert GRAPHED in trace.notes and launched(trace, "forward").count("aten::var_mean") == 3


def test_the_pool_of_the_graphs_widens_the_bound_and_not_the_figure():
    plain, graphed = (estimate(Net(), [[ROWS, WIDTH]], compile=mode) for mode in (True, "reduce-overhead"))
    assert graphed.peak_memory_mib == plain.peak_memory_mib and GRAPHED in graphed.warnings
    pool = traced(Net(), compile="reduce-overhead")
    assert pool.graph_pool_bytes > 0
    large = [
        trace_step(
            nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)),
            torch.empty(4096, 4096, device="meta"),
            torch.empty(4096, dtype=torch.long, device="meta"),
            settings=Training(compile=mode),
        )
        for mode in (True, "reduce-overhead")
    ]
    assert large[0].peak_live_bytes == large[1].peak_live_bytes
    # At least: Adam's temporaries, which one pool would place in the memory of the activations.
    assert large[1].graph_pool_bytes > 4096 * 4096 * 4


def test_a_graph_does_not_keep_what_was_copied_into_it():
    """The gradient of the output, 40 MB here, ends with its last reader; the graph's own copy of it is in the bound."""
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 20_000))
    plain, graphed = (
        trace_step(net, torch.empty(512, 64, device="meta"), settings=Training(compile=mode))
        for mode in (True, "reduce-overhead")
    )
    assert graphed.graph_input_bytes >= 4 * 512 * (64 + 20_000)
    assert graphed.events == plain.events


def test_the_bound_names_the_pool_as_a_cause():
    def factory():
        return nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))

    plain, graphed = (estimate(factory, [[4096, 4096]], compile=mode) for mode in (True, "reduce-overhead"))
    assert graphed.upper_mib > plain.upper_mib + 64
    assert any(GRAPHS in text for text in graphed.warnings)


def test_batches_of_several_shapes_keep_their_blocks_in_the_pool():
    batches = [torch.empty(rows, WIDTH, device="meta") for rows in (ROWS, 2 * ROWS)]
    trace = trace_step(
        Net(),
        None,
        None,
        lambda output, _target: output.sum(),
        settings=Training(compile="reduce-overhead"),
        batches=[(batch,) for batch in batches],
    )
    assert any(block.pooled for block in trace.blocks) and trace.graph_pool_bytes > 0


def test_an_unknown_mode_is_refused_with_the_choices():
    words = "compile is true, false or one of default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs, got"
    for wrong in ("fast", 1, None, ["default"]):
        with pytest.raises(UsageError, match=words):
            Training(compile=wrong)
