"""Show a benchmark: a line for each estimator that is done, a page of tables and plots for people, a mapping for JSON.

Start reading at `benchmark_page`, which the terminal shows, too (`conf.reports.blocks`), and `FigureTable`, which has
every table. `reproduce` makes the tables of arXiv 2602.17817 of several benchmarks, ours beside those that are
published, and `paper_page` draws them.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.errors import UsageError
from conf.reports.blocks import (
    Block,
    Bullets,
    Callout,
    Drawn,
    Heading,
    Lead,
    Legend,
    Page,
    Row,
    Section,
    Table,
    TableColumn,
)
from conf.reports.charts import LETTER_PX, Axis, Margins, Plot
from learn.judging.report import colours_of, plots_of
from learn.judging.scores import (
    GPUMEMNET,
    NEVER_FITTED_ON,
    NOT_INFORMATIVE,
    PUBLISHED_FIGURES,
    TRUSTED_ALONE,
    Benchmark,
    Figures,
    errors_by,
    mean,
    median,
    p90,
    signed_errors,
)
from learn.rows.data import BIN_WIDTHS_GB, MIB_PER_GB, TARGETS, Bins

if TYPE_CHECKING:
    from learn.commands.benchmark_rows import BenchmarkSettings

OTHERS = "(published)"  # behind the name of an estimator whose figures are published ones
# Columns of words; the others hold figures.
WORDS = {
    *("rows", "estimator", "figure", "source", "family", "bins", "target", "model", "of"),
    *("group", "row", "in doubt"),
}
_CLASSES = 8  # beyond this many classes, recalls are in the files only
_REASONS = 5  # an estimator's refusals on a file that are shown; `out=` holds all


def print_figures(target: str, figures: Sequence[Figures]) -> None:
    """Print the figures of an estimator that has answered, a line for each file, to stderr."""
    error = partial(error_text, target in TARGETS and TARGETS[target].space == "log")
    for of_file in figures:
        accuracy = _cell_text(_class_score(of_file, "published", "accuracy"))
        errors = f"median {error(of_file.raw.median)}, p90 {error(of_file.raw.p90)}, accuracy {accuracy}"
        text = NOT_INFORMATIVE if of_file.own_labels else errors
        print(f"{of_file.file}, {of_file.estimator}: answered {_answered_text(of_file)}, {text}", file=sys.stderr)


@dataclass(frozen=True)
class FigureTable:
    """A table for the terminal, a page and JSON. A row is column -> value, which `_cell_text` formats."""

    title: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """A heading and the table, nothing without rows."""
        if not self.rows:
            return ()
        columns = tuple(TableColumn(name, "word" if name in WORDS else "figure") for name in self.columns)
        rows = tuple(Row(tuple(_cell_text(row.get(name)) for name in self.columns)) for row in self.rows)
        return Heading(self.title[:1].upper() + self.title[1:]), Table(columns, rows)


def errors_table(done: Benchmark) -> FigureTable:
    """Return how far off estimates are, by file and estimator."""
    error = partial(error_text, done.relative)
    rows = []
    for figures in done.figures:
        cells = {
            "median": error(figures.raw.median),
            "mean": error(figures.raw.mean),
            "p90": error(figures.raw.p90),
            "under": figures.raw.under,
            f"constant [{done.target.unit}]": _text(figures.constant, "+,.0f", "+.4g", below=1000),
            "median +c": error(figures.shifted.median),
            "p90 +c": error(figures.shifted.p90),
        }
        if done.target.is_memory:
            cells |= {"fit right": figures.fit_right, "by bound": figures.fit_right_bound}
        rows.append(
            {
                "rows": figures.file,
                "estimator": figures.estimator,
                "answered": _answered_text(figures),
                **_if_informative(figures, cells),
                "s each": _text(figures.median_seconds, ".2f", ".4f", below=0.1),
                "s a fit": _text(figures.fit_seconds, ".2f", ".4f", below=0.1),
            }
        )
    return FigureTable(f"{done.error_kind} errors; +c: with one constant per file added", rows)


def classes_table(done: Benchmark) -> FigureTable:
    """Return classes and bounds, by file and estimator."""
    rows = []
    for figures in done.figures:
        cells: dict[str, Any] = {
            "accuracy": _class_score(figures, "published", "accuracy"),
            "macro F1": _class_score(figures, "published", "macro_f1"),
            "macro recall": _class_score(figures, "published", "macro_recall"),
        }
        if done.target.is_memory:
            cells |= {
                "accuracy 1 GB": _class_score(figures, "ours", "accuracy"),
                "macro F1 1 GB": _class_score(figures, "ours", "macro_f1"),
            }
        bound = figures.bound
        cells |= {
            "under bound": None if bound is None else bound.coverage,
            "above it": None if bound is None else bound.above,
            "bound over label": None if bound is None else bound.excess,
            "recall by class": _recalls(figures),
        }
        rows.append({"rows": figures.file, "estimator": figures.estimator, **_if_informative(figures, cells)})
    rules = dict.fromkeys(_rule(done, figures.bins["published"]) for figures in done.figures)
    return FigureTable(f"classes as published ({'; '.join(rules)}), and the {100 * done.level:g} % bound", rows)


def _class_score(figures: Figures, bins: str, name: str) -> float | None:
    score: float | None = getattr(figures.classes.get(bins), name, None)
    return score


def _if_informative(figures: Figures, cells: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the cells; where the labels are the estimator's own, the first says so and the others are empty."""
    if not figures.own_labels:
        return cells
    return dict.fromkeys(cells) | {next(iter(cells)): NOT_INFORMATIVE}


