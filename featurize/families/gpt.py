"""Decoder-only language models after GPT-2: learned positions, pre-norm blocks, causal attention, a logit a token.

Start reading at `Config`; with 50,257 tokens, a context of 1,024, 12 blocks of 768 and 12 heads it is GPT-2 itself
(Radford et al., 2019; as in transformers), at 24 of 1,024 and 36 of 1,280 its medium and large sizes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated

from conf.errors import one_of
from featurize.families import _parts as parts
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import Rate, Repeats, TrialConfig

PROJECTIONS = ("conv1d", "linear")
ACTIVATIONS = ("gelu", "gelu_new")
SAMPLED_ONLY = parts.SAMPLED_ONLY


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """heads: must divide `embedding_size`. feed_forward: absolute inner size of the feed-forward part.
    projection: kind of the blocks' linear layers; `conv1d` keeps weights as [in, out], as transformers' GPT-2 does.
    activation: `gelu`, or `gelu_new`, its tanh formula operator by operator, which keeps more tensors.
    tied_embeddings: the output layer shares the token embedding's weights. dropout: rate of every dropout, the
    attention's included; 0 for none."""

    vocabulary_size: int
    sequence_length: int
    embedding_size: int
    heads: int
    depth: Repeats
    feed_forward: int
    projection: Annotated[str, one_of(PROJECTIONS)] = "conv1d"
    activation: Annotated[str, one_of(ACTIVATIONS)] = "gelu"
    tied_embeddings: bool = True
    dropout: Rate = 0.1

    def problems(self) -> list[str]:
        return parts.heads_problems(self.heads, self.embedding_size)


def blocks(config: Config) -> list[NetworkBlock]:
    """Return the network in the order of the forward pass."""
    return [NetworkBlock("embedding"), NetworkBlock("block", times=config.depth), NetworkBlock("head")]


def block_layers(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a block's part of the forward pass per sample. The tanh formula counts as one activation."""
    length, width = config.sequence_length, config.embedding_size
    if block.kind == "embedding":
        return parts.embed_tokens(width, length, config.vocabulary_size, config.dropout)
    if block.kind == "block":
        return parts.prenorm_block(width, config.feed_forward, length, config.dropout)
    return parts.token_head(width, length, config.vocabulary_size, tied=config.tied_embeddings)


def build(config: Config) -> parts.Module:
    """Return the network: [N, sequence_length] token indices -> logits [N, sequence_length, vocabulary_size]."""
    from torch import nn

    from featurize.nets import modules

    linear, rate = modules.LINEARS[config.projection], config.dropout

    def block() -> nn.Module:
        function = modules.GeluNew() if config.activation == "gelu_new" else nn.GELU()
        return modules.PreNormBlock(
            config.embedding_size,
            modules.SelfAttention(config.embedding_size, config.heads, causal=True, dropout=rate, linear=linear),
            modules.feed_forward(config.embedding_size, config.feed_forward, function, linear=linear),
            dropout=rate,
        )

    return modules.TokenTransformer(
        vocabulary=config.vocabulary_size,
        length=config.sequence_length,
        width=config.embedding_size,
        blocks=[block() for _ in range(config.depth)],
        outputs=config.vocabulary_size,
        per_token=True,
        tied=config.tied_embeddings,
        dropout=rate,
        recompute=config.activation_checkpointing,
    )


batch = functools.partial(parts.token_batch, per_token=True)
repair = parts.repair_prenorm
