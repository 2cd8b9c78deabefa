"""Shows a job's progress: a bar with rate, time left and counts by status; plain lines without a terminal.

Start reading at `Progress`.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from conf.cli.command_line import start_bar
from warehouse.tables.run import Run
from warehouse.tables.schema import STATUSES

if TYPE_CHECKING:
    import rich.progress

_RATE_WINDOW_S = 60.0  # the rate is that of the last minute: trials differ in length by orders of magnitude
_PLAIN_EVERY_S = 10.0

_STYLES = {"ok": "green", "oom": "yellow", "timeout": "magenta", "crashed": "red", "invalid": "red"}


class Progress:
    """A context manager. `totals()` gives (tasks ended by their status, tasks in all) of what is being worked on, with
    those that ended before; the rate is of what lands here.

    `quiet`: says nothing, where a program reads the events.
    """

    def __init__(
        self,
        label: str,
        totals: Callable[[], tuple[Mapping[str, int], int]],
        clock: Callable[[], float] = time.monotonic,
        quiet: bool = False,
    ):
        from rich.console import Console

        self._label = label
        self._totals = totals
        self._clock = clock
        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        self._landed: collections.deque[float] = collections.deque()
        self._any_landed = False
        self._printed_at = clock()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.quiet:
            from rich.progress import TextColumn

            column = TextColumn("{task.fields[note]}")
            self._bar, self._task = start_bar(self._console, self._label, column, note="starting workers")
        else:
            self.say(f"{self._label}: starting workers")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._refresh()
            self._bar.stop()
        elif self._any_landed:
            self._say_state()

    def say(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        (self._bar.console if self._bar is not None else self._console).print(text, markup=False)

    def landed(self, _run: Run) -> None:
        """Count one run that has landed."""
        self._any_landed = True
        self._landed.append(self._clock())

    def update(self) -> None:
        """Redraw the bar; cheap enough for every turn of the dispatcher's loop."""
        if self._bar is not None:
            self._refresh()
        elif self._clock() - self._printed_at >= _PLAIN_EVERY_S and self._any_landed:
            self._say_state()

    def rate_per_s(self) -> float | None:
        """Return the runs landed per second over the last minute; None before the second run."""
        now = self._clock()
        while self._landed and self._landed[0] < now - _RATE_WINDOW_S:
            self._landed.popleft()
        if not self._landed:
            return None
        if len(self._landed) < 2:
            return None
        return (len(self._landed) - 1) / max(now - self._landed[0], 1e-3)  # since the first: start-up is no trial's

    def _state(self, styled: bool) -> tuple[int, int, str]:
        by_status, total = self._totals()
        done = sum(by_status.values())
        if not self._any_landed:
            return done, total, "starting workers"
        parts = []
        for status in STATUSES:
            if count := by_status.get(status, 0):
                text = f"{status} {count}"
                parts.append(f"[{_STYLES[status]}]{text}[/]" if styled else text)
        rate = self.rate_per_s()
        if rate:
            parts.append(f"{rate:.1f}/s" if rate >= 1 else f"{rate * 60:.1f}/min")
            parts.append(f"{_duration((total - done) / rate)} left")
        return done, total, "  ".join(parts)

    def _refresh(self) -> None:
        assert self._bar is not None and self._task is not None
        done, total, note = self._state(styled=True)
        self._bar.update(self._task, completed=done, total=total, note=note)

    def _say_state(self) -> None:
        self._printed_at = self._clock()
        done, total, note = self._state(styled=False)
        self.say(f"{self._label}: {done}/{total}  {note}")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
