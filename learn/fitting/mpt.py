"""LLM Foundry's MPT models, as rows of its published throughput name them.

Start reading at `mpt_config`.
"""

from __future__ import annotations

from typing import Any

import torch

from featurize.families import gpt

LLM_FOUNDRY = "llm_foundry"  # source of the rows
# Size -> width, heads, blocks (mosaicml/llm-foundry, scripts/train/yamls/pretrain).
SIZES = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
_TOKENS = 50_368


def mpt_config(size: str, length: int, samples: int, *, recompute: bool) -> gpt.Config:
    """Return the model of a size of `SIZES` with a batch of so many samples of `length` tokens; `recompute`: blocks are
    checkpointed."""
    width, heads, depth = SIZES[size]
    return gpt.Config(
        vocabulary_size=_TOKENS,
        sequence_length=length,
        embedding_size=width,
        heads=heads,
        depth=depth,
        feed_forward=4 * width,
        projection="linear",
        dropout=0.0,
        batch_size=samples,
        activation_checkpointing=recompute,
    )


def mpt_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each token."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def fused_mpt_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return what stands for the fused cross entropy that LLM Foundry takes by default (flash-attn's): it reads the
    logits once, and once more to write their gradient in their own type. The value is another."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(rows)
            return rows.sum(-1, dtype=torch.float32)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (rows,) = ctx.saved_tensors
            return rows * 1.0

    losses: torch.Tensor = Fused.apply(logits.flatten(0, 1))
    return losses.mean()
