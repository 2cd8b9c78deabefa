"""Measured steps and kernels of a data folder, each with the kernels that it runs.

Start reading at `measured_rows`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

import warehouse
from conf.errors import UsageError
from conf.files.identity import canonical_json
from featurize.configs.trial import UnreadableConfig, config_of_one_gpu
from featurize.device.device_spec import DeviceSpec, load_device
from featurize.families import gpt
from featurize.job.training_settings import Training, TrialConfig, uses_tf32
from featurize.nets.vision import import_library
from featurize.recording.step_trace import Operator
from featurize.timing.calls import HALF, TENSOR, Calls, as_calls, kernel_calls, product
from featurize.timing.step_time import input_ms
from featurize.trace.tracer import TraceError, trace_config, trace_step
from learn.estimators.kernel_fitting import KERNELS, LIGER, PRODUCTS, SAILOR, MeasuredTime
from learn.fitting.published_jobs import LLM_FOUNDRY, SIZES, layer_calls, mpt_config, mpt_loss
from learn.rows.data import LabelledRow, load_rows
from warehouse.exchange.imported_rows import DOUBT
from warehouse.exchange.published_kernels import PREFIX as LAYER
from warehouse.exchange.published_kernels import SAILOR_LAYERS

Progress = Callable[[str, int, int], None]
Row = TypeVar("Row")
_SOURCES = ("measured", "imported")
LEAST_ROWS = 20
# Sources whose weight is not the square root of their number of rows.
WEIGHTS = {KERNELS: 0.1, LLM_FOUNDRY: 1.5, SAILOR: 0.2, LIGER: 0.8, PRODUCTS: 1.0}
# GPU model, side of square matrices, TFLOP/s: bf16 products measured with torch 2.11 and CUDA 13 (769 to 798 in several
# runs on both).
_LARGE_PRODUCTS = (("H100-SXM5-80GB", 8192, 783.5), ("H200-SXM-141GB", 8192, 783.5))
FARM = "farm"  # source of this folder's own trials
_COLUMNS = ("run_id", "source", "job_id", "config", "device_name", "step_time_ms", "torch_version", "origin")
_FIRST_FUSED = (2, 0)  # release of PyTorch with fused attention in `torch.nn.functional` and for-each optimizers

_PREFIXES = ("tf", "legacy", "ig", "swsl", "ssl", "eca", "ese", "cs")  # precede the family in timm's model names
# Operators whose output has the shape of their first input.
_POINTWISE = tuple(
    f"aten::{name}"
    for name in ("native_layer_norm", "_softmax", "relu", "gelu", "tanh", "add", "mul", "div", "pow", "sub", "silu")
)


@dataclass(frozen=True, kw_only=True)
class MeasuredActivity:
    """One measured job.

    Args:
        family, group: Families have equal weight; near-copies of a group are left out together.
        device: The GPU model.
        calls: The kernels of a step.
        smact, smocc: Means over the run, in [0, 1].
        input_ms: Time that the input pipeline adds to a step, in ms.
        whole_run: Whether the means cover the whole run, with its set-up, and not its steps alone.
        channels_last, searched: As in `kernels_on`.
    """

    family: str
    group: str
    device: DeviceSpec
    calls: Calls
    smact: float
    smocc: float
    input_ms: float
    whole_run: bool = False
    channels_last: bool = False
    searched: bool = False


def measured_rows(
    data: str | os.PathLike[str] | None,
    progress: Progress,
    *,
    steps: int | None,
    kernels: int,
    same_shapes: bool = False,
    wanted: Callable[[MeasuredTime], bool] = lambda row: True,
) -> tuple[list[MeasuredTime], dict[str, int]]:
    """Return the measured steps and operators of a data folder, and the number of rows left out by reason.

    Args:
        data: The folder; None: the default one.
        progress: Called for each traced row.
        steps: As `most` of `measured_times`.
        kernels: As `most` of `kernel_times`.
        same_shapes: As in `kernel_times`.
        wanted: Filter of the steps.

    Raises:
        UsageError: The folder has too few steps to fit on.
    """
    rows, left_out = measured_times(data, progress, steps)
    operators, operators_left_out = kernel_times(data, kernels, same_shapes=same_shapes)
    rows = [row for row in rows if wanted(row)]
    if len(rows) < LEAST_ROWS:
        reasons = "; ".join(f"{reason}: {number:,}" for reason, number in left_out.items())
        raise UsageError(
            f"data={data}: {len(rows)} measured steps can be learned from, and {LEAST_ROWS} are needed"
            + (f" (left out: {reasons})" if reasons else "")
        )
    return [*rows, *operators, *(large_products() if operators else [])], left_out | operators_left_out


def measured_times(
    data: str | os.PathLike[str] | None, progress: Progress, most: int | None = None
) -> tuple[list[MeasuredTime], dict[str, int]]:
    """Return the measured steps whose kernels are known, and the number of rows left out by reason.

    Args:
        data: The data folder; None: the default one.
        progress: Called before each row is traced with a text, the number of rows done and their total.
        most: Steps of each source, drawn by their ids; None: all.
    """
    rows = query_rows(
        data,
        f"SELECT {', '.join(_COLUMNS)} FROM runs "
        "WHERE status = 'ok' AND group_id IS NULL AND step_time_ms > 0 AND source IN ('measured', 'imported') "
        f"AND coalesce(quality, 'trusted') = 'trusted' AND coalesce(error_type, '') <> '{DOUBT}' "
        "QUALIFY row_number() OVER (PARTITION BY job_id ORDER BY md5(run_id)) <= coalesce(?, 1e9) ORDER BY run_id",
        [most],
    )
    traces: dict[tuple[Any, ...], Calls] = {}
    return read_each(rows, lambda values: _read_measured(dict(zip(_COLUMNS, values, strict=True)), traces), progress)


def kernel_times(
    data: str | os.PathLike[str] | None, most: int, *, same_shapes: bool = False
) -> tuple[list[MeasuredTime], dict[str, int]]:
    """Return measured operators of the table `kernels`, and the number of rows left out by reason.

    Args:
        data: The data folder; None: the default one.
        most: Rows of an operator on a GPU model, drawn by their ids.
        same_shapes: Draw by shapes instead: the same shapes on every GPU model where they were measured.
    """
    drawn_by = "md5(concat(dims, '/', dtype)), kernel_row" if same_shapes else "md5(kernel_row)"
    rows = query_rows(
        data,
        "SELECT operator, device_name, dims, dtype, phase, duration_us FROM kernels "
        "WHERE timing = 'cuda_events' AND source IN ('measured', 'imported') AND duration_us > 0 "
        "QUALIFY row_number() OVER (PARTITION BY operator, device_name ORDER BY " + drawn_by + ") <= ? "
        "ORDER BY operator, device_name, kernel_row",
        [most],
    )
    return read_each(rows, lambda values: _measured_kernel(*values))


def measured_activity(
    data: str | os.PathLike[str] | None, progress: Progress
) -> tuple[list[MeasuredActivity], dict[str, int]]:
    """Return the jobs with measured SM activity and occupancy, and the number of jobs left out by reason.

    Args:
        data: The data folder; None: the default one.
        progress: Called before each job is traced with a text, the number of jobs done and their total.
    """
    try:
        of_smact, of_smocc = (load_rows(data, target, source=_SOURCES).trusted for target in ("smact", "smocc"))
    except UsageError:  # too few rows of either
        return [], {}
    smocc = dict(zip(of_smocc.run_ids, of_smocc.label.tolist(), strict=True))
    return read_each(of_smact.records, lambda record: _measured_activity(record, smocc), progress)


def query_rows(data: str | os.PathLike[str] | None, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Return the rows of a query of a data folder; None: the default one."""
    with contextlib.closing(warehouse.connect(data)) as connection:
        rows: list[tuple[Any, ...]] = connection.execute(sql, parameters).fetchall()
    return rows


