"""The scores of the fits as tables.

Start reading at `time_table` and `activity_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from learn.kernels.activity_fit import ActivityScore
from learn.kernels.judging import ROOFLINE, TimeScore

if TYPE_CHECKING:
    from rich.table import Table


def time_table(scores: Sequence[TimeScore]) -> str:
    """Return the scores of times as lines of text; with a column for the formula where several are judged."""
    from rich.table import Table

    several = len({score.formula for score in scores} - {ROOFLINE}) > 1
    own = ("formula", "no answer") if several else ()
    table = Table(
        "rows", "judged on", *own, "rows judged", "factor, median", "p90", "estimated / measured", "mean error"
    )
    for score in scores:
        formula = (score.formula, f"{score.unanswered:,}") if several else ()
        figures = (
            (f"{score.median:.3f}", f"{score.p90:.3f}", f"{score.bias:.3f}", f"{score.mean_error:.1%}")
            if score.count
            else ("", "", "", "")
        )
        table.add_row(score.split, score.rows, *formula, f"{score.count:,}", *figures)
    return _text_of(table, width=160 if several else 120)


def activity_table(scores: Sequence[ActivityScore]) -> str:
    """Return the scores of SM activity and occupancy as lines of text."""
    from rich.table import Table

    table = Table("rows", "judged on", "rows judged", "SM activity off by, median", "p90", "occupancy, median", "p90")
    for score in scores:
        figures = (f"{value:.3f}" for value in (*score.smact, *score.smocc))
        table.add_row(score.split, score.rows, f"{score.count:,}", *figures)
    return _text_of(table, width=120)


def _text_of(table: Table, width: int) -> str:
    from rich.console import Console

    console = Console(width=width, no_color=True)
    with console.capture() as text:
        console.print(table)
    return text.get().rstrip("\n")
