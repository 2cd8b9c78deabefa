"""The torch modules of the family `gnn`: graph convolutions by plain message passing. Imported only inside a `build`.

Start reading at `GraphClassifier`. The operators are those that PyTorch Geometric runs without its extensions: features
are read edge by edge (`index_select`) and summed into their targets (`scatter_add_`). Shape suffixes: V nodes, F
features, E edges, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from featurize.nets.modules import Stack, activation, dropout


def with_loops(edges: torch.Tensor, nodes: int) -> torch.Tensor:
    """[2, E] -> [2, E + nodes]: an edge from every node to itself besides."""
    loops = torch.arange(nodes, device=edges.device).expand(2, -1)
    return torch.cat([edges, loops], dim=1)


def sum_by_target(values: torch.Tensor, target_E: torch.Tensor, nodes: int) -> torch.Tensor:
    """Values [E, ...] -> [nodes, ...]: the sum over the edges that lead to each node."""
    return values.new_zeros(nodes, *values.shape[1:]).scatter_add_(0, _like(target_E, values), values)


def softmax_by_target(scores_EH: torch.Tensor, target_E: torch.Tensor, nodes: int) -> torch.Tensor:
    """Over the edges that lead to the same node."""
    most = scores_EH.new_zeros(nodes, *scores_EH.shape[1:]).scatter_reduce_(
        0, _like(target_E, scores_EH), scores_EH.detach(), "amax", include_self=False
    )
    weights = (scores_EH - most.index_select(0, target_E)).exp()
    return weights / (sum_by_target(weights, target_E, nodes) + 1e-16).index_select(0, target_E)


def _like(target_E: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return target_E.view(-1, *[1] * (values.dim() - 1)).expand_as(values)


class GraphConvolution(nn.Module):
    """Nodes [V, F_in], edges [2, E] -> [V, F_out]: the neighbours' and the node's own features, each weighted by the
    degrees of both (Kipf and Welling, arXiv 1609.02907)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.project = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x_VF: torch.Tensor, edges_2E: torch.Tensor) -> torch.Tensor:
        nodes = len(x_VF)
        source, target = with_loops(edges_2E, nodes)
        degree = sum_by_target(torch.ones(len(target), device=x_VF.device), target, nodes)
        scale = degree.pow(-0.5)
        weight = scale[source] * scale[target]
        messages = weight[:, None] * self.project(x_VF).index_select(0, source)
        return sum_by_target(messages, target, nodes) + self.bias


class SampleConvolution(nn.Module):
    """Nodes [V, F_in], edges [2, E] -> [V, F_out]: a linear layer of the neighbours' mean plus one of the node itself
    (GraphSAGE: Hamilton et al., arXiv 1706.02216)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.neighbours = nn.Linear(inputs, outputs)
        self.own = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x_VF: torch.Tensor, edges_2E: torch.Tensor) -> torch.Tensor:
        nodes = len(x_VF)
        source, target = edges_2E
        total = sum_by_target(x_VF.index_select(0, source), target, nodes)
        count = sum_by_target(torch.ones(len(target), device=x_VF.device), target, nodes)
        mean = total / count.clamp(min=1)[:, None]
        return self.neighbours(mean) + self.own(x_VF)


class AttentionConvolution(nn.Module):
    """Nodes [V, F_in], edges [2, E] -> [V, F_out]: each head's mean of the neighbours and the node itself, weighted by
    a softmax over them (GAT: Velickovic et al., arXiv 1710.10903)."""

    def __init__(self, inputs: int, outputs: int, heads: int):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(inputs, outputs, bias=False)
        self.as_source = nn.Parameter(torch.empty(1, heads, outputs // heads))
        self.as_target = nn.Parameter(torch.empty(1, heads, outputs // heads))
        self.bias = nn.Parameter(torch.zeros(outputs))
        for parameter in (self.as_source, self.as_target):
            nn.init.xavier_uniform_(parameter)

    def forward(self, x_VF: torch.Tensor, edges_2E: torch.Tensor) -> torch.Tensor:
        nodes = len(x_VF)
        source, target = with_loops(edges_2E, nodes)
        x_VHF = self.project(x_VF).view(nodes, self.heads, -1)
        by_source_VH, by_target_VH = ((x_VHF * a).sum(-1) for a in (self.as_source, self.as_target))
        scores_EH = by_source_VH.index_select(0, source) + by_target_VH.index_select(0, target)
        weights_EH = softmax_by_target(F.leaky_relu(scores_EH, 0.2), target, nodes)
        messages = weights_EH[:, :, None] * x_VHF.index_select(0, source)
        return sum_by_target(messages, target, nodes).flatten(1) + self.bias


class GraphBlock(nn.Module):
    """A convolution, the activation, dropout."""

    def __init__(self, convolution: nn.Module, activation_name: str, rate: float):
        super().__init__()
        self.convolution = convolution
        self.rest = nn.Sequential(activation(activation_name), *dropout(rate))

    def forward(self, x_VF: torch.Tensor, edges_2E: torch.Tensor) -> torch.Tensor:
        return self.rest(self.convolution(x_VF, edges_2E))


class GraphClassifier(nn.Module):
    """Nodes [V, F], edges [2, E] (row 0 the sources, row 1 the targets) -> logits of every node [V, classes]."""

    def __init__(self, blocks: Sequence[nn.Module], hidden: int, classes: int, *, recompute: bool):
        super().__init__()
        self.body = Stack(blocks, recompute=recompute)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x_VF: torch.Tensor, edges_2E: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x_VF, edges_2E))
