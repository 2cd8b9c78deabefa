"""Formulas for the time of kernels and steps: the kernel model, packaged and refitted, and published ones; and their
judgement on fitted and left-out rows.

Start reading at `FORMULAS`, then at `judge`. Published ones are implemented from their papers, on the work, bytes,
tiles and data-sheet rates of each kernel (`KernelSizes`); the docstring lists differences from the paper. `labels_by`
and `subsets` also serve `learn.benchmark`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.timing.activity import ActivityParameters
from featurize.timing.kernels import (
    ATTENTION,
    CONVOLUTION,
    DEPTHWISE,
    GROUPED,
    GROUPS,
    PRODUCT,
    STREAM,
    Calls,
    clock_ghz,
)
from featurize.timing.simulation import LearnedEfficiencies, load_efficiencies
from learn.fitting.kernel_fit import (
    ALONE,
    INSTRUMENT_MS,
    KERNELS,
    TOLERANCE,
    Descent,
    FittedTimes,
    MeasuredTime,
    Progress,
    TimeFit,
    Values,
    descend,
    join_columns,
    overlapped_ms,
    robust,
)
from learn.judging.evaluate import LEARNED_FROM, held_out_by, judged_by_splits
from learn.judging.scores import RowScores, spread

_TILE_SIDE = {False: 64.0, True: 128.0}  # side of a product's tile, by whether it runs on tensor cores
_SPLIT_DEPTH = 256.0  # least depth of a tile when a product is split along its depth
_BLOCK_BYTES = 8192.0  # bytes of a block that only moves tensors: 256 threads, each a vector of 16 bytes in and out


@dataclass(frozen=True)
class KernelSizes:
    """All kernels of all rows, an entry a kernel; `kind` numbers the kinds in the order of their first kernel.

    `math_s` and `memory_s` are at the data sheet's rates, `ridge` is the FLOP per byte of the kernel's arithmetic
    units.
    """

    kind: np.ndarray
    row: np.ndarray
    count: np.ndarray
    math_s: np.ndarray
    memory_s: np.ndarray
    nbytes: np.ndarray
    intensity: np.ndarray
    ridge: np.ndarray
    blocks: np.ndarray
    sm_count: np.ndarray
    l2_bytes: np.ndarray
    memory_bytes: np.ndarray

    @property
    def kinds(self) -> int:
        """Number of kinds."""
        return int(self.kind.max()) + 1

    @property
    def roofline_s(self) -> np.ndarray:
        return np.asarray(np.maximum(self.math_s, self.memory_s))


def instruments_of(rows: Sequence[MeasuredTime]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row, the index of its single kernel's timing overhead, (rows,), and the start of these
    overheads, logarithms of ms, one for each operator."""
    operators = [row.group if row.source in ALONE else "" for row in rows]
    names = list(dict.fromkeys(operators))
    begin = torch.full((len(names),), math.log(INSTRUMENT_MS), dtype=torch.float64)
    return torch.tensor([names.index(name) for name in operators]), begin


def ends_of(rows: Sequence[MeasuredTime]) -> np.ndarray:
    """Return the index of each row's first kernel among those of all rows, and the end of the last, (rows + 1,)."""
    return np.concatenate([[0], np.cumsum([len(row.calls.kind) for row in rows])])


def sizes_of(rows: Sequence[MeasuredTime]) -> KernelSizes:
    """Return the kernels of all rows."""
    kinds: dict[str, int] = {}
    return join_columns([_of_row(row, place, kinds) for place, row in enumerate(rows)])


