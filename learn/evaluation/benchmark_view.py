"""How a benchmark is shown: a bar while it runs, tables and a page for people, JSON for programs.

Start reading at `print_benchmark`, then `write_benchmark_report`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from conf.bars import start_bar
from conf.outputs import write_output
from conf.reports.blocks import (
    Block,
    Bullets,
    Callout,
    Heading,
    Lead,
    Page,
    Picture,
    Pictures,
    Row,
    Section,
    Table,
    TableColumn,
)
from conf.reports.render import render_page
from learn.evaluation.benchmark_figures import by_group, worst_of
from learn.evaluation.plots import plots_of
from learn.evaluation.scores import NOT_INFORMATIVE
from learn.targets import LEVELS, MIB_PER_GB, TARGETS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from learn.evaluation.benchmark_figures import Benchmark, Figures
    from learn.evaluation.benchmark_settings import BenchmarkSettings

OTHERS = "(published)"  # behind the name of an estimator whose figures are other people's
# Columns of words; the others hold figures.
WORDS = {
    *("rows", "estimator", "figure", "source", "key", "value set", "family", "bins", "target", "model", "of"),
    *("group", "row", "in doubt"),
}
ERRORS = ("median", "mean", "p90")
_PLAIN_EVERY_S = 10.0
_PLAIN_WIDTH = 200
_CLASSES = 8  # more recalls than that are told in the files only
_REASONS = 5  # of an estimator's refusals on a file are told; `out=` holds all


class BenchmarkProgress:
    """A context manager on stderr: a bar on a terminal, else a line every ten seconds; estimators as they are done."""

    def __init__(self, target: str, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self._label, self._clock = f"benchmark of {target}", clock
        self._relative = target in TARGETS and TARGETS[target].space == "log"
        self._console = Console(stderr=True, highlight=False)
        self._bar: tuple[Bar, TaskID] | None = None
        self._began = self._printed = clock()

    def __enter__(self) -> BenchmarkProgress:
        if self._console.is_terminal:
            from rich.progress import TimeRemainingColumn

            self._bar = start_bar(self._console, self._label, TimeRemainingColumn())
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar[0].stop()

    def update(self, done: int, of: int) -> None:
        """`done` of `of` steps are taken."""
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=done, total=of)
        elif done and (self._clock() - self._printed >= _PLAIN_EVERY_S or done == of):
            self._printed = self._clock()
            left = (self._printed - self._began) / done * (of - done)
            self._console.print(f"{self._label}: {done}/{of} steps, {left:.0f} s left", markup=False)

    def show(self, figures: Sequence[Figures]) -> None:
        """Print the figures of an estimator that has answered, a line for each file."""
        for of_file in figures:
            median, _, p90 = (error_text(self._relative, getattr(of_file.raw, name)) for name in ERRORS)
            scores = of_file.classes.get("published")
            figures_text = f"median {median}, p90 {p90}, accuracy {_share(getattr(scores, 'accuracy', None))}"
            if of_file.own_labels:
                figures_text = NOT_INFORMATIVE
            line = f"{of_file.file}, {of_file.estimator}: answered {_answered(of_file)}, {figures_text}"
            self._console.print(line, markup=False, soft_wrap=True)


def print_benchmark(done: Benchmark, *, by: str | None = None, worst: int = 0) -> None:
    """Tables of errors and of classes and bounds, the published figures set apart; with `by`, errors by group; the
    `worst` rows an estimator; refusals and notes."""
    screen = screen_of(_PLAIN_WIDTH)
    screen.print(headline(done), markup=False)
    tables = [errors_table(done), classes_table(done), *([published_table(done)] if done.published else [])]
    if by is not None:
        tables += [_groups_table(done, file, by) for file in dict.fromkeys(figures.file for figures in done.figures)]
    if worst:
        tables += [_worst_table(done, figures, worst) for figures in done.figures]
    for table in tables:
        if table[2]:
            print_table(table)
    for text in refusals(done):
        screen.print(text, soft_wrap=True, markup=False)
    for note in done.notes:
        screen.print(f"note: {note}", soft_wrap=True, markup=False, style="yellow")


def headline(done: Benchmark) -> str:
    card = f", card {done.card_mib:,.0f} MiB" if done.card_mib is not None else ""
    return f"{done.target.name} on {done.device}{card}"


# A table is (title, names of its columns, rows of text); its first columns are words, the others figures.
TableText = tuple[str, list[str], list[list[str]]]


def errors_table(done: Benchmark) -> TableText:
    """How far off, by file and estimator."""
    fits = done.target.is_memory
    columns = ["rows", "estimator", "answered", "median", "mean", "p90", "under"]
    columns += [f"constant [{done.target.unit}]", "median +c", "p90 +c"]
    columns += ["fit told right", "by bound"] if fits else []
    rows = []
    for figures in done.figures:
        raw, shifted = figures.raw, figures.shifted
        row = [figures.file, figures.estimator, _answered(figures)]
        if figures.own_labels:
            row += [NOT_INFORMATIVE, *["–"] * (len(columns) - len(row) - 1)]
            rows.append([*row, _seconds(figures.median_seconds), _seconds(figures.fit_seconds)])
            continue
        row += [error_text(done.relative, getattr(raw, name)) for name in ERRORS]
        row += [_share(raw.under), "–" if figures.constant is None else _constant(figures.constant)]
        row += [error_text(done.relative, value) for value in (shifted.median, shifted.p90)]
        row += [_share(figures.fit_right), _share(figures.fit_right_bound)] if fits else []
        rows.append([*row, _seconds(figures.median_seconds), _seconds(figures.fit_seconds)])
    error = "relative" if done.relative else "absolute"
    return f"{error} errors; +c: with one constant per file added", [*columns, "s each", "s a fit"], rows


def classes_table(done: Benchmark) -> TableText:
    """Classes and bounds, by file and estimator."""
    ours = done.target.is_memory
    columns = ["rows", "estimator", "accuracy", "macro F1", "macro recall"]
    columns += ["accuracy 1 GB", "macro F1 1 GB"] if ours else []
    columns += ["under bound", "above it", "bound over label", "recall by class"]
    rows = []
    for figures in done.figures:
        published, fine = figures.classes.get("published"), figures.classes.get("ours")
        row = [figures.file, figures.estimator]
        if figures.own_labels:
            rows.append([*row, NOT_INFORMATIVE, *["–"] * (len(columns) - len(row) - 1)])
            continue
        row += [_share(getattr(published, name, None)) for name in ("accuracy", "macro_f1", "macro_recall")]
        row += [_share(getattr(fine, name, None)) for name in ("accuracy", "macro_f1")] if ours else []
        row += [_share(getattr(figures.bound, name, None)) for name in ("coverage", "above", "excess")]
        rows.append([*row, _recalls(published)])
    widths = {file: bins["published"] for file, bins in done.bins.items()}
    rules_text = "; ".join(f"{file}: {_rule(bins)}" for file, bins in widths.items())
    if len(rules := {_rule(bins) for bins in widths.values()}) == 1:
        (rules_text,) = rules
    return f"classes as published ({rules_text}), and the 99 % bound", columns, rows


def published_table(done: Benchmark) -> TableText:
    """Return the figures that others published, on their own rows: not measured here."""
    rows = [[f"{f.estimator} {OTHERS}", f.rows, f.measure, f.text, f.source] for f in done.published]
    columns = ["estimator", "rows", "figure", "value", "source"]
    return "published by others, on their own rows and splits; nothing of it is measured here", columns, rows


def _rule(bins) -> str:
    if bins.by_family or len(bins.labels) == len(LEVELS):
        return bins.rule
    return f"{bins.edges[0] / MIB_PER_GB:g} GB" if bins.edges else "one class"


def _recalls(scores) -> str:
    """Percent by class, in the order of the classes."""
    if scores is None:
        return "–"
    values = [f"{100 * value:.0f}" for value in scores.recall.values()]
    return " ".join(values) if len(values) <= _CLASSES else f"{len(values)} classes"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def screen_of(width: int) -> Console:
    """Return standard output; a file or a pipe, where rich would fold figures at 80 columns, is `width` wide."""
    from rich.console import Console

    screen = Console(highlight=False)
    return screen if screen.is_terminal else Console(highlight=False, width=width)


def print_table(table: TableText) -> None:
    """Print a table; what stands in the first column `rows` or `family` stands once."""
    from rich import table as rich_table
    from rich.text import Text

    title, columns, rows = table
    # titles hold brackets, which are no markup
    drawn = rich_table.Table(title=Text(title), title_justify="left")
    for name in columns:
        whole = name in ("rows", "estimator", "answered")
        drawn.add_column(Text(name), justify="left" if name in WORDS else "right", overflow="fold", no_wrap=whole)
    previous = None
    sections = columns[:1] in (["rows"], ["family"])
    for row in rows:
        if sections and previous not in (None, row[0]):
            drawn.add_section()
        first = "" if sections and row[0] == previous else row[0]
        previous = row[0]
        drawn.add_row(*map(Text, [first, *row[1:]]))
    screen_of(_PLAIN_WIDTH).print(drawn)


def error_text(relative: bool, value: float | None) -> str:
    """Return an error as the target's are read: relative ones in percent."""
    if value is None:
        return "–"
    return f"{value:.1%}" if relative else f"{value:.4f}"


