"""A graph network over the operators of the forward pass, with a conformal bound from held-out groups.

Start reading at `GNNEstimator.fit`; the network is in `learn/peers/gnn_nets.py`.

After DNNPerf (Gao et al., ICSE-SEIP 2023), which learns memory and time from a computation graph's node and edge
features, and PerfSeer, which adds features of the whole graph. Ours: operators of the traced step, residual GINE
convolutions, and a readout that adds up sizes: memory is a constant, the weights with their gradients and states, and a
share of what each operator writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from conf.errors import UsageError
from learn.bounds import too_few_for
from learn.cases import Case
from learn.data import Rows
from learn.estimators import LEVEL, Estimator, ResidualPrediction, open_state, require_rows, to_space, write_state
from learn.learned.tabular import group_folds
from learn.step_record import StepRecord
from learn.step_store import StepStore
from learn.targets import Target

if TYPE_CHECKING:
    from learn.peers.gnn_nets import Graph, GraphNet

FOLDS, FEW_FOLDS, FEW_ROWS = 5, 3, 200  # one fold is held out: more of them where rows are few
LEAST_ROWS = 10
CATEGORIES = 64  # of operators; `featurize.opgraph.VOCABULARY` may grow
_MIB_LOG2 = 20

# Features of the whole graph; besides all of the device (`gpu_*`). None is the trace's own figure of memory or time.
_SCALARS = (
    "net_states", "net_math_bits", "net_channels_last", "net_cudnn_benchmark", "net_training_loop",
    "net_log_parameters", "net_parameter_tensors", "net_log_largest_parameter", "net_log_flops", "net_log_elements",
)  # fmt: skip
_SUMMED = ("log_bytes_written", "log_flops")  # node columns that are also summed by category


@dataclass(frozen=True, eq=False)
class Scaling:
    """Columns of the inputs, and how they are standardised. Columns by name, (columns, 2) mean and scale."""

    node_columns: tuple[str, ...]
    scalar_columns: tuple[str, ...]
    nodes: np.ndarray
    scalars: np.ndarray


class GNNEstimator(Estimator):
    """Learns any target from the operator graph, of configs and modules alike. A fifth of the groups is held out (a
    third of few): it tells which of the last epochs is kept, and its errors are the distribution and the bound.

    Out-of-memory rows count as errors where the estimate is below the device's memory. A case that cannot be traced is
    refused, and left out when fitting. Since the same held-out rows choose the epoch and calibrate the bound, the bound
    leans a little low: it is no bound from rows that fitting never looked at.
    """

    name: ClassVar[str] = "gnn"
    targets: ClassVar[tuple[str, ...] | None] = None
    needs_trace: ClassVar[bool] = True
    uses_out_of_memory: ClassVar[bool] = True
    target: Target  # once it is fitted or loaded

    def __init__(self, seed: int = 0) -> None:
        self.seed = int(seed)
        self._scaling: Scaling | None = None
        self._shape: dict[str, Any] = {}  # arguments of GraphNet
        self._weights: dict[str, np.ndarray] = {}
        self._net: GraphNet | None = None
        self._residuals = np.empty(0)

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Self:
        """Fit on the rows that can be traced; at least 10 with exact labels, in 2 groups, or `UsageError`."""
        from learn.peers.gnn_nets import GraphNet, train
        from learn.peers.torch_fit import arrays_of, quiet_torch

        require_rows(rows, least=LEAST_ROWS)
        rows = rows.trusted
        rows = rows.subset(np.argsort(rows.run_ids.astype(str), kind="stable"))
        steps = StepStore() if steps is None else steps
        records = [steps.record(case) for case in rows.cases]
        traced = np.array([record.error is None for record in records], dtype=bool)
        if (~rows.censored[traced]).sum() < LEAST_ROWS:
            reason = next((record.error for record in records if record.error is not None), "")
            raise UsageError(f"estimator=gnn: {traced.sum()} of {len(rows)} rows could be traced; {reason}")
        rows, records = rows.subset(traced), [record for record in records if record.error is None]
        self.target = rows.target

        raw = [_Raw.of(case, record) for case, record in zip(rows.cases, records, strict=True)]
        self._scaling = _learn_scaling(raw)
        graphs = [one.scaled(self._scaling) for one in raw]
        label = to_space(rows.label, rows.target.space)
        exact = label[~rows.censored]
        kind = "sum" if rows.target.is_memory else "ratio" if rows.target.space == "ratio" else "plain"
        self._shape = {
            "nodes": graphs[0].nodes_VX.shape[1],
            "edges": graphs[0].edges_EZ.shape[1],
            "scalars": len(graphs[0].scalars_S),
            "categories": CATEGORIES,
            "kind": kind,
            "offset": float(exact.min() - 0.2 if kind == "sum" else exact.mean()),
            "scale": float(max(exact.std(), 1e-3)),
        }
        held_out = group_folds(rows.group, FEW_FOLDS if len(rows) < FEW_ROWS else FOLDS, self.seed) == 0
        epochs = int(np.clip(100_000 // len(rows), 20, 30))
        with quiet_torch(self.seed):
            net = train(GraphNet(**self._shape), graphs, label, rows.censored, held_out, self.seed, epochs=epochs)
            self._weights, self._net = arrays_of(net), None
        judged = np.flatnonzero(held_out & ~rows.censored)
        if rows.target.space == "ratio":
            label = np.clip(label, 0.0, 1.0)
        self._residuals = np.sort(label[judged] - self._centre([graphs[i] for i in judged]))
        return self

    def predict(self, cases: Sequence[Case], steps: StepStore | None = None) -> ResidualPrediction:
        if self._scaling is None:
            raise RuntimeError("fit or load the estimator before predicting")
        steps = StepStore() if steps is None else steps
        refusals: dict[int, str] = {}
        graphs: dict[int, Graph] = {}
        for i, case in enumerate(cases):
            record = steps.record(case)
            if record.error is None:
                graphs[i] = _Raw.of(case, record).scaled(self._scaling)
            else:
                refusals[i] = record.error
        centre = np.full(len(cases), np.nan)
        if graphs:
            centre[list(graphs)] = self._centre(list(graphs.values()))
        warning = too_few_for(LEVEL, len(self._residuals))
        return ResidualPrediction(centre, self._residuals, self.target.space, (warning,) if warning else (), refusals)

    def save(self, folder: Path) -> None:
        folder = Path(folder)
        if (scaling := self._scaling) is None:
            raise RuntimeError("fit or load the estimator before saving it")
        arrays: dict[str, Any] = {"node_scaling": scaling.nodes, "scalar_scaling": scaling.scalars}
        arrays |= {f"net/{name}": array for name, array in self._weights.items()}
        np.savez_compressed(folder / "gnn.npz", **arrays)
        state = {
            "shape": self._shape,
            "node_columns": list(scaling.node_columns),
            "scalar_columns": list(scaling.scalar_columns),
            "residuals": self._residuals.tolist(),
        }
        write_state(folder, self, state)

    @classmethod
    def load(cls, folder: Path) -> Self:
        folder = Path(folder)
        loaded, state = open_state(cls, folder)
        loaded._shape = state["shape"]
        loaded._residuals = np.asarray(state["residuals"], dtype=float)
        with np.load(folder / "gnn.npz", allow_pickle=False) as arrays:
            names = tuple(state["node_columns"]), tuple(state["scalar_columns"])
            loaded._scaling = Scaling(*names, arrays["node_scaling"], arrays["scalar_scaling"])
            loaded._weights = {n.removeprefix("net/"): arrays[n] for n in arrays.files if n.startswith("net/")}
        return loaded

    def _centre(self, graphs: Sequence[Graph]) -> np.ndarray:
        from learn.peers.gnn_nets import GraphNet, answers
        from learn.peers.torch_fit import quiet_torch, steady, with_arrays

        with quiet_torch(0):
            net = self._net or with_arrays(GraphNet(**self._shape), self._weights)
            self._net = net
            return steady(answers(net, graphs))


@dataclass(frozen=True, eq=False)
class _Raw:
    """A case's graph before it is standardised."""

    record_nodes: np.ndarray
    node_columns: tuple[str, ...]
    categories: np.ndarray
    edges: np.ndarray
    scalars: Mapping[str, float]
    states: float

    @classmethod
    def of(cls, case: Case, record: StepRecord) -> _Raw:
        graph = record.operator_graph()
        columns = tuple(map(str, graph["node_columns"]))
        categories = np.minimum(graph["categories"].astype(np.int64), CATEGORIES - 1)
        values = record.values
        scalars = {name: float(values[name]) for name in _SCALARS}
        scalars |= {name: float(value) for name, value in values.items() if name.startswith("gpu_")}
        scalars["log_batch"] = math.log2(case.batch_size)
        for name in _SUMMED:
            amounts = np.exp2(graph["nodes"][:, columns.index(name)].astype(float))
            sums = np.bincount(categories, weights=amounts, minlength=CATEGORIES)
            scalars |= {f"{name}_{i}": float(math.log2(1 + total)) for i, total in enumerate(sums)}
        mib = 4 * 2 ** (values["net_log_parameters"] - _MIB_LOG2)
        return cls(graph["nodes"], columns, categories, graph["edges"].astype(np.int64), scalars,
                   mib * (2 + values["net_states"]))  # fmt: skip

    def scaled(self, scaling: Scaling) -> Graph:
        from learn.peers.gnn_nets import Graph

        if self.node_columns != scaling.node_columns:
            raise UsageError("the operator graph has other columns than when this was fitted: fit it again")
        source, reader = self.edges
        written = self.record_nodes[:, self.node_columns.index("log_bytes_written")].astype(float)
        inner = written[source] / _MIB_LOG2, np.log1p(reader - source) / 4
        # Both ways, told apart by the last feature: what an operator keeps depends on who reads it.
        there, back = (np.stack([*inner, np.full(len(source), way)], axis=1) for way in (0.0, 1.0))
        scalars = np.array([self.scalars.get(name, 0.0) for name in scaling.scalar_columns])
        return Graph(
            category_V=self.categories,
            nodes_VX=_standardised(self.record_nodes, scaling.nodes),
            source_E=np.concatenate([source, reader]),
            reader_E=np.concatenate([reader, source]),
            edges_EZ=np.concatenate([there, back]).astype(np.float32),
            scalars_S=_standardised(scalars, scaling.scalars),
            size_V=np.exp2(written - _MIB_LOG2).astype(np.float32),
            states=float(self.states),
        )


def _learn_scaling(raw: Sequence[_Raw]) -> Scaling:
    columns = tuple(sorted({name for one in raw for name in one.scalars}))
    scalars = np.array([[one.scalars.get(name, 0.0) for name in columns] for one in raw])
    nodes = np.concatenate([one.record_nodes for one in raw]).astype(float)
    return Scaling(raw[0].node_columns, columns, _mean_and_scale(nodes), _mean_and_scale(scalars))


def _mean_and_scale(table: np.ndarray) -> np.ndarray:
    scale = table.std(axis=0)
    return np.stack([table.mean(axis=0), np.where(scale > 1e-6, scale, 1.0)], axis=1)


def _standardised(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """float32; what lies far from everything seen is taken as 6 deviations away."""
    return np.clip((values - by[:, 0]) / by[:, 1], -6.0, 6.0).astype(np.float32)
