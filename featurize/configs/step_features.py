"""Features of a traced step on one GPU model, for learners: a flat row of numbers, and the operator graph as arrays.

Start reading at `step_features` and `opgraph`. Names that begin with `net_` describe the network for one sample,
whatever the batch size; `job_` the whole job, `gpu_` the device. Nodes of the graph are the operators of one steady
step in their order; edges are tensors that one operator makes and another reads.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec, device_features
from featurize.job.training_settings import MATH_BITS, OPTIMIZERS, TrainingSettings
from featurize.memory.cudnn_workspaces import reserved_by_scenario
from featurize.memory.replay import MemoryProfile, outside_mib
from featurize.operators.table import VOCABULARY, attention_call, category
from featurize.recording.step_trace import BATCH, Operator, StepTrace
from featurize.timing.simulation import operator_costs, python_loader_ms, time_features, time_steps

_INDEX = {kind: index for index, kind in enumerate(VOCABULARY)}

_PHASES = ("forward", "backward", "optimizer")
_LOGS = ("flops", "bytes_read", "bytes_written", "launches", "output_elements", "input_elements")
# For products, convolutions, attention and recurrent layers: `batch` matrix products of m x k by k x n.
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
    nodes       (n, f) float32, `node_columns` names the columns. `depth` (the longest path from the step's start) and
                `position` (in the order of execution) lie in [0, 1]; unknown dims are 0, with `has_dims` 0
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
        settings: The trace's training settings.
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
        *(_logs(np.array(values, dtype=np.float64)) for values in logs),
        widths,
        *(phases == index for index in range(len(_PHASES))),
        depths / max(1, int(depths.max(initial=0))),
        np.arange(count) / max(1, count - 1),
        _logs(np.array([len(sources) for sources in field["sources"]], dtype=np.float64)),
        _logs(outside),
        _logs(np.bincount(edges[0], minlength=count)),
        dims[:, 0] > 0,
        *_logs(dims).T,
        _logs(costs[:, 0] * 1e9),
        *costs[:, 1:].T,
    ]
    return OpGraph(
        categories=np.array([_INDEX[category(name)] for name in field["name"]], dtype=np.int64),
        nodes=np.column_stack(nodes).astype(np.float32),
        node_columns=NODE_COLUMNS,
        edges=edges,
    )


def _edges(sources: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges (2, e), and the number of each operator's inputs that were made before the step."""
    reader = np.repeat(np.arange(len(sources)), [len(of_node) for of_node in sources])
    source = np.array([node for of_node in sources for node in of_node], dtype=np.int64)
    outside = np.bincount(reader[source < 0], minlength=len(sources))
    inside = source >= 0
    pairs = np.unique(np.stack([reader[inside], source[inside]]), axis=1)
    return np.ascontiguousarray(pairs[::-1]), outside


def _depths(edges: np.ndarray, count: int) -> np.ndarray:
    """Return the longest path to each node. Edges are sorted by reader, and sources come before readers."""
    depths = [0] * count
    for source, reader in zip(*edges.tolist(), strict=True):
        if depths[source] >= depths[reader]:
            depths[reader] = depths[source] + 1
    return np.array(depths, dtype=np.float64)


def product_dims(op: Operator) -> tuple[float, ...]:
    """Return batch, m, n, k, kernel elements and stride of an operator's matrix products; zeros if it has none."""
    kind = category(op.name)
    find = _DIMS_OF.get(kind)
    try:
        dims = find(op, "backward" in kind) if find is not None else None
    except (IndexError, ValueError, ZeroDivisionError):  # its shapes do not match its class
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
    matrices = [shape for shape in op.input_shapes[1:] if len(shape) == 2]  # weights of the input, of the state, ...
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


def _logs(values: ArrayLike) -> np.ndarray:
    return np.log2(1.0 + np.asarray(values))


@functools.cache
def _elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


_CONVOLUTIONS = ("1x1", "3x3", "5x5", "wide", "depthwise", "grouped", "strided", "long")


def step_features(
    trace: StepTrace,
    memory: MemoryProfile,
    spec: DeviceSpec,
    settings: TrainingSettings,
    *,
    batch_size: int,
    training_loop: bool,
) -> dict[str, float]:
    """Return name -> finite number, with the same names for every job.

    Args as in `features_on`, of one GPU model.
    """
    placed = [(spec, memory)]
    return features_on(trace, placed, settings, batch_size=batch_size, training_loop=training_loop)[0]


