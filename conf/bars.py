"""The progress bar that commands show while a person waits.

Start reading at `start_bar`, then `terminal_bar`, and `StepBar`, which names steps. rich is imported on use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID


class StepBar:
    """A context manager: a bar on stderr that names the step that runs, on a terminal only."""

    def __init__(self, label: str) -> None:
        from rich.console import Console

        self._label = label
        self._console = Console(stderr=True, highlight=False)
        self._running: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> StepBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running[0].stop()

    def update(self, step: str, done: int, of: int) -> None:
        """`step` runs; `done` of `of` of its kind have ended, 0 of 0 where that is not known."""
        if not self._console.is_terminal:
            return
        if self._running is None:  # not before there is something to tell: another bar may be on the screen until then
            from rich.progress import TimeElapsedColumn

            self._running = start_bar(self._console, self._label, TimeElapsedColumn())
        bar, task = self._running
        bar.update(task, description=f"{self._label}: {step}", completed=done, total=of or None)


@contextlib.contextmanager
def terminal_bar(label: str, *, remaining: bool = False) -> Iterator[Callable[..., None] | None]:
    """A bar on stderr where that is a terminal, and what updates it: `update(completed=, total=, description=)`.

    Its last column is the time that has passed, or with `remaining` the time that is left. Elsewhere None, and no bar.
    """
    from rich.console import Console
    from rich.progress import TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    bar, task = start_bar(console, label, TimeRemainingColumn() if remaining else TimeElapsedColumn())
    try:
        yield lambda **changes: bar.update(task, **changes)
    finally:
        bar.stop()


def start_bar(console: Console, label: str, column: ProgressColumn, **fields: Any) -> tuple[Progress, TaskID]:
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
