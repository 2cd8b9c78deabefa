"""The GPTs that vTrain timed under Megatron-DeepSpeed (MICRO 2024), on one rank, as plain modules.

Start reading at `megatron_step`. Megatron's own layers compute scores, softmax and dropout one after the other, with
weights in half precision (megatron/model/transformer.py, `CoreAttention`). PyTorch's fuse attention, under autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from featurize.device.device_spec import DeviceSpec
from featurize.job.layout import Parallel
from featurize.job.training_settings import MEGATRON, Training
from featurize.recording.step_trace import StepTrace
from featurize.trace.tracer import trace_step

# Megatron splits the vocabulary, too, and takes the loss of each rank's part of the logits.
_PLAN = {
    "tokens": "embedding_rowwise",
    "blocks.*.qkv": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise",
}
LENGTH, VOCABULARY = 1024, 50304  # Megatron pads 50,257 to whole tiles


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.dropout, self.fused = (0.0 if fused else 0.1), fused
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_size = width // heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = self.qkv(self.before(x)).view(batch, length, -1, 3 * self.head_size).transpose(1, 2)
        attended = self._attend(*split.chunk(3, -1)).transpose(1, 2).reshape(batch, length, -1)
        x = x + self._drop(self.out(attended))
        return x + self._drop(self.down(functional.gelu(self.up(self.between(x)))))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.fused:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        # Megatron's softmax kernel also scales and masks.
        return self._drop(functional.softmax(query @ key.transpose(-2, -1), dim=-1)) @ value

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout) if self.dropout else x


class _Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(_Block(width, heads, fused) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def megatron_settings(micro_batches: int, fused: bool) -> Training:
    """Return vTrain's training settings: fp16, full recomputation, a fused Adam. Args: as in `megatron_step`."""
    return Training(
        precision="fp16" if fused else "fp16-true",
        implementation="fused",
        checkpointing="full",
        accumulation=micro_batches,
        framework=MEGATRON,
    )


def megatron_step(
    layers: int, width: int, heads: int, samples: int, micro_batches: int, split: int, fused: bool, device: DeviceSpec
) -> StepTrace:
    """Return the trace of one rank's step.

    Args:
        layers, width, heads: Of the model.
        samples: Of a micro-batch.
        micro_batches: Of a step.
        split: Over how many ranks each layer is split.
        fused: With PyTorch's fused attention, under autocast and without dropout; else with Megatron's own layers.
        device: The GPU model.
    """
    ids = torch.empty(samples, LENGTH, dtype=torch.int64, device="meta")
    return trace_step(
        lambda: _Gpt(layers, width, heads, fused),
        ids,
        ids,
        loss=_loss,
        settings=megatron_settings(micro_batches, fused),
        device=device,
        training_loop=False,
        parallel=Parallel(tp=split, tp_plan=_PLAN) if split > 1 else None,
    )
