"""Denoising diffusion networks: a U-Net of residual blocks that take the timestep, with self-attention.

Start reading at `encoder` and `decoder`, which `blocks` and `build` both follow; the network is that of Ho et al.
(arXiv 2006.11239), whose attention has one head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from conf.errors import COUNT, Allowed, integer
from featurize.families import _parts as parts
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import Rate, Repeats, TrialConfig

GROUPS = 32  # groups of every group norm: all widths are multiples
_WHOLE_GROUPS = Allowed(lambda channels: channels % GROUPS == 0, f"a multiple of {GROUPS}")
TIMESTEPS = 1000  # steps at which the noise is drawn
MIN_HEAD = 8  # sampled heads have a multiple of this many channels, as fast attention kernels need


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """levels: sizes of the map, each half of the one before; 2**(levels - 1) must divide `image_size`.
    base_channels: width of the first level, a multiple of 32; each level doubles it, up to `widest` times as much.
    blocks: residual blocks a level in the encoder; the decoder has one more.
    attention_size, attention_size_min: every block on a map of that many pixels a side, or between the two, is followed
    by self-attention; 0: only between encoder and decoder, where it always is. heads: must divide `base_channels`.
    dropout: rate, 0 for none."""

    image_size: int
    channels: int
    base_channels: Annotated[int, COUNT, _WHOLE_GROUPS]
    levels: int
    blocks: Repeats
    widest: int = 4
    attention_size: Annotated[int, integer(0)] = 16
    attention_size_min: int = 1
    heads: int = 1
    dropout: Rate = 0.0

    def problems(self) -> Iterator[str]:
        if self.base_channels % self.heads:
            yield f"heads must divide base_channels, got {self.heads} heads for {self.base_channels} channels"
        size = self.image_size
        if self.levels > size.bit_length():
            yield f"2**(levels - 1) must divide image_size, got levels {self.levels} for {size} pixels a side"
        elif size % (step := 2 ** (self.levels - 1)):
            yield f"image_size must be a multiple of 2**(levels - 1) = {step}, got {size}"


def _block(config: Config, inputs: int, outputs: int, side: int) -> NetworkBlock:
    """Return a block; self-attention follows it on maps of some sizes."""
    attends = config.attention_size_min <= side <= config.attention_size
    return NetworkBlock("attending" if attends else "block", inputs, outputs, map_out=side)


def widths(config: Config) -> list[int]:
    """Return the channels of each level, the image's own size first."""
    return [config.base_channels * min(2**i, config.widest) for i in range(config.levels)]


def encoder(config: Config) -> list[NetworkBlock]:
    """Return the blocks from the first convolution's result to the smallest map. The decoder reads each one's
    output."""
    steps, inputs, side = [], config.base_channels, config.image_size
    for level, width in enumerate(widths(config)):
        if level:
            side //= 2
            steps.append(NetworkBlock("halve", inputs, inputs, map_out=side))
        for _ in range(config.blocks):
            steps.append(_block(config, inputs, width, side))
            inputs = width
    return steps


def middle(config: Config) -> list[NetworkBlock]:
    """Return the two blocks on the smallest map."""
    width, side = widths(config)[-1], config.image_size >> (config.levels - 1)
    return [NetworkBlock(kind, width, width, map_out=side) for kind in ("attending", "block")]


def decoder(config: Config) -> list[NetworkBlock]:
    """Return the blocks from the smallest map to the last convolution. Inputs include what is read from the encoder."""
    skips = [config.base_channels, *(block.outputs for block in encoder(config))]
    side, inputs, steps = config.image_size >> (config.levels - 1), skips[-1], []
    for level, width in reversed(list(enumerate(widths(config)))):
        for _ in range(config.blocks + 1):
            steps.append(_block(config, inputs + skips.pop(), width, side))
            inputs = width
        if level:
            side *= 2
            steps.append(NetworkBlock("double", inputs, inputs, map_out=side))
    return steps


def blocks(config: Config) -> list[NetworkBlock]:
    """Return the network in the order of the forward pass; `joined` blocks of the decoder also read the encoder."""
    steps = [NetworkBlock("input", map_out=config.image_size), *encoder(config), *middle(config)]
    for block in decoder(config):
        steps += [block] if block.kind == "double" else [block._replace(kind="joined"), block]
    return [*steps, NetworkBlock("output", map_out=config.image_size)]


def _norm(channels: int, side: int) -> Layer:
    return Layer("groupnorm", channels * side**2, 2 * channels)


