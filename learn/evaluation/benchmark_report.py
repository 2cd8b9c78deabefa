"""A benchmark as one HTML page: its tables, the published figures set apart, and plots for every file.

Start reading at `write_benchmark_report`. The page needs no network and no JavaScript; every text in it is escaped.
"""

from __future__ import annotations

import base64
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from conf.html_page import html_page, stylesheet
from conf.outputs import write_output
from learn.evaluation.benchmark_plots import plots_of
from learn.evaluation.benchmark_view import TableText, classes_table, errors_table, headline, published_table, refusals

if TYPE_CHECKING:
    from learn.evaluation.benchmark_result import Benchmark
    from learn.evaluation.benchmark_settings import BenchmarkSettings

_WORDS = ("rows", "estimator", "figure", "source", "key", "value set")
_OTHERS = "(published)"


def write_benchmark_report(path: str | Path, done: Benchmark, settings: BenchmarkSettings) -> None:
    """Write the page in one step, in place of what was there."""
    write_output(path, benchmark_page(done, settings).encode("utf-8", errors="replace"), key="report")


def benchmark_page(done: Benchmark, settings: BenchmarkSettings) -> str:
    """The page's text."""
    title = f"Estimators of {done.target.name}"
    style = stylesheet("learn.evaluation", "benchmark_report.css")
    files = list(done.bins)
    links = "".join(f'<a href="#file-{k}">{escape(file)}</a>' for k, file in enumerate(files))
    sections = [
        f"<header><h1>{escape(title)}</h1><p>{escape(headline(done))}</p><nav>{links}</nav></header>",
        *(f'<p class="note">{escape(note)}</p>' for note in done.notes),
        _table(errors_table(done)),
        _table(classes_table(done)),
        f'<section class="apart">{_table(published_table(done))}</section>' if done.published else "",
        *(_plots(done, file, k) for k, file in enumerate(files)),
        _refusals(done),
        _settings(settings),
    ]
    return html_page(title, style, sections, images=True)


def _table(table: TableText) -> str:
    title, columns, rows = table
    classes = [' class="word"' if name in _WORDS else "" for name in columns]
    head = "".join(f"<th{css}>{escape(name)}</th>" for name, css in zip(columns, classes, strict=True))
    body, previous = [], None
    for row in rows:
        first = columns[0] == "rows" and row[0] != previous
        shown = row if first or columns[0] != "rows" else ["", *row[1:]]
        previous = row[0]
        others = columns[0] == "rows" and row[1].endswith(_OTHERS)
        css = " ".join(filter(None, ("first" if first else "", "others" if others else "")))
        cells = "".join(f"<td{c}>{escape(cell)}</td>" for cell, c in zip(shown, classes, strict=True))
        body.append(f'<tr class="{css}">{cells}</tr>' if css else f"<tr>{cells}</tr>")
    heading = f"<h3>{escape(title[:1].upper() + title[1:])}</h3>"
    return f'{heading}<div class="wide"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def _plots(done: Benchmark, file: str, k: int) -> str:
    own = next(figures for figures in done.figures if figures.file == file)
    oom = f", {own.oom:,} that ran out of memory" if own.oom else ""
    lead = f"{own.ok + own.oom:,} rows{oom}; classes: {done.bins[file]['published'].rule}"
    drawn = "".join(
        f'<figure><figcaption>{escape(caption)}</figcaption><img alt="{escape(caption)}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"></figure>'
        for caption, svg in plots_of(done, file)
    )
    return f'<section id="file-{k}"><h2>{escape(file)}</h2><p class="lead">{escape(lead)}</p>' + (
        f'<div class="plots">{drawn}</div></section>'
    )


def _refusals(done: Benchmark) -> str:
    said = "".join(f"<li>{escape(text)}</li>" for text in refusals(done))
    return f"<section><h2>Rows without an answer</h2><ul>{said}</ul></section>" if said else ""


def _settings(settings: BenchmarkSettings) -> str:
    given = {name: value for name, value in asdict(settings).items() if value is not None}
    rows = [[name, ", ".join(value) if isinstance(value, tuple) else str(value)] for name, value in given.items()]
    return f"<section><h2>Settings</h2>{_table(('keys of the command', ['key', 'value set'], rows))}</section>"
