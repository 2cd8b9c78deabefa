"""Vision transformers: a convolution that cuts patches, a class token, learned positions, pre-norm encoder blocks.

Start reading at `Config`; sizes are those of ViT and DeiT (arXiv 2010.11929, 2012.12877), from Ti (192, 12 blocks, 3
heads) to L (1,024, 24 blocks, 16 heads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from featurize.families import _parts as parts
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import Rate, Repeats, TrialConfig

SAMPLED_ONLY = parts.SAMPLED_ONLY


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """patch_size: side of a patch, must divide `image_size`. heads: must divide `embedding_size`. feed_forward:
    absolute inner size of the feed-forward part. dropout: rate of every dropout, the attention's included; 0 for
    none."""

    image_size: int
    patch_size: int
    classes: int
    embedding_size: int
    heads: int
    depth: Repeats
    feed_forward: int
    channels: int = 3
    dropout: Rate = 0.0

    def problems(self) -> Iterator[str]:
        if self.image_size % self.patch_size:
            yield f"patch_size must divide image_size, got {self.patch_size} for images of {self.image_size} pixels"
        yield from parts.heads_problems(self.heads, self.embedding_size)


def blocks(config: Config) -> list[NetworkBlock]:
    """Return the network in the order of the forward pass."""
    return [NetworkBlock("patches"), NetworkBlock("block", times=config.depth), NetworkBlock("head")]


def block_layers(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a block's part of the forward pass per sample. The class token's weights are in `position`."""
    width, patches = config.embedding_size, (config.image_size // config.patch_size) ** 2
    length, weights = patches + 1, config.channels * config.patch_size**2 * width
    if block.kind == "block":
        return parts.prenorm_block(width, config.feed_forward, length, config.dropout, inner_rate=config.dropout)
    if block.kind == "head":
        return [parts.layer_norm(width, length), parts.linear(width, config.classes)]
    return [
        Layer("position", (length + 1) * width, (length + 1) * width),
        Layer("conv2d", patches * width, weights + width, 2 * patches * weights),
        Layer("concat", length * width),
        parts.dropout(config.dropout, length * width),
    ]


def build(config: Config) -> parts.Module:
    """Return the network: [N, channels, image_size, image_size] floats -> [N, classes]."""
    from torch import nn

    from featurize.nets import modules

    width, rate = config.embedding_size, config.dropout

    def block() -> nn.Module:
        return modules.PreNormBlock(
            width,
            modules.SelfAttention(width, config.heads, causal=False, dropout=rate),
            modules.feed_forward(width, config.feed_forward, nn.GELU(), inner_dropout=rate),
            dropout=rate,
            eps=1e-6,
        )

    return modules.VisionTransformer(
        side=config.image_size,
        channels=config.channels,
        patch=config.patch_size,
        width=width,
        blocks=[block() for _ in range(config.depth)],
        outputs=config.classes,
        dropout=rate,
        recompute=config.activation_checkpointing,
    )


batch = parts.classified_images


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Return sizes that fit each other, see `_parts.repair_prenorm`; the image becomes a whole number of patches."""
    values = parts.repair_prenorm(values, draw)
    parts.round_down(values, "image_size", values.get("patch_size"))
    return values
