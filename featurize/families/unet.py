"""U-Nets for segmentation: an encoder that halves the map, a decoder that doubles it, joined at every size.

Start reading at `widths`; the network is that of Ronneberger et al. (arXiv 1505.04597) with padded convolutions, so
that every pixel gets logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from conf.errors import COUNT, at_most, one_of
from featurize.families import _parts as parts
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import Activation, TrialConfig

ENLARGEMENTS = ("transposed", "upsample")
MAX_CHANNELS = 1024  # channels of any level


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """depth: how often the map is halved, and doubled again; 2**depth must divide `image_size`.
    base_channels: width of the first level; each halving doubles it, up to 1,024.
    enlargement: how the decoder doubles the map: `transposed`, a 2x2 convolution with stride 2, or `upsample`, bilinear
    and a 3x3 convolution. batch_norm: after every 3x3 convolution of the blocks, which then have no bias.
    Each block has two convolutions; each size has one block on either side."""

    image_size: int
    channels: int
    classes: int
    base_channels: Annotated[int, COUNT, at_most(MAX_CHANNELS)]
    depth: int
    enlargement: Annotated[str, one_of(ENLARGEMENTS)] = "transposed"
    batch_norm: bool = True
    activation: Activation = "relu"

    def problems(self) -> Iterator[str]:
        if self.depth >= self.image_size.bit_length():
            yield f"2**depth must divide image_size, got depth {self.depth} for {self.image_size} pixels a side"
        elif self.image_size % 2**self.depth:
            yield f"image_size must be a multiple of 2**depth = {2**self.depth}, got {self.image_size}"
        elif self.batch_norm and self.batch_size == 1 and self.image_size == 2**self.depth:
            yield "batch_size must be >= 2 with batch_norm on a 1x1 feature map, got 1"


def widths(config: Config) -> list[int]:
    """Return the channels of each level, the image's own size first: `depth` + 1 of them."""
    return [min(config.base_channels * 2**i, MAX_CHANNELS) for i in range(config.depth + 1)]


def blocks(config: Config) -> list[NetworkBlock]:
    """Return the network in the order of the forward pass. A map is as large as the block's output."""
    levels, inputs, steps = widths(config), config.channels, []
    for index, width in enumerate(levels):
        side = config.image_size >> index
        steps += [NetworkBlock("pool", inputs, inputs, map_out=side)] if index else []
        steps.append(NetworkBlock("block", inputs, width, map_out=side))
        inputs = width
    for index in reversed(range(config.depth)):
        side, width = config.image_size >> index, levels[index]
        steps.append(NetworkBlock(config.enlargement, inputs, width, map_out=side))
        steps.append(NetworkBlock("block", 2 * width, width, map_out=side))
        inputs = width
    return [*steps, NetworkBlock("head", inputs, config.classes, map_out=config.image_size)]


def block_layers(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a block's part of the forward pass per sample."""
    _, inputs, outputs, _, side, _ = block
    elements = outputs * side**2
    if block.kind == "pool":
        return [Layer("max_pool2d", elements)]
    if block.kind == "head":
        return [parts.conv2d(inputs, outputs, 1, side)]
    joined = Layer("concat", 2 * elements)
    if block.kind == "upsample":
        return [Layer("upsample", inputs * side**2), parts.conv2d(inputs, outputs, 3, side), joined]
    if block.kind == "transposed":
        weights = inputs * outputs * 4
        return [Layer("conv_transpose2d", elements, weights + outputs, 2 * weights * (side // 2) ** 2), joined]
    norm = Layer("batchnorm2d", elements, 2 * outputs, present=config.batch_norm)
    norm_and_activation = [norm, parts.activation(config.activation, elements)]
    first, second = (parts.conv2d(c, outputs, 3, side, bias=1 - config.batch_norm) for c in (inputs, outputs))
    return [first, *norm_and_activation, second, *norm_and_activation]


def build(config: Config) -> parts.Module:
    """Return the network: [N, channels, image_size, image_size] floats -> logits [N, classes, image_size,
    image_size]."""
    from featurize.nets.modules import UNet

    return UNet(
        channels=config.channels,
        classes=config.classes,
        widths=widths(config),
        batch_norm=config.batch_norm,
        activation_name=config.activation,
        transposed=config.enlargement == "transposed",
        recompute=config.activation_checkpointing,
    )


def batch(config: Config, device: parts.Device) -> parts.Batch:
    """Return images [N, channels, image_size, image_size] float32 and class indices [N, image_size, image_size]."""
    import torch

    places = (config.image_size, config.image_size)
    images = torch.randn(config.batch_size, config.channels, *places, device=device)
    return (images,), torch.randint(config.classes, (config.batch_size, *places), device=device)


def loss(config: Config) -> Callable[..., Any]:
    """Return the cross entropy with the classes in the second dimension, even if there are as many classes as pixels a
    side."""
    import torch.nn.functional as F

    return lambda logits, targets: F.cross_entropy(logits, targets)  # looked up when called: the trace casts there


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Make the image's size a multiple of 2**depth."""
    depth = values.get("depth")
    if parts.is_integer(depth) and 0 < depth < 32:
        parts.round_down(values, "image_size", 2**depth)
    return values
