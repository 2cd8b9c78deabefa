"""A distribution whose width differs from case to case: a point, a scale, and what residuals over it were seen.

Start reading at `ScaledPrediction`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from learn.estimators import LEVEL, class_masses, conformal_score, from_space, to_space
from learn.learned.conformal_groups import Held


@dataclass(frozen=True)
class ScaledPrediction:
    """`centre + scale * score` in the target's space, with the scores of held-out rows as the distribution.

    centre, scale (n,)   NaN in the rows of `refusals`
    scores    one ascending array for each kind of case: (label - centre) / scale of rows that no fit had seen
    kind      (n,) int: which of `scores` is a row's own
    least     (n,) in the target's unit: no figure of a row lies below it
    unfamiliar  row -> why it is unlike what was fitted on
    outside   rows that no scores of held-out rows speak for: their scale is wider, or no row of their family or their
              module was fitted on
    held      index in `scores` -> what the bound at `LEVEL` held of left-out rows
    """

    centre: np.ndarray
    scale: np.ndarray
    scores: Sequence[np.ndarray]
    kind: np.ndarray
    space: str
    least: np.ndarray
    warnings: tuple[str, ...] = ()
    refusals: Mapping[int, str] = field(default_factory=dict)
    unfamiliar: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    outside: frozenset[int] = frozenset()
    held: Mapping[int, Held] = field(default_factory=dict)

    @property
    def point(self) -> np.ndarray:
        return self._figure(self.centre)

    def quantile(self, q: float) -> np.ndarray:
        if not 0 < q < 1:
            raise ValueError(f"a quantile lies between 0 and 1, got {q}")
        asked = set(self.kind.tolist())
        return self._at(
            [
                float(np.quantile(scores, q)) if index in asked and scores.size else 0.0
                for index, scores in enumerate(self.scores)
            ]
        )

    def bin_probabilities(self, edges: np.ndarray) -> np.ndarray:
        n = len(self.centre)
        edges = np.asarray(edges, dtype=float)
        edges = np.broadcast_to(edges, (n, edges.shape[-1]))
        gap = (to_space(edges, self.space) - self.centre[:, None]) / self.scale[:, None]
        below = np.zeros(edges.shape)
        for index, scores in enumerate(self.scores):
            mine = self.kind == index
            known = scores if scores.size else np.zeros(1)
            below[mine] = np.searchsorted(known, gap[mine], side="left") / len(known)
        below = np.where(edges <= self.least[:, None], 0.0, below)  # no figure lies below it
        return class_masses(below, edges, self.centre, self.space)

    def upper(self, level: float = LEVEL) -> np.ndarray | None:
        """Split-conformal over scaled residuals (Lei et al. 2018, section 5.2), by kind of case."""
        if not any(scores.size for scores in self.scores):
            return None
        return self._at([conformal_score(scores, level) for scores in self.scores])

    def held_of(self, row: int) -> Held | None:
        """Return what the row's bound at `LEVEL` held of left-out rows; None where none speak for it."""
        return None if row in self.outside else self.held.get(int(self.kind[row]))

    def _at(self, score_of_kind: Sequence[float]) -> np.ndarray:
        return self._figure(self.centre + self.scale * np.asarray(score_of_kind, dtype=float)[self.kind])

    def _figure(self, values: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(values), np.nan, np.maximum(from_space(values, self.space), self.least))
