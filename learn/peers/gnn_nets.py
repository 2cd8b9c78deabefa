"""The graph network behind the `gnn` estimator, and how it is trained.

Start reading at `GraphNet.forward`. Torch-only: import it inside functions. torch-geometric is imported when a net is
made: it takes seconds, and one of its dependencies tries a socket.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Suffixes: G graphs, V nodes, E edges, X node features, Z edge features, S scalars of a graph, D width.

WIDTH = 48
CONVOLUTIONS = 3
_LEAST_LOG, _MOST_LOG = -8.0, 3.0  # of the share of an operator's output that counts


@dataclass(frozen=True, eq=False)
class Graph:
    """One case. category_V int64; nodes_VX, edges_EZ, scalars_S float, standardised; source_E, reader_E int64;
    size_V: mebibytes that each operator writes; states: mebibytes of weights, gradients and the optimizer's states."""

    category_V: np.ndarray
    nodes_VX: np.ndarray
    source_E: np.ndarray
    reader_E: np.ndarray
    edges_EZ: np.ndarray
    scalars_S: np.ndarray
    size_V: np.ndarray
    states: float


@dataclass(frozen=True, eq=False)
class Batch:
    category_V: Tensor
    nodes_VX: Tensor
    ends_2E: Tensor
    edges_EZ: Tensor
    scalars_GS: Tensor
    size_V: Tensor
    states_G: Tensor
    graph_V: Tensor

    @classmethod
    def of(cls, graphs: Sequence[Graph], dtype: torch.dtype = torch.float32) -> Batch:
        """The graphs side by side, none joined to another."""
        counts = [len(one.category_V) for one in graphs]
        first = np.concatenate([[0], np.cumsum(counts)[:-1]])
        ends = [np.stack([one.source_E, one.reader_E]) + start for one, start in zip(graphs, first, strict=True)]

        def joined(name: str) -> Tensor:
            return torch.from_numpy(np.concatenate([getattr(one, name) for one in graphs])).to(dtype)

        return cls(
            category_V=torch.from_numpy(np.concatenate([one.category_V for one in graphs])),
            nodes_VX=joined("nodes_VX"),
            ends_2E=torch.from_numpy(np.concatenate(ends, axis=1)),
            edges_EZ=joined("edges_EZ"),
            scalars_GS=torch.from_numpy(np.stack([one.scalars_S for one in graphs])).to(dtype),
            size_V=joined("size_V"),
            states_G=torch.tensor([one.states for one in graphs], dtype=dtype),
            graph_V=torch.from_numpy(np.repeat(np.arange(len(graphs)), counts)),
        )


class GraphNet(nn.Module):
    """Message passing over operators, then a readout of the graph.

    kind  `sum`: the logarithm of a sum of sizes: a constant, a multiple of the states and a share of what each
          operator writes, all learned. `ratio`: a sigmoid. `plain`: a number. `offset` and `scale`: of the label; the
          offset of a sum is the constant's.
    """

    def __init__(
        self, nodes: int, edges: int, scalars: int, categories: int, kind: str, offset: float, scale: float
    ) -> None:
        from torch_geometric.nn import GINEConv

        super().__init__()
        self.kind, self.offset, self.scale = kind, offset, scale
        self.of_category = nn.Embedding(categories, WIDTH)
        self.of_node = nn.Linear(nodes, WIDTH)
        self.convolutions = nn.ModuleList(
            GINEConv(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
                edge_dim=edges,
            )
            for _ in range(CONVOLUTIONS)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(CONVOLUTIONS))
        self.of_graph = nn.Sequential(nn.Linear(2 * WIDTH + scalars, 64), nn.ReLU())
        self.out = nn.Linear(64, 2)
        self.share = nn.Sequential(nn.Linear(WIDTH + 64, 32), nn.ReLU(), nn.Linear(32, 1))
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, batch: Batch) -> Tensor:
        """(G,) the label in its space."""
        from torch_geometric.nn import global_max_pool, global_mean_pool

        x_VD = self.of_category(batch.category_V) + self.of_node(batch.nodes_VX)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x_VD = x_VD + convolution(norm(x_VD), batch.ends_2E, batch.edges_EZ)
        graphs = len(batch.states_G)
        pooled = [pool(x_VD, batch.graph_V, graphs) for pool in (global_mean_pool, global_max_pool)]
        found_G = self.of_graph(torch.cat([*pooled, batch.scalars_GS], dim=1))
        out_G2 = self.out(found_G)
        if self.kind == "ratio":
            return torch.sigmoid(out_G2[:, 0])
        if self.kind == "plain":
            return self.offset + self.scale * out_G2[:, 0]
        share_V = self.share(torch.cat([x_VD, found_G[batch.graph_V]], dim=1))[:, 0].clamp(_LEAST_LOG, _MOST_LOG)
        written_G = torch.zeros_like(batch.states_G).index_add(0, batch.graph_V, batch.size_V * share_V.exp())
        constant_G = (self.offset + out_G2[:, 0].clamp(-3, 3)).exp()
        return (constant_G + batch.states_G * out_G2[:, 1].clamp(-3, 3).exp() + written_G).log()


def train(
    net: GraphNet,
    graphs: Sequence[Graph],
    label: np.ndarray,
    censored: np.ndarray,
    held_out: np.ndarray,
    seed: int,
    *,
    epochs: int,
) -> GraphNet:
    """The net, trained on the graphs outside `held_out` (n,) bool, as it was when those were told best.

    label (n,) is in the target's space; where censored, only what is below it is an error.
    """
    inside, outside = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-4)
    size = int(np.clip(len(inside) // 16, 16, 64))
    steps = epochs * math.ceil(len(inside) / size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.15)
    rng = np.random.default_rng(seed)
    tolerance = 0.05 * (net.scale if net.kind == "plain" else 1.0)
    held = [(part, Batch.of([graphs[i] for i in part])) for part in _parts(outside, 128)]
    best, best_loss = copy.deepcopy(net.state_dict()), math.inf
    for epoch in range(epochs):
        for part in _parts(rng.permutation(inside), size):
            optimizer.zero_grad(set_to_none=True)
            error = _errors(net, Batch.of([graphs[i] for i in part]), label[part], censored[part])
            F.smooth_l1_loss(error, torch.zeros_like(error), beta=tolerance).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        if epoch < epochs // 2:  # the best is among the last, when the steps are small
            continue
        with torch.no_grad():
            loss = sum(_errors(net, batch, label[part], censored[part]).abs().sum().item() for part, batch in held)
        if loss < best_loss:
            best, best_loss = copy.deepcopy(net.state_dict()), loss
    net.load_state_dict(best)
    return net


def answers(net: GraphNet, graphs: Sequence[Graph]) -> np.ndarray:
    """(n,) labels in their space, of a net from `learn.peers.torch_fit.with_arrays`."""
    with torch.inference_mode():
        parts = [Batch.of(graphs[i : i + 128], torch.float64) for i in range(0, len(graphs), 128)]
        return np.concatenate([net(batch).numpy() for batch in parts]) if parts else np.empty(0)


def _errors(net: GraphNet, batch: Batch, label: np.ndarray, censored: np.ndarray) -> Tensor:
    error = net(batch) - torch.from_numpy(label.astype(np.float32))
    return torch.where(torch.from_numpy(censored), error.clamp(max=0.0), error)


def _parts(index: np.ndarray, size: int) -> list[np.ndarray]:
    return [index[i : i + size] for i in range(0, len(index), size)]
