"""The distribution that a classifier over bins predicts.

Start reading at `BinnedPrediction`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from learn.estimators import conformal_rank


@dataclass(frozen=True, eq=False)
class BinnedPrediction:
    """Probabilities of bins by row, mass spread evenly inside a bin. Rows in `refusals` are NaN throughout.

    edges          (n, k + 1), ascending, in the target's unit; rows with fewer bins repeat their last edge
    probabilities  (n, k), each row sums to 1
    point_share    where in the likeliest bin the point lies: 0 its lower edge, 1 its upper
    scores         ascending, in [0, 1]: where in their predicted distribution held-out labels lay, by kind of row
    kind           (n,) int, whose scores bound the row; -1 in refused rows
    """

    edges: np.ndarray
    probabilities: np.ndarray
    point_share: float
    scores: Sequence[np.ndarray]
    kind: np.ndarray
    warnings: tuple[str, ...] = ()
    refusals: Mapping[int, str] = field(default_factory=dict)
    unfamiliar: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def point(self) -> np.ndarray:
        likeliest = self.probabilities.argmax(axis=1)
        row = np.arange(len(likeliest))
        low, high = self.edges[row, likeliest], self.edges[row, likeliest + 1]
        return low + self.point_share * (high - low)

    def quantile(self, q: float) -> np.ndarray:
        if not 0 < q < 1:
            raise ValueError(f"a quantile lies between 0 and 1, got {q}")
        return self._quantile(np.full(len(self.kind), q))

    def bin_probabilities(self, edges: np.ndarray) -> np.ndarray:
        edges = np.asarray(edges, dtype=float)
        n = len(self.kind)
        if edges.ndim == 1:
            edges = np.broadcast_to(edges, (n, len(edges)))
        below = cumulative(self.edges, self.probabilities, edges)
        mass = np.diff(np.hstack([np.zeros((n, 1)), below, np.ones((n, 1))]), axis=1)
        mass[np.isnan(self.edges[:, 0])] = np.nan
        return mass

    def upper(self, level: float = 0.99) -> np.ndarray | None:
        """Distributional conformal prediction (Chernozhukov et al. 2021): the quantile of each row's own distribution
        at the ceil((m + 1) * level)-th smallest of the m held-out scores; the largest where there are too few."""
        if not any(scores.size for scores in self.scores):
            return None
        q = np.full(len(self.kind), np.nan)
        for kind, scores in enumerate(self.scores):
            if scores.size:
                rank = min(conformal_rank(len(scores), level), len(scores))
                q[self.kind == kind] = scores[rank - 1]
            else:
                q[self.kind == kind] = 1.0
        return np.maximum(self._quantile(q), self.point)

    def _quantile(self, q: np.ndarray) -> np.ndarray:
        """(n,) where each row's distribution reaches q, by linear interpolation inside the bin."""
        row = np.arange(len(q))
        reached = np.cumsum(self.probabilities, axis=1)
        reached[:, -1] = np.where(np.isnan(reached[:, -1]), np.nan, 1.0)
        bin_index = (reached >= q[:, None]).argmax(axis=1)
        before = np.where(bin_index > 0, reached[row, np.maximum(bin_index - 1, 0)], 0.0)
        mass = np.maximum(reached[row, bin_index] - before, 1e-300)
        low, high = self.edges[row, bin_index], self.edges[row, bin_index + 1]
        return low + np.clip((q - before) / mass, 0.0, 1.0) * (high - low)


def cumulative(edges: np.ndarray, probabilities: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(n, v) mass below each of the values (n, v), under bins (n, k + 1) of the probabilities (n, k)."""
    below = np.zeros(values.shape)
    for k in range(probabilities.shape[1]):
        low, width = edges[:, k, None], edges[:, k + 1, None] - edges[:, k, None]
        share = np.clip((values - low) / np.maximum(width, 1e-300), 0.0, 1.0)
        below = below + probabilities[:, k, None] * share
    # Above the last edge there is nothing, whatever the sum was rounded to.
    return np.where(values >= edges[:, -1:], 1.0, np.minimum(below, 1.0))
