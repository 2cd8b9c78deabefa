"""Which candidates a fitted estimator would learn most from: where it is unsure, not one beside the other.

Start reading at `doubts`, then `spread_out`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from learn.estimators import to_space
from learn.targets import get_target

LEAST_ROWS = 20  # with a label: fewer teach nothing about doubt
MEMBERS, TREES = 8, 8  # forests that are each grown on a sample of the rows of their own, and the trees of each
_SHORTLIST = 10_000  # candidates, the most doubtful ones, that a batch is spread over
_KNOWN_AT_MOST = 20_000  # rows, drawn at random, that distances are taken to
_BLOCK = 512  # rows whose distances to all candidates are held together


@dataclass(frozen=True)
class Doubts:
    """Of n candidates, for one target, in its space (memory and times: natural logarithm).

    shift         (n,) what the known rows add to the rough figures: label - figure
    disagreement  (n,) standard deviation of that among forests grown on different samples of the rows
    width         (n,) of the estimator's calibrated interval, as carried over from the known rows; None without it
    """

    shift: np.ndarray
    disagreement: np.ndarray
    width: np.ndarray | None

    @property
    def score(self) -> np.ndarray:
        """(n,) around 1: disagreement, times the root of the width where there is one."""
        found = self.disagreement / max(float(self.disagreement.mean()), 1e-12)
        if self.width is None:
            return found
        return found * np.sqrt(self.width / max(float(self.width.mean()), 1e-12))


def doubts(
    target: str,
    table: np.ndarray,
    figures: np.ndarray,
    known_table: np.ndarray,
    known_figures: np.ndarray,
    labels: np.ndarray,
    *,
    widths: np.ndarray | None = None,
    seed: int = 0,
) -> Doubts | None:
    """What known rows teach about candidates; None for fewer than 20 rows with a label.

    table, known_table  (n, columns), (k, columns) of one outlook; figures, known_figures (n,), (k,): rough figures
    labels  (k,) in the target's unit, NaN where there is none; widths (k,): of the estimator's interval on those rows

    Query by committee (Seung, Opper, Sompolinsky 1992), of forests on bootstrap samples: unlike that of single trees,
    their disagreement says little of noise that more rows would not mend.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    space = get_target(target).space
    gap = to_space(labels, space) - to_space(known_figures, space)
    told = np.flatnonzero(np.isfinite(gap) & np.isfinite(labels))
    if len(told) < LEAST_ROWS:
        return None
    random = np.random.default_rng(seed)
    said = np.empty((MEMBERS, len(table)))
    for member in range(MEMBERS):
        rows = told[random.integers(len(told), size=len(told))]
        forest = ExtraTreesRegressor(TREES, max_features=0.5, n_jobs=1, random_state=seed * MEMBERS + member)
        said[member] = forest.fit(known_table[rows], gap[rows]).predict(table)
    width = None
    if widths is not None and np.isfinite(widths[told]).sum() >= LEAST_ROWS:
        rows = told[np.isfinite(widths[told])]
        forest = ExtraTreesRegressor(MEMBERS * TREES, min_samples_leaf=2, max_features=0.5, n_jobs=1, random_state=seed)
        logged = np.log(np.maximum(widths[rows], 1e-6))
        width = np.exp(forest.fit(known_table[rows], logged).predict(table))
    return Doubts(said.mean(0), said.std(0), width)


def spread_out(
    score: np.ndarray,
    table: np.ndarray,
    known_table: np.ndarray,
    cell: np.ndarray,
    cell_rows: np.ndarray,
    n: int,
    *,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """(places, distances) of n candidates, in the order chosen.

    Greedy: the next is the one with the largest score x distance to whatever is known or chosen / root of (1 + rows of
    its cell, the chosen ones included). The first two factors are k-center (Sener, Savarese, ICLR 2018) weighted by
    doubt; the third is what keeps a bin with many rows from being chosen for its noise.

    score (n,) >= 0; cell (n,) int: which of `cell_rows` (cells,) is a candidate's own. Memory and time grow with
    candidates x chosen of a shortlist, and with candidates x known rows in blocks: nothing is quadratic.
    """
    random = np.random.default_rng(seed)
    crowding = 1 / np.sqrt(1.0 + cell_rows)
    most = max(_SHORTLIST, 4 * n)
    first = score * crowding[cell] * random.uniform(0.999, 1.001, len(score))  # equal ones in any order
    listed = np.sort(np.argsort(-first, kind="stable")[:most])
    rows = table[listed].astype(np.float32)
    if len(known_table) > _KNOWN_AT_MOST:
        known_table = known_table[random.choice(len(known_table), _KNOWN_AT_MOST, replace=False)]
    square = (rows**2).sum(1)
    nearest = np.full(len(rows), np.inf, dtype=np.float32)
    for start in range(0, len(known_table), _BLOCK):
        block = known_table[start : start + _BLOCK].astype(np.float32)
        gaps = square[:, None] - 2 * rows @ block.T + (block**2).sum(1)
        nearest = np.minimum(nearest, gaps.min(1))
    if not len(known_table):
        nearest[:] = square.max(initial=1.0)
    worth, cell, counts = first[listed] / crowding[cell[listed]], cell[listed], cell_rows.astype(float)
    places, distances = [], []
    for _ in range(min(n, len(listed))):
        value = worth * np.sqrt(np.maximum(nearest, 1e-9)) / np.sqrt(1.0 + counts[cell])
        best = int(np.argmax(np.where(worth >= 0, value, -1.0)))
        places.append(int(listed[best]))
        distances.append(float(np.sqrt(max(nearest[best], 0.0))))
        worth[best] = -1.0
        counts[cell[best]] += 1
        nearest = np.minimum(nearest, square - 2 * rows @ rows[best] + square[best])
    return np.array(places, dtype=int), np.array(distances)


def joined(found: Mapping[str, Doubts]) -> np.ndarray:
    """(n,) the score over several targets, each counting the same."""
    return np.mean([doubt.score for doubt in found.values()], axis=0)
