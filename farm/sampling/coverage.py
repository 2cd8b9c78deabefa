"""Counts rows and candidates by bins of the labels and regions of the configs, to find where rows are few.

Start reading at `Map.of`, then `fill`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from featurize.configs.trial import TrialConfig
from learn.rows.targets import LEVELS, MIB_PER_GB, UTILIZATION_EDGES, default_bin_gb, get_target, utilization_bins

OUT_OF_MEMORY = "out of memory"
NO_FIGURE = "unknown"
DIMENSIONS = ("memory", *UTILIZATION_EDGES, "region")


@dataclass(frozen=True)
class Map:
    """The cells of n configs, by dimension: `memory`, `smact`, `smocc`, `drama` and `region`.

    codes  (n, dimensions) int, an index into that dimension's `names`; a cell is one family's
    """

    codes: np.ndarray
    names: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(
        cls,
        configs: Sequence[TrialConfig],
        figures: Mapping[str, np.ndarray],
        parameters: np.ndarray,
        capacity_mib: float,
    ) -> Map:
        """`figures`: target -> (n,) in the target's unit, NaN where there is none; `parameters` (n,) of the networks.
        Memory of the device's `capacity_mib` or more is one cell: what such runs tell is that they do not fit."""
        families = [config.family for config in configs]
        cells = {"memory": _memory_cells(families, figures["memory"], capacity_mib)}
        for name in UTILIZATION_EDGES:
            values = np.asarray(figures.get(name, np.full(len(configs), np.nan)), dtype=float)
            # What does not fit is not driven either.
            cells[name] = _level_cells(families, np.where(figures["memory"] >= capacity_mib, np.nan, values), name)
        cells["region"] = [region_of(*both) for both in zip(configs, parameters.tolist(), strict=True)]
        codes, names = [], {}
        for dimension in DIMENSIONS:
            known, code = np.unique(np.array(cells[dimension], dtype=object).astype(str), return_inverse=True)
            names[dimension] = tuple(known.tolist())
            codes.append(code)
        return cls(np.stack(codes, axis=1), names)

    def cell(self, row: int, dimension: str) -> str:
        """Return a cell's name, such as `cnn 8-16 GB`."""
        column = DIMENSIONS.index(dimension)
        return self.names[dimension][self.codes[row, column]]

    def counts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the number of rows in each cell, by dimension."""
        return [
            np.bincount(self.codes[rows, column], minlength=len(self.names[dimension])).astype(float)
            for column, dimension in enumerate(DIMENSIONS)
        ]

    def tally(self, rows: np.ndarray) -> dict[str, dict[str, int]]:
        """Return the rows of each non-empty cell, by dimension and name."""
        return {
            dimension: {name: int(n) for name, n in zip(self.names[dimension], counts, strict=True) if n}
            for dimension, counts in zip(DIMENSIONS, self.counts(rows), strict=True)
        }


def fill(cells: Map, known: np.ndarray, pool: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Choose n rows of `pool`, each time one whose cells have the fewest rows so far; return their places in order.

    A cell is worth 1 / (1 + its rows), the sum over the dimensions counts; unknown bins are worth nothing. Rows of
    the very same cells are alike and taken in a random order of `seed`, so that it costs as many cells as occur, times
    n, however many candidates there are.
    """
    counts = cells.counts(known)
    worth = [
        np.array([0.0 if name.endswith(NO_FIGURE) else 1.0 for name in cells.names[dimension]])
        for dimension in DIMENSIONS
    ]
    order = np.random.default_rng(seed).permutation(len(pool))
    kinds, member = np.unique(cells.codes[pool[order]], axis=0, return_inverse=True)
    waiting: list[list[int]] = [[] for _ in kinds]
    for place, kind in zip(order[::-1], member.ravel()[::-1], strict=True):  # popped from the end
        waiting[kind].append(place)
    open_kind = np.ones(len(kinds), dtype=bool)
    chosen = []
    for _ in range(min(n, len(pool))):
        value = sum(
            worth[column][kinds[:, column]] / (1 + counts[column][kinds[:, column]])
            for column in range(len(DIMENSIONS))
        )
        best = int(np.argmax(np.where(open_kind, value, -1.0)))
        chosen.append(pool[waiting[best].pop()])
        open_kind[best] = bool(waiting[best])
        for column in range(len(DIMENSIONS)):
            counts[column][kinds[best, column]] += 1
    return np.array(chosen, dtype=int)


def region_of(config: TrialConfig, parameters: float) -> str:
    """Return the cell of the main features: parameters by decade, batch size by 4, depth by 2, topology."""
    parts = [config.family]
    if topology := getattr(config, "topology", None) or getattr(config, "model", None):
        parts.append(str(topology))
    depth = getattr(config, "depth", None) or getattr(config, "layers", None)
    if isinstance(depth, int) and depth > 0:
        parts.append(f"depth {_range(depth, 2)}")
    parts += [f"batch {_range(config.batch_size, 4)}", f"parameters 1e{int(math.log10(max(parameters, 1)))}"]
    return ", ".join(parts)


def _range(value: int, factor: int) -> str:
    low = factor ** int(math.log(value, factor) + 1e-9)
    return f"{low}-{low * factor - 1}"


def _memory_cells(families: Sequence[str], memory_mib: np.ndarray, capacity_mib: float) -> list[str]:
    cells = []
    for family, mib in zip(families, np.asarray(memory_mib, dtype=float).tolist(), strict=True):
        if mib != mib:
            cells.append(f"{family} {NO_FIGURE}")
        elif mib >= capacity_mib:
            cells.append(f"{family} {OUT_OF_MEMORY}")
        else:
            width = default_bin_gb([family])
            low = int(mib // (width * MIB_PER_GB)) * width
            cells.append(f"{family} {low}-{low + width} GB")
    return cells


def _level_cells(families: Sequence[str], values: np.ndarray, target: str) -> list[str]:
    level = utilization_bins(get_target(target)).classify(values, families)
    return [
        f"{family} {target} {LEVELS[at] if value == value else NO_FIGURE}"
        for family, at, value in zip(families, level.tolist(), values.tolist(), strict=True)
    ]
