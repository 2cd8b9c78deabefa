"""Measured steps and kernels of a data folder, and the fit of the kernel model's efficiencies to them.

Start reading at `measured_rows`, then at `TimeFit`; the formula is `featurize.timing.kernels.call_seconds`, on torch
tensors. All fits of kernels use `descend`, a gradient descent with priors.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

import warehouse
from conf.errors import UsageError
from conf.files.identity import canonical_json
from featurize.configs.trial import UnreadableConfig, config_of_one_gpu
from featurize.device.device_spec import DeviceSpec, load_device
from featurize.families import gpt
from featurize.job.training_settings import EAGER, Training, TrialConfig, uses_tf32
from featurize.nets.vision import import_library
from featurize.recording.step_trace import Operator
from featurize.timing.kernels import (
    ATTENTION,
    GROUP_VALUES,
    GROUPS,
    HALF,
    OTHER,
    SINGLE_VALUES,
    STREAM,
    TENSOR,
    UNIT_VALUES,
    UNITS,
    Calls,
    Kernels,
    Parameters,
    as_calls,
    call_seconds,
    host_ms,
    kernel_calls,
    kernels_on,
    product,
    units_names,
)
from featurize.timing.simulation import OVERLAP, input_ms, overlap_times
from featurize.trace.tracer import TraceError, trace_config, trace_step
from learn.fitting.published_jobs import LLM_FOUNDRY, SIZES, layer_calls, mpt_config, mpt_loss
from learn.rows.data import LabelledRow, load_rows
from warehouse.exchange.imported_rows import DOUBT
from warehouse.exchange.published_tables import PREFIX, SAILOR_LAYERS

Progress = Callable[[str, int, int], None]
Values = Mapping[str, torch.Tensor]
Columns = TypeVar("Columns")
Row = TypeVar("Row")
_LAST_PART = 0.7  # share of the iterations after which `last_rate` applies
_FREE = (-math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Settings of a gradient descent.

    Args:
        of_priors: Weight of the squared distance between a value and its start.
        firmness: Name -> further factor of this weight.
        iterations: Number of steps; 0 returns the start.
        rate, last_rate: Learning rate, and that of the last 30 % of the steps.
        limits: Name -> the least and the most that the value may be.
    """

    of_priors: float
    firmness: Mapping[str, float] = field(default_factory=dict)
    iterations: int
    rate: float
    last_rate: float
    limits: Mapping[str, tuple[float, float]]