def _of_row(row: MeasuredTime, place: int, kinds: dict[str, int]) -> KernelSizes:
    """Return the kernels of one row, the `place`-th; new kinds are added to `kinds`."""
    calls, device = row.calls, row.device
    tensor, rate = _units(calls, device)
    names = [
        kind if GROUPS[group] == STREAM else f"{kind}/{'tensor' if on else 'fp32'}"
        for kind, group, on in zip(calls.kind, calls.group.tolist(), tensor.tolist(), strict=True)
    ]
    same = np.ones(len(names))
    flops = np.where(calls.within(STREAM), 0.0, calls.flops)
    nbytes, bandwidth = np.maximum(calls.nbytes, 1.0), device.bandwidth_gb_s * 1e9
    return KernelSizes(
        kind=np.array([kinds.setdefault(name, len(kinds)) for name in names], dtype=int),
        row=np.full(len(names), place),
        count=calls.count,
        math_s=flops / rate,
        memory_s=nbytes / bandwidth,
        nbytes=calls.nbytes,
        intensity=flops / nbytes,
        ridge=rate / bandwidth,
        blocks=_blocks(calls, tensor, device.sm_count),
        sm_count=device.sm_count * same,
        l2_bytes=device.l2_mib * MIB * same,
        memory_bytes=device.memory_mib * MIB * same,
    )


