"""The tables and figures of arXiv 2602.17817, ours beside those that are published.

Start reading at `reproduce`, which makes them of benchmarks of the published files; `paper_page` draws them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from conf.errors import UsageError
from conf.files.outputs import write_output
from conf.reports.blocks import Block, Callout, Drawn, Lead, Legend, Page, Section, write_page
from conf.reports.charts import LETTER_PX, Axis, Margins, Plot
from conf.reports.terminal import print_page
from learn.commands.benchmark_rows import NEVER_FITTED_ON, BenchmarkSettings
from learn.judging.benchmark_view import OTHERS, table_blocks
from learn.judging.report import colours_of
from learn.judging.scores import GPUMEMNET, PUBLISHED_FIGURES, TRUSTED_ALONE, Benchmark, Scored, mean, median
from learn.rows.data import BIN_WIDTHS_GB

_BARS = Margins(width=1000, height=300, bottom=50)
ROWS = 100  # rows of each file, where rows= is not given: minutes on two cores
FAMILIES = ("mlp", "cnn", "transformer")
ABSENT = (
    "of the paper, only the figures in the columns theirs and (published) are known here; its others (F1 scores, "
    "single bin widths and estimators, other GPUs, latency of FakeTensor and Horus) are left out"
)
OURS = (
    "gpumemnet_mlp and gpumemnet_transformer are our implementations of the paper's estimators; their classes are 1 GB "
    "wide for MLPs alone, else 8 GB, so that narrower ones are interpolated"
)
_LEARNED = ("hybrid", "lightgbm", "gpumemnet_mlp", "gpumemnet_transformer")
# Target, whether the families' files and the well-known models are asked, and the estimators.
RUNS: tuple[tuple[str, bool, bool, tuple[str, ...]], ...] = (
    ("memory", True, True, (*_LEARNED, "trace")),
    ("memory", False, True, ("horus", "faketensor")),
    ("smact", True, False, _LEARNED),
    ("smocc", True, False, _LEARNED),
    ("drama", True, False, _LEARNED),
)


@dataclass(frozen=True)
class PaperTable:
    """One table: a row is column -> value. Shares are numbers in [0, 1]; None stands for no figure."""

    name: str
    title: str
    rows: tuple[Mapping[str, Any], ...]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))


@dataclass(frozen=True)
class Paper:
    """All tables with rows, and what a reader has to know."""

    tables: tuple[PaperTable, ...]
    notes: tuple[str, ...]


def reproduce(settings: BenchmarkSettings, ask: Callable[[BenchmarkSettings, Sequence[int]], Benchmark]) -> Paper:
    """Make the paper's tables from the published files. `ask` runs one benchmark, with these widths of memory
    classes in GB.

    Raises `UsageError` where the files hold neither configurations of a family nor well-known models.
    """
    from warehouse.exchange.published import read_published

    assert settings.published is not None  # checked with the settings
    files = read_published(settings.published).files
    of_families = [file for file in files if file.form == "gpumemnet"]
    known_models = [file for file in files if file.form == NEVER_FITTED_ON]
    if not of_families and not known_models:
        raise UsageError(f"published={settings.published}: no file of GPUMemNet's sets or of well-known models")
    rows = settings.rows or ROWS
    notes = [ABSENT, OURS]
    if any(len(file.rows) > rows for file in of_families):
        notes.append(f"a sample of {rows} rows of each file, all that is fitted on; rows=N takes more")
    records: list[dict[str, Any]] = []
    benchmarks: list[Benchmark] = []
    for target, families, models, estimators in RUNS:
        asked = (of_families if families else []) + (known_models if models else [])
        learns = any(name in _LEARNED for name in estimators)
        if not asked or (learns and not of_families):
            continue
        run = replace(
            settings,
            paper=False,
            target=target,
            estimators=estimators,
            rows=rows,
            out=None,
            report=None,
            published=tuple(str(file.path) for file in asked),
        )
        try:
            benchmarks.append(ask(run, BIN_WIDTHS_GB))
        except UsageError as error:  # the files may lack a column
            notes.append(f"{target} is not judged: {str(error).partition(': ')[2] or error}")
            continue
        records += _records(benchmarks[-1])
        notes += [note for note in benchmarks[-1].notes if "in doubt" in note]
    tables = [_accuracy(records), _utilization(records), _models(benchmarks), _latency(records)]
    return Paper(tuple(table for table in tables if table.rows), tuple(dict.fromkeys(notes)))


def _records(benchmark: Benchmark) -> Iterator[dict[str, Any]]:
    """Yield one record for each family and estimator. Rows in doubt count, as they do in the paper."""
    for figures in benchmark.figures:
        families = {row.family for row in benchmark.scored[figures.file, figures.estimator]}
        if len(families) == 1 and families <= {*FAMILIES} and not figures.file.endswith(TRUSTED_ALONE):
            yield {
                "target": benchmark.target.name,
                "family": families.pop(),
                "estimator": figures.estimator,
                "n": figures.ok + figures.oom,
                "accuracy": {name: scores.accuracy for name, scores in figures.classes.items()},
                "seconds": figures.median_seconds,
            }


def _accuracy(records: Sequence[Mapping[str, Any]]) -> PaperTable:
    rows = [
        _classes(records, "memory", family, {"bins": f"{width} GB"}, width)
        for family in FAMILIES
        for width in BIN_WIDTHS_GB
    ]
    title = "Accuracy of memory classes by family and bin width, 3-fold"
    return PaperTable("memory", title, tuple(row for row in rows if row["n"] is not None))


def _utilization(records: Sequence[Mapping[str, Any]]) -> PaperTable:
    rows = [
        _classes(records, target, family, {"target": target})
        for family in FAMILIES
        for target in ("smact", "smocc", "drama")
    ]
    title = "Accuracy of utilization classes (low, medium, high) by family, 3-fold"
    return PaperTable("utilization", title, tuple(rows) if any(row["n"] for row in rows) else ())


def _classes(
    records: Sequence[Mapping[str, Any]], target: str, family: str, about: Mapping[str, str], width: int | None = None
) -> dict[str, Any]:
    """Return the accuracies of one family's rows, of memory classes `width` GB wide."""
    rows = [record for record in records if (record["target"], record["family"]) == (target, family)]
    ours = {record["estimator"]: record["accuracy"].get(about.get("bins", "published")) for record in rows}
    of_family = [f for f in PUBLISHED_FIGURES if (f.target, f.rows, f.source) == (target, family, GPUMEMNET)]
    theirs = [figure for figure in of_family if width is None or width in figure.bin_gb]
    return {"family": family, **about, "n": rows[0]["n"] if rows else None, **ours, "theirs": theirs or None}


