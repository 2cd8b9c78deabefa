"""A graph network over the operators of the forward pass, with a conformal bound from held-out groups.

Start reading at `GNNEstimator.fit` and `GraphNet.forward`. torch-geometric is imported when a net is made: the import
takes seconds, and one of its dependencies opens a socket.

After DNNPerf (Gao et al., ICSE-SEIP 2023), which learns memory and time from a computation graph's node and edge
features, and PerfSeer, which adds features of the whole graph. Ours: operators of the traced step, residual GINE
convolutions, and a readout that adds up sizes: memory is a constant, the weights with their gradients and states, and a
share of each operator's output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from learn.estimators.protocol import (
    LEAST_ROWS,
    LEVEL,
    Estimator,
    ResidualPrediction,
    group_folds,
    records_of,
    require_rows,
    to_space,
    too_few_for,
    traced_rows,
    within_space,
)
from learn.job.training_job import Case
from learn.peers.base import arrays_of, in_parts, quiet_torch, steady, train_best, with_arrays
from learn.rows.data import Rows
from learn.rows.step_store import StepRecord, StepStore

FOLDS, FEW_FOLDS, FEW_ROWS = 5, 3, 200  # one fold is held out; there are fewer folds where rows are few
CATEGORIES = 64  # categories of operators: room for `featurize.operators.table.VOCABULARY` to grow
_MIB_LOG2 = 20

# Features of the whole graph, in addition to those of the device (`gpu_*`). None is the trace's figure of memory or
# time.
_SCALARS = (
    "net_states",
    "net_math_bits",
    "net_channels_last",
    "net_cudnn_benchmark",
    "net_training_loop",
    "net_log_parameters",
    "net_parameter_tensors",
    "net_log_largest_parameter",
    "net_log_flops",
    "net_log_elements",
)
_SUMMED = ("log_bytes_written", "log_flops")  # node columns that are also summed by category


class GNNEstimator(Estimator):
    """Learns any target from the operator graph, of configs and modules alike. A fifth of the groups is held out (a
    third where rows are few): it selects among the last epochs, and its errors are the distribution and the bound.

    Out-of-memory rows count as errors where the estimate is below the device's memory. A case that cannot be traced is
    refused, and left out of fits. The same held-out rows choose the epoch and calibrate the bound, so the bound is
    slightly low: no rows are kept from the fit entirely.
    """

    name: ClassVar[str] = "gnn"
    needs_trace: ClassVar[bool] = True
    uses_out_of_memory: ClassVar[bool] = True

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Self:
        """Fit on the rows that can be traced. Raises `UsageError` for fewer than 10 exact labels or 2 groups."""
        require_rows(rows, least=LEAST_ROWS)
        rows, records = traced_rows(rows.trusted, steps)
        self.target = rows.target

        raw = [graph_of(case, record) for case, record in zip(rows.cases, records, strict=True)]
        self._node_scaling = _mean_and_scale(torch.cat([graph.nodes_VX for graph in raw]))
        self._scalar_scaling = _mean_and_scale(torch.cat([graph.scalars_GS for graph in raw]))
        graphs = [self._scaled(graph) for graph in raw]
        label = to_space(rows.label, rows.target.space)
        exact = label[~rows.censored]
        kind = "sum" if rows.target.is_memory else "ratio" if rows.target.space == "ratio" else "plain"
        self._shape: dict[str, Any] = {
            "nodes": graphs[0].nodes_VX.shape[1],
            "edges": graphs[0].edges_EZ.shape[1],
            "scalars": graphs[0].scalars_GS.shape[1],
            "categories": CATEGORIES,
            "kind": kind,
            "offset": float(exact.min() - 0.2 if kind == "sum" else exact.mean()),
            "scale": float(max(exact.std(), 1e-3)),
        }
        held_out = group_folds(rows.group, FEW_FOLDS if len(rows) < FEW_ROWS else FOLDS, self.seed) == 0
        epochs = int(np.clip(100_000 // len(rows), 20, 30))
        with quiet_torch(self.seed):
            net = train(GraphNet(**self._shape), graphs, label, rows.censored, held_out, self.seed, epochs=epochs)
            self._weights = arrays_of(net)
        judged = np.flatnonzero(held_out & ~rows.censored)
        label = within_space(label, rows.target.space)
        self._residuals = np.sort(label[judged] - self._centre([graphs[i] for i in judged]))
        return self

    def predict(self, cases: Sequence[Case], steps: StepStore | None = None) -> ResidualPrediction:
        target = self.require_fitted()
        records, refusals = records_of(cases, steps)
        centre = np.full(len(cases), np.nan)
        if records:
            graphs = [self._scaled(graph_of(cases[i], record)) for i, record in records.items()]
            centre[list(records)] = self._centre(graphs)
        warnings = too_few_for(LEVEL, len(self._residuals))
        return ResidualPrediction(centre, self._residuals, target.space, warnings=warnings, refusals=refusals)

    def write_fit(self, folder: Path) -> dict[str, Any]:
        arrays: dict[str, Any] = {"node_scaling": self._node_scaling, "scalar_scaling": self._scalar_scaling}
        arrays |= {f"net/{name}": array for name, array in self._weights.items()}
        np.savez_compressed(folder / "gnn.npz", **arrays)
        return {"shape": self._shape, "residuals": self._residuals.tolist()}

    def read_fit(self, folder: Path, state: Mapping[str, Any]) -> None:
        self._shape = state["shape"]
        self._residuals = np.asarray(state["residuals"], dtype=float)
        with np.load(folder / "gnn.npz", allow_pickle=False) as arrays:
            self._node_scaling, self._scalar_scaling = arrays["node_scaling"], arrays["scalar_scaling"]
            self._weights = {n.removeprefix("net/"): arrays[n] for n in arrays.files if n.startswith("net/")}

    def _scaled(self, graph: Graphs) -> Graphs:
        """Return the graph with standardised features."""
        return replace(
            graph,
            nodes_VX=_standardise(graph.nodes_VX, self._node_scaling),
            scalars_GS=_standardise(graph.scalars_GS, self._scalar_scaling),
        )

    def _centre(self, graphs: Sequence[Graphs]) -> np.ndarray:
        with quiet_torch(0):
            return steady(answers(with_arrays(GraphNet(**self._shape), self._weights), graphs))


def graph_of(case: Case, record: StepRecord) -> Graphs:
    """Return a case's graph with raw features; its scalars are in the alphabetical order of their names."""
    graph = record.operator_graph()
    columns = graph["node_columns"].tolist()
    categories = np.minimum(graph["categories"].astype(np.int64), CATEGORIES - 1)
    values = record.values
    scalars = {name: float(values[name]) for name in _SCALARS}
    scalars |= {name: float(value) for name, value in values.items() if name.startswith("gpu_")}
    scalars["log_batch"] = math.log2(case.batch_size)
    for name in _SUMMED:
        amounts = np.exp2(graph["nodes"][:, columns.index(name)].astype(float))
        sums = np.bincount(categories, weights=amounts, minlength=CATEGORIES)
        scalars |= {f"{name}_{i}": float(math.log2(1 + total)) for i, total in enumerate(sums)}
    source, reader = graph["edges"].astype(np.int64)
    written = graph["nodes"][:, columns.index("log_bytes_written")].astype(float)
    inner = written[source] / _MIB_LOG2, np.log1p(reader - source) / 4
    # Edges in both directions, distinguished by the last feature: an operator's kept memory depends on its readers.
    forward_edges, backward_edges = (np.stack([*inner, np.full(len(source), way)], axis=1) for way in (0.0, 1.0))
    states_mib = 4 * 2 ** (values["net_log_parameters"] - _MIB_LOG2) * (2 + values["net_states"])
    ends = torch.from_numpy(np.stack([source, reader]))
    return Graphs(
        category_V=torch.from_numpy(categories),
        nodes_VX=torch.from_numpy(graph["nodes"]),
        ends_2E=torch.cat([ends, ends.flip(0)], dim=1),
        edges_EZ=torch.from_numpy(np.concatenate([forward_edges, backward_edges]).astype(np.float32)),
        scalars_GS=torch.tensor([[scalars[name] for name in sorted(scalars)]], dtype=torch.float64),
        size_V=torch.from_numpy(np.exp2(written - _MIB_LOG2).astype(np.float32)),
        states_G=torch.tensor([states_mib], dtype=torch.float64),
        graph_V=torch.zeros(len(categories), dtype=torch.int64),
    )


