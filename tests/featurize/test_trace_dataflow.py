"""Whose operators they are and what feeds them: modules, phases, sources, and how gradients are added up."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from featurize.job.training_settings import Training
from featurize.recording.block_record import NOBODY, BlockRecord
from featurize.recording.step_trace import BATCH
from featurize.trace.tracer import trace_step
from tests.featurize.small_nets import Computes

N, WIDTH, CLASSES = 4, 8, 3


class Block(nn.Module):
    """A residual block whose own mask needs no gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.norm = nn.Tanh(), nn.LayerNorm(WIDTH)

    def forward(self, x):
        mask = torch.ones(x.shape, device=x.device)
        return self.norm(self.b(self.act(self.a(x * mask))) + x)


class Net(nn.Module):
    """Blocks b0, b1, b2 and a head; to recompute: nothing, or b1 within a checkpoint of b1 and b2."""

    def __init__(self, recompute=False):
        super().__init__()
        self.b0, self.b1, self.b2, self.head = Block(), Block(), Block(), nn.Linear(WIDTH, CLASSES)
        self.recompute = recompute

    def _inner(self, x):
        return self.b2(checkpoint(self.b1, x, use_reentrant=False))

    def forward(self, x):
        x = self.b0(x)
        return self.head(checkpoint(self._inner, x, use_reentrant=False) if self.recompute else self.b2(self.b1(x)))


def of_layer(function):
    """`function` of a linear layer without bias and the input."""
    return Computes(lambda net, x: function(net.lin, x), lin=nn.Linear(WIDTH, WIDTH, bias=False))


def traced(model, rows=N, **more):
    return trace_step(model, torch.empty(rows, WIDTH, device="meta"), settings=Training(optimizer="sgd"), **more)


def summed(function):
    """The trace of a function of a layer whose loss is the sum of its output."""
    target = torch.empty(1, device="meta")
    return traced(lambda: of_layer(function), target=target, loss=lambda output, _: output.sum())


def modules(trace, phase, name):
    return [op.module for op in trace.operators if op.phase == phase and op.name == f"aten::{name}"]


def test_an_operator_belongs_to_the_innermost_module_that_calls_it():
    trace = traced(Net)
    assert modules(trace, "forward", "addmm") == ["b0.a", "b0.b", "b1.a", "b1.b", "b2.a", "b2.b", "head"]
    assert modules(trace, "forward", "add") == modules(trace, "forward", "ones") == ["b0", "b1", "b2"]
    assert modules(trace, "forward", "_log_softmax") == [""]  # the loss is no module's
    assert {op.module for op in trace.operators if op.phase == "optimizer"} == {""}
    assert {block.module for block in trace.blocks if block.operator == "aten::tanh"} == {"b0.act", "b1.act", "b2.act"}
    assert modules(traced(lambda: nn.Linear(WIDTH, CLASSES)), "forward", "addmm") == ["Linear"]  # the root: its class


def test_a_backward_operator_belongs_to_the_module_whose_operator_it_derives():
    trace = traced(Net)
    assert modules(trace, "backward", "tanh_backward") == ["b2.act", "b1.act", "b0.act"]
    # Two products a layer; the batch needs no gradient.
    twice = [name for name in ("head", "b2.b", "b2.a", "b1.b", "b1.a", "b0.b") for _ in range(2)]
    assert modules(trace, "backward", "mm") == [*twice, "b0.a"]
    # A mask that needs no gradient does not take over the operator before it.
    assert modules(trace, "backward", "native_layer_norm_backward") == ["b2.norm", "b1.norm", "b0.norm"]
    assert modules(trace, "backward", "_log_softmax_backward_data") == [""]


def test_recomputed_operators_belong_to_their_modules_and_to_the_backward_pass():
    trace = traced(lambda: Net(recompute=True))
    assert sorted(modules(trace, "backward", "tanh")) == ["b1.act", "b1.act", "b2.act"]
    assert modules(trace, "forward", "tanh") == ["b0.act", "b1.act", "b2.act"]
    # A recomputation that ends early leaves no module behind.
    assert modules(trace, "backward", "tanh_backward") == ["b2.act", "b1.act", "b0.act"]
    assert modules(trace, "backward", "sum") == ["head", "b2.b", "b2.a", "b1.b", "b1.a", "b0.b", "b0.a"]


def test_sources_are_the_operators_that_made_the_inputs():
    trace = summed(lambda lin, x: torch.relu(lin(x)))
    assert [(op.name, op.sources) for op in trace.operators] == [
        ("aten::mm", (BATCH, -1)),  # 0: the batch and the weight's transpose, a view
        ("aten::relu", (0,)),
        ("aten::sum", (1,)),
        ("aten::ones_like", (2,)),  # 3: where the backward pass begins
        ("aten::threshold_backward", (3, 1)),  # 4: of an expanded view of 3
        ("aten::mm", (4, BATCH)),  # 5: the weight's gradient
        ("aten::_foreach_add_", (-1, 5)),
    ]


# What the same nets do on the CPU, which adds gradients up as a GPU does (counted with torch.profiler).
@pytest.mark.parametrize(
    "function, additions",
    [
        pytest.param(lambda lin, x: lin(torch.relu(lin(x))), ["add"], id="tied weight: both gradients are views"),
        pytest.param(
            lambda lin, x: (lambda h: torch.relu(h) + torch.tanh(h) * torch.sigmoid(h))(lin(x)),
            ["add_", "add_"],
            id="three branches",
        ),
        pytest.param(
            lambda lin, x: (lambda h: h + torch.relu(h))(lin(x)), ["add"], id="residual: the sum's gradient is expanded"
        ),
        pytest.param(
            lambda lin, x: (lambda h: (lambda y: y * y)(torch.tanh(h) + torch.relu(h) + h))(lin(x)),
            ["add_", "add", "add_"],
            id="one gradient still waits for another branch",
        ),
        pytest.param(
            lambda lin, x: (lambda h: (lambda a, b: (a * b + h[:, :4]).square())(*h.chunk(2, -1)))(lin(x)),
            ["add_"],
            id="chunks and slices",
        ),
    ],
)
def test_a_second_gradient_is_added_in_place_where_nothing_else_holds_the_first(function, additions):
    names = [op.name.removeprefix("aten::") for op in summed(function).operators if op.phase == "backward"]
    assert [name for name in names if name in ("add", "add_")] == additions
    model, x = of_layer(function), torch.randn(N, WIDTH)
    loss = model(x).sum()
    with torch.profiler.profile() as profile:
        loss.backward()
    assert [
        e.name.removeprefix("aten::") for e in profile.events() if e.name in ("aten::add", "aten::add_")
    ] == additions


def test_threads_of_a_script_that_load_ahead_take_blocks_of_their_own():
    record = BlockRecord()

    def load(rounds):
        for _ in range(rounds):
            record.give_back(record.take(8, "batch", NOBODY))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            loading = [threads.submit(load, 2000) for _ in range(4)]
            while not all(each.done() for each in loading):
                events, blocks = record.final()
                assert all(event.block < len(blocks) for event in events)
    finally:
        sys.setswitchinterval(before)
    events, blocks = record.final()
    assert [event.block for event in events if event.nbytes > 0] == [*range(len(blocks))]