def _models(benchmarks: Sequence[Benchmark]) -> PaperTable:
    """Return signed relative errors, and their means and medians without sign, of models that are never fitted on."""
    answers: dict[str, dict[str, Scored]] = {}
    for of_run in benchmarks:
        for (file, estimator), scored in of_run.scored.items():
            known = of_run.target.is_memory and not file.endswith(TRUSTED_ALONE)
            if known and not {row.family for row in scored} & {*FAMILIES} and any(row.estimate for row in scored):
                answers.setdefault(estimator, {}).update({row.name.partition(" ")[2]: row for row in scored})
    labels = {name: row.label for by_name in reversed(answers.values()) for name, row in by_name.items()}
    names = dict.fromkeys(name for by_name in answers.values() for name in by_name)
    errors = {
        estimator: {name: row.estimate / row.label - 1 for name, row in by_name.items() if row.estimate and row.label}
        for estimator, by_name in answers.items()
    }
    rows: list[dict[str, Any]] = []
    for name in names:
        signed = {estimator: _Signed(of[name]) if name in of else None for estimator, of in errors.items()}
        label = labels[name]
        rows.append({"model": name, "actual [MiB]": label and round(label), **signed})
    for title, summary in (("mean error", mean), ("median error", median)) if rows else ():
        of_all = {estimator: summary(np.abs(list(of.values()))) for estimator, of in errors.items()}
        rows.append({"model": title, "actual [MiB]": None, **of_all})
    return PaperTable("models", "Relative error of well-known models, which nothing is fitted on", tuple(rows))


def _latency(records: Sequence[Mapping[str, Any]]) -> PaperTable:
    timed = [record for record in records if record["target"] == "memory" and record["seconds"] is not None]
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(record["estimator"] for record in timed):
        times = {record["family"]: _Time(record["seconds"]) for record in timed if record["estimator"] == name}
        rows.append(
            {"estimator": name, **{family: times.get(family) for family in FAMILIES}, "theirs": None, "of": "here"}
        )
    for figure in PUBLISHED_FIGURES if rows else ():
        if figure.unit in ("s", "ms"):
            source = f"{figure.measure}; {figure.source}"
            rows.append({"estimator": f"{figure.estimator} {OTHERS}", "theirs": [figure], "of": source})
    title = "Time of one estimate: ours on one core of this machine, features not remembered"
    return PaperTable("latency", title, tuple(rows))


