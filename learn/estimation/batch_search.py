"""The largest batch that fits: a search that asks for few figures, each of which costs a traced step.

Start reading at `largest_fitting`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

# Nothing is said of larger batches: the default estimators were fitted on batches of at most 1,023 samples.
MOST_SAMPLES = 65_536
_GROWTH = 16  # times the largest batch known to fit, at most, for the next one that is tried
_WIDER = 4  # times as wide is each further step away from the line's prediction
_BY_LINE = 2  # tries of the line's own prediction between a batch that fits and one that does not
# Between a batch that fits and one that does not, so many sizes, or one in so many of the batch, are halved at once:
# memory grows in steps of the allocator's segments.
_FEW, _NARROW = 64, 32
_FAR = 2  # times a batch that fits: one that does not says little of the limit


def largest_fitting(needed_mib: Callable[[int], float], limit_mib: float, start: int, most: int = MOST_SAMPLES) -> int:
    """Return a batch size that fits while the next larger one does not; 0 where a batch of 1 does not fit.

    Returns `most`, or a larger `start`, where that fits: no larger one is tried.

    Memory is close to affine in the batch: two figures predict the limit, and the search steps away from the
    prediction in ever wider steps until the limit lies in between, then halves the rest. Both neighbours of the limit
    are asked for.

    Args:
        needed_mib: Memory in MiB that a batch of that size needs; each size is asked for once.
        limit_mib: Memory in MiB that there is.
        start: First batch size to try.
        most: Largest batch size to try, unless `start` is larger.

    Known limitations:
        Where memory does not grow with every sample, a larger batch beyond the first that does not fit may fit again.
    """
    tried: dict[int, float] = {}
    most = max(most, start)
    low, high = 0, None  # a batch of 0 fits by definition
    batch, tries_between = start, 0
    step = side = None  # of the walk away from the prediction: how far, and whether its last batch fitted
    while high is None or high - low > 1:
        tried[batch] = needed_mib(batch)
        fitted = tried[batch] <= limit_mib
        low, high = (batch, high) if fitted else (low, batch)
        if low == most:
            return most
        guess = _predicted(tried, low, high, limit_mib)
        if high is None:
            guess = (
                low * (2 if len(tried) == 1 else _GROWTH) if guess is None else max(guess, low + 2 ** (len(tried) // 4))
            )
            batch = min(guess, low * _GROWTH, most)
            continue
        tries_between += 1
        batch = (low + high) // 2
        narrow = max(low // _NARROW, _FEW)
        if guess is not None and tries_between <= _BY_LINE:
            batch = min(max(guess, low + 1), high - 1)
        elif guess is not None and high - low > narrow and (step is None or fitted == side):
            step, side = (narrow // 2, guess - low <= high - guess) if step is None else (_WIDER * step, side)
            batch = min(low + step, batch) if side else max(high - step, batch)
    return low


def _predicted(tried: Mapping[int, float], low: int, high: int | None, limit_mib: float) -> int | None:
    """Return the largest batch that fits by a line through two figures; None where there is no rising line."""
    if len(tried) < 2:
        return None
    sizes = sorted(tried)
    if low not in tried:
        first, second = sizes[:2]
    elif high is not None and (high < _FAR * low or low == sizes[0]):
        first, second = low, high
    else:  # memory moves in steps: two batches far apart say best how it grows
        first, second = sizes[0], low
    slope = (tried[second] - tried[first]) / (second - first)
    return int(first + (limit_mib - tried[first]) / slope + 1e-9) if slope > 0 else None