class RowLeftOut(Exception):
    """The reason why a row is not fitted on."""


def read_each(
    rows: Sequence[Any], read: Callable[[Any], Row], progress: Progress | None = None
) -> tuple[list[Row], dict[str, int]]:
    """Return the results of `read` on the rows, and for each reason of a `RowLeftOut` the number of rows."""
    results: list[Row] = []
    left_out: Counter[str] = Counter()
    for completed, row in enumerate(rows):
        if progress is not None:
            progress("tracing", completed, len(rows))
        try:
            results.append(read(row))
        except RowLeftOut as reason:
            left_out[str(reason)] += 1
    return results, dict(left_out)


def describe_gpu(name: str | None) -> DeviceSpec:
    """Return a measured GPU's description. Raises `RowLeftOut` without one."""
    try:
        return load_device(name or "")
    except UsageError as error:
        raise RowLeftOut(f"no description of {name}") from error


def _measured_kernel(
    name: str, device_name: str | None, dims: str, dtype: str, phase: str | None, duration_us: float
) -> MeasuredTime:
    device = describe_gpu(device_name)
    if name.startswith(LAYER):
        return _measured_layer(name.removeprefix(LAYER), device, json.loads(dims), dtype, phase, duration_us)
    operator = _operator(name, json.loads(dims), dtype)
    if operator is None:
        raise RowLeftOut(f"kernels of {name}")
    return MeasuredTime(
        name=name,
        source=KERNELS,
        group=name,
        device=device,
        calls=kernel_calls([operator], tf32_convolutions=False),
        measured_ms=duration_us / 1e3,
        searched=True,
    )


