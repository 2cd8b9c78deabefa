"""The operator graph of a traced step as plain arrays, for estimators that learn from it.

Start reading at `opgraph` and `OpGraph`. Nodes are the operators of one steady step in their order, edges the tensors
that one makes and another reads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import TrainingSettings
from featurize.operators.table import VOCABULARY, attention_call, category
from featurize.recording.step_trace import Operator, StepTrace
from featurize.timing.costs import operator_costs

_INDEX = {kind: index for index, kind in enumerate(VOCABULARY)}

_PHASES = ("forward", "backward", "optimizer")
_LOGS = ("flops", "bytes_read", "bytes_written", "launches", "output_elements", "input_elements")
# Of products, convolutions, attention and recurrent layers: `batch` matrix products of m x k by k x n.
_DIMS = ("batch", "m", "n", "k", "kernel_elements", "stride")
NODE_COLUMNS = (
    *(f"log_{name}" for name in _LOGS),
    "dtype_bytes",
    *(f"in_{phase}" for phase in _PHASES),
    "depth",
    "position",
    "log_inputs",
    "log_outside_inputs",
    "log_readers",
    "has_dims",
    *(f"log_{name}" for name in _DIMS),
    "log_nanoseconds",
    "occupancy",
    "sm_share",
)
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True, eq=False)
class OpGraph:
    """One step on a GPU model. Names beginning with `log_` hold log2(1 + x); every value is finite.

    categories  (n,) int64, indices of `VOCABULARY`
    nodes       (n, f) float32, `node_columns` names the columns. `depth` (the longest path from the step's begin) and
                `position` (in the order of execution) lie in [0, 1]; dims that are not known are 0, with `has_dims` 0
    edges       (2, e) int64: source, reader; source < reader, no pair twice, sorted by reader
    """

    categories: np.ndarray
    nodes: np.ndarray
    node_columns: tuple[str, ...]
    edges: np.ndarray


def opgraph(trace: StepTrace, spec: DeviceSpec, settings: TrainingSettings) -> OpGraph:
    """Return the operator graph of a trace's steady step, priced by the kernel model.

    Args:
        trace: One step.
        spec: The GPU model.
        settings: The trace's own.
    """
    count = len(trace.operators)
    columns = list(zip(*trace.operators, strict=True)) if count else [()] * len(Operator._fields)
    field = dict(zip(Operator._fields, columns, strict=True))
    outputs = [sum(map(_elements, shapes)) for shapes in field["output_shapes"]]
    inputs = [sum(map(_elements, shapes)) for shapes in field["input_shapes"]]
    widths = np.array([DTYPE_BYTES.get(dtype, 4) for dtype in field["dtype"]], dtype=np.float64)
    edges, outside = _edges(field["sources"])
    depths = _depths(edges, count)

    logs = [field["flops"], field["bytes_read"], field["bytes_written"], field["launches"], outputs, inputs]
    phases = np.array([_PHASES.index(phase) if phase in _PHASES else -1 for phase in field["phase"]], dtype=np.int64)
    dims = np.array([product_dims(op) for op in trace.operators], dtype=np.float64).reshape(count, len(_DIMS))
    costs = np.array(operator_costs(trace, spec, settings), dtype=np.float64).reshape(count, 3)
    nodes = [
        *(_log(np.array(values, dtype=np.float64)) for values in logs),
        widths,
        *(phases == index for index in range(len(_PHASES))),
        depths / max(1, int(depths.max(initial=0))),
        np.arange(count) / max(1, count - 1),
        _log(np.array([len(sources) for sources in field["sources"]], dtype=np.float64)),
        _log(outside),
        _log(np.bincount(edges[0], minlength=count)),
        dims[:, 0] > 0,
        *_log(dims).T,
        _log(costs[:, 0] * 1e9),
        *costs[:, 1:].T,
    ]
    return OpGraph(
        categories=np.array([_INDEX[category(name)] for name in field["name"]], dtype=np.int64),
        nodes=np.column_stack(nodes).astype(np.float32),
        node_columns=NODE_COLUMNS,
        edges=edges,
    )


def _edges(sources: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges (2, e), and how many inputs of each operator come from before the step."""
    reader = np.repeat(np.arange(len(sources)), [len(of_node) for of_node in sources])
    source = np.array([one for of_node in sources for one in of_node], dtype=np.int64)
    outside = np.bincount(reader[source < 0], minlength=len(sources))
    inside = source >= 0
    pairs = np.unique(np.stack([reader[inside], source[inside]]), axis=1)
    return np.ascontiguousarray(pairs[::-1]), outside


def _depths(edges: np.ndarray, count: int) -> np.ndarray:
    """The longest path to each node. Edges are sorted by reader, and sources come before readers."""
    depths = [0] * count
    for source, reader in zip(*edges.tolist(), strict=True):
        if depths[source] >= depths[reader]:
            depths[reader] = depths[source] + 1
    return np.array(depths, dtype=np.float64)


def product_dims(op: Operator) -> tuple[float, ...]:
    """Return batch, m, n, k, kernel elements and stride of an operator's matrix products; zeros where it has none."""
    kind = category(op.name)
    find = _DIMS_OF.get(kind)
    try:
        dims = find(op, "backward" in kind) if find is not None else None
    except (IndexError, ValueError, ZeroDivisionError):  # not shaped as its class is
        dims = None
    return dims or (0.0,) * len(_DIMS)


def _matmul_dims(op: Operator, _backward: bool) -> tuple[float, ...] | None:
    shape = op.output_shapes[0]
    if len(shape) < 2:
        return None
    batch, m, n = math.prod(shape[:-2]), *shape[-2:]
    return batch, m, n, op.flops / (2 * batch * m * n), 0, 0


def _convolution_dims(op: Operator, backward: bool) -> tuple[float, ...]:
    x, weight = op.input_shapes[1:3] if backward else op.input_shapes[:2]
    y = op.input_shapes[0] if backward else op.output_shapes[0]
    kernel = math.prod(weight[2:])
    transposed = weight[0] == x[1] and weight[0] != y[1]
    groups = max(1, (y[1] if transposed else x[1]) // weight[1])
    stride = round(max(x[-1], y[-1]) / min(x[-1], y[-1]))
    return groups, y[0] * math.prod(y[2:]), y[1] / groups, x[1] * kernel / groups, kernel, stride


def _attention_dims(op: Operator, backward: bool) -> tuple[float, ...]:
    kernel = attention_call(op.name)
    query, key = op.input_shapes[kernel.query : kernel.query + 2]
    return *kernel.sizes(query, key), query[-1], 0, 0


def _recurrent_dims(op: Operator, backward: bool) -> tuple[float, ...]:
    x = op.input_shapes[0]
    matrices = [shape for shape in op.input_shapes[1:] if len(shape) == 2]  # of the input, of the state, ...
    steps, hidden = math.prod(x[:-1]), matrices[1][1]
    return 1, steps, hidden, op.flops / (2 * steps * hidden), 0, 0


_DIMS_OF = {
    "matmul": _matmul_dims,
    "convolution": _convolution_dims,
    "convolution_backward": _convolution_dims,
    "attention": _attention_dims,
    "attention_backward": _attention_dims,
    "recurrent": _recurrent_dims,
    "recurrent_backward": _recurrent_dims,
}


def _log(values: ArrayLike) -> np.ndarray:
    return np.log2(1.0 + np.asarray(values))


@functools.cache
def _elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
