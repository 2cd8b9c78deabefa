"""Mixtures of experts: pre-norm transformers whose feed-forward parts, in every n-th block, are routed experts.

Start reading at `Config`; the routing is GShard's (arXiv 2006.16668, one or two experts a token, a capacity for each
expert), its auxiliary loss Switch Transformer's (arXiv 2101.03961).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from conf.errors import Allowed, is_finite, one_of
from featurize.families import _parts as parts
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import Rate, Repeats, TrialConfig

if TYPE_CHECKING:
    import torch

TOPOLOGIES = ("decoder", "encoder")
ACTIVATIONS = ("relu", "gelu", "silu")
BALANCE_WEIGHT = 0.01  # weight of the auxiliary loss, as published
_FACTOR = Allowed(lambda factor: is_finite(factor) and factor > 0, "a number > 0")
SAMPLED_ONLY = parts.SAMPLED_ONLY


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """topology: `decoder`, causal, a logit a token of the vocabulary; `encoder`, mean pool and one linear layer to
    `classes`, which decoders ignore. experts: number in each routed part; top_k: 1 or 2 experts for each token.
    capacity_factor: places of an expert, as a multiple of its even share of a sample's choices.
    moe_every: every n-th block is routed, the others are dense. feed_forward: absolute inner size of each expert and of
    the dense parts. heads: must divide `embedding_size`. dropout: rate of every dropout, the attention's included; 0
    for none."""

    vocabulary_size: int
    sequence_length: int
    embedding_size: int
    heads: int
    depth: Repeats
    feed_forward: int
    experts: int
    top_k: Annotated[int, one_of((1, 2))] = 2
    capacity_factor: Annotated[float, _FACTOR] = 1.25
    moe_every: int = 2
    topology: Annotated[str, one_of(TOPOLOGIES)] = "decoder"
    classes: int = 1000
    activation: Annotated[str, one_of(ACTIVATIONS)] = "gelu"
    dropout: Rate = 0.1

    def problems(self) -> Iterator[str]:
        if self.top_k > self.experts:
            yield f"top_k must be <= experts, got {self.top_k} of {self.experts} experts"
        if self.moe_every > self.depth:
            yield f"moe_every must be <= depth, got {self.moe_every} in {self.depth} blocks"
        yield from parts.heads_problems(self.heads, self.embedding_size)


def capacity(config: Config) -> int:
    """Return the places of each expert for one sample's tokens; a token chooses an expert at most once."""
    share = config.top_k * config.sequence_length / config.experts
    return min(max(math.ceil(share * config.capacity_factor), 1), config.sequence_length)


def is_routed(config: Config, index: int) -> bool:
    """Return whether the block of that index, from 0, has experts."""
    return (index + 1) % config.moe_every == 0


def blocks(config: Config) -> list[NetworkBlock]:
    """Return the network in the order of the forward pass; `outputs` of a `routed` block are the rows of all
    experts."""
    routed = NetworkBlock("routed", outputs=config.experts * capacity(config))
    body = [routed if is_routed(config, index) else NetworkBlock("dense") for index in range(config.depth)]
    return [NetworkBlock("embedding"), *body, NetworkBlock(config.topology)]


def block_layers(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a block's part of the forward pass per sample."""
    length, width, rate = config.sequence_length, config.embedding_size, config.dropout
    if block.kind == "embedding":
        return parts.embed_tokens(width, length, config.vocabulary_size, rate)
    if block.kind == "dense":
        return parts.prenorm_block(width, config.feed_forward, length, rate, activation_name=config.activation)
    if block.kind == "routed":
        return [*parts.attention_part(width, length, rate), *_routed_part(config, block.outputs)]
    if block.kind == "decoder":
        return parts.token_head(width, length, config.vocabulary_size, tied=False)
    return [parts.layer_norm(width, length), Layer("mean_pool", width), parts.linear(width, config.classes)]


def _routed_part(config: Config, rows: int) -> list[Layer]:
    """Return the norm, the router, the gathered rows of the experts, their linear layers side by side, the scattered
    rows, and the sum."""
    length, width, inner, experts = config.sequence_length, config.embedding_size, config.feed_forward, config.experts
    outer, products = length * width, 2 * rows * width * inner
    return [
        parts.layer_norm(width, length),
        Layer("linear", length * experts, width * experts, 2 * outer * experts),
        Layer("softmax", length * experts),
        Layer("dispatch", rows * width),
        Layer("linear", rows * inner, experts * (width + 1) * inner, products),
        parts.activation(config.activation, rows * inner),
        Layer("linear", rows * width, experts * (inner + 1) * width, products),
        Layer("combine", config.top_k * outer),
        parts.dropout(config.dropout, outer),
        Layer("add", outer),
    ]


def build(config: Config) -> parts.Module:
    """Return the network: [N, sequence_length] token indices -> (logits, balance). Logits are [N, sequence_length,
    vocabulary_size] for a decoder, [N, classes] for an encoder; balance is the routers' auxiliary loss, a scalar."""
    from torch import nn

    from featurize.nets import modules

    width, inner, rate = config.embedding_size, config.feed_forward, config.dropout
    decoder = config.topology == "decoder"

    def forward_part(index: int) -> nn.Module:
        if not is_routed(config, index):
            return modules.feed_forward(width, inner, modules.activation(config.activation))
        return modules.RoutedExperts(
            width,
            inner,
            experts=config.experts,
            choices=config.top_k,
            capacity=capacity(config),
            activation_name=config.activation,
        )

    return modules.RoutedTransformer(
        vocabulary=config.vocabulary_size,
        length=config.sequence_length,
        width=width,
        blocks=[
            modules.RoutedBlock(
                width,
                modules.SelfAttention(width, config.heads, causal=decoder, dropout=rate),
                forward_part(index),
                dropout=rate,
            )
            for index in range(config.depth)
        ],
        outputs=config.vocabulary_size if decoder else config.classes,
        per_token=decoder,
        tied=False,
        dropout=rate,
        recompute=config.activation_checkpointing,
    )


def batch(config: Config, device: parts.Device) -> parts.Batch:
    """Return token indices [N, sequence_length] int64; the next tokens' indices of the same shape for a decoder, class
    indices [N] for an encoder."""
    return parts.token_batch(config, device, per_token=config.topology == "decoder")


def loss(config: Config) -> Callable[..., Any]:
    """Return the cross entropy of the logits and a hundredth of the routers' auxiliary loss."""
    from featurize.training.training_step import cross_entropy

    def of(output: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        logits, balance = output
        return cross_entropy(logits, targets) + BALANCE_WEIGHT * balance

    return of


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Return sizes that fit each other, see `_parts.repair_prenorm`, with at least one routed block. A decoder's
    `classes`, which have no effect, are reset to their default."""
    values = parts.repair_prenorm(values, draw)
    if parts.is_integer(interval := values.get("moe_every", Config.moe_every)):
        parts.at_least(values, "depth", interval)
    if values.get("topology", Config.topology) == "decoder":
        values.pop("classes", None)
    return values