def _units(calls: Calls, device: DeviceSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each kernel runs on tensor cores, and the rate of its units in FLOP/s."""
    rates = device.peak_tflops
    half = rates.fp16 or rates.bf16
    fp8 = rates.fp8 or half
    tensor = np.array([False, rates.tf32 is not None, half is not None, fp8 is not None])[calls.pipe]
    of_pipes = np.array([rates.fp32, rates.tf32 or rates.fp32, half or rates.fp32, fp8 or rates.fp32])
    return tensor, (of_pipes * 1e12)[calls.pipe]


def _blocks(calls: Calls, tensor: np.ndarray, sm_count: int) -> np.ndarray:
    """Return each kernel's number of tiles: those of its output, split along the depth while SMs are idle."""
    side = np.where(tensor, _TILE_SIDE[True], _TILE_SIDE[False])
    tiled = calls.within(PRODUCT, CONVOLUTION, GROUPED)
    tiles = np.maximum(np.ceil(calls.rows / side) * np.ceil(calls.columns / side) * calls.batch, 1.0)
    splits = np.maximum(np.minimum(np.floor(sm_count / tiles), np.floor(calls.depth / _SPLIT_DEPTH)), 1.0)
    queries = np.ceil(calls.rows / side) * calls.batch
    streamed = np.ceil(calls.nbytes / _BLOCK_BYTES)
    return np.maximum(np.where(tiled, tiles * splits, np.where(calls.within(ATTENTION), queries, streamed)), 1.0)


def wave_scaling(fit: TimeFit) -> Formula:
    """Habitat's wave scaling: a time measured on one GPU, scaled to another.

    Yu, Gao, Golikov, Pekhimenko: "Habitat: A Runtime-Based Computational Performance Predictor for Deep Neural Network
    Training", USENIX ATC 2021, sections 3.3 and 4.2. For B blocks, W blocks a wave, bandwidth D and clock C of origin o
    and destination d:

        T_d / T_o = ceil(B / W_d) / ceil(B / W_o) * (D_o W_d / (D_d W_o))^gamma * (C_o / C_d)^(1 - gamma)

    which for many waves is (D_o / D_d)^gamma * (W_o C_o / (W_d C_d))^(1 - gamma). Gamma falls from 1 to 1/2 as the
    kernel's FLOP per byte x rises to the destination's R, and is R / 2x beyond.

    Differences: the paper profiles each kernel on the origin. Here a step has one measured time, divided among its
    kernels in the ratios of the origin's roofline. The paper has networks for products, convolutions and LSTMs; here
    they are scaled too. Occupancy is the same on both GPUs, so W is in proportion to the SMs. Of several origins, the
    geometric mean is taken. There is no answer without a measurement of the same kernels on another GPU model.
    """
    sizes, ends, measured_ms = sizes_of(fit.rows), ends_of(fit.rows), fit.measured_ms.numpy()
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(fit.rows):
        alike[_job_of(row)].append(place)

    def factor(origin: int, destination: int) -> float:
        """Return the ratio of the row's time on the destination's GPU to that on the origin's."""
        at_origin, at_destination = (slice(ends[job], ends[job + 1]) for job in (origin, destination))
        before, after = fit.rows[origin].device, fit.rows[destination].device
        share = sizes.count[at_origin] * sizes.roofline_s[at_origin]
        factors = wave_factors(
            sizes.blocks[at_origin], sizes.intensity[at_origin], sizes.ridge[at_destination], before, after
        )
        return float((share * factors).sum() / share.sum())

    def log_ratios(of: np.ndarray) -> np.ndarray:
        ratios = np.full(len(fit.rows), np.nan)
        for members in alike.values():
            for member in members:
                origins = [o for o in members if of[o] and fit.devices[o] != fit.devices[member]]
                if origins:
                    scaled = [math.log(measured_ms[origin] * factor(origin, member)) for origin in origins]
                    ratios[member] = np.mean(scaled) - math.log(measured_ms[member])
        return ratios

    return log_ratios


def wave_factors(
    blocks: np.ndarray, intensity: np.ndarray, ridge: np.ndarray, before: DeviceSpec, after: DeviceSpec
) -> np.ndarray:
    """Return each kernel's time on one GPU model over its time on another, by `wave_scaling`'s formula.

    Args:
        blocks: Thread blocks of each kernel.
        intensity: Its FLOP per byte.
        ridge: FLOP per byte of the units that compute, on the destination.
        before, after: Origin and destination.
    """
    bound = np.where(intensity < ridge, 1 - 0.5 * intensity / ridge, 0.5 * ridge / np.maximum(intensity, 1e-9))
    waves = np.ceil(blocks / after.sm_count) / np.ceil(blocks / before.sm_count)
    sms = after.sm_count / before.sm_count
    bandwidth = before.bandwidth_gb_s / after.bandwidth_gb_s
    clock = clock_ghz(before) / clock_ghz(after)
    return np.asarray(waves * (bandwidth * sms) ** bound * clock ** (1 - bound))


def _job_of(row: MeasuredTime) -> tuple[Any, ...]:
    """Return a key that is equal for rows that run the same kernels in the same setting."""
    calls = row.calls
    columns = (calls.count, calls.pipe, calls.flops, calls.nbytes, calls.rows, calls.columns, calls.depth, calls.batch)
    return (
        row.source,
        row.group,
        row.channels_last,
        row.searched,
        calls.kind,
        *(column.tobytes() for column in columns),
    )


class TilesAndWaves:
    """NeuSight's form: a network estimates a tile's utilization of the roofline; the number of waves scales it up.

    Lee, Phanishayee, Mahajan: "Forecasting GPU Performance for Deep Learning Training and Inference", ASPLOS 2025
    (arXiv 2407.13853), sections 4 and 5. A kernel takes waves x (time of a tile at one SM's share of the peak rates) /
    utilization, utilization = alpha - beta / waves. A multilayer perceptron estimates alpha and beta from a tile's
    FLOPs, bytes and footprint over what one SM has; sigmoids keep the utilization between 0 and 1, so that no kernel is
    faster than the roofline. It learns by the symmetric percentage error. A step is the sum of its kernels, without the
    host.

    Differences: one small network with the kernel's kind as an input, where the paper trains a large one for each of
    five operators and treats the others as bound by memory. Tiles have one size for each kind of units, where the paper
    looks them up among profiled kernels. It learns from whole steps as well, which the paper does not: only they hold
    tensor cores and backward passes. The overhead of timing a single kernel is learned for each operator.
    """

    _EPOCHS, _ROWS, _RATE, _HIDDEN, _OF_KIND = 20, 128, 3e-3, 64, 8

    def __init__(self, fit: TimeFit, epochs: int = _EPOCHS) -> None:
        self.fit, self.epochs = fit, epochs
        sizes = sizes_of(fit.rows)
        self.ends = ends_of(fit.rows)
        self.kinds = sizes.kinds
        self.kind = torch.tensor(sizes.kind)
        waves = np.ceil(sizes.blocks / sizes.sm_count)
        of_sm = sizes.sm_count / sizes.blocks  # one tile, at one SM's share of the GPU
        self.waves = torch.tensor(waves, dtype=torch.float32)
        self.all_waves_ms = torch.tensor(sizes.count * waves * sizes.roofline_s * of_sm * 1e3, dtype=torch.float32)
        features = np.log(
            np.stack(
                [
                    sizes.math_s * of_sm + 1e-9,
                    sizes.memory_s * of_sm + 1e-9,
                    sizes.nbytes * of_sm / sizes.l2_bytes + 1e-9,
                    sizes.nbytes * of_sm / sizes.memory_bytes + 1e-12,
                ],
                axis=1,
            )
        )
        self.features = torch.tensor((features - features.mean(axis=0)) / (features.std(axis=0) + 1e-9)).float()
        self.instrument, self.added = instruments_of(fit.rows)
        self.measured_ms = fit.measured_ms.float()

    def __call__(self, of: np.ndarray) -> np.ndarray:
        """Return the logarithms that `Formula` describes."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            kind = torch.nn.Embedding(self.kinds, self._OF_KIND)
            network = torch.nn.Sequential(
                torch.nn.Linear(self.features.shape[1] + self._OF_KIND, self._HIDDEN),
                torch.nn.ReLU(),
                torch.nn.Linear(self._HIDDEN, self._HIDDEN),
                torch.nn.ReLU(),
                torch.nn.Linear(self._HIDDEN, 2),
            )
        added = self.added.clone().requires_grad_(True)
        learned = [*network.parameters(), *kind.parameters(), added]
        optimizer = torch.optim.AdamW(learned, lr=self._RATE, weight_decay=1e-4)
        weights = torch.tensor(self.fit.row_weights(of)).float()
        inside, order = np.flatnonzero(of), np.random.default_rng(0)
        batches = math.ceil(len(inside) / self._ROWS)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs * batches)
        for _ in range(self.epochs):
            for rows in np.array_split(order.permutation(inside), batches):
                optimizer.zero_grad()
                estimated, measured = self._milliseconds(network, kind, added, rows), self.measured_ms[rows]
                error = 2 * (estimated - measured).abs() / (estimated + measured)
                (weights[rows] * error).sum().mul(batches).backward()
                optimizer.step()
                schedule.step()
        with torch.no_grad():
            parts = np.array_split(np.arange(len(self.fit.rows)), max(1, len(self.fit.rows) // self._ROWS))
            estimated = torch.cat([self._milliseconds(network, kind, added, rows) for rows in parts])
            return torch.log(estimated / self.measured_ms).double().numpy()

    def _milliseconds(
        self, network: torch.nn.Module, kind: torch.nn.Module, added: torch.Tensor, rows: np.ndarray
    ) -> torch.Tensor:
        lengths = self.ends[rows + 1] - self.ends[rows]
        row = np.repeat(np.arange(len(rows)), lengths)
        index = torch.tensor(np.arange(len(row)) + np.repeat(self.ends[rows] - (np.cumsum(lengths) - lengths), lengths))
        alpha, beta = torch.sigmoid(network(torch.cat([self.features[index], kind(self.kind[index])], dim=1))).unbind(1)
        utilization = alpha - alpha * beta / self.waves[index]
        kernels_ms = self.all_waves_ms[index] / utilization.clamp(min=1e-4)
        busy_ms = torch.zeros(len(rows)).index_add(0, torch.tensor(row), kernels_ms)
        added_ms = torch.exp(added)[self.instrument[rows]].float()
        return busy_ms + self.fit.one_kernel[rows] * added_ms


_USUAL_SHARE = 0.6
_DESCENT = Descent(
    of_priors=1e-4,
    firmness={"instrument": 0.0},
    iterations=300,
    rate=0.03,
    last_rate=0.03,
    limits={"share": (-math.inf, 0.0)},
)


# A formula, prepared for the rows of a `TimeFit`. It takes the mask `of` of the rows to fit on, (rows,), and returns
# the logarithm of estimated over measured time of every row; NaN where it has no answer. Rows outside `of` do not
# affect the fit.
Formula: TypeAlias = Callable[[np.ndarray], np.ndarray]


def kernel_model(fit: TimeFit) -> Formula:
    """Return the kernel model with refitted efficiencies."""
    return lambda of: fit.log_ratios(fit.fitted(of))


def kernel_model_as_it_comes(fit: TimeFit) -> Formula:
    """Return the kernel model with the packaged efficiencies, independent of the rows."""
    learned = load_efficiencies()
    instrument_ms = dict.fromkeys(fit.instruments, INSTRUMENT_MS)
    packaged = FittedTimes(parameters=learned.parameters, instrument_ms=instrument_ms, leftover=learned.sharded)
    ratios = fit.log_ratios(packaged)
    return lambda _: ratios


def roofline_by_kind(fit: TimeFit) -> Formula:
    """The roofline with one learned share for each kind of kernel on each kind of units.

    A share is at most 1. Time of a step: the longer of GPU and host, as ours. A kind without rows has 0.6.
    """
    sizes, (instrument, added) = sizes_of(fit.rows), instruments_of(fit.rows)
    by_kind_ms = np.zeros((len(fit.rows), sizes.kinds))
    np.add.at(by_kind_ms, (sizes.row, sizes.kind), sizes.count * sizes.roofline_s * 1e3)
    usual = torch.full((sizes.kinds,), math.log(_USUAL_SHARE), dtype=torch.float64)

    def log_ratios(values: Values) -> torch.Tensor:
        busy_ms = torch.from_numpy(by_kind_ms) @ torch.exp(-values["share"])
        one_kernel_ms = busy_ms + torch.exp(values["instrument"])[instrument]
        steps_ms = overlapped_ms(busy_ms, fit.host_ms)
        return torch.log(torch.where(fit.one_kernel, one_kernel_ms, steps_ms) / fit.measured_ms)

    def learned(of: np.ndarray) -> np.ndarray:
        values = descend(
            {"share": usual, "instrument": added},
            lambda values: robust(log_ratios(values), TOLERANCE),
            fit.row_weights(of),
            _DESCENT,
        )
        return np.asarray(log_ratios(values).numpy())

    return learned


AS_IT_COMES = "trace"  # the estimator of that name has the same figures
FORMULAS: Mapping[str, Callable[[TimeFit], Formula]] = {
    AS_IT_COMES: kernel_model_as_it_comes,
    "kernels": kernel_model,
    "roofline": roofline_by_kind,
    "habitat": wave_scaling,
    "neusight": TilesAndWaves,
}


_OF_KERNELS = (LEARNED_FROM, "GPU models left out")
COVERAGES = (0.5, 0.75, 0.9, 0.95, 0.99)
_LONG_TOKENS = 8192
_DEPTHWISE_SHARE = 0.25  # share of a network's convolutions
_TILED_OPERATORS = tuple(f"{KERNELS}/aten::{name}" for name in ("addmm", "bmm", "convolution"))


def judge(fit: TimeFit, folds: int, progress: Progress) -> tuple[list[RowScores], np.ndarray]:
    """Return the scores of each split, and the logarithm of estimated over measured time of rows in left-out families.

    Args:
        fit: The rows.
        folds: Parts of the families that are left out in turn.
        progress: Called before each fit with a text, the number of fits done and their total.
    """
    splits = {"families left out": held_out_by(labels_by(fit, "family"), folds)}
    for by, title in (("source", "sources left out"), ("device", "GPU models left out")):
        labels = labels_by(fit, by)
        if len(np.unique(labels[fit.steps])) > 1:
            splits[title] = held_out_by(labels)
    _, ratios = judged_by_splits(fit.fitted, fit.log_ratios, splits, progress)
    of_subsets = dict(subsets(fit))
    kernels_alone = {rows for rows, mask in of_subsets.items() if not (mask & fit.steps).any()}
    scores = [
        score_of(split, rows, values[mask])
        for split, values in ratios.items()
        for rows, mask in of_subsets.items()
        if rows not in kernels_alone or split in _OF_KERNELS
    ]
    return [score for score in scores if score.count], ratios["families left out"][fit.steps]


def efficiencies_of(fit: TimeFit, held_out: np.ndarray, activity: ActivityParameters) -> LearnedEfficiencies:
    """Return the content of the file: the fit on all rows, and its error on left-out families."""
    longer = -held_out[np.isfinite(held_out)]  # measured over estimated
    sources, counts = np.unique(fit.sources, return_counts=True)
    fitted = fit.fitted(np.ones(len(fit.rows), dtype=bool))
    return LearnedEfficiencies(
        parameters=fitted.parameters,
        sharded=fitted.leftover,
        activity=activity,
        error_quantiles={coverage: float(np.exp(np.quantile(longer, coverage))) for coverage in COVERAGES},
        fitted_on=dict(zip(sources.tolist(), counts.tolist(), strict=True)),
    )


def labels_by(fit: TimeFit, by: str) -> np.ndarray:
    """Return the label of each row; rows of one label are left out together.

    Args:
        by: device, family or source. Single operators have no source: all splits except by device learn from them.
    """
    return {"device": fit.devices, "family": fit.groups, "source": np.where(fit.steps, fit.sources, KERNELS)}[by]


def subsets(fit: TimeFit) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the name of each set of rows that is judged together, with its mask."""
    steps = fit.steps
    long_rows = np.array([(row.calls.rows[row.calls.within(ATTENTION)] >= _LONG_TOKENS).any() for row in fit.rows])
    for source in np.unique(fit.sources):
        yield str(source), fit.sources == source
    for name, mask in (
        ("products, convolutions", np.isin(fit.groups, _TILED_OPERATORS)),
        ("depthwise networks", steps & np.array([_is_depthwise(row) for row in fit.rows])),
        (f"{_LONG_TOKENS:,} tokens and more", steps & long_rows),
    ):
        if mask.any():
            yield name, mask
    for device in np.unique(fit.devices[steps]):
        yield str(device), (fit.devices == device) & steps


def _is_depthwise(row: MeasuredTime) -> bool:
    calls = row.calls
    depthwise = float(calls.count[calls.within(DEPTHWISE)].sum())
    convolutions = float(calls.count[calls.within(DEPTHWISE, CONVOLUTION, GROUPED)].sum())
    return depthwise > 0 and depthwise >= _DEPTHWISE_SHARE * convolutions


def score_of(split: str, rows: str, ratios: np.ndarray) -> RowScores:
    """Return the factor by which times are off, from logarithms of estimated over measured time; NaN: no answer.

    `factor_median` and `factor_p90`, never below 1, are exceeded by half and by a tenth of the rows;
    `bias` is the median of estimated over measured, `mean_error` the mean of |estimated / measured - 1|.
    """
    answered = ratios[np.isfinite(ratios)]
    median, p90 = np.exp(spread(ratios)).tolist()
    bias, mean_error = math.nan, math.nan
    if len(answered):
        bias, mean_error = float(np.exp(np.median(answered))), float(np.mean(np.abs(np.exp(answered) - 1)))
    figures = {"factor_median": median, "factor_p90": p90, "bias": bias, "mean_error": mean_error}
    return RowScores(rows=rows, by=split, count=len(answered), figures=figures)
