"""The progress bar that commands show while a person waits.

Start reading at `start_bar`, then `StepBar`, which names steps. rich is imported on use.
"""

from __future__ import annotations


class StepBar:
    """A context manager: a bar on stderr that names the step that runs, on a terminal only."""

    def __init__(self, label: str) -> None:
        from rich.console import Console

        self._label = label
        self._console = Console(stderr=True, highlight=False)
        self._bar = self._task = None

    def __enter__(self) -> StepBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: str, done: int, of: int) -> None:
        """`step` runs; `done` of `of` of its kind have ended, 0 of 0 where that is not known."""
        if not self._console.is_terminal:
            return
        if self._bar is None:  # not before there is something to tell: another bar may be on the screen until then
            from rich.progress import TimeElapsedColumn

            self._bar, self._task = start_bar(self._console, self._label, TimeElapsedColumn())
        self._bar.update(self._task, description=f"{self._label}: {step}", completed=done, total=of or None)


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
