"""Judge estimated times, on rows that were fitted on and on rows left out.

Start reading at `judged`; `left_out_by`, `left_out_ratios` and `subsets` serve `learn.benchmark`, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from featurize.timing.activity import ActivityParameters
from featurize.timing.calls import ATTENTION, CONVOLUTION, DEPTHWISE, GROUPED
from featurize.timing.step_time import LearnedEfficiencies
from learn.estimators.kernel_fitter import LEARNED_FROM, judged_by_splits, left_out_errors
from learn.estimators.kernel_fitting import KERNELS, SHARDED, MeasuredTime, TimeFit, held_out_by
from learn.fitting.formulas import Formula
from learn.judging.scores import RowScores, score_table, spread

ROOFLINE = "nothing learned"  # the described rates alone
_OF_KERNELS = (ROOFLINE, LEARNED_FROM, "GPU models left out")
COVERAGES = (0.5, 0.75, 0.9, 0.95, 0.99)
_LONG_TOKENS = 8192
_DEPTHWISE_SHARE = 0.25  # of a network's convolutions
_TILED_OPERATORS = tuple(f"{KERNELS}/aten::{name}" for name in ("addmm", "bmm", "convolution"))


def judged(fit: TimeFit, folds: int, progress: Callable[[str, int, int], None]) -> tuple[list[RowScores], np.ndarray]:
    """Return the scores of each split, and the logarithm of estimated over measured of rows in left-out families.

    Args:
        fit: The rows.
        folds: Parts of the families that are left out in turn.
        progress: Called before each fit with a text, the number of fits done and their total.
    """
    _, ratios = judged_by_splits(fit.fitted, fit.log_ratios, _splits(fit, folds), progress)
    ratios = {ROOFLINE: fit.log_ratios(fit.roofline()), **ratios}
    of_subsets = dict(subsets(fit))
    kernels_alone = {rows for rows, mask in of_subsets.items() if not (mask & fit.steps).any()}
    scores = [
        score_of(split, rows, values[mask])
        for split, values in ratios.items()
        for rows, mask in of_subsets.items()
        if rows not in kernels_alone or split in _OF_KERNELS
    ]
    return [score for score in scores if score.count], ratios["families left out"][fit.steps]


def left_out_ratios(formula: Formula, masks: Sequence[np.ndarray], heard: Callable[[], None]) -> np.ndarray:
    """Return the logarithm of estimated over measured time of rows, each from what was learned without it.

    Args:
        formula: Whose estimates.
        masks: Of the rows that are left out in turn; at least one.
        heard: Is called before each fit.

    Returns:
        (rows,); NaN where the formula has no answer, no mask holds the row, or one holds all rows.
    """

    def heard_of() -> Iterator[np.ndarray]:
        for mask in masks:
            heard()
            yield mask

    return left_out_errors(np.empty(len(masks[0])), heard_of(), lambda mask: formula.log_ratios(~mask))


def learned_of(fit: TimeFit, held_out: np.ndarray, activity: ActivityParameters) -> LearnedEfficiencies:
    """Return the content of the file: the fit on all rows, and what families that were left out say of its error."""
    longer = -held_out[np.isfinite(held_out)]  # measured over estimated
    sources, counts = np.unique(fit.sources, return_counts=True)
    fitted = fit.fitted(np.ones(len(fit.rows), dtype=bool))
    return LearnedEfficiencies(
        parameters=fitted.parameters,
        sharded=fitted.factor(SHARDED[0]),
        activity=activity,
        error_quantiles={coverage: float(np.exp(np.quantile(longer, coverage))) for coverage in COVERAGES},
        fitted_on=dict(zip(sources.tolist(), counts.tolist(), strict=True)),
    )


def labels_by(fit: TimeFit, by: str) -> np.ndarray:
    """Return the label of each row by which rows are left out together.

    Args:
        by: device, family or source. Single operators have no source, as all splits but by their device learn from
            them.
    """
    return {"device": fit.devices, "family": fit.groups, "source": np.where(fit.steps, fit.sources, KERNELS)}[by]


def left_out_by(fit: TimeFit, by: str, folds: int | None = None) -> list[np.ndarray]:
    """Return the masks of the rows that are left out in turn: those of a label, or of one of so many parts of them."""
    return held_out_by(labels_by(fit, by), folds)


def _splits(fit: TimeFit, folds: int) -> dict[str, list[np.ndarray]]:
    """Return for each split the masks of the rows that are left out in turn."""
    splits = {"families left out": left_out_by(fit, "family", folds)}
    for by, title in (("source", "sources left out"), ("device", "GPU models left out")):
        if len(np.unique(labels_by(fit, by)[fit.steps])) > 1:
            splits[title] = left_out_by(fit, by)
    return splits


def subsets(fit: TimeFit) -> Iterable[tuple[str, np.ndarray]]:
    """Yield which rows are judged together, with their mask."""
    steps = fit.steps
    for source in np.unique(fit.sources):
        yield str(source), fit.sources == source
    for name, mask in (
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


def score_of(split: str, rows: str, ratios: np.ndarray) -> RowScores:
    """Return by which factor times are off, by their logarithms of estimated over measured time; NaN: no answer.

    `factor_median` and `factor_p90` are factors, never below 1, that half and nine tenths of the rows stay below;
    `bias` is the median of estimated over measured, `mean_error` the mean of |estimated / measured - 1|.
    """
    answered = ratios[np.isfinite(ratios)]
    median, p90 = np.exp(spread(ratios)).tolist()
    bias, mean_error = math.nan, math.nan
    if len(answered):
        bias, mean_error = float(np.exp(np.median(answered))), float(np.mean(np.abs(np.exp(answered) - 1)))
    figures = {"factor_median": median, "factor_p90": p90, "bias": bias, "mean_error": mean_error}
    return RowScores(rows=rows, by=split, count=len(answered), figures=figures)


def score_text(scores: Sequence[RowScores], subset: str = "judged on") -> str:
    """Return the scores as lines of text; `subset` is the head over which rows each is of."""
    from rich.console import Console
    from rich.table import Table

    heads, rows = score_table(scores, {"rows": "by", subset: "rows", "rows judged": "count"})
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    console = Console(width=120, no_color=True)
    with console.capture() as text:
        console.print(table)
    return text.get().rstrip("\n")
