"""The GPTs that vTrain timed under Megatron-DeepSpeed (MICRO 2024), on one rank, as plain modules.

Start reading at `megatron_step`. Its fused kernels are left to PyTorch: attention is fused, and dropout left out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from featurize.device_spec import DeviceSpec
from featurize.parallel.layout import Parallel
from featurize.step_trace import StepTrace
from featurize.trace import trace_step
from featurize.training_settings import MEGATRON, Training

_PLAN = {"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
LENGTH, VOCABULARY = 1024, 50304  # Megatron pads 50,257 to whole tiles


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_size = width // heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = self.qkv(self.before(x)).view(batch, length, -1, 3 * self.head_size).transpose(1, 2)
        query, key, value = split.chunk(3, -1)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class _Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def megatron_settings(micro_batches: int) -> Training:
    """Return vTrain's training settings: fp16, full recomputation, a fused Adam."""
    return Training(
        precision="fp16",
        implementation="fused",
        checkpointing="full",
        accumulation=micro_batches,
        framework=MEGATRON,
    )


def megatron_step(
    layers: int, width: int, heads: int, samples: int, micro_batches: int, split: int, device: DeviceSpec
) -> StepTrace:
    """Return the trace of one rank's step.

    Args:
        layers, width, heads: Of the model.
        samples: Of a micro-batch.
        micro_batches: Of a step.
        split: Over how many ranks each layer is split.
        device: The GPU model.
    """
    ids = torch.empty(samples, LENGTH, dtype=torch.int64, device="meta")
    return trace_step(
        lambda: _Gpt(layers, width, heads), ids, ids, loss=_loss, settings=megatron_settings(micro_batches),
        device=device, training_loop=False,
        parallel=Parallel(tp=split, tp_plan=_PLAN) if split > 1 else None,
    )  # fmt: skip
