"""How far estimated times are off, of rows that were fitted on and of rows that were left out.

Start reading at `judged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from featurize.kernel_model.activity import ActivityParameters
from featurize.kernel_model.step_time import LearnedEfficiencies
from learn.kernels.fitting import KERNELS, TimeFit, held_out_by

ROOFLINE = "nothing learned"  # the described rates alone
_OF_KERNELS = (ROOFLINE, "learned from", "GPU models left out")
COVERAGES = (0.5, 0.75, 0.9, 0.95, 0.99)


@dataclass(frozen=True, kw_only=True)
class TimeScore:
    """By which factor times are off.

    Args:
        split: Which rows were left out of the fit.
        rows: Which rows are judged.
        count: Of them.
        median, p90: Factor, never below 1, that half and nine tenths of the rows stay below.
        bias: Median of estimated over measured.
    """

    split: str
    rows: str
    count: int
    median: float
    p90: float
    bias: float


def judged(fit: TimeFit, folds: int, progress: Callable[[str, int, int], None]) -> tuple[list[TimeScore], np.ndarray]:
    """Return the scores of each split, and the logarithm of estimated over measured of rows in left-out families.

    Args:
        fit: The rows.
        folds: Parts of the families that are left out in turn.
        progress: Hears of each fit.
    """
    everything = np.ones(len(fit.rows), dtype=bool)
    steps = fit.sources != KERNELS
    sources, devices = np.unique(fit.sources[steps]), np.unique(fit.devices[steps])
    fits = 1 + folds + (len(sources) if len(sources) > 1 else 0) + (len(devices) if len(devices) > 1 else 0)
    done = 0

    def held_out(split: str, parts: Iterable[tuple[str, np.ndarray]]) -> np.ndarray:
        nonlocal done
        ratios = np.full(len(fit.rows), np.nan)
        for _, mask in parts:
            progress(f"fitting, {split}", done, fits)
            if (~mask).any():
                ratios[mask] = fit.log_ratios(fit.fitted(~mask))[mask]
            done += 1
        return ratios

    progress("fitting", done, fits)
    ratios = {ROOFLINE: fit.log_ratios(fit.roofline()), "learned from": fit.log_ratios(fit.fitted(everything))}
    done += 1
    ratios["families left out"] = held_out("families left out", held_out_by(fit.groups, folds))
    if len(sources) > 1:
        ratios["sources left out"] = held_out("sources left out", held_out_by(np.where(steps, fit.sources, KERNELS)))
    if len(devices) > 1:
        ratios["GPU models left out"] = held_out("GPU models left out", held_out_by(fit.devices))
    scores = [
        _score(split, name, values[mask])
        for split, values in ratios.items()
        for name, mask in (
            *((str(source), fit.sources == source) for source in sources),
            *([(KERNELS, ~steps)] if split in _OF_KERNELS else []),
            *((str(device), (fit.devices == device) & steps) for device in devices),
        )
        if mask.any() and np.isfinite(values[mask]).any()
    ]
    return scores, ratios["families left out"][steps]


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


def table_of(scores: Sequence[TimeScore]) -> str:
    """Return the scores as lines of text."""
    from rich.console import Console
    from rich.table import Table

    table = Table("rows", "judged on", "rows judged", "factor, median", "p90", "estimated / measured")
    for score in scores:
        table.add_row(
            score.split, score.rows, f"{score.count:,}", f"{score.median:.3f}", f"{score.p90:.3f}", f"{score.bias:.3f}"
        )
    console = Console(width=120, no_color=True)
    with console.capture() as text:
        console.print(table)
    return text.get().rstrip("\n")


def _score(split: str, rows: str, ratios: np.ndarray) -> TimeScore:
    ratios = ratios[np.isfinite(ratios)]
    size = np.abs(ratios)
    return TimeScore(
        split=split,
        rows=rows,
        count=len(ratios),
        median=float(np.exp(np.median(size))),
        p90=float(np.exp(np.quantile(size, 0.9))),
        bias=float(np.exp(np.median(ratios))),
    )
