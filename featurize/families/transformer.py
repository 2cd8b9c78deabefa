"""Transformer classifiers: token embedding with learned positions, a stack of layers, mean pool, one linear layer.

Start reading at `Config`; an encoder is GPUMemNet's transformer (arXiv 2602.17817), a stack of post-norm
`nn.TransformerEncoderLayer`s, batch first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from conf.errors import one_of
from featurize.families import _parts as parts
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import Activation, Rate, Repeats, TrialConfig

TOPOLOGIES = ("encoder", "decoder", "hybrid")
SAMPLED_ONLY = parts.SAMPLED_ONLY
HEAD_SIZES = range(8, 257, 8)  # sizes of sampled heads


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """topology: `encoder`; `decoder`, decoder-only, causal self-attention; `hybrid`, an encoder of `depth // 2` layers
    read by a causal decoder of the others. heads: must divide `embedding_size`. feed_forward: absolute inner size of
    the feed-forward part. dropout: rate of every dropout, the attention's included; 0 for none. softmax: ends in a
    softmax before the loss; off, as published, the outputs are logits."""

    vocabulary_size: int
    sequence_length: int
    embedding_size: int
    heads: int
    depth: Repeats
    feed_forward: int
    classes: int
    topology: Annotated[str, one_of(TOPOLOGIES)] = "encoder"
    activation: Activation = "relu"
    dropout: Rate = 0.1
    softmax: bool = False

    def problems(self) -> Iterator[str]:
        yield from parts.heads_problems(self.heads, self.embedding_size)
        if self.topology == "hybrid" and self.depth < 2:
            yield f"depth must be >= 2 for topology hybrid, got {self.depth}"


def stages(config: Config) -> tuple[int, int]:
    """Return (self-attention layers, layers with cross-attention)."""
    if config.topology == "hybrid":
        return config.depth // 2, config.depth - config.depth // 2
    return config.depth, 0


def _attention(config: Config) -> Layer:
    """Return the fused attention: its kernels keep no scores, so only the output counts; the scores' products are in
    the FLOPs, masked or not, as in `torch.utils.flop_counter`."""
    length, width = config.sequence_length, config.embedding_size
    projections = 4 * width * (width + 1)
    return Layer("attention", length * width, projections, 8 * length * width**2 + 4 * length**2 * width)


def blocks(config: Config) -> list[NetworkBlock]:
    """Return the network in the order of the forward pass; `crossed` layers also have cross-attention."""
    plain, crossed = stages(config)
    return [
        NetworkBlock("embedding"),
        NetworkBlock("plain", times=plain),
        NetworkBlock("crossed", times=crossed),
        NetworkBlock("head"),
    ]


def block_layers(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a block's part of the forward pass per sample."""
    length, width, inner = config.sequence_length, config.embedding_size, config.feed_forward
    outer = length * width
    if block.kind == "embedding":
        return [Layer("embedding", outer, config.vocabulary_size * width), Layer("position", outer, outer)]
    if block.kind == "head":
        classes = config.classes
        softmax = Layer("softmax", classes, present=config.softmax)
        return [Layer("mean_pool", width), parts.linear(width, classes), softmax]
    residual = [parts.dropout(config.dropout, outer), Layer("add", outer), Layer("layernorm", outer, 2 * width)]
    return [
        *[_attention(config), *residual] * (2 if block.kind == "crossed" else 1),
        parts.linear(width, inner, length),
        parts.activation(config.activation, length * inner),
        parts.dropout(config.dropout, length * inner),
        parts.linear(inner, width, length),
        *residual,
    ]


def build(config: Config) -> parts.Module:
    """Return the network: [N, sequence_length] token indices -> [N, classes]."""
    from torch import nn

    from featurize.nets import modules

    def stack(layer: type[nn.Module], count: int) -> modules.Stack:
        # A callable activation: a new module in every layer, since `prelu` has a parameter.
        sizes = config.embedding_size, config.heads, config.feed_forward, config.dropout
        layers = [
            layer(*sizes, activation=modules.activation(config.activation), batch_first=True) for _ in range(count)
        ]
        return modules.Stack(layers, recompute=config.activation_checkpointing)

    plain, crossed = stages(config)
    return modules.TransformerClassifier(
        stack(nn.TransformerEncoderLayer, plain),
        stack(nn.TransformerDecoderLayer, crossed) if crossed else None,
        vocabulary=config.vocabulary_size,
        length=config.sequence_length,
        width=config.embedding_size,
        causal=config.topology == "decoder",
        classes=config.classes,
        softmax=config.softmax,
    )


batch = functools.partial(parts.token_batch, per_token=False)


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Return sizes that fit each other, see `_parts.repair_prenorm`; a hybrid has a layer for each of its stacks."""
    if values.get("topology") == "hybrid":
        parts.at_least(values, "depth", 2)
    return parts.repair_prenorm(values, draw, head_sizes=HEAD_SIZES, step=16)
