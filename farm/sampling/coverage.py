"""A device's rows in the warehouse, counted by bins of labels and regions of configs.

Start reading at `known_runs`, then `Map.of` and `fill`, which finds where rows are few.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from conf.errors import UsageError
from featurize.configs.trial import TrialConfig, config_of_row, problem_of
from featurize.device.device_spec import same_device
from learn.rows.data import (
    LEVELS,
    MIB_PER_GB,
    TARGETS,
    UTILIZATION_EDGES,
    default_bin_gb,
    get_target,
    named,
    utilization_bins,
)
from warehouse.files.folder import DataFolder
from warehouse.tables.schema import ENVIRONMENT


@dataclass(frozen=True)
class Known:
    """Runs of one device and source.

    measured  hashes of the configs that ran there in this environment, with any outcome
    configs   (k,) of the runs with a label to learn from, in any environment
    labels    target -> (k,) in the target's unit, NaN if not measured
    out_of_memory  (k,) bool: the run did not fit, and has no figures
    seconds   (k,) wall time of each run, NaN if unknown
    left_out  sentences on runs with a label from which nothing can be learned
    """

    measured: frozenset[str]
    configs: tuple[TrialConfig, ...]
    labels: Mapping[str, np.ndarray]
    out_of_memory: np.ndarray
    seconds: np.ndarray
    left_out: tuple[str, ...] = ()

    @classmethod
    def nothing(cls) -> Known:
        return cls(frozenset(), (), {}, np.zeros(0, dtype=bool), np.zeros(0))


def known_runs(
    data: DataFolder | str | os.PathLike[str] | None,
    device_name: str,
    *,
    source: str = "measured",
    environment: Mapping[str, str | None] | None = None,
) -> Known:
    """Read the device's runs from the warehouse at `data` (None: the default folder), sorted by `run_id`.

    `environment`: columns of `ENVIRONMENT` -> tonight's values; runs of another environment may be measured again, but
    count as rows. None: any environment. Untrusted runs count as measured, but have no labels.
    """
    from warehouse.reading.connection import select

    environment = environment or {}
    labels = {name: target.column for name, target in TARGETS.items()}
    about = (
        "run_id",
        "family",
        "config_hash",
        "config",
        "device_name",
        "status",
        "oom_kind",
        "quality",
        "error_type",
        "wall_s",
    )
    columns = (*about, *ENVIRONMENT, *labels.values())
    query = f"SELECT {', '.join(columns)} FROM runs WHERE source = ? AND group_id IS NULL ORDER BY run_id"
    device_rows = select(data, query, [source])
    device_rows = [row for row in device_rows if row["device_name"] and same_device(row["device_name"], device_name)]
    measured = {row["config_hash"] for row in device_rows if all(row[name] == v for name, v in environment.items())}
    configs, labelled_rows = [], []
    left_out: dict[str, list[str]] = {}
    for row in device_rows:
        is_out_of_memory = row["status"] == "oom" and row["oom_kind"] == "device"
        doubtful = row["quality"] == "untrusted" or row["error_type"] == "doubt"
        if doubtful or not (is_out_of_memory or (row["status"] == "ok" and row["peak_memory_mib"])):
            continue
        try:
            config = config_of_row(row["config"])
            problem = problem_of(config)
        except UsageError as error:  # a family or field that this version lacks, or no config
            problem = str(error)
        if problem is not None:
            left_out.setdefault(problem, []).append(row["run_id"])
            continue
        configs.append(config)
        labelled_rows.append(row)
    values = {
        name: np.array([np.nan if row[column] is None else row[column] for row in labelled_rows], dtype=float)
        for name, column in labels.items()
    }
    return Known(
        frozenset(measured),
        tuple(configs),
        values,
        np.array([row["status"] == "oom" for row in labelled_rows], dtype=bool),
        np.array([np.nan if row["wall_s"] is None else row["wall_s"] for row in labelled_rows], dtype=float),
        tuple(f"{named(run_ids)} left out: {problem}" for problem, run_ids in sorted(left_out.items())),
    )


def thin(known: Known, at_most: int, seed: int = 0) -> Known:
    """Keep at most this many rows: all rows of rare kinds, and equally many of each common kind.

    A kind is a family, an octave of memory and a tenth of `smact`; out of memory is a separate kind. `measured` stays
    as it is.
    """
    if len(known.configs) <= at_most:
        return known
    memory = known.labels["memory"]
    octave = np.where(known.out_of_memory, -1, np.floor(np.log2(np.maximum(np.nan_to_num(memory, nan=1.0), 1.0))))
    tenth = np.floor(10 * np.nan_to_num(known.labels.get("smact", np.zeros(len(memory))), nan=-1.0))
    family = np.unique([config.family for config in known.configs], return_inverse=True)[1]
    kind = np.unique(np.stack([family, octave, tenth], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    # Each row's number within its kind, in any order: the lowest numbers of all kinds come first.
    order = np.random.default_rng(seed).permutation(len(kind))
    by_kind = order[np.argsort(kind[order], kind="stable")]
    first = np.searchsorted(kind[by_kind], kind[by_kind])
    number = np.arange(len(by_kind)) - first
    places = np.sort(by_kind[np.argsort(number, kind="stable")[:at_most]])
    return replace(
        known,
        configs=tuple(known.configs[place] for place in places),
        labels={name: values[places] for name, values in known.labels.items()},
        out_of_memory=known.out_of_memory[places],
        seconds=known.seconds[places],
    )


OUT_OF_MEMORY = "out of memory"
NO_FIGURE = "unknown"
DIMENSIONS = ("memory", *UTILIZATION_EDGES, "region")


@dataclass(frozen=True)
class Map:
    """The cells of n configs in each dimension: `memory`, `smact`, `smocc`, `drama` and `region`.

    codes  (n, dimensions) int, an index into that dimension's `names`; a cell belongs to one family
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
        """Return the cells of configs.

        `figures`: target -> (n,) in the target's unit, NaN if unknown; `parameters`: (n,) of the networks. Memory of
        `capacity_mib` or more is one cell: such runs show only that they do not fit.
        """
        families = [config.family for config in configs]
        cells = {"memory": memory_cells(families, figures["memory"].tolist(), capacity_mib)}
        for name in UTILIZATION_EDGES:
            values = np.asarray(figures.get(name, np.full(len(configs), np.nan)), dtype=float)
            # A run that does not fit has no utilization.
            cells[name] = _level_cells(families, np.where(figures["memory"] >= capacity_mib, np.nan, values), name)
        cells["region"] = [region_of(*both) for both in zip(configs, parameters.tolist(), strict=True)]
        codes, names = [], {}
        for dimension in DIMENSIONS:
            known, code = np.unique(np.array(cells[dimension], dtype=object).astype(str), return_inverse=True)
            names[dimension] = tuple(known.tolist())
            codes.append(code)
        return cls(np.stack(codes, axis=1), names)

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

    A cell is worth 1 / (1 + its rows), summed over the dimensions; unknown bins are worth 0. Rows of the same cells are
    interchangeable and taken in a random order of `seed`, so the cost is the number of distinct cells times n.
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


def memory_cells(families: Sequence[str], memory_mib: Sequence[float], capacity_mib: float) -> list[str]:
    """Return the bin of each config's memory, such as `cnn 8-16 GB`; NaN: unknown."""
    cells = []
    for family, mib in zip(families, memory_mib, strict=True):
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
        f"{family} {target} {LEVELS[bin_index] if value == value else NO_FIGURE}"
        for family, bin_index, value in zip(families, level.tolist(), values.tolist(), strict=True)
    ]
