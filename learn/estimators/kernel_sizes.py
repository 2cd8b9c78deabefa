"""All kernels of measured rows as columns: their work, bytes, tiles and rates of the data sheet, which formulas of
other people start from.

Start reading at `KernelSizes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from conf.units import MIB
from featurize.device.device_spec import DeviceSpec
from featurize.timing.calls import ATTENTION, CONVOLUTION, GROUPED, GROUPS, PRODUCT, STREAM, Calls
from learn.estimators.kernel_fitter import joined
from learn.estimators.kernel_fitting import ALONE, INSTRUMENT_MS, MeasuredTime

_TILE_SIDE = {False: 64.0, True: 128.0}  # of a product's tile, on tensor cores and not
_SPLIT_DEPTH = 256.0  # depth that is worth a tile of its own
_BLOCK_BYTES = 8192.0  # of a kernel that only moves its tensors: 256 threads, a vector of 16 bytes in and out each


@dataclass(frozen=True)
class KernelSizes:
    """All kernels of all rows, an entry a kernel; `kind` numbers the kinds in the order of their first kernel.

    `math_s` and `memory_s` are at the data sheet's rates, `ridge` is the FLOP per byte of the units that compute.
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
        return np.maximum(self.math_s, self.memory_s)


class Instruments:
    """Time that timing single kernels adds: one learned logarithm of ms for each operator."""

    def __init__(self, rows: Sequence[MeasuredTime]) -> None:
        operators = [row.group if row.source in ALONE else "" for row in rows]
        names = list(dict.fromkeys(operators))
        self.operator = torch.tensor([names.index(name) for name in operators])  # of each row
        self.begin = torch.full((len(names),), math.log(INSTRUMENT_MS), dtype=torch.float64)


def ends_of(rows: Sequence[MeasuredTime]) -> np.ndarray:
    """Return where each row's kernels begin among those of all rows, and where the last one's end, (rows + 1,)."""
    return np.concatenate([[0], np.cumsum([len(row.calls.kind) for row in rows])])


def sizes_of(rows: Sequence[MeasuredTime]) -> KernelSizes:
    """Return the kernels of all rows."""
    kinds: dict[str, int] = {}
    return joined([_of_row(row, at, kinds) for at, row in enumerate(rows)])


def _of_row(row: MeasuredTime, at: int, kinds: dict[str, int]) -> KernelSizes:
    """Return the kernels of one row, the `at`-th one; new kinds are added to `kinds`."""
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
        row=np.full(len(names), at),
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
    """Return which kernels run on tensor cores, and the rate of each one's units in FLOP/s."""
    rates = device.peak_tflops
    half = rates.fp16 or rates.bf16
    fp8 = rates.fp8 or half
    tensor = np.array([False, rates.tf32 is not None, half is not None, fp8 is not None])[calls.pipe]
    of_pipes = np.array([rates.fp32, rates.tf32 or rates.fp32, half or rates.fp32, fp8 or rates.fp32])
    return tensor, (of_pipes * 1e12)[calls.pipe]


def _blocks(calls: Calls, tensor: np.ndarray, sm_count: int) -> np.ndarray:
    """Return how many tiles each kernel's work has: of its output, split along the depth while SMs are idle."""
    side = np.where(tensor, _TILE_SIDE[True], _TILE_SIDE[False])
    tiled = calls.within(PRODUCT, CONVOLUTION, GROUPED)
    tiles = np.maximum(np.ceil(calls.rows / side) * np.ceil(calls.columns / side) * calls.batch, 1.0)
    splits = np.maximum(np.minimum(np.floor(sm_count / tiles), np.floor(calls.depth / _SPLIT_DEPTH)), 1.0)
    queries = np.ceil(calls.rows / side) * calls.batch
    streamed = np.ceil(calls.nbytes / _BLOCK_BYTES)
    return np.maximum(np.where(tiled, tiles * splits, np.where(calls.within(ATTENTION), queries, streamed)), 1.0)
