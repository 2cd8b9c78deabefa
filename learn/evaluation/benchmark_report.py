"""A benchmark as one HTML page: its tables, the published figures set apart, and plots for every file.

Start reading at `benchmark_page`; `conf.reports` draws it.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from conf.outputs import write_output
from conf.reports.blocks import (
    Block,
    Bullets,
    Callout,
    ColumnKind,
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
from learn.evaluation.benchmark_plots import plots_of
from learn.evaluation.benchmark_view import (
    OTHERS,
    WORDS,
    TableText,
    classes_table,
    errors_table,
    headline,
    published_table,
    refusals,
)

if TYPE_CHECKING:
    from learn.evaluation.benchmark_result import Benchmark
    from learn.evaluation.benchmark_settings import BenchmarkSettings


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
    columns = tuple(TableColumn(name, _kind(name)) for name in names)
    return Heading(title[:1].upper() + title[1:]), Table(columns, tuple(rows))


def _kind(column: str) -> ColumnKind:
    return "word" if column in WORDS else "figure"


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
