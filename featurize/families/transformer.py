"""Transformer classifiers: token embedding with learned positions, a stack of layers, mean pool, one linear layer.

Start reading at `Config`; an encoder is GPUMemNet's transformer (arXiv 2602.17817), a stack of post-norm
`nn.TransformerEncoderLayer`s, batch first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from featurize.families import _parts as parts
from featurize.trial_config import ACTIVATIONS, TrialConfig, at_least, one_of

if TYPE_CHECKING:
    import torch

TOPOLOGIES = ("encoder", "decoder", "hybrid")
SAMPLED_ONLY = parts.TRANSFORMER_SAMPLED_ONLY
HEAD_SIZES = range(8, 257, 8)  # of sampled heads: multiples of 8, as fast kernels ask for


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """topology: `encoder`; `decoder`, decoder-only, causal self-attention; `hybrid`, an encoder of `depth // 2` layers
    read by a causal decoder of the others. heads: must divide `embedding_size`. feed_forward: inner size of the
    feed-forward part, absolute. dropout: rate of every dropout, the attention's included; 0 for none.
    softmax: ends in a softmax before the loss; off, as published, the outputs are logits."""

    family: ClassVar[str] = "transformer"

    vocabulary_size: int
    sequence_length: int
    embedding_size: int
    heads: int
    depth: int
    feed_forward: int
    classes: int
    topology: str = "encoder"
    activation: str = "relu"
    dropout: float = 0.1
    softmax: bool = False

    def problems(self) -> list[str]:
        problems = [
            *super().problems(),
            *at_least(self, vocabulary_size=1, sequence_length=1, embedding_size=1, heads=1),
            *at_least(self, depth=1, feed_forward=1, classes=1),
            *one_of(self, topology=TOPOLOGIES, activation=ACTIVATIONS),
            *parts.rates(self, "dropout"),
            *parts.switches(self, "softmax"),
        ]
        if problems:
            return problems
        problems += parts.heads_problems(self.heads, self.embedding_size)
        if self.topology == "hybrid" and self.depth < 2:
            problems.append(f"depth must be >= 2 for topology hybrid, got {self.depth}")
        return problems


def build(config: Config) -> torch.nn.Module:
    """[N, sequence_length] token indices -> [N, classes]."""
    from featurize.nets.transformer import TransformerClassifier

    return TransformerClassifier(config)


def batch(config: Config, device: str | torch.device) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Token indices [N, sequence_length] int64 and class indices [N]."""
    return parts.token_batch(config, device, config.classes)


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Make sizes fit each other, see `_parts.fit_heads`; a hybrid has two layers or more."""
    if values.get("topology") == "hybrid":
        values = dict(values)
        parts.at_least(values, "depth", 2)
    return parts.fit_heads(values, draw, HEAD_SIZES, step=16)