def large_products() -> list[MeasuredTime]:
    """Return products in half precision that were measured back to back, without the cost of a launch."""
    return [
        MeasuredTime(
            name=f"product of {side}",
            source=PRODUCTS,
            group="product",
            device=load_device(device),
            calls=as_calls(Counter({product(side, side, side, 1, TENSOR, 6.0 * side * side): 1}), 0.0),
            measured_ms=2 * side**3 / tflops / 1e9,
        )
        for device, side, tflops in _LARGE_PRODUCTS
    ]


def _measured_layer(
    layer: str, device: DeviceSpec, sizes: Mapping[str, int], dtype: str, phase: str | None, duration_us: float
) -> MeasuredTime:
    if sizes.get("ranks", 1) > 1 and (layer, phase) != ("head", "forward"):
        raise RowLeftOut("layers that end with an all-reduce")
    try:
        calls = layer_calls(layer, sizes, phase, dtype, device)
    except (KeyError, TraceError, UsageError) as error:
        raise RowLeftOut(f"layer {layer}: {type(error).__name__}") from error
    return MeasuredTime(
        name=f"{layer} {phase or 'both'} {canonical_json(sizes)}",
        source=SAILOR if layer in SAILOR_LAYERS else LIGER,
        group=layer,
        device=device,
        calls=calls,
        measured_ms=duration_us / 1e3,
    )


def _measured_activity(record: LabelledRow, smocc: Mapping[str, float]) -> MeasuredActivity:
    """Return a job with its SM activity, and its occupancy by run id."""
    config = record.case.config
    if record.run_id not in smocc or config is None:
        raise RowLeftOut("no occupancy")
    try:
        device = load_device(record.device)
        trace = trace_config(config, device=device)
    except (TraceError, UsageError) as error:
        raise RowLeftOut(f"cannot be traced: {type(error).__name__}") from error
    return MeasuredActivity(
        family=record.family,
        group=record.group,
        device=device,
        calls=kernel_calls(trace.operators, **uses_tf32(config.precision)),
        smact=record.label,
        smocc=smocc[record.run_id],
        input_ms=input_ms(trace, config.batch_size) if record.case.training_loop else 0.0,
        whole_run=record.source == "imported",
        channels_last=config.channels_last,
        searched=config.cudnn_benchmark,
    )


def _operator(name: str, dims: Mapping[str, Any], dtype: str) -> Operator | None:
    """Return the forward operator of a row; None where the input shapes do not determine its output."""
    shapes = [tuple(shape) for shape in dims["shapes"]]
    inputs = tuple(shape for shape in shapes if shape)
    output: tuple[int, ...]
    if name == "aten::addmm":
        (rows, depth), (_, columns) = inputs[1:]
        output, flops = (rows, columns), 2 * rows * depth * columns
    elif name == "aten::bmm":
        (batch, rows, depth), (_, _, columns) = inputs
        output, flops = (batch, rows, columns), 2 * batch * rows * depth * columns
    elif name == "aten::convolution":
        x, weight = inputs[:2]
        arguments = dims["arguments"]
        strides, paddings = arguments["stride"], arguments["padding"]
        sides = [
            (side + 2 * padding - size) // stride + 1
            for side, size, stride, padding in zip(x[2:], weight[2:], strides, paddings, strict=True)
        ]
        output = (x[0], weight[0], *sides)
        flops = 2 * math.prod(output) * math.prod(weight[1:])
    elif name in _POINTWISE:
        output, flops = inputs[0], math.prod(inputs[0])
    else:
        return None
    size = 2 if dtype in HALF else 4
    return Operator(
        name=name,
        phase="forward",
        dtype=dtype,
        input_shapes=inputs,
        output_shapes=(output,),
        flops=flops,
        bytes_read=size * sum(map(math.prod, inputs)),
        bytes_written=size * math.prod(output),
        launches=1,
    )