def _attention(channels: int, side: int) -> list[Layer]:
    places = side**2
    project = parts.linear(channels, channels, places)
    mixed = Layer("attention", places * channels, 0, 4 * places**2 * channels)
    return [_norm(channels, side), project, project, project, mixed, project, Layer("add", places * channels)]


def block_layers(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a block's part of the forward pass per sample."""
    _, inputs, outputs, _, side, _ = block
    base, elements, time = config.base_channels, outputs * side**2, 4 * config.base_channels
    if block.kind == "input":
        return [
            Layer("position", base),  # the timestep's sines and cosines
            parts.linear(base, time),
            parts.activation("silu", time),
            parts.linear(time, time),
            parts.conv2d(config.channels, base, 3, side),
        ]
    if block.kind == "output":
        silu = parts.activation("silu", base * side**2)
        return [_norm(base, side), silu, parts.conv2d(base, config.channels, 3, side)]
    if block.kind == "joined":
        return [Layer("concat", inputs * side**2)]
    if block.kind in ("halve", "double"):
        doubled = Layer("upsample", inputs * side**2, present=block.kind == "double")
        return [doubled, parts.conv2d(inputs, outputs, 3, side)]
    return [
        _norm(inputs, side),
        parts.activation("silu", inputs * side**2),
        parts.conv2d(inputs, outputs, 3, side),
        parts.activation("silu", time),
        parts.linear(time, outputs),
        Layer("add", elements),
        _norm(outputs, side),
        parts.activation("silu", elements),
        parts.dropout(config.dropout, elements),
        parts.conv2d(outputs, outputs, 3, side),
        parts.conv2d(inputs, outputs, 1, side, present=inputs != outputs),
        Layer("add", elements),
        *(_attention(outputs, side) if block.kind == "attending" else []),
    ]


def build(config: Config) -> parts.Module:
    """Return the network: noisy images [N, channels, image_size, image_size], timesteps [N] -> noise of the same
    shape."""
    from torch import nn

    from featurize.nets.modules import DenoisingBlock, DenoisingUNet, Stack

    def block(part: NetworkBlock) -> nn.Module:
        return DenoisingBlock(
            part.inputs,
            part.outputs,
            4 * config.base_channels,
            rate=config.dropout,
            heads=config.heads if part.kind == "attending" else None,
        )

    def stack(*parts_of_it: NetworkBlock) -> Stack:
        return Stack(map(block, parts_of_it), recompute=config.activation_checkpointing)

    def module(part: NetworkBlock) -> nn.Module:
        if part.kind == "halve":
            return nn.Conv2d(part.inputs, part.outputs, 3, stride=2, padding=1)
        if part.kind == "double":  # nearest neighbours and a 3x3 convolution
            enlarged = nn.Upsample(scale_factor=2, mode="nearest")
            return nn.Sequential(enlarged, nn.Conv2d(part.inputs, part.inputs, 3, padding=1))
        return stack(part)

    return DenoisingUNet(
        channels=config.channels,
        width=config.base_channels,
        encoder=[module(part) for part in encoder(config)],
        middle=stack(*middle(config)),
        decoder=[module(part) for part in decoder(config)],
    )


def batch(config: Config, device: parts.Device) -> parts.Batch:
    """Return noisy images [N, channels, image_size, image_size] float32 and timesteps [N]; noise of the images'
    shape."""
    import torch

    size = (config.batch_size, config.channels, config.image_size, config.image_size)
    images, noise = torch.randn(size, device=device), torch.randn(size, device=device)
    return (images, torch.randint(TIMESTEPS, (config.batch_size,), device=device)), noise


def loss(config: Config) -> Callable[..., Any]:
    """Return the mean squared error of the predicted noise."""
    import torch.nn.functional as F

    return lambda predicted, noise: F.mse_loss(predicted, noise)  # looked up when called: the trace casts there


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Make widths multiples of 32, the image's size one of 2**(levels - 1), and `heads` the largest number up to it
    with a multiple of 8 channels a head."""
    levels = values.get("levels")
    if parts.is_integer(levels) and 0 < levels < 32:
        parts.round_down(values, "image_size", 2 ** (levels - 1))
    parts.round_down(values, "base_channels", GROUPS)
    width, heads = values.get("base_channels"), values.get("heads")
    if parts.is_integer(width) and parts.is_integer(heads) and heads > 0:
        values["heads"] = next(n for n in range(min(heads, width), 0, -1) if n == 1 or width % (MIN_HEAD * n) == 0)
    return values
