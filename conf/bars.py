"""The progress bar that commands show while a person waits.

Start reading at `start_bar`. rich is imported on use.
"""

from __future__ import annotations


def start_bar(console, label: str, column, **fields):
    """A bar that has started: spinner, `label`, bar, how many of how many, and `column` last.

    Returns it with its task, whose total is not known yet; `fields` are what `column` shows. The caller stops it.
    """
    from rich import progress as bars

    bar = bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=None),
        bars.MofNCompleteColumn(),
        column,
        console=console,
    )
    bar.start()
    return bar, bar.add_task(label, total=None, **fields)
