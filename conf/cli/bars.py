"""The progress bar of commands.

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
    """Show a bar on stderr that names the running step; on a terminal only. A context manager."""

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
        """Show the running step and its progress, `done` of `of`; 0 of 0 where the number is unknown."""
        if not self._console.is_terminal:
            return
        if self._running is None:  # not before there is something to tell: another bar may be on the screen until then
            from rich.progress import TimeElapsedColumn

            self._running = start_bar(self._console, self._label, TimeElapsedColumn())
        bar, task = self._running
        bar.update(task, description=f"{self._label}: {step}", completed=done, total=of or None)


@contextlib.contextmanager
def terminal_bar(label: str, *, remaining: bool = False) -> Iterator[Callable[..., None] | None]:
    """Show a bar on stderr and give its update function, `update(completed=, total=, description=)`.

    The last column is the elapsed time, or with `remaining` the time left. Without a terminal there is no bar: None.
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
    """Start a bar (spinner, `label`, bar, count, `column`) and return it with its task, whose total is unknown.

    `fields` are the values that `column` shows. The caller stops the bar.
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
