"""How far off estimated times are, ours and other formulas', of rows that were fitted on and of rows left out.

Start reading at `judged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from featurize.kernel_model.activity import ActivityParameters
from featurize.kernel_model.calls import ATTENTION, CONVOLUTION, DEPTHWISE, GROUPED
from featurize.kernel_model.step_time import LearnedEfficiencies
from learn.kernels.fitting import KERNELS, MeasuredTime, TimeFit, held_out_by
from learn.kernels.peers import Peer

OURS = "learned efficiencies"
ROOFLINE = "nothing learned"  # the described rates alone
_OF_KERNELS = (ROOFLINE, "learned from", "GPU models left out")
COVERAGES = (0.5, 0.75, 0.9, 0.95, 0.99)
_LONG_TOKENS = 8192
_DEPTHWISE_SHARE = 0.25  # of a network's convolutions
_TILED_OPERATORS = tuple(f"{KERNELS}/aten::{name}" for name in ("addmm", "bmm", "convolution"))


@dataclass(frozen=True, kw_only=True)
class TimeScore:
    """By which factor times are off.

    Args:
        split: Which rows were left out of the fit.
        rows: Which rows are judged.
        formula: Whose estimates: `OURS`, or a key of `learn.kernels.peers.PEERS`.
        count: Of the rows with an answer.
        unanswered: Rows without one.
        median, p90: Factor, never below 1, that half and nine tenths of the rows stay below.
        bias: Median of estimated over measured.
        mean_error: Mean of |estimated / measured - 1|.
    """

    split: str
    rows: str
    formula: str
    count: int
    unanswered: int
    median: float
    p90: float
    bias: float
    mean_error: float


class _Ours:
    """The kernel model as one formula among others."""

    def __init__(self, fit: TimeFit) -> None:
        self.fit = fit

    def log_ratios(self, of: np.ndarray) -> np.ndarray:
        return self.fit.log_ratios(self.fit.fitted(of))


def judged(
    fit: TimeFit,
    folds: int,
    progress: Callable[[str, int, int], None],
    peers: Mapping[str, Callable[[TimeFit], Peer]] | None = None,
) -> tuple[list[TimeScore], np.ndarray]:
    """Return the scores of each split, and the logarithm of estimated over measured of rows in left-out families.

    Args:
        fit: The rows.
        folds: Parts of the families that are left out in turn.
        progress: Called before each fit with a text, the number of fits done and their total.
        peers: Formulas to judge beside ours, on the same rows, each fitted on the same others.
    """
    formulas: dict[str, Peer] = {OURS: _Ours(fit)} | {name: make(fit) for name, make in (peers or {}).items()}
    steps = fit.sources != KERNELS
    splits = _splits(fit, steps, folds)
    fits, done = len(formulas) * (1 + sum(map(len, splits.values()))), 0
    everything = np.ones(len(fit.rows), dtype=bool)
    ratios: dict[tuple[str, str], np.ndarray] = {(ROOFLINE, ROOFLINE): fit.log_ratios(fit.roofline())}
    for name, formula in formulas.items():
        progress("fitting", done, fits)
        ratios["learned from", name] = formula.log_ratios(everything)
        done += 1
    for split, masks in splits.items():
        for name, formula in formulas.items():
            left_out = np.full(len(fit.rows), np.nan)
            for mask in masks:
                progress(f"fitting, {split}", done, fits)
                if (~mask).any():
                    left_out[mask] = formula.log_ratios(~mask)[mask]
                done += 1
            ratios[split, name] = left_out
    subsets = dict(_subsets(fit, steps))
    kernels_alone = {rows for rows, mask in subsets.items() if not (mask & steps).any()}
    scores = [
        _score(split, rows, name, values[mask])
        for split in dict.fromkeys(split for split, _ in ratios)
        for rows, mask in subsets.items()
        if rows not in kernels_alone or split in _OF_KERNELS
        for (of_split, name), values in ratios.items()
        if of_split == split
    ]
    return [score for score in scores if score.count or score.formula != OURS], ratios["families left out", OURS][steps]


def learned_of(fit: TimeFit, held_out: np.ndarray, activity: ActivityParameters) -> LearnedEfficiencies:
    """Return the content of the file: the fit on all rows, and what families that were left out say of its error."""
    longer = -held_out[np.isfinite(held_out)]  # measured over estimated
    sources, counts = np.unique(fit.sources, return_counts=True)
    return LearnedEfficiencies(
        parameters=fit.fitted(np.ones(len(fit.rows), dtype=bool)).parameters,
        activity=activity,
        error_quantiles={coverage: float(np.exp(np.quantile(longer, coverage))) for coverage in COVERAGES},
        fitted_on=dict(zip(sources.tolist(), counts.tolist(), strict=True)),
    )


def _splits(fit: TimeFit, steps: np.ndarray, folds: int) -> dict[str, list[np.ndarray]]:
    """Return for each split the masks of the rows that are left out in turn."""

    def masks(parts: Iterable[tuple[str, np.ndarray]]) -> list[np.ndarray]:
        return [mask for _, mask in parts]

    splits = {"families left out": masks(held_out_by(fit.groups, folds))}
    if len(np.unique(fit.sources[steps])) > 1:
        splits["sources left out"] = masks(held_out_by(np.where(steps, fit.sources, KERNELS)))
    if len(np.unique(fit.devices[steps])) > 1:
        splits["GPU models left out"] = masks(held_out_by(fit.devices))
    return splits


def _subsets(fit: TimeFit, steps: np.ndarray) -> Iterable[tuple[str, np.ndarray]]:
    """Yield which rows are judged together, with their mask."""
    for source in np.unique(fit.sources[steps]):
        yield str(source), fit.sources == source
    for name, mask in (
        (KERNELS, ~steps),
        ("products, convolutions", np.isin(fit.groups, _TILED_OPERATORS)),
        ("depthwise networks", steps & np.array([_is_depthwise(row) for row in fit.rows])),
        (f"{_LONG_TOKENS:,} tokens and more", steps & np.array([_is_long(row) for row in fit.rows])),
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


def _is_long(row: MeasuredTime) -> bool:
    return bool((row.calls.rows[row.calls.within(ATTENTION)] >= _LONG_TOKENS).any())


def _score(split: str, rows: str, formula: str, ratios: np.ndarray) -> TimeScore:
    answered = ratios[np.isfinite(ratios)]
    size = np.abs(answered) if len(answered) else np.array([np.nan])
    return TimeScore(
        split=split,
        rows=rows,
        formula=formula,
        count=len(answered),
        unanswered=len(ratios) - len(answered),
        median=float(np.exp(np.median(size))),
        p90=float(np.exp(np.quantile(size, 0.9))),
        bias=float(np.exp(np.median(answered))) if len(answered) else float("nan"),
        mean_error=float(np.mean(np.abs(np.exp(answered) - 1))) if len(answered) else float("nan"),
    )
