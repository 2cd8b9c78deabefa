"""Convolutional networks: blocks of convolutions, global average pool, one linear layer to the classes.

Start reading at `blocks`: the topologies are those of GPUMemNet's CNNs (arXiv 2602.17817), width for width, with kernel
size, dilation and pooling as further dimensions. `block_layers` and `build` both follow the list from `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from conf.errors import COUNT, at_most, one_of
from featurize.families import _parts as parts
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import Activation, Rate, Repeats, TrialConfig

PLAIN = ("pyramid", "reverse_pyramid", "uniform", "bottleneck", "gradual", "hourglass")
TOPOLOGIES = (*PLAIN, "residual", "dense")
MAX_FILTERS = 2048
SMALLEST_MAP = 7  # published: neither strides nor pooling continue below 7x7
DENSE_LAYERS = 4  # convolutions in a dense block
MIN_DEPTH = {"residual": 2, "dense": DENSE_LAYERS}  # convolutions in the first block


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """depth: convolutions; a residual block takes 2 of them and a dense block 4 (a remainder is not built).
    base_filters: width of the first block (a dense network's widths follow from `growth_rate` instead).
    Convolutions keep the map's size: an even kernel pads one side more. dropout: rate, 0 for no such layers.
    pooling: 2x2 max pool after every `pool_interval`-th block except the first, down to 7x7; plain topologies only,
    since residual networks shrink by strides and dense ones by transitions every `pool_interval`-th dense block.
    softmax: ends in a softmax before the loss, as published; off, the outputs are logits."""

    image_size: int
    channels: int
    classes: int
    base_filters: Annotated[int, COUNT, at_most(MAX_FILTERS)]
    depth: Repeats
    topology: Annotated[str, one_of(TOPOLOGIES)] = "pyramid"
    kernel_size: int = 3
    dilation: int = 1
    growth_rate: int = 32
    activation: Activation = "relu"
    batch_norm: bool = False
    dropout: Rate = 0.0
    pooling: bool = False
    pool_interval: int = 5
    softmax: bool = False

    def problems(self) -> Iterator[str]:
        least = MIN_DEPTH.get(self.topology, 1)
        if self.depth < least:
            yield f"depth must be >= {least} for topology {self.topology}, got {self.depth}"
        elif self.batch_norm and self.batch_size == 1:
            smallest = min(b.map_out if b.kind == "residual" else b.map_in for b in blocks(self)[:-1])
            if smallest == 1:
                yield "batch_size must be >= 2 with batch_norm on a 1x1 feature map, got 1"


def widths(config: Config) -> list[int]:
    """Return the filters of each block of a plain or residual topology, geometric between `base_filters` and 2,048."""
    base, depth = config.base_filters, config.depth

    def grow(steps: int, power: int) -> int:
        # int() of exactly this product: the published widths depend on its rounding
        return min(int(base * ((MAX_FILTERS / base) ** (1 / steps)) ** power), MAX_FILTERS)

    if config.topology == "uniform":
        return [base] * depth
    rising = {"residual": (depth, depth // 2), "pyramid": (depth, depth), "gradual": (2 * depth, depth)}
    if config.topology in rising:
        steps, count = rising[config.topology]
        return [grow(steps, i) for i in range(count)]
    if config.topology == "reverse_pyramid":
        factor = (MAX_FILTERS / base) ** (1 / depth)
        return [max(int(base / factor**i), 1) for i in range(depth)]
    if config.topology == "bottleneck":
        others = [base] if depth == 2 else [grow(depth - 1, i) for i in range(depth - 1)]
        return [min(2 * base, MAX_FILTERS), *others]
    assert config.topology == "hourglass"
    half = depth // 2
    falling = depth - half
    return [
        *(grow(half, i) for i in range(half)),
        *(max(grow(falling, falling - 1 - i), base) for i in range(falling)),
    ]


def blocks(config: Config) -> list[NetworkBlock]:
    """Return the network in the order of the forward pass: `plain`, `residual`, `dense`, `transition`, `pool`, and
    `head`."""
    body = _dense_blocks(config) if config.topology == "dense" else _other_blocks(config)
    return [*body, NetworkBlock("head", body[-1].outputs, config.classes)]


def _other_blocks(config: Config) -> list[NetworkBlock]:
    conv_blocks, inputs, side = [], config.channels, config.image_size
    published_side = side  # the published stopping rule halves downwards, a strided convolution upwards
    for i, outputs in enumerate(widths(config)):
        if config.topology == "residual":
            halve = i % 2 == 1 and published_side > SMALLEST_MAP
            conv_blocks.append(NetworkBlock("residual", inputs, outputs, side, (side + 1) // 2 if halve else side))
            side = conv_blocks[-1].map_out
            published_side = published_side // 2 if halve else published_side
            if published_side <= SMALLEST_MAP:
                break
        else:
            conv_blocks.append(NetworkBlock("plain", inputs, outputs, side, side))
            if config.pooling and i and i % config.pool_interval == 0 and side > SMALLEST_MAP:
                conv_blocks.append(NetworkBlock("pool", outputs, outputs, side, side // 2))
                side //= 2
        inputs = outputs
    return conv_blocks


def _dense_blocks(config: Config) -> list[NetworkBlock]:
    conv_blocks, inputs, side = [], config.channels, config.image_size
    count = config.depth // DENSE_LAYERS
    for i in range(count):
        outputs = inputs + DENSE_LAYERS * config.growth_rate
        conv_blocks.append(NetworkBlock("dense", inputs, outputs, side, side))
        inputs = outputs
        if i % config.pool_interval == 0 and i != count - 1:
            after = side // 2 if side > 1 else side
            conv_blocks.append(NetworkBlock("transition", inputs, inputs // 2, side, after))
            inputs, side = inputs // 2, after
    return conv_blocks


def _conv_block(config: Config, inputs: int, outputs: int, side_in: int, side_out: int) -> list[Layer]:
    padding = config.dilation * (config.kernel_size - 1)  # of both sides: stride 1 keeps the map's size
    elements = outputs * side_out**2
    return [
        Layer("pad2d", inputs * (side_in + padding) ** 2, present=padding % 2 == 1),
        parts.conv2d(inputs, outputs, config.kernel_size, side_out),
        _norm(config, outputs, elements),
        parts.activation(config.activation, elements),
        parts.dropout(config.dropout, elements),
    ]


def _norm(config: Config, channels: int, elements: int, present: bool = True) -> Layer:
    return Layer("batchnorm2d", elements, 2 * channels, present=present & config.batch_norm)


def block_layers(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a block's part of the forward pass per sample."""
    _, inputs, outputs, side, after, _ = block
    elements = outputs * after**2
    if block.kind == "plain":
        return _conv_block(config, inputs, outputs, side, after)
    if block.kind == "pool":
        return [Layer("max_pool2d", elements)]
    if block.kind == "residual":
        changes = (inputs != outputs) | (side != after)
        return [
            parts.conv2d(inputs, outputs, 1, after, present=changes),
            _norm(config, outputs, elements, changes),
            *_conv_block(config, inputs, outputs, side, after),
            *_conv_block(config, outputs, outputs, after, after),
            Layer("add", elements),
        ]
    if block.kind == "dense":
        layers = []
        for i in range(DENSE_LAYERS):
            width = inputs + i * config.growth_rate
            layers.append(Layer("concat", width * side**2))
            layers += _conv_block(config, width, config.growth_rate, side, side)
        return [*layers, Layer("concat", elements)]
    if block.kind == "transition":
        wide = outputs * side**2
        return [
            parts.conv2d(inputs, outputs, 1, side),
            _norm(config, outputs, wide),
            parts.activation("relu", wide),
            Layer("avg_pool2d", elements, present=after != side),
        ]
    assert block.kind == "head"
    return [
        Layer("adaptive_avg_pool2d", inputs),
        parts.linear(inputs, outputs),
        Layer("softmax", outputs, present=config.softmax),
    ]


def build(config: Config) -> parts.Module:
    """Return the network: [N, channels, image_size, image_size] floats -> [N, classes]."""
    from torch import nn

    from featurize.nets import modules

    style = modules.ConvStyle(config.kernel_size, config.dilation, config.batch_norm, config.activation, config.dropout)

    def module(block: NetworkBlock) -> nn.Module:
        if block.kind == "plain":
            return modules.conv_block(block.inputs, block.outputs, style)
        if block.kind == "pool":
            return nn.MaxPool2d(2)
        if block.kind == "residual":
            return modules.ResidualBlock(block.inputs, block.outputs, 1 + (block.map_out != block.map_in), style)
        if block.kind == "dense":
            return modules.DenseBlock(block.inputs, config.growth_rate, DENSE_LAYERS, style)
        assert block.kind == "transition"
        return modules.transition(block.inputs, block.outputs, style, shrink=block.map_out != block.map_in)

    *body, head = blocks(config)
    return nn.Sequential(
        modules.Stack([module(block) for block in body], recompute=config.activation_checkpointing),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Linear(head.inputs, head.outputs),
        *([nn.Softmax(dim=1)] if config.softmax else []),
    )


batch = parts.classified_images


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Make it deep enough for one residual or dense block, and reset settings without effect, so that two points that
    build the same network get the same config."""
    topology = values.get("topology", "pyramid")
    parts.at_least(values, "depth", MIN_DEPTH.get(topology, 1))
    if values.get("kernel_size") == 1:
        values["dilation"] = 1
    if topology not in PLAIN:
        values["pooling"] = False
    if topology == "residual" or (topology in PLAIN and not values.get("pooling", False)):
        values.pop("pool_interval", None)
    return values
