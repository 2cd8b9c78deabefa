"""A compiled model under DistributedDataParallel is cut where Dynamo cuts it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from featurize.job.layout import Parallel
from featurize.recording.compiled import in_pieces
from featurize.trace.tracer import trace_step
from featurize.training.training_step import Training


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.down(nn.functional.gelu(self.up(x)))


class _Net(nn.Module):
    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 100, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Frozen(_Net):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.arange(24).reshape(2, 12)


def pieces_of(model: nn.Module, limits: list[float]) -> tuple[Any, list[int], list[Tensor]]:
    """Return a callable that runs the model in pieces, the bytes of parameters of each, and tensors to call it."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = [*held.values(), IDS]
    ran: list[int] = []

    def forward(*given: Tensor) -> list[Tensor]:
        return [functional_call(model, dict(zip(held, given, strict=False)), given[-1])]

    def compiled(function: Any, weights: int) -> Any:
        def run(*given: Tensor) -> Any:
            ran.append(sum(one.nbytes for one in given[:weights] if one.requires_grad))
            return function(*given)

        return run

    return in_pieces(forward, tensors, len(held), limits, compiled), ran, tensors


@pytest.mark.spread(2)
@pytest.mark.parametrize("limits", [[1_000, 60_000], [20_000, 20_000], [1_000, 1_000], [70_000, 70_000]])
def test_pieces_hold_the_parameters_that_dynamo_gives_them(limits):
    from torch._dynamo.backends.distributed import DDPOptimizer  # with all of the compiler

    torch.manual_seed(0)
    model = _Net()
    cut = DDPOptimizer(limits[-1], lambda graph, _inputs: graph, first_bucket_cap=limits[0])
    torch._dynamo.reset()
    torch.compile(model, backend=cut.compile_fn)(IDS)
    run, ran, tensors = pieces_of(model, limits)
    run(*tensors)
    assert len(ran) > 1
    assert ran == [bucket.size for bucket in cut.buckets]


def test_pieces_give_what_the_model_gives():
    torch.manual_seed(0)
    model = _Net()
    run, _, tensors = pieces_of(model, [20_000])
    (output,) = run(*tensors)
    gradients = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    expected = torch.autograd.grad(model(IDS).square().sum(), list(model.parameters()))
    torch.testing.assert_close(output, model(IDS))
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize(
    ("model", "limits"),
    [pytest.param(_Net(), [1e9], id="one bucket"), pytest.param(_Frozen(), [1_000], id="a part without gradients")],
)
def test_what_cannot_be_cut_stays_whole(model, limits):
    run, _, _ = pieces_of(model, limits)
    assert run is None


def test_a_bucket_is_reduced_while_the_pieces_before_it_run_backwards():
    batch = torch.zeros(2, 12, dtype=torch.long)
    traces = {
        cap: trace_step(
            lambda: _Net(256),
            batch,
            loss=lambda output, _: output.sum(),
            settings=Training(compile=True),
            parallel=Parallel(ddp=2, bucket_cap_mb=cap),
        )
        for cap in (1.0, 100.0)
    }
    ready = {cap: [one.after for one in trace.collectives] for cap, trace in traces.items()}
    assert len(ready[100.0]) == 1
    assert len(ready[1.0]) > 4
    assert ready[1.0] == sorted(set(ready[1.0])), "each after a piece of its own"