def _mean_and_scale(values: Tensor) -> np.ndarray:
    """Return (columns, 2), the mean and the scale by which `_standardise` divides."""
    table = values.double().numpy()
    scale = table.std(axis=0)
    return np.stack([table.mean(axis=0), np.where(scale > 1e-6, scale, 1.0)], axis=1)


def _standardise(values: Tensor, scaling: np.ndarray) -> Tensor:
    """Return the values in float32, standardised and clipped to 6 deviations."""
    mean, scale = torch.from_numpy(scaling).unbind(1)
    return ((values - mean) / scale).clip(-6.0, 6.0).float()


# Suffixes: G graphs, V nodes, E edges, X node features, Z edge features, S scalars of a graph, D width.

WIDTH = 48
CONVOLUTIONS = 3
_LEAST_LOG, _MOST_LOG = -8.0, 3.0  # limits of the logarithm of the counted share of an operator's output


@dataclass(frozen=True, eq=False)
class Graphs:
    """One case, or several in a batch.

    category_V int64; nodes_VX, edges_EZ, scalars_GS float, the first and the last standardised by `_scaled`; ends_2E
    int64: each edge's operators; size_V: mebibytes of each operator's output; states_G: mebibytes of weights, gradients
    and optimizer state; graph_V int64: each operator's graph.
    """

    category_V: Tensor
    nodes_VX: Tensor
    ends_2E: Tensor
    edges_EZ: Tensor
    scalars_GS: Tensor
    size_V: Tensor
    states_G: Tensor
    graph_V: Tensor


