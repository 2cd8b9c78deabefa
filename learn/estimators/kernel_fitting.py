"""Fit the efficiencies of the kernel model to measured kernels and steps together, and judge them on held-out ones.

Start reading at `TimeFit`. The formula is `featurize.timing.times.call_seconds`, on torch tensors. All fits of kernels
use `descend`, a gradient descent with priors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import EAGER
from featurize.timing.calls import ATTENTION, GROUPS, STREAM, Calls
from featurize.timing.step_time import OVERLAP, overlap_times
from featurize.timing.times import (
    GROUP_VALUES,
    OTHER,
    SINGLE_VALUES,
    UNIT_VALUES,
    UNITS,
    Kernels,
    Parameters,
    call_seconds,
    host_ms,
    kernels_on,
    units_names,
)

Values = Mapping[str, torch.Tensor]
Columns = TypeVar("Columns")
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
    zero = torch.zeros_like(off)
    return torch.nn.functional.huber_loss(off, zero, delta=tolerance, reduction="none") / tolerance


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
SHARDED = "llm_foundry"  # source of steps with FSDP: weights arrive and gradients leave while the GPU computes
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
_HOST_FACTOR = 1.0  # factor on the time of `featurize.timing.times` for a launch: hosts differ
_LEFTOVER = 0.1  # start of the logarithm by which kernels in a step of `SHARDED` take longer than alone
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
        leftover: Factor by which kernels in a step of `SHARDED` take longer than alone. It stays out of the
            efficiencies.
    """

    parameters: Parameters
    instrument_ms: Mapping[tuple[str, str], float]
    leftover: float

    def row_ms(self, row: MeasuredTime, busy_ms: float, host_ms: float) -> float:
        """Return the time of a row in ms, from its kernels' time and its host's."""
        if row.source in ALONE:
            return busy_ms + self.instrument_ms[row.device.name, row.group]
        return overlap_times(busy_ms * self.leftover if row.source == SHARDED else busy_ms, host_ms)


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
        self.is_sharded = of_rows(row.source == SHARDED for row in rows)
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
        if (of & (self.sources == SHARDED)).any():
            leftover = values["leftover"][self.hosts.tolist().index(SHARDED)].item()
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
    """Return `featurize.timing.step_time.overlap_times` of many steps; both arguments have a gradient at 0."""
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
