"""The scores of the fits as tables.

Start reading at `time_table`, `activity_table` and `power_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from learn.kernels.activity_fit import ActivityScore
from learn.kernels.judging import TimeScore
from learn.kernels.power_fit import PowerScore

if TYPE_CHECKING:
    from rich.table import Table


def time_table(scores: Sequence[TimeScore]) -> str:
    """Return the scores of times as lines of text."""
    from rich.table import Table

    table = Table("rows", "judged on", "rows judged", "factor, median", "p90", "estimated / measured", "mean error")
    for score in scores:
        figures = (f"{score.median:.3f}", f"{score.p90:.3f}", f"{score.bias:.3f}", f"{score.mean_error:.1%}")
        table.add_row(score.split, score.rows, f"{score.count:,}", *figures)
    return _text_of(table)


def activity_table(scores: Sequence[ActivityScore]) -> str:
    """Return the scores of SM activity and occupancy as lines of text."""
    from rich.table import Table

    table = Table("rows", "judged on", "rows judged", "SM activity off by, median", "p90", "occupancy, median", "p90")
    for score in scores:
        figures = (f"{value:.3f}" for value in (*score.smact, *score.smocc))
        table.add_row(score.split, score.rows, f"{score.count:,}", *figures)
    return _text_of(table)


def power_table(scores: Sequence[PowerScore]) -> str:
    """Return the scores of power as lines of text."""
    from rich.table import Table

    table = Table(
        "rows", "limit", "rows judged", "power off by, median", "p90", "signed", "time by limit, median", "p90"
    )
    for score in scores:
        figures = (f"{value:.1%}" for value in (*score.power, score.bias, *score.slower))
        table.add_row(score.split, score.limit, f"{score.count:,}", *figures)
    return _text_of(table)


def _text_of(table: Table) -> str:
    from rich.console import Console

    console = Console(width=120, no_color=True)
    with console.capture() as text:
        console.print(table)
    return text.get().rstrip("\n")
