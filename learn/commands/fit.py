"""The command `learn.fit`: settings in, a table of held-out figures and the artifact's path out.

Start reading at `entry`; `learn.fitting.fit_call` does the work.
"""

from __future__ import annotations

from conf.cli.command_line import StepBar
from learn.fitting.fit_call import FitSettings, fit
from learn.rows.targets import SLOWDOWN


def entry(settings: FitSettings) -> int:
    """Fit with the settings, and print the figures and the artifact's path. Returns the exit code."""
    if settings.target == SLOWDOWN:
        from learn.sharing.command import fit_entry

        return fit_entry(settings)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    screen = Console()
    with StepBar(settings.target) as bar:
        fitted = fit(settings, progress=bar.update)

    from learn.judging.report import metric_rows

    rows = fitted.meta["rows"]
    families = ", ".join(f"{name} {n}" for name, n in rows["family"].items())
    screen.print(
        f"{settings.target} by {fitted.meta['estimator']}: {rows['train'] + rows['test']} rows ({families}), "
        f"{', '.join(rows['source'])}, {', '.join(rows['device'])}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    table = Table()
    table.add_column("metric")
    table.add_column("3-fold CV", justify="right")
    table.add_column(f"held out (n={rows['test']})", justify="right")
    for row in metric_rows(fitted.evaluation):
        table.add_row(*map(Text, row))  # a unit in brackets is not markup
    screen.print(table)
    screen.print(f"bins: {fitted.meta['bins']['rule']}", soft_wrap=True, highlight=False)
    for note in fitted.meta["warnings"]:
        screen.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False, style="yellow")
    screen.print(f"artifact: {fitted.path}", soft_wrap=True, highlight=False, markup=False)
    return 0
