"""Compiled modules in a trace: what is saved, what is fused, and what cannot be captured."""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from featurize.job.training_settings import Training
from featurize.recording import compiled
from featurize.recording.compiled import AS_EAGER, MODELLED
from featurize.recording.step_trace import StepTrace
from featurize.timing.kernels import model_flops
from featurize.trace.tracer import trace_step
from tests.featurize.small_nets import Computes, Stack
from tests.featurize.trace_sums import alive_after

ROWS, WIDTH = 64, 32


class Block(nn.Module):
    """Norm, gated layers and a residual, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def net(blocks: int = 2) -> Stack:
    return Stack((Block() for _ in range(blocks)), nn.Identity())


def reading() -> nn.Module:
    """A model that reads a value that is computed in the step, which no graph has."""
    return Computes(lambda net, x: net.inner(x) if x.isfinite().all().item() else x, inner=net())


def chain() -> nn.Module:
    return Computes(
        lambda net, x: net.last(net.first(x).sin().mul(2).tanh().add(1)),
        first=nn.Linear(WIDTH, WIDTH),
        last=nn.Linear(WIDTH, WIDTH),
    )


def summed(output: Tensor, _target: Tensor) -> Tensor:
    return output.pow(2).sum()


def traced(model: nn.Module, **settings) -> StepTrace:
    x, target = torch.empty(ROWS, WIDTH, device="meta"), torch.empty((), device="meta")
    return trace_step(model, x, target, summed, settings=Training(**settings), training_loop=False)


@functools.cache
def traced_net(**settings) -> StepTrace:
    return traced(net(), **settings)


def saved_bytes(trace: StepTrace) -> int:
    """Bytes of the activations that are alive when the backward pass of the second step begins."""
    return alive_after(trace, 2, "forward")["activation"]


def really_saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that a step of the compiled model saves on the CPU, weights and input left out."""
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = summed(compiled(x), x)
    loss.backward()
    return sum(saved.values())


def test_a_compiled_model_saves_what_a_real_compiled_step_on_the_cpu_saves():
    torch.manual_seed(0)
    really = really_saved_bytes(net(), torch.randn(ROWS, WIDTH))
    trace = traced_net(compile=True)
    loss = 4
    assert saved_bytes(trace) == pytest.approx(really + loss, abs=1024)
    assert saved_bytes(trace) < 0.9 * saved_bytes(traced_net())
    assert MODELLED in trace.notes


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_models_that_the_caller_compiled_are_estimated_as_the_setting_does(how):
    model = net()
    if how == "wrapped":
        model = torch.compile(model)
    else:
        model.compile()
    assert saved_bytes(traced(model)) == pytest.approx(saved_bytes(traced_net(compile=True)), rel=0.1)


@pytest.mark.parametrize(
    "way",
    [{}, pytest.param({"checkpoint_reentrant": True}, marks=pytest.mark.wide), {"checkpointing": "selective"}],
    ids=str,
)
def test_model_flops_of_compiled_checkpoints_are_those_of_the_model_without_any(way):
    model = embedded(net())
    plain = sum(map(model_flops, traced(model).operators))
    trace = traced(model, compile=True, **{"checkpointing": "full", **way})
    assert sum(map(model_flops, trace.operators)) == plain
    products = [op.recomputed for op in trace.operators if op.flops and op.name in ("aten::mm", "aten::addmm")]
    assert any(products) == (way.get("checkpointing") != "selective")


def test_what_cannot_be_captured_whole_is_compiled_block_by_block_and_said():
    trace = traced(reading(), compile=True)
    assert saved_bytes(trace) < 0.9 * saved_bytes(traced(reading()))
    assert trace.notes[0] == MODELLED and "the model is not captured" in trace.notes[1]


def test_what_cannot_be_captured_at_all_is_estimated_as_eager():
    reads = Computes(lambda net, x: net.line(x) if x.isfinite().all().item() else x, line=nn.Linear(WIDTH, WIDTH))
    eager, compiled = traced(reads), traced(reads, compile=True)
    assert compiled.notes[0] == AS_EAGER and "the model is not captured" in compiled.notes[1]
    assert compiled.peak_live_bytes == eager.peak_live_bytes


def test_a_compiled_loss_takes_no_memory_like_its_input_but_the_gradient():
    """As Inductor does it: neither the softmax nor the scattered gradient of the chosen class is materialized."""

    layers = {"linear": nn.Linear(WIDTH, 4096, bias=False), "loss": nn.CrossEntropyLoss()}
    layers["loss"].compile()
    head = Computes(lambda net, x, target: net.loss(net.linear(x), target), **layers)
    inputs = torch.empty(ROWS, WIDTH, device="meta"), torch.zeros(ROWS, dtype=torch.int64)
    trace = trace_step(head, inputs, torch.empty(()), lambda output, _target: output, settings=Training())
    logits = 4 * ROWS * 4096
    large = [block for block in trace.blocks if block.nbytes == logits]
    assert len(large) == 2 * 2, large  # the logits and their gradient, of two steps
    assert MODELLED in trace.notes


def checkpointed(reentrant: bool) -> nn.Module:
    """A model that calls torch's checkpoint itself, as transformers' models do, and whose input needs a gradient."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    return embedded(Computes(forward, blocks=net().blocks))


def embedded(model: nn.Module) -> nn.Module:
    """The model with an input that needs a gradient, as the reentrant checkpoint wants it."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), model)


def test_a_model_with_checkpoints_of_its_own_saves_what_a_real_compiled_step_on_the_cpu_saves():
    torch.manual_seed(0)
    really = really_saved_bytes(checkpointed(False), torch.randn(ROWS, WIDTH))
    trace = traced(checkpointed(False), compile=True)
    assert saved_bytes(trace) == pytest.approx(really + 4, abs=1024)  # the loss
    assert saved_bytes(trace) == saved_bytes(traced(checkpointed(True), compile=True))


class Layer(nn.Module):
    """A layer with an attribute that nobody reads, and others that its graph depends on."""

    def __init__(self, number: int, repeats: int = 1, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.number, self.repeats = number, repeats
        self.linear, self.act = nn.Linear(WIDTH, WIDTH, bias=False), activation()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.repeats):
            x = self.act(self.linear(x))
        return x


@pytest.mark.parametrize(
    ("layers", "graphs"),
    [
        pytest.param([Layer(number) for number in range(4)], 2, id="alike"),  # the first one's input needs no gradient
        pytest.param([Layer(0), Layer(1), Layer(2, repeats=3)], 3, id="another depth"),
        pytest.param([Layer(0), Layer(1), Layer(2, activation=nn.ReLU)], 3, id="another member"),
        pytest.param([Layer(0), Layer(1), Layer(2).eval()], 2, id="a mode that nobody reads"),
    ],
)
def test_blocks_share_a_graph_where_all_that_they_read_is_alike(monkeypatch, layers, graphs):
    captured, whole = [], compiled._captured
    monkeypatch.setattr(compiled, "_captured", lambda *args: captured.append(args) or whole(*args))
    for layer in layers:
        layer.compile()
    trace = traced(nn.Sequential(*layers))
    assert len(captured) == graphs
    products = [op.module for op in trace.operators if op.name == "aten::mm" and op.phase == "forward"]
    assert products == [str(place) for place, layer in enumerate(layers) for _ in range(layer.repeats)]
