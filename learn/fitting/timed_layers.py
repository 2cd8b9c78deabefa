"""The kernels of layers that were timed by themselves, as rows of `kernels` with `layer::NAME` describe them.

Start reading at `layer_calls`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import Training, uses_tf32
from featurize.recording.step_trace import Operator
from featurize.timing.calls import Calls, kernel_calls
from featurize.trace.tracer import trace_step

_PRECISIONS = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16-true"}


def layer_calls(name: str, sizes: Mapping[str, int], phase: str | None, dtype: str, device: DeviceSpec) -> Calls:
    """Return the kernels of a layer's forward or backward pass; of both where `phase` is None.

    Args:
        name: One of `LAYERS`.
        sizes: As `warehouse.exchange.published_kernels` names them.
        phase: `forward`, `backward` or None.
        dtype: `float32`, `tf32` or `bfloat16`.
        device: The GPU model that was measured.

    Raises:
        KeyError: There is no such layer or type, or a size lacks.
    """
    precision = _PRECISIONS[dtype]
    operators = _operators(name, tuple(sorted(sizes.items())), precision, device)
    wanted = [op for op in operators if phase in (None, op.phase)]
    if phase != "forward" and LAYERS[name] is _gated:
        # The benchmark adds up the weights' gradients from run to run.
        wanted += [_accumulation(weight) for weight in _gated_weights(sizes)]
    return kernel_calls(wanted, **uses_tf32(precision))


@functools.lru_cache(maxsize=64)
def _operators(
    name: str, sizes: tuple[tuple[str, int], ...], precision: str, device: DeviceSpec
) -> tuple[Operator, ...]:
    of_sizes = dict(sizes)
    build = LAYERS[name]

    class Timed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, shape = build(of_sizes)
            self.x = torch.nn.Parameter(torch.empty(shape))  # its gradient is computed, too

        def forward(self, target: torch.Tensor) -> torch.Tensor:
            return self.layer(self.x, target)

    def model() -> nn.Module:
        timed = Timed()
        return timed.to(torch.bfloat16) if precision == "bf16-true" else timed

    def batch(on: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros(_targets(of_sizes), dtype=torch.int64, device=on), None

    trace = trace_step(
        model,
        batch,
        loss=lambda output, target: output.sum(),
        training_loop=False,
        device=device,
        settings=Training(optimizer="sgd", precision=precision),
    )
    return tuple(op for op in trace.operators if op.module.startswith("layer"))


def _targets(sizes: Mapping[str, int]) -> int:
    return sizes["length"] * sizes["samples"]


def _block(sizes: Mapping[str, int]) -> tuple[nn.Module, tuple[int, ...]]:
    """A rank's part of a decoder block of Megatron-LM without flash attention (megatron/model/transformer.py).

    Its fused kernels of bias, dropout and residual stand as the operators that they replace; scores outweigh them.
    """
    width, heads, ranks = sizes["width"], sizes["heads"] // sizes["ranks"], sizes["ranks"]
    head = sizes["width"] // sizes["heads"]
    length, samples = sizes["length"], sizes["samples"]

    class Block(nn.Module):
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv = nn.Linear(width, 3 * width // ranks)
            self.dense = nn.Linear(width // ranks, width)
            self.wide = nn.Linear(width, 4 * width // ranks)
            self.narrow = nn.Linear(4 * width // ranks, width)
            self.dropout = nn.Dropout(0.1)
            self.register_buffer("mask", torch.zeros(1, 1, length, length, dtype=torch.bool), persistent=False)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            split = self.qkv(self.norms[0](x)).view(length, samples * heads, 3 * head)
            query, key, value = (part.transpose(0, 1) for part in split.chunk(3, dim=-1))
            scores = (
                torch.bmm(query, key.transpose(1, 2)).view(samples, heads, length, length).masked_fill(self.mask, -1e4)
            )
            weights = self.dropout(torch.softmax(scores, dim=-1)).view(samples * heads, length, length)
            context = torch.bmm(weights, value).transpose(0, 1).contiguous().view(length, samples, heads * head)
            x = x + self.dropout(self.dense(context))
            hidden = nn.functional.gelu(self.wide(self.norms[1](x)), approximate="tanh")
            return x + self.dropout(self.narrow(hidden))

    return Block(), (length, samples, width)


def _head(sizes: Mapping[str, int]) -> tuple[nn.Module, tuple[int, ...]]:
    """The logits of a rank's part of the vocabulary, and Megatron's cross entropy over them."""
    width, vocabulary = sizes["width"], sizes["vocabulary"] // sizes["ranks"]

    class CrossEntropy(torch.autograd.Function):  # megatron/core/tensor_parallel/cross_entropy.py
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            logits = logits - logits.amax(dim=-1, keepdim=True)
            chosen = logits.gather(1, target[:, None])
            exponents = logits.exp()
            total = exponents.sum(dim=-1, keepdim=True)
            ctx.save_for_backward(exponents.div_(total))
            return total.log() - chosen

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            (shares,) = ctx.saved_tensors
            return shares.mul_(gradients[0]), None

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.logits = nn.Linear(width, vocabulary, bias=False)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return CrossEntropy.apply(self.logits(self.norm(x)).flatten(0, 1), target)

    return Head(), (sizes["length"], sizes["samples"], width)


def _gated(sizes: Mapping[str, int]) -> tuple[nn.Module, tuple[int, ...]]:
    """The feed-forward layer of Llama (transformers, modeling_llama.py: LlamaMLP)."""
    width, inner = sizes["width"], sizes["inner"]

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
            self.down = nn.Linear(inner, width, bias=False)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    return Gated(), (sizes["samples"], sizes["length"], width)


# Silu and gelu read and write alike: one layer stands for both.
LAYERS: Mapping[str, Callable[[Mapping[str, int]], tuple[nn.Module, tuple[int, ...]]]] = {
    "block": _block,
    "head": _head,
    "silu": _gated,
    "gelu": _gated,
}


def _gated_weights(sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    width, inner = sizes["width"], sizes["inner"]
    return [(inner, width), (inner, width), (width, inner)]


def _accumulation(weight: tuple[int, int]) -> Operator:
    nbytes = 2 * math.prod(weight)
    return Operator(
        name="aten::add_",
        phase="backward",
        dtype="bfloat16",
        input_shapes=(weight, weight),
        output_shapes=(weight,),
        flops=math.prod(weight),
        bytes_read=2 * nbytes,
        bytes_written=nbytes,
        launches=1,
    )