def batch_of(graphs: Sequence[Graphs], dtype: torch.dtype = torch.float32) -> Graphs:
    """Return the graphs in one batch, without edges between them; features and sizes are of that type."""
    counts = [len(graph.category_V) for graph in graphs]
    firsts = np.cumsum([0, *counts[:-1]]).tolist()

    def join(name: str) -> Tensor:
        return torch.cat([getattr(graph, name) for graph in graphs]).to(dtype)

    return Graphs(
        category_V=torch.cat([graph.category_V for graph in graphs]),
        nodes_VX=join("nodes_VX"),
        ends_2E=torch.cat([graph.ends_2E + first for graph, first in zip(graphs, firsts, strict=True)], dim=1),
        edges_EZ=join("edges_EZ"),
        scalars_GS=join("scalars_GS"),
        size_V=join("size_V"),
        states_G=join("states_G"),
        graph_V=torch.repeat_interleave(torch.tensor(counts)),
    )


class GraphNet(nn.Module):
    """Message passing over operators, then a readout of the graph.

    kind  `sum`: the logarithm of a sum of sizes: a constant, a multiple of the states and a share of each operator's
          output, all learned. `ratio`: a sigmoid. `plain`: a number. `offset` and `scale` are the label's; for a sum,
          the offset is the constant's.
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

    def forward(self, batch: Graphs) -> Tensor:
        """Return (G,) labels in their space."""
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
    graphs: Sequence[Graphs],
    label: np.ndarray,
    censored: np.ndarray,
    held_out: np.ndarray,
    seed: int,
    *,
    epochs: int,
) -> GraphNet:
    """Return the net trained on the graphs outside `held_out` (n,) bool, of the epoch that estimates those best.

    label (n,) is in the target's space; where censored, only an estimate below it is an error.
    """
    inside, outside = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-4)
    size = int(np.clip(len(inside) // 16, 16, 64))
    steps = epochs * math.ceil(len(inside) / size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.15)
    rng = np.random.default_rng(seed)
    tolerance = 0.05 * (net.scale if net.kind == "plain" else 1.0)
    held_out_batches = [(part, batch_of([graphs[i] for i in part])) for part in in_parts(outside, 128)]

    def loss_of(part: np.ndarray) -> Tensor:
        error = _errors(net, batch_of([graphs[i] for i in part]), label[part], censored[part])
        return nn.functional.smooth_l1_loss(error, torch.zeros_like(error), beta=tolerance)

    def held_out_loss() -> float:
        with torch.no_grad():
            return sum(
                _errors(net, batch, label[part], censored[part]).abs().sum().item() for part, batch in held_out_batches
            )

    return train_best(
        net,
        optimizer,
        schedule,
        lambda: in_parts(rng.permutation(inside), size),
        loss_of,
        held_out_loss,
        epochs=epochs,
        first=epochs // 2,  # the best one is among the last, when the steps are small
    )


def answers(net: GraphNet, graphs: Sequence[Graphs]) -> np.ndarray:
    """Return (n,) labels in their space, of a net from `learn.peers.base.with_arrays`."""
    with torch.inference_mode():
        parts = [batch_of(graphs[i : i + 128], torch.float64) for i in range(0, len(graphs), 128)]
        return np.concatenate([net(batch).numpy() for batch in parts]) if parts else np.empty(0)


def _errors(net: GraphNet, batch: Graphs, label: np.ndarray, censored: np.ndarray) -> Tensor:
    error = net(batch) - torch.from_numpy(label.astype(np.float32))
    return torch.where(torch.from_numpy(censored), error.clamp(max=0.0), error)
