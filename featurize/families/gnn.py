"""Graph networks that classify nodes: graph convolutions over random graphs of a fixed size, one linear layer.

Start reading at `Config`; the operators run as PyTorch Geometric runs them without its extensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from conf.errors import one_of
from featurize.families import _parts as parts
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import Activation, Rate, Repeats, TrialConfig

OPERATORS = ("gcn", "sage", "gat")
MAX_SAMPLED_EDGES = 4_000_000  # edges of a sampled batch


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """A graph has `nodes` nodes with `features` features each, and `nodes` * `degree` edges; `batch_size` of them are
    joined into one without edges between them. depth: convolutions, `hidden` features wide.
    operator: `gcn`, weighted by degrees; `sage`, the neighbours' mean; `gat`, attention with `heads` heads, which must
    divide `hidden`; the others ignore `heads`. dropout: rate after every convolution, 0 for none."""

    nodes: int
    degree: int
    features: int
    classes: int
    hidden: int
    depth: Repeats
    operator: Annotated[str, one_of(OPERATORS)] = "gcn"
    heads: int = 1
    activation: Activation = "relu"
    dropout: Rate = 0.0

    def problems(self) -> Iterator[str]:
        if self.operator == "gat" and self.hidden % self.heads:
            yield f"heads must divide hidden, got {self.heads} heads for {self.hidden} features"


def kind(config: Config) -> str:
    """Return the kind, such as `gnn/gat`."""
    return f"{config.family}/{config.operator}"


def _matrix(inputs: int, outputs: int, rows: int) -> Layer:
    """Return `nn.Linear` without bias."""
    return Layer("linear", rows * outputs, inputs * outputs, 2 * rows * inputs * outputs)


def blocks(config: Config) -> list[NetworkBlock]:
    """Return the network in the order of the forward pass: convolutions have their operator's name."""
    first = NetworkBlock(config.operator, config.features)
    return [first, NetworkBlock(config.operator, config.hidden, times=config.depth - 1), NetworkBlock("head")]


def block_layers(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a block's part of the forward pass per graph."""
    nodes, outputs = config.nodes, config.hidden
    if block.kind == "head":
        return [parts.linear(outputs, config.classes, nodes)]
    elements = nodes * outputs
    return [
        *_convolution(config, block),
        parts.activation(config.activation, elements),
        parts.dropout(config.dropout, elements),
    ]


def _convolution(config: Config, block: NetworkBlock) -> list[Layer]:
    """Return a convolution: `gather` reads features edge by edge, `scatter` sums them into targets. Loops are edges."""
    inputs, nodes, outputs, edges = block.inputs, config.nodes, config.hidden, config.nodes * config.degree
    if block.kind == "sage":
        return [
            Layer("gather", edges * inputs),
            Layer("scatter", nodes * inputs),
            parts.linear(inputs, outputs, nodes),
            _matrix(inputs, outputs, nodes),
            Layer("add", nodes * outputs),
        ]
    looped = edges + nodes
    return [
        _matrix(inputs, outputs, nodes),
        Layer("edge_softmax", looped * config.heads, 2 * outputs, present=block.kind == "gat"),
        Layer("gather", looped * outputs),
        Layer("scatter", nodes * outputs, outputs),
    ]


def build(config: Config) -> parts.Module:
    """Return the network: nodes [V, features] floats and edges [2, E] indices -> logits [V, classes]."""
    from torch import nn

    from featurize.nets.modules import (
        AttentionConvolution,
        GraphBlock,
        GraphClassifier,
        GraphConvolution,
        SampleConvolution,
    )

    def convolution(inputs: int) -> nn.Module:
        if config.operator == "gat":
            return AttentionConvolution(inputs, config.hidden, config.heads)
        if config.operator == "sage":
            return SampleConvolution(inputs, config.hidden)
        return GraphConvolution(inputs, config.hidden)

    widths = [config.features, *[config.hidden] * (config.depth - 1)]
    return GraphClassifier(
        [GraphBlock(convolution(width), config.activation, config.dropout) for width in widths],
        config.hidden,
        config.classes,
        recompute=config.activation_checkpointing,
    )


def batch(config: Config, device: parts.Device) -> parts.Batch:
    """Return nodes [V, features] float32 and edges [2, E] int64, V = N * nodes and E = V * degree, with no edge between
    graphs; class indices [V]."""
    import torch

    graphs, nodes = config.batch_size, config.nodes
    features = torch.randn(graphs * nodes, config.features, device=device)
    edges = torch.randint(nodes, (2, graphs, nodes * config.degree), device=device)
    edges += torch.arange(0, graphs * nodes, nodes, device=device)[:, None]
    return (features, edges.flatten(1)), torch.randint(config.classes, (graphs * nodes,), device=device)


def repair(values: dict[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Make `hidden` a multiple of `heads` for attention; others get one head, so that two points that build the same
    network get the same config. The degree is lowered to what `MAX_SAMPLED_EDGES` allows."""
    if values.get("operator", "gcn") == "gat":
        parts.round_down(values, "hidden", values.get("heads"))
    else:
        values.pop("heads", None)
    nodes, degree, graphs = values.get("nodes"), values.get("degree"), values.get("batch_size")
    if not (parts.is_integer(nodes) and parts.is_integer(degree) and parts.is_integer(graphs)):
        return values
    if min(nodes, degree, graphs) > 0:
        values["degree"] = min(degree, max(MAX_SAMPLED_EDGES // (nodes * graphs), 1))
    return values