def descend(
    begin: Values, losses: Callable[[Values], torch.Tensor], weights: np.ndarray, how: Descent
) -> dict[str, torch.Tensor]:
    """Return the values that minimise the rows' weighted losses while they stay near their start, found by Adam.

    All values are one vector: with a tensor each, launching the many small operators of the optimizer takes longer than
    their arithmetic.

    Args:
        begin: Name -> start of the value; not modified.
        losses: Returns each row's loss, (rows,), for values with the names and shapes of `begin`.
        weights: Weights of the rows, (rows,).
        how: Steps, rates and limits.
    """
    sizes = torch.tensor([value.numel() for value in begin.values()])
    weight = of_rows(weights)

    def of_each(numbers: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.float64).repeat_interleave(sizes)

    def named(vector: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = zip(begin.items(), vector.split(sizes.tolist()), strict=True)
        return {name: part.view(value.shape) for (name, value), part in parts}

    start = torch.cat([value.flatten() for value in begin.values()])
    cost = how.of_priors * of_each(how.firmness.get(name, 1.0) for name in begin)
    least, most = (of_each(how.limits.get(name, _FREE)[end] for name in begin) for end in (0, 1))
    vector = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([vector], lr=how.rate)
    for iteration in range(how.iterations):
        if iteration == int(_LAST_PART * how.iterations):
            optimizer.param_groups[0]["lr"] = how.last_rate
        optimizer.zero_grad()
        ((weight * losses(named(vector))).sum() + (cost * (vector - start) ** 2).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            vector.clamp_(least, most)
    return named(vector.detach())


def robust(off: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return the Huber loss beyond the tolerance: larger deviations count in proportion, not squared."""
    return torch.nn.functional.huber_loss(off, torch.zeros_like(off), delta=tolerance, reduction="none") / tolerance


def weights_by(
    labels: np.ndarray, of: np.ndarray, *, power: float, factors: Mapping[str, float] | None = None
) -> np.ndarray:
    """Return each row's weight, (rows,), 1 in sum: 0 outside the mask `of`, else by the number of rows of its label.

    Args:
        labels: Labels of the rows.
        of: Mask of the rows to fit on.
        power: 1: all labels weigh alike; 0.5: a label weighs as the square root of its number of rows.
        factors: Label -> further factor of its weight.
    """
    weight = np.zeros(len(labels))
    for label in np.unique(labels[of]):
        inside = of & (labels == label)
        weight[inside] = (factors or {}).get(label, 1.0) / inside.sum() ** power
    return np.asarray(weight / weight.sum())


def join_columns(parts: Sequence[Columns]) -> Columns:
    """Return dataclasses of columns joined into one: arrays and tuples are concatenated, single numbers added up.

    Args:
        parts: At least one, all of the same class.
    """
    first = parts[0]
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(first)}  # type: ignore[arg-type]
    return type(first)(**{name: _one_column(column) for name, column in columns.items()})


def row_of_kernels(rows: Sequence[int], calls: Sequence[Calls]) -> torch.Tensor:
    """Return the row of each kernel of joined calls, (kernels,), where `calls[i]` are those of `rows[i]`."""
    return torch.repeat_interleave(torch.tensor(rows), torch.tensor([len(row_calls.kind) for row_calls in calls]))


def of_rows(values: Iterable[float]) -> torch.Tensor:
    """Return one number a row as a column in double precision."""
    return torch.tensor(list(values), dtype=torch.float64)


def _one_column(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return tuple(itertools.chain.from_iterable(parts)) if isinstance(parts[0], tuple) else sum(parts)


KERNELS = "kernels"  # source of rows that are one kernel each
SAILOR, LIGER = "sailor", "liger"  # sources whose rows are the few kernels of a layer, forward or backward
PRODUCTS = "products"  # source whose rows are one large product, timed in a series of many
ALONE = (KERNELS, SAILOR, LIGER)  # timed one by one, which adds overhead to each
_NO_STEPS = (*ALONE, PRODUCTS)
# Start of the fit and its limits: values that are usual for such kernels. Shares as logarithms.
_COMPUTE, _BANDWIDTH = math.log(0.6), math.log(0.75)
# Kernels of narrow groups load an operand for each multiply-add.
_COMPUTE_OF = {"depthwise_large": math.log(0.03), "depthwise": math.log(0.15), "grouped": math.log(0.3)}
_BY_GROUP = {"half_depth": math.log(32.0), "half_width": math.log(16.0), "sm_rate": 0.15, "wave": 0.7}
# Kinds of kernels whose efficiency does not depend on the layout of images.
_IN_ANY_LAYOUT = ("product", "attention", "layer_norm", "softmax", "optimizer", "gather", "scatter")
# Exponentials bind flash attention, and tensor cores do not speed them up: on an H100 it reaches half of its share on
# an A100 (FlashAttention-3, arXiv:2407.08608).
_SM_RATE_OF_ATTENTION = 0.9
_BY_UNITS = {"power": 0.5, "searched": 0.15}
_SINGLE = {"half_head": math.log(64.0), "latency_us": math.log(4.0), "l2": math.log(2.0), "unaligned": math.log(0.6)}
INSTRUMENT_MS = 0.035  # start of the overhead of timing one kernel, by device and kind of measurement
_HOST_FACTOR = 1.0  # factor on the time of `featurize.timing.kernels` for a launch: hosts differ
# Start of the logarithm by which kernels in a step of `LLM_FOUNDRY` take longer than alone: under FSDP, weights arrive
# and gradients leave while the GPU computes.
_LEFTOVER = 0.1
TOLERANCE = 0.15  # in the logarithm; larger deviations count in proportion, not squared
_DESCENT = Descent(
    of_priors=2e-4,
    firmness={"latency_us": 20.0, "power": 3.0, "half_depth": 0.5, "half_width": 0.5, "instrument": 0.02, "host": 2.0},
    iterations=250,
    rate=0.03,
    last_rate=0.008,
    # Physical signs of the exponents: a share never rises with the work of an SM or with idle blocks.
    limits={
        "sm_rate": (0.0, 1.0),
        "wave": (0.0, 1.0),
        "power": (0.0, 1.5),
        "searched": (0.0, 0.7),
        "leftover": (0.0, 1.0),
    },
)
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
class MeasuredTime:
    """One measured step, or one measured kernel.

    Args:
        name: For messages.
        source: Source of the measurement; rows of a source are left out together. `KERNELS` for single kernels.
        group: Family of models, left out together within a source.
        device: The GPU model.
        calls: The kernels of the step.
        measured_ms: Its measured time.
        channels_last, searched: As in `kernels_on`.
        run_id: Id of the row of `runs`; empty for single kernels.
    """

    name: str
    source: str
    group: str
    device: DeviceSpec
    calls: Calls
    measured_ms: float
    channels_last: bool = False
    searched: bool = False
    run_id: str = ""


@dataclass(frozen=True, kw_only=True)
class FittedTimes:
    """Result of a fit.

    Args:
        parameters: The efficiencies.
        instrument_ms: (GPU model, operator) of each kernel timed alone -> overhead of timing it; where no row of the
            two was fitted on, the median of the operator's other overheads.
        leftover: Factor by which kernels in a step of `LLM_FOUNDRY` take longer than alone. It stays out of the
            efficiencies.
    """

    parameters: Parameters
    instrument_ms: Mapping[tuple[str, str], float]
    leftover: float

    def row_ms(self, row: MeasuredTime, busy_ms: float, host_ms: float) -> float:
        """Return the time of a row in ms, from its kernels' time and its host's."""
        if row.source in ALONE:
            return busy_ms + self.instrument_ms[row.device.name, row.group]
        return overlap_times(busy_ms * self.leftover if row.source == LLM_FOUNDRY else busy_ms, host_ms)


class TimeFit:
    """Rows prepared once, and fitted with some of them left out.

    Args:
        rows: The measurements.
        weights: Source -> factor on the weight of its rows, beside the square root of their number.
    """

    def __init__(self, rows: Sequence[MeasuredTime], weights: Mapping[str, float]) -> None:
        self.rows, self.weights = rows, weights
        self.names = _names(rows)
        self.sources = np.array([row.source for row in rows])
        self.steps = ~np.isin(self.sources, _NO_STEPS)
        self.groups = np.array([f"{row.source}/{row.group}" for row in rows])
        self.devices = np.array([row.device.name for row in rows])
        self.measured_ms = of_rows(row.measured_ms for row in rows)
        self.host_ms = of_rows(host_ms(row.calls, row.device, EAGER) for row in rows)
        self.one_kernel = torch.tensor([row.source in ALONE for row in rows])
        instruments = [(row.device.name, row.group) if row.source in ALONE else ("", "") for row in rows]
        self.instruments = list(dict.fromkeys(instruments))
        self.instrument = torch.tensor([self.instruments.index(instrument) for instrument in instruments])
        self.hosts, places = np.unique(self.sources, return_inverse=True)
        self.host = torch.tensor(places)
        self.is_sharded = of_rows(row.source == LLM_FOUNDRY for row in rows)
        self.kernels, self.count, self.row = self._all_kernels(self.names)

    def _all_kernels(
        self, names: tuple[tuple[str, ...], tuple[str, ...]]
    ) -> tuple[Kernels, torch.Tensor, torch.Tensor]:
        """Return the kernels of all rows as one sequence, the number of runs of each, and its row."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for place, row in enumerate(self.rows):
            alike.setdefault((row.device, row.channels_last, row.searched), []).append(place)
        kernels, calls = [], []
        for (device, channels_last, searched), members in alike.items():
            calls.append(join_columns([self.rows[place].calls for place in members]))
            kernels.append(kernels_on(calls[-1], device, names, channels_last=channels_last, searched=searched))
        order = [place for members in alike.values() for place in members]
        rows = row_of_kernels(order, [self.rows[place].calls for place in order])
        return join_columns(kernels).map_columns(torch.as_tensor), torch.as_tensor(join_columns(calls).count), rows

    def fitted(self, of: np.ndarray, *, iterations: int = _DESCENT.iterations) -> FittedTimes:
        """Return the efficiencies that explain the rows of the mask `of`, (rows,), and the overhead of timing
        kernels."""

        def losses(values: Values) -> torch.Tensor:
            return robust(torch.log(self._milliseconds(values) / self.measured_ms), TOLERANCE)

        values = descend(self._begin(), losses, self.row_weights(of), replace(_DESCENT, iterations=iterations))
        added_ms = dict(zip(self.instruments, torch.exp(values["instrument"]).tolist(), strict=True))
        measured = {self.instruments[place] for place in self.instrument[torch.tensor(of)].tolist()}

        def usual_ms(operator: str) -> float:
            known = [added_ms[key] for key in measured if key[1] == operator]
            return float(np.median(known)) if known else INSTRUMENT_MS

        leftover = _LEFTOVER
        if (of & (self.sources == LLM_FOUNDRY)).any():
            leftover = values["leftover"][self.hosts.tolist().index(LLM_FOUNDRY)].item()
        return FittedTimes(
            parameters=self._parameters(values, np.asarray),
            instrument_ms={key: ms if key in measured else usual_ms(key[1]) for key, ms in added_ms.items()},
            leftover=math.exp(leftover),
        )

    def row_weights(self, of: np.ndarray) -> np.ndarray:
        """Return each row's weight in a fit of the rows of mask `of`; 0 for the others, 1 in sum."""
        return weights_by(self.sources, of, power=0.5, factors=self.weights)

    def log_ratios(self, fitted: FittedTimes) -> np.ndarray:
        """Return the logarithm of estimated over measured time of each row; the host's time is the modelled one."""
        seconds = np.zeros(len(self.rows))
        names = fitted.parameters.names
        kernels = self.kernels if names == self.names else self._all_kernels(names)[0]
        kernels = kernels.map_columns(lambda column: column.numpy())
        np.add.at(seconds, self.row.numpy(), self.count.numpy() * call_seconds(kernels, fitted.parameters))
        estimated = [
            fitted.row_ms(row, busy, host)
            for row, busy, host in zip(self.rows, (seconds * 1e3).tolist(), self.host_ms.tolist(), strict=True)
        ]
        return np.asarray(np.log(np.array(estimated) / self.measured_ms.numpy()))

    def _begin(self) -> dict[str, torch.Tensor]:
        def full(shape: Sequence[int], value: float) -> torch.Tensor:
            return torch.full(tuple(shape), value, dtype=torch.float64)

        by_group = {name: full([len(GROUPS), len(UNITS)], _BY_GROUP[name]) for name in GROUP_VALUES}
        by_group["sm_rate"][GROUPS.index(ATTENTION)] = _SM_RATE_OF_ATTENTION
        return {
            "compute": torch.tensor([_compute_of(name) for name in self.names[0]], dtype=torch.float64),
            "bandwidth": full([len(self.names[1])], _BANDWIDTH),
            **by_group,
            **{name: full([len(UNITS)], _BY_UNITS[name]) for name in UNIT_VALUES},
            **{name: full([], _SINGLE[name]) for name in SINGLE_VALUES},
            "instrument": full([len(self.instruments)], math.log(INSTRUMENT_MS)),
            "host": full([len(self.hosts)], math.log(_HOST_FACTOR)),
            "leftover": full([len(self.hosts)], _LEFTOVER),
        }

    def _milliseconds(self, values: Values) -> torch.Tensor:
        learned = self._parameters(values, lambda value: value)
        seconds = self.count * call_seconds(self.kernels, learned, torch)
        busy = torch.zeros(len(self.rows), dtype=torch.float64).index_add(0, self.row, seconds) * 1e3
        host = self.host_ms * torch.exp(values["host"])[self.host]
        one_kernel = busy + torch.exp(values["instrument"])[self.instrument]
        beside_others = busy * torch.exp(values["leftover"][self.host] * self.is_sharded)
        return torch.where(self.one_kernel, one_kernel, overlapped_ms(beside_others, host))

    def _parameters(self, values: Values, convert: Callable[..., Any]) -> Parameters:
        return Parameters(
            names=self.names,
            compute=convert(values["compute"]),
            bandwidth=convert(values["bandwidth"]),
            by_group={name: convert(values[name]) for name in GROUP_VALUES},
            by_units={name: convert(values[name]) for name in UNIT_VALUES},
            single={name: convert(values[name]) for name in SINGLE_VALUES},
        )


def overlapped_ms(busy_ms: torch.Tensor, host_ms: torch.Tensor) -> torch.Tensor:
    """Return `featurize.timing.simulation.overlap_times` of many steps; both arguments have a gradient at 0."""
    return (busy_ms**OVERLAP + host_ms**OVERLAP + 1e-30) ** (1 / OVERLAP)


def _names(rows: Sequence[MeasuredTime]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of `Parameters`: every kind, in every layout and on all units of the rows."""
    compute, bandwidth = {OTHER}, {OTHER}
    for row in rows:
        layout = "/channels_last" if row.channels_last else ""
        rates = row.device.peak_tflops
        half = (rates.fp16 or rates.bf16) is not None
        has = (False, rates.tf32 is not None, half, half)
        for kind, group, pipe in zip(row.calls.kind, row.calls.group.tolist(), row.calls.pipe.tolist(), strict=True):
            in_layout = "" if kind.startswith(_IN_ANY_LAYOUT) else layout
            bandwidth.add(f"{kind}{in_layout}")
            if GROUPS[group] != STREAM:
                compute.add(f"{kind}{in_layout}/{units_names(pipe, has[pipe])[0]}")
    return tuple(sorted(compute)), tuple(sorted(bandwidth))


def _compute_of(name: str) -> float:
    return next((share for kind, share in _COMPUTE_OF.items() if name.startswith(kind)), _COMPUTE)


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
    with warehouse.connect(data) as connection:
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
    if name.startswith(PREFIX):  # a layer, not an operator
        return _measured_layer(name.removeprefix(PREFIX), device, json.loads(dims), dtype, phase, duration_us)
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
    inputs = tuple(tuple(shape) for shape in dims["shapes"] if shape)
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