def _answered(figures: Figures) -> str:
    asked = f"{figures.answered_ok:,}/{figures.ok:,}"
    return asked + (f" + {figures.answered_oom}/{figures.oom} oom" if figures.oom else "")


def _constant(value: float) -> str:
    return f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.4g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _groups_table(done: Benchmark, file: str, by: str) -> TableText:
    """Errors by group, an estimator a column."""
    own = [figures for figures in done.figures if figures.file == file]
    groups = {f.estimator: by_group(done.scored[file, f.estimator], f.constant, space=done.target.space) for f in own}
    rows = []
    for group in sorted({name for of_file in groups.values() for name in of_file}):
        n = max(of_file[group][0] for of_file in groups.values() if group in of_file)
        cells = []
        for figures in own:
            _, errors = groups[figures.estimator].get(group, (0, None))
            both = (errors.median, errors.p90) if errors else (None, None)
            cells.append(" / ".join(error_text(done.relative, value) for value in both))
        rows.append([group, f"{n}", *cells])
    title = f"{file} by {by}: median / p90 error, constant added"
    return title, ["group", "n", *(figures.estimator for figures in own)], rows


def _worst_table(done: Benchmark, figures: Figures, n: int) -> TableText:
    """The rows that one estimator is furthest off."""
    constant = figures.constant or 0.0
    rows = []
    for row, error in worst_of(done.scored[figures.file, figures.estimator], constant, n, space=done.target.space):
        if row.label is not None and row.estimate is not None:  # `worst_of` gives rows with both
            shown_error = f"{error:+.1%}" if done.relative else f"{error:+.4f}"
            figures_text = f"{row.label:,.5g}", f"{row.estimate + constant:,.5g}", shown_error
            rows.append([row.name, row.group, *figures_text, row.doubt or ""])
    columns = ["row", "group", f"label [{done.target.unit}]", "estimate", "error", "in doubt"]
    return f"{figures.file}, {figures.estimator}: furthest off, constant added", columns, rows


