"""What a benchmark found. Start reading at `Benchmark`; `learn.benchmark` makes one, the views and the page show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from learn.targets import Bins, Target

if TYPE_CHECKING:
    from learn.evaluation.benchmark_figures import Figures, Scored
    from learn.evaluation.published_figures import PublishedFigure


@dataclass(frozen=True)
class Benchmark:
    """The figures of every file and estimator, the answers behind them in the same order of rows, and what to know.

    bins       file -> name -> the classes that its rows were judged by
    published  what others published for this target, on their own rows
    """

    target: Target
    device: str
    card_mib: float | None
    bins: Mapping[str, Mapping[str, Bins]]
    figures: tuple[Figures, ...]
    scored: Mapping[tuple[str, str], Sequence[Scored]]
    published: tuple[PublishedFigure, ...]
    notes: tuple[str, ...]

    @property
    def relative(self) -> bool:
        return self.target.space == "log"