def published_table(done: Benchmark) -> FigureTable:
    """Return the figures that others published, on their own rows: not measured here."""
    rows = [
        {
            "estimator": f"{figure.estimator} {OTHERS}",
            "rows": figure.rows,
            "figure": figure.measure,
            "value": figure.text,
            "source": figure.source,
        }
        for figure in done.published
    ]
    return FigureTable("published by others, on their own rows and splits; nothing of it is measured here", rows)


def _rule(done: Benchmark, bins: Bins) -> str:
    if not done.target.is_memory:
        return bins.rule
    return f"{bins.edges[0] / MIB_PER_GB:g} GB" if bins.edges else "one class"


def _text(value: float | None, form: str, small: str = "", *, below: float = 0.0) -> str:
    """Return a figure in its format, of sizes under `below` in that of `small`; a dash without one."""
    return "–" if value is None else format(value, small if abs(value) < below else form)


def error_text(relative: bool, value: float | None) -> str:
    """Return an error as the target's are read: relative ones in percent."""
    return _text(value, ".1%" if relative else ".4f")


def _recalls(figures: Figures) -> str:
    """Return percent by class, in the order of the classes."""
    if "published" not in figures.classes:
        return "–"
    values = [f"{100 * value:.0f}" for value in figures.classes["published"].recall.values()]
    return " ".join(values) if len(values) <= _CLASSES else f"{len(values)} classes"


def _answered_text(figures: Figures) -> str:
    asked = f"{figures.answered_ok:,}/{figures.ok:,}"
    return asked + (f" + {figures.answered_oom}/{figures.oom} oom" if figures.oom else "")


def _groups_table(done: Benchmark, file: str, by: str) -> FigureTable:
    """Errors by group, an estimator a column."""
    errors = {
        of.estimator: errors_by(lambda row: row.group, of.rows, of.constant, done.target.space)
        for of in done.by_file[file]
    }
    rows = []
    for group in sorted(set().union(*errors.values())):
        absolute = {name: np.abs(of.get(group, np.empty(0))) for name, of in errors.items()}
        texts = {
            name: f"{error_text(done.relative, median(of_group))} / {error_text(done.relative, p90(of_group))}"
            for name, of_group in absolute.items()
        }
        rows.append({"group": group, "n": f"{max(map(len, absolute.values()))}", **texts})
    return FigureTable(f"{file} by {by}: median / p90 error, constant added", rows)


def _worst_table(done: Benchmark, figures: Figures, n: int) -> FigureTable:
    """Return the ok rows that one estimator is furthest off, the furthest first."""
    errors = signed_errors(figures.rows, figures.constant, done.target.space)
    worst = sorted(errors, key=lambda row_and_error: abs(row_and_error[-1]), reverse=True)[:n]
    rows = [
        {
            "row": row.name,
            "group": row.group,
            f"label [{done.target.unit}]": _text(row.label, ",.5g"),
            "estimate": f"{estimate:,.5g}",
            "error": f"{error:+.1%}" if done.relative else f"{error:+.4f}",
            "in doubt": row.doubt or "",
        }
        for row, estimate, error in worst
    ]
    return FigureTable(f"{figures.file}, {figures.estimator}: furthest off, constant added", rows)


def refusals(done: Benchmark) -> list[str]:
    """Return why rows have no answer: the commonest reasons of each estimator and file."""
    return [
        f"{figures.file}, {figures.estimator}: no answer for {count}: {reason}"
        for figures in done.figures
        for reason, count in itertools.islice(figures.refusals.items(), _REASONS)
    ]