def refusals(done: Benchmark) -> list[str]:
    """Why rows have no answer, the commonest reasons of each estimator and file."""
    refusal_lines = []
    for figures in done.figures:
        reasons = list(figures.refusals.items())
        where = f"{figures.file}, {figures.estimator}: no answer for"
        refusal_lines += [f"{where} {count}: {reason}" for reason, count in reasons[:_REASONS]]
        if more := reasons[_REASONS:]:
            refusal_lines.append(f"{where} {sum(n for _, n in more)} for other reasons")
    return refusal_lines


def write_json(path: str, done: Benchmark, settings: BenchmarkSettings) -> None:
    """Settings, figures, notes and every row with its estimates, replacing `path` in one step."""
    rows: dict[tuple[str, str], dict] = {}
    for (file, estimator), scored in done.scored.items():
        for row in scored:
            entry = rows.setdefault(
                (file, row.name),
                {
                    "file": file,
                    "row": row.name,
                    "group": row.group,
                    "family": row.family,
                    "label": row.label,
                    "batch_size": row.batch_size,
                    "status": "oom" if row.label is None else "ok",
                    "doubt": row.doubt,
                    "answers": {},
                },
            )
            entry["answers"][estimator] = {
                "estimate": row.estimate,
                "upper": row.upper,
                "reason": row.reason,
                "seconds": row.seconds,
            }
    report = {
        "target": done.target.name,
        "unit": done.target.unit,
        "errors": "relative" if done.relative else "absolute",
        "device": done.device,
        "card_mib": done.card_mib,
        "settings": asdict(settings),
        "bins": {
            file: {name: bins.to_mapping() for name, bins in of_file.items()} for file, of_file in done.bins.items()
        },
        "figures": [figures.to_mapping() for figures in done.figures],
        "published": [figure.to_mapping() for figure in done.published],
        "notes": list(done.notes),
        "rows": list(rows.values()),
    }
    write_output(path, (json.dumps(report, indent=1) + "\n").encode())


