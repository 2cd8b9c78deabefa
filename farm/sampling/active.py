"""Ranks candidates by how much an estimator would learn from them: where it is unsure, with rare bins first.

Start reading at `doubts`, then `worth`, then `drawn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from learn.estimators.protocol import to_space
from learn.rows.targets import get_target

LEAST_ROWS = 20  # with a label: fewer teach nothing about doubt
MEMBERS, TREES = 8, 8  # forests that are each grown on a sample of the rows of their own, and the trees of each
_POWER = 1.5  # of the doubt
_LOG_ERROR = 0.15  # at least, of a memory figure: standard deviation of its logarithm
_FITTING_AT_LEAST = 0.1  # so that figures that are wrong about what does not fit are found out
_BLOCK = 512  # rows whose distances to all chosen ones are held together


@dataclass(frozen=True)
class Doubts:
    """Uncertainty of n candidates for one target, in its space (memory and times: natural logarithm).

    shift         (n,) what the known rows add to the rough figures: label - figure
    disagreement  (n,) standard deviation of that among forests grown on different samples of the rows
    of_label      (n,) the same of forests that learn the label itself
    """

    shift: np.ndarray
    disagreement: np.ndarray
    of_label: np.ndarray

    @property
    def score(self) -> np.ndarray:
        """Return (n,) around 1: the mean of both disagreements, each divided by its own mean."""
        both = (self.disagreement, self.of_label)
        return np.mean([disagreement / max(float(disagreement.mean()), 1e-12) for disagreement in both], axis=0)


def doubts(
    target: str,
    table: np.ndarray,
    figures: np.ndarray,
    known_table: np.ndarray,
    known_figures: np.ndarray,
    labels: np.ndarray,
    *,
    seed: int = 0,
) -> Doubts | None:
    """Estimate the uncertainty of candidates from known rows; None for fewer than 20 rows with a label.

    table, known_table  (n, columns), (k, columns) of one outlook; figures, known_figures (n,), (k,): rough figures
    labels  (k,) in the target's unit, NaN where there is none

    Query by committee (Seung, Opper, Sompolinsky 1992), of forests on bootstrap samples: unlike that of single trees,
    their disagreement says little of noise that more rows would not mend. One committee learns how labels differ from
    the rough figures, as `hybrid` does; one learns labels beside them, as estimators without a trace do.
    """
    space = get_target(target).space
    new, old = to_space(figures, space), to_space(known_figures, space)
    label = to_space(labels, space)
    labelled = np.flatnonzero(np.isfinite(label) & np.isfinite(old))
    if len(labelled) < LEAST_ROWS:
        return None
    label, old = label[labelled], old[labelled]
    shift, disagreement = _committee(known_table[labelled], label - old, table, seed)
    beside = [np.column_stack([rows, np.nan_to_num(of)]) for rows, of in ((known_table[labelled], old), (table, new))]
    _, of_label = _committee(beside[0], label, beside[1], seed)
    return Doubts(shift, disagreement, of_label)


def _committee(known: np.ndarray, taught: np.ndarray, asked: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation over the committee's members for the rows asked."""
    from sklearn.ensemble import ExtraTreesRegressor

    random = np.random.default_rng(seed)
    predictions = np.empty((MEMBERS, len(asked)))
    for member in range(MEMBERS):
        rows = random.integers(len(known), size=len(known))
        forest = ExtraTreesRegressor(TREES, max_features=0.5, n_jobs=1, random_state=seed * MEMBERS + member)
        predictions[member] = forest.fit(known[rows], taught[rows]).predict(asked)
    return predictions.mean(0), predictions.std(0)


def worth(scores: Mapping[str, np.ndarray], cells: Mapping[str, np.ndarray], fits: np.ndarray) -> np.ndarray:
    """(n,) > 0, what a run of each candidate is worth: doubt ** 1.5 / root of the candidates in the same bin, times the
    chance that it fits (`fits`): out of memory there is no figure to learn from.

    scores  target -> (n,); cells: target -> (n,) int, the bin that it is expected in. Memory counts as much as all
            other targets together: it is one question, and how the GPU is driven is one.

    The root is half-way between two wishes: without it, rows go where most candidates are, which is best for the error
    of the mean row; with the number itself, every bin gets as many as any other. The power is more than 1 since doubt
    says less of the errors than it seems to.
    """
    total = np.zeros(len(fits))
    others = max(sum(target != "memory" for target in scores), 1)
    for target, score in scores.items():
        share = np.maximum(score, 1e-9) ** _POWER / np.sqrt(np.bincount(cells[target])[cells[target]])
        total += share / share.sum() / (1 if target == "memory" else others)
    return total * np.maximum(fits, _FITTING_AT_LEAST)


def chance_to_fit(memory_mib: np.ndarray, disagreement: np.ndarray, capacity_mib: float) -> np.ndarray:
    """Return (n,) chances to fit: log memory is normal around the figure, as wide as the disagreement, or 15 %."""
    from scipy.special import ndtr

    error = np.maximum(disagreement, _LOG_ERROR)
    return ndtr((np.log(capacity_mib) - np.log(np.maximum(memory_mib, 1.0))) / error)


def drawn(worth: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Draw n candidates without replacement, with probabilities proportional to their worth; return their places.

    The method is that of Efraimidis and Spirakis (2006), in the form with Gumbel noise. The greatest are not simply
    taken first, since these are all of one odd kind, and the candidates between would never be measured.
    """
    noise = np.random.default_rng(seed).gumbel(size=len(worth))
    return np.argsort(-(np.log(worth) + noise), kind="stable")[:n]


def distances(chosen: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return (n,) distances of each chosen row's features to the nearest row known or chosen before; inf if none."""
    nearest = np.full(len(chosen), np.inf)
    rows = chosen.astype(np.float64)
    square = (rows**2).sum(1)
    for start in range(0, len(known), _BLOCK):
        block = known[start : start + _BLOCK].astype(np.float64)
        gaps = square[:, None] - 2 * rows @ block.T + (block**2).sum(1)
        nearest = np.minimum(nearest, gaps.min(1))
    for i in range(1, len(rows)):
        gaps = square[i] - 2 * rows[:i] @ rows[i] + square[:i]
        nearest[i] = min(nearest[i], gaps.min())
    return np.sqrt(np.maximum(nearest, 0.0))
