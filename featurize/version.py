"""The version of the features: what artifacts and stored features carry, so that older ones are known to be stale.

Start reading at `FEATURES_VERSION` and `HISTORY`; `is_current` judges what an artifact carries. Imports no torch.
"""

from __future__ import annotations

from types import MappingProxyType

# Raise it when a feature of a trial config, of a traced step or of the fast path's sketch gets another value or name.
# `tests/learn/test_golden_features.py` fails when values move and this number does not.
FEATURES_VERSION = 1

HISTORY = MappingProxyType(
    {
        1: "Features as of November 2026, the first with a number; the hashes of source text before it end here.",
    }
)

# What the last release with hashes of source text recorded: of traced steps, of trial configs, of the fast path.
_HASHES_OF_VERSION = MappingProxyType({1: ("40c75313b7a5", "143632fa0067", "199c62bcc1e4")})

FEATURES_STAMP = str(FEATURES_VERSION)  # as artifacts carry it


def current_stamps() -> tuple[str, ...]:
    """Return every text that stands for today's features, the one that is written first."""
    return FEATURES_STAMP, *_HASHES_OF_VERSION.get(FEATURES_VERSION, ())


def is_current(stamp: object) -> bool:
    """Return whether a recorded stamp stands for the features that this code computes."""
    return isinstance(stamp, str) and stamp in current_stamps()