def benchmark_mapping(done: Benchmark, settings: BenchmarkSettings) -> dict[str, Any]:
    """Return settings, figures, notes and every row with its estimates; values may be dataclasses."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for figures in done.figures:
        for row in figures.rows:
            about = {name: getattr(row, name) for name in ("group", "family", "label", "batch_size")}
            of_row = {
                "file": figures.file,
                "row": row.name,
                **about,
                "status": "oom" if row.label is None else "ok",
                "doubt": row.doubt,
                "answers": {},
            }
            rows.setdefault((figures.file, row.name), of_row)["answers"][figures.estimator] = {
                name: getattr(row, name) for name in ("estimate", "upper", "reason", "seconds")
            }
    apart = ("rows", "bins")  # which stand beside the figures
    return {
        "target": done.target.name,
        "unit": done.target.unit,
        "errors": done.error_kind,
        "device": done.device,
        "card_mib": done.card_mib,
        "settings": settings,
        "bins": {figures.file: figures.bins for figures in done.figures},
        "figures": [{name: value for name, value in vars(of).items() if name not in apart} for of in done.figures],
        "published": done.published,
        "notes": done.notes,
        "rows": list(rows.values()),
    }


# ---- the page


def benchmark_page(done: Benchmark, settings: BenchmarkSettings) -> Page:
    """Return the page's contents: tables of errors and of classes and bounds, the published figures set apart; with
    `by=`, errors by group; the `worst=` rows of each estimator; refusals and plots."""
    by, worst = settings.by, settings.worst
    tables = {
        "errors": [errors_table(done)],
        "classes": [classes_table(done)],
        "published": [published_table(done)],
        "groups": [_groups_table(done, file, by) for file in done.by_file] if by else [],
        "worst": [_worst_table(done, figures, worst) for figures in done.figures],
    }
    sections = []
    for key, of_key in tables.items():
        if blocks := [block for table in of_key for block in table.blocks]:
            sections.append(Section(key, "", tuple(blocks), apart=key == "published"))
    if reasons := refusals(done):
        sections.append(Section("refusals", "Rows without an answer", (Bullets(tuple(reasons)),)))
    if settings.report is not None:
        sections += [_plots(done, file, f"file-{k}") for k, file in enumerate(done.by_file)]
    card = f", card {done.card_mib:,.0f} MiB" if done.card_mib is not None else ""
    return Page(
        title=f"Estimators of {done.target.name}",
        head=(Lead(f"{done.target.name} on {done.device}{card}"), *map(Callout, done.notes)),
        sections=tuple(sections),
    )


def _plots(done: Benchmark, file: str, key: str) -> Section:
    first = done.by_file[file][0]
    oom = f", {first.oom:,} that ran out of memory" if first.oom else ""
    intro = Lead(f"{first.ok + first.oom:,} rows{oom}; classes: {first.bins['published'].rule}")
    return Section(key, file, (intro, *plots_of(done, file)), name=file)


# ---- the tables of arXiv 2602.17817


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


def reproduce(
    settings: BenchmarkSettings, ask: Callable[[BenchmarkSettings, Sequence[int]], Benchmark]
) -> tuple[dict[str, FigureTable], list[str]]:
    """Return the paper's tables that have rows, by name, made from the published files, and what a reader has to know.
    `ask` runs one benchmark, with these widths of memory classes in GB.

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
        notes += [note for note in benchmarks[-1].notes if "in doubt" in note]
    judged = _by_families(benchmarks)
    of_memory = _accuracies(judged, [("memory", f"{width} GB") for width in BIN_WIDTHS_GB])
    of_levels = _accuracies(judged, [(target, "published") for target in ("smact", "smocc", "drama")])
    tables = {
        "memory": FigureTable(
            "Accuracy of memory classes by family and bin width, 3-fold",
            [row for row in of_memory if row["n"] is not None],
        ),
        "utilization": FigureTable(
            "Accuracy of utilization classes (low, medium, high) by family, 3-fold",
            of_levels if any(row["n"] for row in of_levels) else (),
        ),
        "models": _models(judged),
        "latency": _latency(judged),
    }
    return {name: table for name, table in tables.items() if table.rows}, list(dict.fromkeys(notes))


Judged = Mapping[tuple[str, frozenset[str]], Sequence[Figures]]


def _by_families(benchmarks: Sequence[Benchmark]) -> Judged:
    """Return (target, families of the rows) -> the figures. Rows in doubt count, as they do in the paper."""
    judged: dict[tuple[str, frozenset[str]], list[Figures]] = defaultdict(list)
    for done in benchmarks:
        for figures in done.figures:
            if not figures.file.endswith(TRUSTED_ALONE):
                judged[done.target.name, frozenset(row.family for row in figures.rows)].append(figures)
    return judged


