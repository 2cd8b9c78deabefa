"""How much of each cause the bound by causes takes, as `learn.fit_bound` fitted it, and what held on left-out rows.

Start reading at `bound_shares`, which reads `bound_by_causes.json`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from learn.learned.conformal_groups import Held

PACKAGED = "bound_by_causes.json"


@dataclass(frozen=True, kw_only=True)
class BoundShares:
    """The content of the file.

    Args:
        of_causes: Cause -> how many times its own figure it adds to the 99 % margin.
        scores: Coverage -> share of that margin.
        held: What the 99 % bound held of left-out rows, by kind of group.
        rows: Source -> number of its rows.
    """

    of_causes: Mapping[str, float]
    scores: Mapping[float, float]
    held: tuple[Held, ...] = ()
    rows: Mapping[str, int]

    def text(self) -> str:
        """Return the file's text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def packaged_path() -> Path:
    """Return the place of the packaged file."""
    return Path(__file__).with_name(PACKAGED)


@functools.cache
def bound_shares() -> BoundShares:
    """Return the packaged shares."""
    stored = json.loads(packaged_path().read_text())
    return BoundShares(
        of_causes=stored["of_causes"],
        scores={float(coverage): score for coverage, score in stored["scores"].items()},
        held=tuple(Held(**held) for held in stored["held"]),
        rows=stored["rows"],
    )
