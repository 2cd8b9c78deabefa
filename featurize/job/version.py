"""The version of the features: what artifacts and stored features carry, so that older ones are known to be stale.

Start reading at `FEATURES_VERSION` and `HISTORY`; `is_current` judges what an artifact carries. Imports no torch.
"""

from __future__ import annotations

from types import MappingProxyType

# Raise it when a feature of a trial config or of a traced step gets another value or name.
# `tests/learn/test_golden_features.py` fails when values move and this number does not.
FEATURES_VERSION = 5

HISTORY = MappingProxyType(
    {
        1: "Features as of November 2026, the first with a number; the hashes of source text before it end here.",
        2: "Traced steps have `job_scenario_*`: memory under other assumptions about cuDNN's workspaces.",
        3: "Times, activity and power of traced steps (`job_priced_*`) come from the learned kernel model.",
        4: "Times, activity and power follow kernels measured alone, the framework's host and measured power.",
        5: "Megatron's host follows its layers' passes; fp32 convolutions count the workspaces of Winograd transforms.",
    }
)

FEATURES_STAMP = str(FEATURES_VERSION)  # as artifacts carry it


def is_current(stamp: object) -> bool:
    """Return whether a recorded stamp stands for the features that this code computes."""
    return stamp == FEATURES_STAMP