def features_on(
    trace: StepTrace,
    placed: Sequence[tuple[DeviceSpec, MemoryProfile]],
    settings: TrainingSettings,
    *,
    batch_size: int,
    training_loop: bool,
) -> list[dict[str, float]]:
    """Return the features of a step on each GPU model: name -> finite number, with the same names for every job.

    Sizes are in MiB, or logarithms of base 2 (`log_*`), `share_*` lie in [0, 1]. `job_priced_*` are the features of
    `featurize.timing.simulation.time_features`, with the input pipeline of a plain loop if the job runs in one.

    Args:
        trace: One step.
        placed: The GPU models, each with the trace's replay on it.
        settings: The trace's training settings.
        batch_size: Samples of a batch.
        training_loop: Whether the job runs in the usual loop.
    """
    # Of all steps, also in a mix, as the learned estimators were fitted; `trace.batch_bytes` has a mix's last two.
    batches = (block.nbytes for block in trace.blocks if block.kind == "batch")
    nbytes = trace.remembered("batch bytes of all steps", lambda: sum(batches))
    waits_ms = python_loader_ms(batch_size, nbytes) if training_loop else 0.0
    of_job = {
        **trace.remembered(("network", batch_size), lambda: _network(trace, batch_size)),
        "net_states": OPTIMIZERS[settings.optimizer].states,
        "net_math_bits": MATH_BITS.get(settings.precision, 32),
        "net_channels_last": float(settings.channels_last),
        "net_cudnn_benchmark": float(settings.cudnn_benchmark),
        "net_training_loop": float(training_loop),
        "job_log_batch": math.log2(batch_size),
        "job_log_batch_bytes": _log(nbytes),
    }
    steps = time_steps(trace, [spec for spec, _ in placed], settings)
    of_replays: dict[int, tuple[dict[str, float], dict[str, float]]] = {}  # GPU models with equal libraries share one
    features = []
    for (spec, memory), step in zip(placed, steps, strict=True):
        if id(memory) not in of_replays:
            reserved = reserved_by_scenario(trace, spec).items()
            scenarios_mib = {f"job_scenario_{name}": nbytes / MIB for name, nbytes in reserved}
            of_replays[id(memory)] = of_job | _allocator_features(trace, memory), scenarios_mib
        of_replay, scenarios_mib = of_replays[id(memory)]
        outside = outside_mib(trace, spec)
        total = memory.peak_reserved / MIB + outside
        timed = step.with_input(waits_ms)
        features.append(
            {
                **of_replay,
                "job_memory_mib": total,
                "job_outside_mib": outside,
                "job_log_memory": _log(total),
                # The logarithm (base 2) of the ratio of the job's memory in a scenario to its memory as replayed.
                **{name: math.log2((mib + outside) / total) for name, mib in scenarios_mib.items()},
                **{f"job_priced_{name}": value for name, value in time_features(timed).items()},
                "job_input_share": waits_ms / timed.step_time_ms,
                "job_step_time_ms": timed.step_time_ms,
                **device_features(spec),
            }
        )
    return features


