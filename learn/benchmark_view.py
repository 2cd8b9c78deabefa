"""How a benchmark is shown: a bar while it runs, tables for people, JSON for programs.

Start reading at `print_benchmark`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from conf.bars import start_bar
from learn.benchmark_figures import by_group, worst_of

if TYPE_CHECKING:
    from learn.benchmark import Benchmark, BenchmarkSettings

_PLAIN_EVERY_S = 10.0
_PLAIN_WIDTH = 170
_REASONS = 5  # of an estimator's refusals on a file are told; `out=` holds all


class Progress:
    """A context manager on stderr: a bar on a terminal, else a line every ten seconds."""

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self._label, self._clock = label, clock
        self._console = Console(stderr=True, highlight=False)
        self._bar = self._task = None
        self._began = self._said = clock()

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            from rich.progress import TimeRemainingColumn

            self._bar, self._task = start_bar(self._console, self._label, TimeRemainingColumn())
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, of: int) -> None:
        """`done` of `of` answers are there."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=of)
        elif done and (self._clock() - self._said >= _PLAIN_EVERY_S or done == of):
            self._said = self._clock()
            left = (self._said - self._began) / done * (of - done)
            self._console.print(f"{self._label}: {done}/{of} estimates, {left:.0f} s left", markup=False)


def print_benchmark(done: Benchmark, *, by: str | None = None, worst: int = 0) -> None:
    """The table of figures; with `by`, one of groups a file; the `worst` rows an estimator; refusals and notes."""
    from rich.console import Console
    from rich.table import Table

    screen = Console()
    if not screen.is_terminal:  # a file or a pipe has no width; rich would take 80 columns and fold the figures
        screen = Console(width=_PLAIN_WIDTH)
    card = f", card {done.card_mib:,.0f} MiB" if done.card_mib is not None else ""
    screen.print(f"{done.target.name} on {done.device}{card}", highlight=False, markup=False)
    error = "error" if done.relative else "abs. error"
    table = Table()
    table.add_column("rows", overflow="fold")
    table.add_column("estimator", overflow="fold")
    columns = ["answered", f"median {error}", "p90", "under", f"constant [{done.target.unit}]", "median +c", "p90 +c"]
    if done.card_mib is not None:
        columns.append("fit told right")
    for name in (*columns, "s each"):
        table.add_column(name, justify="right")
    previous = None
    for figures in done.figures:
        asked = f"{figures.answered_ok}/{figures.ok}"
        if figures.oom:
            asked += f" + {figures.answered_oom}/{figures.oom} oom"
        cells = [
            asked,
            error_text(done, figures.raw.median),
            error_text(done, figures.raw.p90),
            _share(figures.raw.under),
            "–" if figures.constant is None else f"{figures.constant:+,.4g}",
            error_text(done, figures.shifted.median),
            error_text(done, figures.shifted.p90),
        ]
        if done.card_mib is not None:
            cells.append(_share(figures.fit_right))
        seconds = figures.median_seconds
        if previous not in (None, figures.file):
            table.add_section()
        shown = figures.file if figures.file != previous else ""
        previous = figures.file
        table.add_row(shown, figures.estimator, *cells, "–" if seconds is None else f"{seconds:.3f}")
    screen.print(table)
    if by is not None:
        _print_groups(screen, done, by)
    if worst:
        _print_worst(screen, done, worst)
    _print_refusals(screen, done)
    for note in done.notes:
        screen.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False, style="yellow")


def error_text(done: Benchmark, value: float | None) -> str:
    """An error as the target's are read: relative ones in percent."""
    if value is None:
        return "–"
    return f"{value:.1%}" if done.relative else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _print_groups(screen, done: Benchmark, by: str) -> None:
    from rich.table import Table

    for file in dict.fromkeys(figures.file for figures in done.figures):
        own = [figures for figures in done.figures if figures.file == file]
        groups = {
            f.estimator: by_group(done.scored[file, f.estimator], f.constant, relative=done.relative) for f in own
        }  # fmt: skip
        table = Table(title=f"{file} by {by}: median / p90 error, constant added", title_justify="left")
        table.add_column(by, overflow="fold")
        table.add_column("n", justify="right")
        for figures in own:
            table.add_column(figures.estimator, justify="right")
        for group in sorted({name for found in groups.values() for name in found}):
            n = max(found[group][0] for found in groups.values() if group in found)
            cells = []
            for figures in own:
                _, errors = groups[figures.estimator].get(group, (0, None))
                both = (errors.median, errors.p90) if errors else (None, None)
                cells.append(" / ".join(error_text(done, value) for value in both))
            table.add_row(group, f"{n}", *cells)
        screen.print(table)


def _print_worst(screen, done: Benchmark, n: int) -> None:
    from rich.table import Table

    unit = done.target.unit
    for figures in done.figures:
        rows = worst_of(done.scored[figures.file, figures.estimator], figures.constant, n, relative=done.relative)
        if not rows:
            continue
        table = Table(title=f"{figures.file}, {figures.estimator}: furthest off, constant added", title_justify="left")
        table.add_column("row", overflow="fold")
        table.add_column("group", overflow="fold")
        for name in (f"label [{unit}]", "estimate", "error"):
            table.add_column(name, justify="right")
        table.add_column("in doubt", overflow="fold")
        for row, error in rows:
            estimate = row.estimate + (figures.constant or 0.0)
            said = f"{error:+.1%}" if done.relative else f"{error:+.4f}"
            table.add_row(row.name, row.group, f"{row.label:,.5g}", f"{estimate:,.5g}", said, row.doubt or "")
        screen.print(table)


def _print_refusals(screen, done: Benchmark) -> None:
    for figures in done.figures:
        reasons = list(figures.refusals.items())
        for reason, count in reasons[:_REASONS]:
            said = f"{figures.file}, {figures.estimator}: no answer for {count}: {reason}"
            screen.print(said, soft_wrap=True, highlight=False, markup=False)
        if more := reasons[_REASONS:]:
            said = f"{figures.file}, {figures.estimator}: no answer for {sum(n for _, n in more)} for other reasons"
            screen.print(said, soft_wrap=True, highlight=False, markup=False)


def write_json(path: str, done: Benchmark, settings: BenchmarkSettings) -> None:
    """Settings, figures, notes and every row with its estimates, replacing `path` in one step."""
    rows: dict[tuple[str, str], dict] = {}
    for (file, estimator), scored in done.scored.items():
        for row in scored:
            entry = rows.setdefault(
                (file, row.name),
                {"file": file, "row": row.name, "group": row.group, "label": row.label,
                 "status": "oom" if row.label is None else "ok", "doubt": row.doubt, "answers": {}},
            )  # fmt: skip
            entry["answers"][estimator] = {"estimate": row.estimate, "reason": row.reason, "seconds": row.seconds}
    report = {
        "target": done.target.name,
        "unit": done.target.unit,
        "errors": "relative" if done.relative else "absolute",
        "device": done.device,
        "card_mib": done.card_mib,
        "settings": asdict(settings),
        "figures": [figures.to_mapping() for figures in done.figures],
        "notes": list(done.notes),
        "rows": list(rows.values()),
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, target)