def _read_measured(row: Mapping[str, Any], traces: dict[tuple[Any, ...], Calls]) -> MeasuredTime:
    source = str(row["job_id"]).removeprefix("import-") if row["source"] == "imported" else FARM
    device = describe_gpu(row["device_name"])
    release = re.match(r"(\d+)\.(\d+)", str(row["torch_version"]))
    if source == LLM_FOUNDRY:
        return _of_llm_foundry(row, device, traces)
    try:
        config = config_of_one_gpu(row["config"])
    except UnreadableConfig as error:
        raise RowLeftOut(f"{source}: no trial config") from error
    fused = release is None or (int(release[1]), int(release[2])) >= _FIRST_FUSED
    key = (row["config"], device.architecture.attention, fused)
    if key not in traces:
        with contextlib.ExitStack() as after:
            if not fused:  # timm's models then compute attention as before PyTorch had a fused operator
                layers = import_library("timm.layers")
                after.callback(layers.set_fused_attn, layers.use_fused_attn())
                layers.set_fused_attn(False)
            traces[key] = _trace(lambda: trace_config(config, device=device), config.precision, listed=fused)
    return MeasuredTime(
        name=str(getattr(config, "model", config.family)),
        source=source,
        group=_group(config),
        device=device,
        calls=traces[key],
        measured_ms=float(row["step_time_ms"]),
        channels_last=config.channels_last,
        searched=config.cudnn_benchmark,
        run_id=row["run_id"],
    )


def _of_llm_foundry(row: Mapping[str, Any], device: DeviceSpec, traces: dict[tuple[Any, ...], Calls]) -> MeasuredTime:
    """Return one micro-step of one GPU as if it ran alone: sharded weights arrive while the GPU computes."""
    cells = json.loads(row["origin"])
    size = cells["Model"].lower()
    if size not in SIZES or not cells["Precision"].endswith("bf16"):
        raise RowLeftOut(f"{LLM_FOUNDRY}: {size} in {cells['Precision']}")
    config = mpt_config(cells)
    key = (config, device.architecture.attention)
    if key not in traces:
        step = partial(
            trace_step,
            lambda: gpt.build(config).to(torch.bfloat16),
            lambda on: gpt.batch(config, on),
            loss=mpt_loss,
            device=device,
            settings=Training(optimizer="sgd", precision="bf16-true"),  # the optimizer's state is sharded too
            training_loop=False,
        )
        traces[key] = _trace(step, "bf16", listed=True)
    return MeasuredTime(
        name=f"MPT-{size}, {config.batch_size} x {config.sequence_length}",
        source=LLM_FOUNDRY,
        group=size,
        device=device,
        calls=traces[key],
        measured_ms=config.batch_size * config.sequence_length / float(cells["Throughput (T/s/GPU)"]) * 1e3,
        run_id=row["run_id"],
    )


def _trace(trace: Callable[..., Any], precision: str, *, listed: bool) -> Calls:
    try:
        step = trace()
    except (TraceError, UsageError) as error:
        raise RowLeftOut(f"cannot be traced: {type(error).__name__}") from error
    return kernel_calls(step.operators, **uses_tf32(precision), listed=listed)


def _group(config: TrialConfig) -> str:
    """Return the group that is left out together: the family, or for timm the letters that its model's name begins
    with."""
    model = getattr(config, "model", None)
    if config.family != "timm" or not model:
        return config.family
    word = next((part for part in model.split("_") if part not in _PREFIXES), model)
    return "".join(letter for letter in word if letter.isalpha()) or word