def _accuracies(judged: Judged, kinds: Sequence[tuple[str, str]]) -> list[Mapping[str, Any]]:
    """Return a row for each family and kind, with the accuracy of each estimator and that of the paper. A kind is a
    target and the name of its classes: `published`, or a width as `2 GB`."""
    rows: list[Mapping[str, Any]] = []
    for family, (target, bins) in itertools.product(FAMILIES, kinds):
        ours = judged.get((target, frozenset({family})), ())
        theirs = [
            figure
            for figure in PUBLISHED_FIGURES
            if (figure.target, figure.rows, figure.source) == (target, family, GPUMEMNET)
            and (bins == "published" or bins in [f"{width} GB" for width in figure.bin_gb])
        ]
        rows.append(
            {
                "family": family,
                **({"target": target} if bins == "published" else {"bins": bins}),
                "n": ours[0].ok + ours[0].oom if ours else None,
                **{
                    figures.estimator: figures.classes[bins].accuracy if bins in figures.classes else None
                    for figures in ours
                },
                "theirs": theirs or None,
            }
        )
    return rows


def _models(judged: Judged) -> FigureTable:
    """Return signed relative errors, and their means and medians without sign, of models that are never fitted on."""
    of_models = [
        figures
        for (target, families), of_rows in judged.items()
        for figures in of_rows
        if target == "memory" and families.isdisjoint(FAMILIES) and figures.answered
    ]
    labels: dict[str, float | None] = {}
    errors: dict[str, dict[str, _Signed]] = {}
    for figures in of_models:
        of_estimator = errors.setdefault(figures.estimator, {})
        for row in figures.rows:
            name = row.name.partition(" ")[2]
            labels.setdefault(name, row.label)
            if row.estimate and row.label:
                of_estimator[name] = _Signed(row.estimate / row.label - 1)
    rows: list[dict[str, Any]] = [
        {
            "model": name,
            "actual [MiB]": label and round(label),
            **{estimator: by_model.get(name) for estimator, by_model in errors.items()},
        }
        for name, label in labels.items()
    ]
    for title, summary in (("mean error", mean), ("median error", median)) if rows else ():
        of_all = {estimator: summary(np.abs(list(by_model.values()))) for estimator, by_model in errors.items()}
        rows.append({"model": title, "actual [MiB]": None, **of_all})
    return FigureTable("Relative error of well-known models, which nothing is fitted on", rows)


def _latency(judged: Judged) -> FigureTable:
    times: dict[str, dict[str, _Time]] = defaultdict(dict)
    for family in FAMILIES:
        for figures in judged.get(("memory", frozenset({family})), ()):
            if figures.median_seconds is not None:
                times[figures.estimator][family] = _Time(figures.median_seconds)
    rows: list[dict[str, Any]] = [
        {"estimator": name, **{family: of.get(family) for family in FAMILIES}, "theirs": None, "of": "here"}
        for name, of in times.items()
    ]
    rows += [
        {
            "estimator": f"{figure.estimator} {OTHERS}",
            "theirs": [figure],
            "of": f"{figure.measure}; {figure.source}",
        }
        for figure in PUBLISHED_FIGURES
        if rows and figure.unit in ("s", "ms")
    ]
    return FigureTable("Time of one estimate: ours on one core of this machine, features not remembered", rows)


class _Signed(float):
    """A share whose sign is shown."""


class _Time(float):
    """Seconds."""


def _cell_text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(figure.text for figure in value)
    if isinstance(value, _Time):
        return f"{1000 * value:,.1f} ms"
    if isinstance(value, float):
        return f"{value:+.1%}" if isinstance(value, _Signed) else f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def paper_mapping(
    tables: Mapping[str, FigureTable], notes: Sequence[str], settings: BenchmarkSettings
) -> dict[str, Any]:
    """Return the tables' rows; values may be dataclasses."""
    rows = {name: table.rows for name, table in tables.items()}
    return {"source": GPUMEMNET, "settings": settings, "notes": notes, **rows}


def paper_page(tables: Mapping[str, FigureTable], notes: Sequence[str]) -> Page:
    """Return the page: each table with its figure."""
    draws = {"memory": _draw_accuracy, "utilization": _draw_accuracy, "models": _draw_errors}
    sections = []
    for name, table in tables.items():
        drawn = draws[name](table) if name in draws else ()
        sections.append(Section(name, "", (*table.blocks, *drawn)))
    return Page(
        title="The tables of arXiv 2602.17817",
        head=(Lead("Ours beside theirs; theirs are on their own rows and splits"), *map(Callout, notes)),
        sections=tuple(sections),
    )


def _draw_accuracy(table: FigureTable) -> tuple[Block, ...]:
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


def _draw_errors(table: FigureTable) -> tuple[Block, ...]:
    """Draw each model's error as a point and the mean as a bar, an estimator a line."""
    kinds = [name for name in table.columns if name not in ("model", "actual [MiB]")]
    limit = 1.5
    left = max(map(len, kinds), default=0) * LETTER_PX + 14
    margins = Margins(width=left + 620, height=60 + 22 * len(kinds), left=left, top=8, bottom=44)
    plot = Plot(Axis.of(0.0, limit, 6), Axis(len(kinds), 0.0), margins)
    plot.ticks_below("relative error, 1.5 or more at the edge: bar the mean, a point a model")
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
