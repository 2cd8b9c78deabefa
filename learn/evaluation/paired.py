"""Two fitted models on the same rows: whether the newer one is worse, and by how much at the most.

Start reading at `compare`; `figures` are one model's own, which are comparable from night to night.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from learn.data import Rows
from learn.estimators import LEVEL, Prediction, to_space
from learn.evaluation.evaluate import judged_classes
from learn.evaluation.scores import exceeds, mean, median
from learn.targets import Bins

CONFIDENCE = 0.95  # one-sided, of either limit
DRAWS = 2_000
ALLOWED_SHARE = 0.05  # of the current one's mean error
# Less is not worth keeping a newer model back for: half of the 1 % of memory, and a tenth of the 0.05 of activity, that
# one configuration may differ from itself before a machine is called sick. By the space that errors are taken in.
ALLOWED_AT_LEAST = {"log": 0.005, "ratio": 0.005}


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of a candidate with the current model, on rows that neither has seen.

    worse     the candidate has to stay behind; `why` has the figures, a clause or more
    current, candidate
              `figures` of either
    """

    worse: bool
    why: str
    current: Mapping
    candidate: Mapping


def compare(rows: Rows, bins: Bins, current: Prediction, candidate: Prediction, seed: int = 0) -> PairedComparison:
    """Compare two predictions of the same n rows, all of which both answer, at least one with an exact label.

    The candidate is worse unless the difference of the mean absolute errors (in the target's space, exact labels only)
    is, at its upper 95 % limit, within 5 % of the current one's error or `ALLOWED_AT_LEAST`. It is worse as well where
    significantly more labels are above its bound, out-of-memory rows counted, and more than the bound promises: a wide
    bound that nothing exceeds is no merit that a tighter one must match.
    """
    theirs, ours = figures(rows, bins, current), figures(rows, bins, candidate)
    exact = ~rows.censored
    difference = (errors(rows, candidate) - errors(rows, current))[exact]
    _, highest = limits(difference, rows.group[exact], seed)
    their_error, our_error = (float(errors(rows, one)[exact].mean()) for one in (current, candidate))
    allowed = max(ALLOWED_SHARE * their_error, ALLOWED_AT_LEAST[rows.target.space])
    larger = highest > allowed

    explanation = (
        f"the new one's mean error is {our_error:.4f}, the current one's {their_error:.4f} "
        f"({in_words(rows.target.space)}): with 95 % confidence at "
        f"{f'most {highest:.4f} more' if highest > 0 else f'least {-highest:.4f} less'}, and {allowed:.4f} more "
        "is allowed"
    )
    if larger and our_error <= their_error:
        explanation += "; these rows are too few to tell"

    over = False
    above_ours, above_theirs = above(rows, candidate), above(rows, current)
    if above_ours is not None and above_theirs is not None:
        lowest, _ = limits(above_ours.astype(float) - above_theirs, rows.group, seed)
        our_share, their_share = float(above_ours.mean()), float(above_theirs.mean())
        over = lowest > 0 and our_share > 1 - LEVEL
        explanation += f"; {our_share:.1%} of labels are above its bound, {their_share:.1%} above the other's"
        if over:
            explanation += f": significantly more, and more than the {1 - LEVEL:.0%} that the bound promises"
    return PairedComparison(larger or over, explanation, theirs, ours)


def figures(rows: Rows, bins: Bins, prediction: Prediction) -> dict[str, float | int | None]:
    """Return the figures of n rows that the prediction answers:

    rows, out_of_memory   n, and how many of them are out-of-memory rows
    mean_abs_error        in the target's space: of the natural logarithm for memory, time and power
    median_rel_error      |point - label| / label; of ratios `median_abs_error` instead
    accuracy              share of rows in their bin, out-of-memory rows as in `judged_classes`
    above_bound           share of labels above the 99 % bound, out-of-memory rows counted; None without a bound

    None where no row has an exact label.
    """
    exact = ~rows.censored
    gap = np.abs(np.asarray(prediction.point) - rows.label)[exact]
    if rows.target.space == "ratio":
        typical = {"median_abs_error": median(gap)}
    else:
        typical = {"median_rel_error": median(gap / rows.label[exact])}
    predicted = prediction.bin_probabilities(bins.edges_of(rows.family)).argmax(axis=1)
    over = above(rows, prediction)
    return {
        "rows": len(rows),
        "out_of_memory": int(rows.censored.sum()),
        "mean_abs_error": mean(errors(rows, prediction)[exact]),
        **typical,
        "accuracy": mean(predicted == judged_classes(rows, bins, predicted)),
        "above_bound": None if over is None else mean(over),
    }


def errors(rows: Rows, prediction: Prediction) -> np.ndarray:
    """(n,) absolute errors in the target's space; of out-of-memory rows they mean nothing."""
    space = rows.target.space
    return np.abs(to_space(prediction.point, space) - to_space(rows.label, space))


def above(rows: Rows, prediction: Prediction) -> np.ndarray | None:
    """(n,) bool: the label, or what an out-of-memory row needs at least, exceeds the bound; None without one."""
    upper = prediction.upper(LEVEL)
    return None if upper is None else exceeds(rows.label, upper)


def limits(values: np.ndarray, group: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """(lower, upper) limit of the mean of (n,) values, each at 95 %: percentiles over draws of whole groups, with
    replacement, since near-copies err alike (cluster bootstrap; Davison and Hinkley 1997, section 3.8)."""
    names, member = np.unique(np.asarray(group).astype(str), return_inverse=True)
    total = np.bincount(member, weights=values, minlength=len(names))
    size = np.bincount(member, minlength=len(names))
    rng = np.random.default_rng(seed)
    means = np.empty(DRAWS)
    for i in range(DRAWS):
        drawn = rng.integers(len(names), size=len(names))
        means[i] = total[drawn].sum() / size[drawn].sum()
    low, high = np.quantile(means, [1 - CONFIDENCE, CONFIDENCE])
    return float(low), float(high)


def in_words(space: str) -> str:
    """The unit of `mean_abs_error`."""
    return "of the natural logarithm" if space == "log" else "of the ratio"
