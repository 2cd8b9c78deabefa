"""The targets of estimates with their columns and units, and the bins that published results use.

Start reading at `TARGETS`, then `Bins`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conf.errors import UsageError, unknown_name

MIB_PER_GB = 1024.0  # bins are counted in units of 1024 MiB, as nvidia-smi's figures are read
BIN_WIDTHS_GB = (1, 2, 8)
SLOWDOWN = "slowdown"  # target of jobs that share a GPU: not a column of `runs`, see `learn.sharing`

# Edges between low, medium and high, by family: GPUMemNet's utilization sets (arXiv 2602.17817).
UTILIZATION_EDGES: dict[str, dict[str, tuple[float, float]]] = {
    "smact": {"mlp": (0.2, 0.7), "cnn": (0.3, 0.9), "transformer": (0.3, 0.8)},
    "smocc": {"mlp": (0.1, 0.3), "cnn": (0.1, 0.3), "transformer": (0.3, 0.4)},
    "drama": {"mlp": (0.2, 0.7), "cnn": (0.3, 0.9), "transformer": (0.3, 0.8)},
}
_UNPUBLISHED = "transformer"  # a family without published edges is read with this one's
LEVELS = ("low", "medium", "high")


@dataclass(frozen=True)
class Target:
    """One label column. `space` says where errors are taken: `log` of positive values, `ratio` in [0, 1]."""

    name: str
    column: str
    unit: str
    space: str

    @property
    def is_memory(self) -> bool:
        return self.column == "peak_memory_mib"


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("memory", "peak_memory_mib", "MiB", "log"),
        Target("smact", "smact", "ratio", "ratio"),
        Target("smocc", "smocc", "ratio", "ratio"),
        Target("drama", "drama", "ratio", "ratio"),
        Target("gpu_util", "gpu_util", "ratio", "ratio"),
        Target("step_time", "step_time_ms", "ms", "log"),
        Target("power", "power_w", "W", "log"),
    )
}


def get_target(name: str) -> Target:
    """The target of that name. An unknown one raises `UsageError` listing the known."""
    if name not in TARGETS:
        raise unknown_name("target", name, TARGETS)
    return TARGETS[name]


def check_target(name: str) -> None:
    """Raise `UsageError` for what is neither a column's target nor `slowdown`, listing the known."""
    if name not in TARGETS and name != SLOWDOWN:
        raise unknown_name("target", name, (*TARGETS, SLOWDOWN))


@dataclass(frozen=True)
class Bins:
    """Classes over a label. `edges` are the inner edges, in the label's unit; the first class is open below and the
    last above, and class i holds `edges[i-1] <= value < edges[i]`. `by_family` overrides them for some families.
    """

    labels: tuple[str, ...]
    edges: tuple[float, ...]
    by_family: dict[str, tuple[float, ...]]
    rule: str  # in words, for reports

    def edges_of(self, families: Sequence[str] | np.ndarray) -> np.ndarray:
        """Inner edges by row, (n, classes - 1)."""
        rows = [self.by_family.get(family, self.edges) for family in families]
        return np.asarray(rows, dtype=float).reshape(len(rows), len(self.labels) - 1)

    def classify(self, values: np.ndarray | Sequence[float], families: Sequence[str] | np.ndarray) -> np.ndarray:
        """Class index of each value, (n,) int."""
        return np.asarray((np.asarray(values, dtype=float)[:, None] >= self.edges_of(families)).sum(axis=1))

    def to_mapping(self) -> dict[str, Any]:
        return {
            "labels": list(self.labels),
            "edges": list(self.edges),
            "by_family": {family: list(edges) for family, edges in self.by_family.items()},
            "rule": self.rule,
        }


def default_bin_gb(families: Sequence[str] | np.ndarray) -> int:
    """The published width: 1 GB where every row is an MLP, else 8 GB."""
    return 1 if set(families) == {"mlp"} else 8


_MOST_BINS = 4096  # bins of 1 GB: more than any GPU has


def memory_bins(labels_mib: np.ndarray, bin_gb: int, ceiling_mib: float | None) -> Bins:
    """Bins of `bin_gb` * 1024 MiB. The last is open: the bin that ends at `ceiling_mib`, the device's memory, where
    out-of-memory rows are to be classed (they say "at least this much"), else the largest label's bin."""
    if bin_gb not in BIN_WIDTHS_GB:
        raise UsageError(f"bin_gb must be one of {', '.join(map(str, BIN_WIDTHS_GB))}, got {bin_gb!r}")
    width = bin_gb * MIB_PER_GB
    top = int(np.max(labels_mib, initial=0.0) // width)
    if ceiling_mib is not None:
        top = max(0, math.ceil(ceiling_mib / width) - 1)
    if top > _MOST_BINS:
        raise UsageError(
            f"a label of {np.max(labels_mib):,.6g} MiB is more than any GPU has: mend or leave out that run"
        )
    edges = tuple(width * (i + 1) for i in range(top))
    names = (*(f"{bin_gb * i}-{bin_gb * (i + 1)} GB" for i in range(top)), f"{bin_gb * top}+ GB")
    return Bins(names, edges, {}, f"{bin_gb} GB (1 GB = 1024 MiB) wide, the last one open")


def utilization_bins(target: Target) -> Bins:
    """low / medium / high with the published edges of each row's own family."""
    published = UTILIZATION_EDGES[target.name]
    words = "; ".join(f"{family} [{low:g}, {high:g})" for family, (low, high) in published.items())
    rule = f"medium is {words}; any other family as {_UNPUBLISHED}"
    return Bins(LEVELS, published[_UNPUBLISHED], dict(published), rule)


def tercile_bins(labels: np.ndarray, target: Target) -> Bins:
    """low / medium / high thirds of these very labels: for targets that nobody published edges for."""
    low, high = np.quantile(labels, [1 / 3, 2 / 3])
    rule = f"thirds of this data: medium is [{low:.4g}, {high:.4g}) {target.unit}"
    return Bins(LEVELS, (float(low), float(high)), {}, rule)


def make_bins(
    target: Target,
    labels: np.ndarray,
    families: Sequence[str] | np.ndarray,
    *,
    bin_gb: int | None = None,
    ceiling_mib: float | None = None,
) -> Bins:
    """The bins a target is judged by. `bin_gb` is for memory only; None takes `default_bin_gb`."""
    if target.is_memory:
        return memory_bins(labels, default_bin_gb(families) if bin_gb is None else bin_gb, ceiling_mib)
    if bin_gb is not None:
        raise UsageError(f"bin_gb is for target=memory; target={target.name} has bins low, medium, high")
    return utilization_bins(target) if target.name in UTILIZATION_EDGES else tercile_bins(labels, target)
