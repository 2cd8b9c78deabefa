"""Which compiled modules run the same graph: those that read the same attributes, whatever else differs."""

import pytest
import torch
from torch import Tensor, nn

from featurize.recording import compiled
from featurize.recording.compiled import AttributeReads
from featurize.recording.step_trace import StepTrace
from featurize.trace.tracer import trace_step
from featurize.training.training_step import Training

ROWS, WIDTH = 64, 32


def scaled_by(factor: float):
    return lambda x: x * factor


class Layer(nn.Module):
    def __init__(self, number: int, repeats: int = 1, factor: float = 1.0) -> None:
        super().__init__()
        self.number, self.repeats, self.scale = number, repeats, scaled_by(factor)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.repeats):
            x = self.act(self.linear(self.scale(x)))
        return x


def reads_of(layer: nn.Module) -> AttributeReads:
    reads = AttributeReads(layer)
    with reads.noted():
        layer(torch.zeros(1, WIDTH))
    return reads


def test_an_attribute_that_no_one_reads_keeps_no_two_layers_apart():
    assert reads_of(Layer(0)).alike(Layer(1))

    class Peeking(Layer):
        """Reads all attributes at once."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * vars(self)["number"]

    assert not reads_of(Peeking(1)).alike(Peeking(1))


@pytest.mark.parametrize("other", [Layer(0, repeats=2), Layer(0, factor=2.0), Layer(0).eval(), nn.Linear(WIDTH, WIDTH)])
def test_what_is_read_keeps_layers_apart(other):
    first = Layer(0)
    first.act = nn.Dropout()  # which reads whether it trains
    if isinstance(other, Layer):
        other.act = nn.Dropout().train(other.training)
    assert not reads_of(first).alike(other)


def test_members_of_another_class_and_hooks_keep_layers_apart():
    other, hooked = Layer(0), Layer(0)
    other.act = nn.ReLU()
    hooked.linear.register_forward_hook(lambda _module, _args, output: output * 2)
    reads = reads_of(Layer(0))
    assert not reads.alike(other) and not reads.alike(hooked)


def traced(*layers: nn.Module) -> StepTrace:
    for layer in layers:
        layer.compile()
    x, target = torch.empty(ROWS, WIDTH, device="meta"), torch.empty((), device="meta")
    model = nn.Sequential(*layers)
    return trace_step(model, x, target, lambda output, _target: output.sum(), settings=Training(), training_loop=False)


def test_blocks_that_run_the_same_graph_are_captured_once(monkeypatch):
    captured = []
    whole = compiled._captured
    monkeypatch.setattr(compiled, "_captured", lambda *args: (captured.append(args), whole(*args))[1])
    trace = traced(*map(Layer, range(4)))
    assert len(captured) == 2  # the first one's input needs no gradient
    products = [op.module for op in trace.operators if op.name == "aten::mm" and op.phase == "forward"]
    assert products == ["0", "1", "2", "3"]
    assert sum(block.kind == "gradient" for block in trace.blocks if block.nbytes == 4 * WIDTH * WIDTH) >= 4


def test_blocks_of_different_depth_each_run_their_own_graph():
    products = [op for op in traced(Layer(0), Layer(1, repeats=3)).operators if op.name == "aten::mm"]
    assert len(products) == (1 + 3) + (1 + 3) * 2 - 1  # the first layer's input needs no gradient
