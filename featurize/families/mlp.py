"""Multi-layer perceptrons: blocks of linear, batch norm, activation and dropout, then one linear layer to the classes.

Start reading at `widths`: the four topologies are those of GPUMemNet's MLPs (arXiv 2602.17817), width for width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from conf.errors import integer, one_of
from featurize.families import _parts as parts
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import MOST_REPEATS, Activation, Rate, Repeats, TrialConfig

TOPOLOGIES = ("pyramid", "uniform", "bottleneck", "gradual")
SAMPLED_ONLY = {"linear_layers": integer(2, MOST_REPEATS)}  # consumed by `repair`


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """depth: hidden layers by the topology's rule (a bottleneck adds one more): `depth + 1` linear layers, or
    `depth + 2`. classes: outputs; 1 trains on a loss of 0, at the same cost. dropout: rate, 0 for no such layers.
    softmax: ends in a softmax before the loss, as published; off, the outputs are logits."""

    input_size: int
    classes: int
    depth: Repeats
    topology: Annotated[str, one_of(TOPOLOGIES)] = "pyramid"
    activation: Activation = "relu"
    batch_norm: bool = False
    dropout: Rate = 0.0
    softmax: bool = False

    def problems(self) -> Iterator[str]:
        if self.batch_norm and self.batch_size == 1:
            yield "batch_size must be >= 2 with batch_norm, got 1"


def widths(config: Config) -> list[int]:
    """Return the outputs of every linear layer, with the last one's (`classes`)."""
    width, hidden = config.input_size, []
    step = (config.input_size - config.classes) // config.depth
    for _ in range(config.depth + (config.topology == "bottleneck")):
        if config.topology in ("pyramid", "bottleneck"):
            width = max(width // 2, config.classes)
        elif config.topology == "gradual":
            width = max(width - step, config.classes)
        hidden.append(width)
    return [*hidden, config.classes]


def blocks(config: Config) -> list[NetworkBlock]:
    """Return the linear layers in the order of the forward pass, each with its norm, activation and dropout."""
    *hidden, classes = widths(config)
    pairs = zip([config.input_size, *hidden], hidden, strict=False)
    return [*(NetworkBlock("hidden", *pair) for pair in pairs), NetworkBlock("head", hidden[-1], classes)]


def block_layers(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a block's part of the forward pass per sample."""
    outputs = block.outputs
    dense = parts.linear(block.inputs, outputs)
    if block.kind == "head":
        return [dense, Layer("softmax", outputs, present=config.softmax)]
    return [
        dense,
        Layer("batchnorm1d", outputs, 2 * outputs, present=config.batch_norm),
        parts.activation(config.activation, outputs),
        parts.dropout(config.dropout, outputs),
    ]


def build(config: Config) -> parts.Module:
    """Return the network: [N, input_size] floats -> [N, classes]."""
    from torch import nn

    from featurize.nets import modules

    def hidden(block: NetworkBlock) -> nn.Module:
        return nn.Sequential(
            nn.Linear(block.inputs, block.outputs),
            *([nn.BatchNorm1d(block.outputs)] if config.batch_norm else []),
            modules.activation(config.activation),
            *modules.dropouts(config.dropout),
        )

    *body, head = blocks(config)
    return nn.Sequential(
        modules.Stack(map(hidden, body), recompute=config.activation_checkpointing),
        nn.Linear(head.inputs, head.outputs),
        *([nn.Softmax(dim=1)] if config.softmax else []),
    )


def batch(config: Config, device: parts.Device) -> parts.Batch:
    """Return inputs [N, input_size] float32 and class indices [N]."""
    import torch

    inputs = torch.randn(config.batch_size, config.input_size, device=device)
    return (inputs,), torch.randint(config.classes, (config.batch_size,), device=device)


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Turn `linear_layers`, the number of all linear layers, into `depth` unless that is given."""
    linear_layers = values.pop("linear_layers", None)
    if "depth" not in values and linear_layers is not None:
        extra = 2 if values.get("topology") == "bottleneck" and linear_layers != 2 else 1
        values["depth"] = linear_layers - extra if parts.is_integer(linear_layers) else linear_layers
    return values