def _network(trace: StepTrace, batch: int) -> dict[str, float]:
    """Return counts and sizes of the forward pass for one sample: equal for equal networks at any batch size."""
    counts = dict.fromkeys(VOCABULARY, 0)
    elements: dict[str, float] = defaultdict(float)
    flops: dict[str, float] = defaultdict(float)
    kinds: dict[str, float] = dict.fromkeys(_CONVOLUTIONS, 0.0)
    convolution_elements: dict[str, float] = dict.fromkeys(_CONVOLUTIONS, 0.0)
    largest = widest_in = widest_out = widest_weight = pixels = tokens = head = 0.0
    reached = zip(trace.operators, _reached_by_batch(trace), strict=True)
    forward = [(op, of_batch) for op, of_batch in reached if op.phase == "forward"]
    readers = Counter(source for op, _ in forward for source in op.sources if source >= 0)
    for op, of_batch in forward:
        kind = category(op.name)
        # Only the first output: others are statistics and the like, which do not grow with the batch; nor does a loss.
        elements_made = math.prod(op.output_shapes[0]) if op.output_shapes and kind != "loss" else 0
        work = op.flops if kind != "loss" else 0
        if of_batch:
            elements_made, work = (size // batch if size % batch == 0 else 0 for size in (elements_made, work))
        counts[kind] += 1
        elements[kind] += elements_made
        flops[kind] += work
        largest = max(largest, elements_made)
        if kind == "convolution":
            groups, rows, n, k, kernel, stride = product_dims(op)
            inner = k / max(kernel, 1)
            widest_in, widest_out = max(widest_in, inner * groups), max(widest_out, n * groups)
            widest_weight = max(widest_weight, n * k * groups)
            pixels = max(pixels, rows / batch)
            for name, holds in (
                ("1x1", kernel == 1),
                ("3x3", kernel == 9 and groups == 1),
                ("5x5", kernel > 9 and kernel <= 25 and groups == 1),
                ("wide", kernel > 25 and groups == 1),
                ("depthwise", groups > 1 and inner <= 1),
                ("grouped", groups > 1 and inner > 1),
                ("strided", stride > 1),
                ("long", kernel > 1 and kernel not in (9, 25, 49)),
            ):
                if holds:
                    kinds[name] += 1
                    convolution_elements[name] += elements_made
        elif kind == "attention":
            _, queries, _, size, _, _ = product_dims(op)
            tokens, head = max(tokens, queries), max(head, size)
        elif kind == "matmul":
            _, _, n, k, _, _ = product_dims(op)
            widest_weight = max(widest_weight, n * k)
    all_elements, all_flops = sum(elements.values()) or 1.0, sum(flops.values()) or 1.0
    tensors = [block.nbytes for block in trace.blocks if block.kind == "parameter"]
    return {
        "net_log_parameters": _log(trace.parameters),
        "net_parameter_tensors": float(len(tensors)),
        "net_log_largest_parameter": _log(max(tensors, default=0)),
        "net_share_largest_parameter": max(tensors, default=0) / max(sum(tensors), 1),
        "net_log_flops": _log(all_flops),
        "net_log_elements": _log(all_elements),
        "net_share_largest_output": largest / all_elements,
        "net_log_flops_per_element": math.log2(1 + all_flops / all_elements),
        "net_log_parameters_per_element": math.log2((1 + trace.parameters) / all_elements),
        "net_operators": float(len(forward)),
        "net_joins": sum(n > 1 for n in readers.values()) / max(len(forward), 1),
        "net_log_widest_in": _log(widest_in),
        "net_log_widest_out": _log(widest_out),
        "net_log_widest_weight": _log(widest_weight),
        "net_log_pixels": _log(pixels),
        "net_log_tokens": _log(tokens),
        "net_head_size": head,
        **{f"net_count_{kind}": float(n) for kind, n in counts.items() if not kind.endswith("_backward")},
        **{
            f"net_share_elements_{kind}": elements[kind] / all_elements
            for kind in VOCABULARY
            if not kind.endswith("_backward") and kind != "optimizer"
        },
        **{f"net_share_flops_{kind}": flops[kind] / all_flops for kind in ("convolution", "matmul", "attention")},
        **{f"net_convolutions_{name}": n for name, n in kinds.items()},
        **{f"net_share_convolution_{name}": n / all_elements for name, n in convolution_elements.items()},
    }


def _reached_by_batch(trace: StepTrace) -> list[bool]:
    """Return whether each operator works on samples: it reads the batch, or the output of an operator that does. Others
    (standardised weights, tables of positions) do the same work for any batch."""
    reached: list[bool] = []
    for op in trace.operators:
        reached.append(any(source == BATCH or (source >= 0 and reached[source]) for source in op.sources))
    return reached


def _allocator_features(trace: StepTrace, memory: MemoryProfile) -> dict[str, float]:
    reserved, allocated = memory.peak_reserved / MIB, memory.peak_allocated / MIB
    parts = {kind: nbytes / MIB for kind, nbytes in memory.peak_parts.items()}
    sizes = trace.remembered("sizes", lambda: [block.nbytes for block in trace.blocks if block.call is None])
    largest = trace.remembered("largest block", lambda: max(sizes, default=0))
    return {
        "job_reserved_mib": reserved,
        "job_allocated_mib": allocated,
        "job_weights_mib": trace.parameter_bytes / MIB,
        "job_fits": float(memory.fits),
        "job_share_fragmentation": 1 - sum(parts.values()) / max(reserved, 1e-9),
        "job_log_largest_block": _log(largest),
        "job_share_largest_block": largest / MIB / max(allocated, 1e-9),
        "job_workspaces": float(len(trace.blocks) - len(sizes)),
        **{f"job_share_{kind}": mib / max(allocated, 1e-9) for kind, mib in parts.items()},
        **{f"job_peak_in_{phase}": float(memory.peak_phase == phase) for phase in ("forward", "backward", "optimizer")},
    }


def _log(value: float) -> float:
    return math.log2(1 + value)
