"""Two fitted models on the same rows: whether the newer one is worse, and by how much at the most.

Start reading at `compare`; `figures` are one model's own, which are comparable from night to night.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from learn.estimators.protocol import LEVEL, to_space
from learn.judging.evaluate import Evaluation
from learn.judging.scores import exceeds, mean, median

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


def compare(current: Evaluation, candidate: Evaluation, seed: int = 0) -> PairedComparison:
    """Compare two evaluations on the same n rows, all of which both answer, at least one with an exact label.

    The candidate is worse unless the difference of the mean absolute errors (in the target's space, exact labels only)
    is, at its upper 95 % limit, within 5 % of the current one's error or `ALLOWED_AT_LEAST`. It is worse as well where
    significantly more labels are above its bound, out-of-memory rows counted, and more than the bound promises: a wide
    bound that nothing exceeds is no merit that a tighter one must match.
    """
    theirs, ours = figures(current), figures(candidate)
    rows = current.test_rows
    _, highest = limits(errors(candidate) - errors(current), rows.exact.group, seed)
    their_error, our_error = theirs["mean_abs_error"], ours["mean_abs_error"]
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
    our_share, their_share = ours["above_bound"], theirs["above_bound"]
    if our_share is not None and their_share is not None:
        above = [exceeds(rows.label, np.array([row.upper for row in one.scored])) for one in (candidate, current)]
        lowest, _ = limits(above[0].astype(float) - above[1], rows.group, seed)
        over = lowest > 0 and our_share > 1 - LEVEL
        explanation += f"; {our_share:.1%} of labels are above its bound, {their_share:.1%} above the other's"
        if over:
            explanation += f": significantly more, and more than the {1 - LEVEL:.0%} that the bound promises"
    return PairedComparison(larger or over, explanation, theirs, ours)


def figures(of: Evaluation) -> dict[str, Any]:
    """Return the figures of n rows that are answered:

    rows, out_of_memory   n, and how many of them are out-of-memory rows
    mean_abs_error        in the target's space: of the natural logarithm for memory, time and power
    median_rel_error      |point - label| / label; of ratios `median_abs_error` instead
    accuracy              share of rows in their bin
    above_bound           share of labels above the 99 % bound, out-of-memory rows counted; None without a bound
    own_labels            true where the estimator itself simulated the labels; else absent

    None where no row has an exact label.
    """
    off = errors(of)
    typical = {"median_rel_error": of.test["median_relative_error"]}
    if of.test_rows.target.space == "ratio":
        typical = {"median_abs_error": median(off)}
    return {
        "rows": len(of.scored),
        "out_of_memory": of.figures.oom,
        "mean_abs_error": mean(off),
        **typical,
        "accuracy": of.test["accuracy"],
        "above_bound": None if of.figures.bound is None else of.figures.bound.above,
        **({"own_labels": True} if of.figures.own_labels else {}),
    }


def errors(of: Evaluation) -> np.ndarray:
    """Return the absolute errors of the rows with an exact label, (n,), in the target's space."""
    exact = [(row.estimate, row.label) for row in of.scored if row.label is not None]
    estimate, label = to_space(np.array(exact, dtype=float).reshape(-1, 2).T, of.test_rows.target.space)
    return np.abs(estimate - label)


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