# ---- the page


def write_benchmark_report(path: str | Path, done: Benchmark, settings: BenchmarkSettings) -> None:
    """Write the page in one step, in place of what was there."""
    page = render_page(benchmark_page(done, settings))
    write_output(path, page.encode("utf-8", errors="replace"), key="report")


def benchmark_page(done: Benchmark, settings: BenchmarkSettings) -> Page:
    """Return the page's contents."""
    sections = [
        *(_plots(done, file, f"file-{k}") for k, file in enumerate(done.bins)),
        _refusals(done),
        _settings(settings),
    ]
    tables = [
        Section("errors", "", (*map(Callout, done.notes), *table_blocks(errors_table(done)))),
        Section("classes", "", table_blocks(classes_table(done))),
    ]
    if done.published:
        tables.append(Section("published", "", table_blocks(published_table(done)), apart=True))
    return Page(
        title=f"Estimators of {done.target.name}",
        head=(Lead(headline(done)),),
        sections=(*tables, *(section for section in sections if section is not None)),
        pictures=True,
    )


def table_blocks(table: TableText) -> tuple[Block, ...]:
    """A heading and the table; a name of rows stands once, where its rows begin."""
    title, names, lines = table
    grouped = names[0] == "rows"
    rows: list[Row] = []
    previous: str | None = None
    for line in lines:
        first = grouped and line[0] != previous
        shown = line if first or not grouped else ["", *line[1:]]
        previous = line[0]
        marks = ("first" if first else "", "others" if grouped and line[1].endswith(OTHERS) else "")
        rows.append(Row(tuple(shown), " ".join(filter(None, marks))))
    columns = tuple(TableColumn(name, "word" if name in WORDS else "figure") for name in names)
    return Heading(title[:1].upper() + title[1:]), Table(columns, tuple(rows))


def _plots(done: Benchmark, file: str, key: str) -> Section:
    own = next(figures for figures in done.figures if figures.file == file)
    oom = f", {own.oom:,} that ran out of memory" if own.oom else ""
    intro = Lead(f"{own.ok + own.oom:,} rows{oom}; classes: {done.bins[file]['published'].rule}")
    pictures = tuple(Picture(svg.encode(), "image/svg+xml", caption, caption) for caption, svg in plots_of(done, file))
    return Section(key, file, (intro, Pictures(pictures)), name=file)


def _refusals(done: Benchmark) -> Section | None:
    reasons = tuple(refusals(done))
    return Section("refusals", "Rows without an answer", (Bullets(reasons),)) if reasons else None


def _settings(settings: BenchmarkSettings) -> Section:
    given = {name: value for name, value in asdict(settings).items() if value is not None}
    rows = [[name, ", ".join(value) if isinstance(value, tuple) else str(value)] for name, value in given.items()]
    return Section("settings", "Settings", table_blocks(("keys of the command", ["key", "value set"], rows)))
