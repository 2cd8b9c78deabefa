"""Learning curves of policies: how many times fewer rows than uniform sampling they take.

Start reading at `compared`. A curve is (seeds, nights, errors + 1): rows, then `ERRORS`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

ERRORS = ("median", "mean", "p90", "wrong", "bins", "bound")
JUDGED_AT = (0.3, 0.6, 1.0)  # shares of the most rows: the error of uniform sampling there is the one to reach


def compared(curves: Mapping[str, np.ndarray]) -> dict[tuple[str, str], tuple[list[float | None], float, float]]:
    """(error, policy) -> how many times fewer rows than uniform sampling it takes, for each error judged (None: never
    there), and the least and greatest of the middle one when one of the seeds is left out (0: never there).

    Of the means over seeds, as the least error so far: the first place where each is as good, between two nights by the
    logarithms."""
    ratios_by_family = {}
    seeds = len(curves["uniform"])
    for column, error in enumerate(ERRORS, start=1):
        for policy in curves:
            if policy == "uniform":
                continue
            ratios = _ratios(curves, policy, column, np.arange(seeds))
            others = [np.delete(np.arange(seeds), i) for i in range(seeds)] if seeds > 1 else [np.arange(1)]
            without = [_ratios(curves, policy, column, of)[1] or 0.0 for of in others]
            ratios_by_family[error, policy] = ratios, min(without), max(without)
    return ratios_by_family


def _ratios(curves, policy: str, column: int, seeds: np.ndarray) -> list[float | None]:
    rows = curves["uniform"][0, :, 0]
    uniform, other = (np.minimum.accumulate(curves[name][seeds, :, column].mean(0)) for name in ("uniform", policy))
    uniform, other = np.maximum(uniform, 1e-9), np.maximum(other, 1e-9)
    ratios = []
    for share in JUDGED_AT:
        at = share * rows[-1]
        wanted = np.exp(np.interp(np.log(at), np.log(rows), np.log(uniform)))
        both = [_first(curve, wanted, rows) for curve in (uniform, other)]
        ratios.append(None if both[1] is None else float(both[0] / both[1]))
    return ratios


def _first(curve: np.ndarray, wanted: float, rows: np.ndarray) -> float | None:
    good = np.flatnonzero(curve <= wanted * (1 + 1e-12))
    if not len(good):
        return None
    i = int(good[0])
    if i == 0 or curve[i] == curve[i - 1]:
        return float(rows[i])
    part = np.log(curve[i - 1] / wanted) / np.log(curve[i - 1] / curve[i])
    return float(np.exp(np.log(rows[i - 1]) + part * np.log(rows[i] / rows[i - 1])))