class _Signed(float):
    """A share whose sign is shown."""


class _Time(float):
    """Seconds."""


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(figure.text for figure in value)
    if isinstance(value, _Time):
        return f"{1000 * value:,.1f} ms"
    if isinstance(value, float):
        return f"{value:+.1%}" if isinstance(value, _Signed) else f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def paper_entry(settings: BenchmarkSettings, ask: Callable[[BenchmarkSettings, Sequence[int]], Benchmark]) -> int:
    """Print the tables, and write the files that are asked for. Returns the exit code."""
    paper = reproduce(settings, ask)
    page = paper_page(paper)
    print_page(page)
    if settings.out is not None:
        report = {"source": GPUMEMNET, "settings": asdict(settings), "notes": paper.notes} | {
            table.name: table.rows for table in paper.tables
        }
        write_output(settings.out, (json.dumps(report, indent=1, default=asdict) + "\n").encode())
    if settings.report is not None:
        write_page(settings.report, page)
    return 0


def paper_page(paper: Paper) -> Page:
    """Return the page: each table with its figure."""
    draws: dict[str, Callable[[PaperTable], tuple[Block, ...]]] = {
        "memory": _draw_accuracy,
        "utilization": _draw_accuracy,
        "models": _draw_errors,
    }
    sections = []
    for table in paper.tables:
        rows = [[_text(row.get(name)) for name in table.columns] for row in table.rows]
        drawn = draws[table.name](table) if table.name in draws else ()
        sections.append(Section(table.name, "", (*table_blocks(table.title, table.columns, rows), *drawn)))
    return Page(
        title="The tables of arXiv 2602.17817",
        head=(Lead("Ours beside theirs; theirs are on their own rows and splits"), *map(Callout, paper.notes)),
        sections=tuple(sections),
    )


def _draw_accuracy(table: PaperTable) -> tuple[Block, ...]:
    """Draw grouped bars: an estimator a colour, the published range as a grey band over its group."""
    kinds = colours_of(name for name in table.columns if name not in ("family", "bins", "target", "n", "theirs"))
    plot = Plot(Axis(0.0, len(table.rows)), Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0)), _BARS)
    plot.grid()
    width = 0.8 / max(len(kinds), 1)
    for place, row in enumerate(table.rows):
        for k, (name, css) in enumerate(kinds.items()):
            if (share := row.get(name)) is not None:
                left = place + 0.1 + k * width
                plot.column(css, left, left + width, 0.0, share, f"{name}: {share:.1%}")
        for theirs in row["theirs"] or ():
            top = max(theirs.high, theirs.low + 0.006)
            plot.column("band", place + 0.05, place + 0.95, theirs.low, top, "published")
        for line, text in enumerate((row["family"], row.get("bins") or row["target"])):
            plot.text("axis", plot.x(place + 0.5), plot.bottom + 16 + 14 * line, str(text))
    return Legend({**kinds, "theirs": "band"}), Drawn(plot.picture(f"{table.title}: accuracy by family and estimator"))


def _draw_errors(table: PaperTable) -> tuple[Block, ...]:
    """Draw each model's error as a point and the mean as a bar, an estimator a line."""
    kinds = [name for name in table.columns if name not in ("model", "actual [MiB]")]
    limit = 1.5
    left = max(map(len, kinds), default=0) * LETTER_PX + 14
    margins = Margins(width=left + 620, height=60 + 22 * len(kinds), left=left, top=8, bottom=44)
    plot = Plot(Axis.of(0.0, limit, 6), Axis(len(kinds), 0.0), margins)
    plot.ticks_below("relative error, 1.5 or more at the edge: bar the mean, a point a model", lines=True)
    for place, name in enumerate(kinds):
        errors = [abs(row[name]) for row in table.rows if isinstance(row.get(name), _Signed)]
        css = "k0" if name.endswith(OTHERS) else "k1"
        plot.text("name", left - 8, plot.y(place + 0.5) + 4, name, "end")
        if errors:
            average = min(float(np.mean(errors)), limit)
            plot.column(f"{css} pale", 0.0, average, place + 0.85, place + 0.15, f"{name}: {average:.1%} in the mean")
        for error in errors:
            plot.dot(f"full {css}", min(error, limit), place + 0.5, 3, f"{error:.1%}")
    return (Drawn(plot.picture(f"{table.title}: errors by estimator")),)
