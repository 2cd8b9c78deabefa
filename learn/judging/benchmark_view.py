"""Show a benchmark: a line for each estimator that is done, a page of tables and plots for people, a mapping for JSON.

Start reading at `benchmark_page`, which the terminal shows, too (`conf.reports.blocks`). `reproduce` makes the tables
of arXiv 2602.17817 of several benchmarks, ours beside those that are published, and `paper_page` draws them.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    NO_ERRORS,
    NOT_INFORMATIVE,
    PUBLISHED_FIGURES,
    TRUSTED_ALONE,
    Benchmark,
    Figures,
    Scored,
    by_group,
    mean,
    median,
    worst_of,
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
        accuracy = _score("published", "accuracy")(of_file)
        text = f"median {error(of_file.raw.median)}, p90 {error(of_file.raw.p90)}, accuracy {accuracy}"
        if of_file.own_labels:
            text = NOT_INFORMATIVE
        print(f"{of_file.file}, {of_file.estimator}: answered {_answered_text(of_file)}, {text}", file=sys.stderr)


Cell = Callable[["Figures"], str]


def errors_table(done: Benchmark) -> tuple[Block, ...]:
    """Return how far off estimates are, by file and estimator."""
    error = partial(error_text, done.relative)
    cells: dict[str, Cell] = {
        "median": lambda figures: error(figures.raw.median),
        "mean": lambda figures: error(figures.raw.mean),
        "p90": lambda figures: error(figures.raw.p90),
        "under": lambda figures: _share(figures.raw.under),
        f"constant [{done.target.unit}]": lambda figures: _text(figures.constant, "+,.0f", "+.4g", below=1000),
        "median +c": lambda figures: error(figures.shifted.median),
        "p90 +c": lambda figures: error(figures.shifted.p90),
    }
    if done.target.is_memory:
        cells |= {
            "fit right": lambda figures: _share(figures.fit_right),
            "by bound": lambda figures: _share(figures.fit_right_bound),
        }
    times: dict[str, Cell] = {
        "s each": lambda figures: _text(figures.median_seconds, ".2f", ".4f", below=0.1),
        "s a fit": lambda figures: _text(figures.fit_seconds, ".2f", ".4f", below=0.1),
    }
    title = f"{done.error_kind} errors; +c: with one constant per file added"
    return _figures_table(title, done, {"answered": _answered_text}, cells, times)


def classes_table(done: Benchmark) -> tuple[Block, ...]:
    """Return classes and bounds, by file and estimator."""
    cells = {"accuracy": _score("published", "accuracy"), "macro F1": _score("published", "macro_f1")}
    cells["macro recall"] = _score("published", "macro_recall")
    if done.target.is_memory:
        cells |= {"accuracy 1 GB": _score("ours", "accuracy"), "macro F1 1 GB": _score("ours", "macro_f1")}
    for name, field in {"under bound": "coverage", "above it": "above", "bound over label": "excess"}.items():
        cells[name] = partial(_bound, field)
    cells["recall by class"] = _recalls
    rules = dict.fromkeys(_rule(done, bins["published"]) for bins in done.bins.values())
    title = f"classes as published ({'; '.join(rules)}), and the {100 * done.level:g} % bound"
    return _figures_table(title, done, {}, cells, {})


def _score(bins: str, name: str) -> Cell:
    return lambda figures: _share(getattr(figures.classes.get(bins), name, None))


def _bound(name: str, figures: Figures) -> str:
    return _share(getattr(figures.bound, name, None))


def _figures_table(
    title: str, done: Benchmark, before: Mapping[str, Cell], cells: Mapping[str, Cell], after: Mapping[str, Cell]
) -> tuple[Block, ...]:
    """Return a row for each file and estimator. `cells` stay empty where the labels are the estimator's own."""
    rows = []
    for figures in done.figures:
        first, texts, last = ([cell(figures) for cell in of.values()] for of in (before, cells, after))
        if figures.own_labels:
            texts = [NOT_INFORMATIVE, *["–"] * (len(cells) - 1)]
        rows.append([figures.file, figures.estimator, *first, *texts, *last])
    return table_blocks(title, ["rows", "estimator", *before, *cells, *after], rows)


def published_table(done: Benchmark) -> tuple[Block, ...]:
    """Return the figures that others published, on their own rows: not measured here."""
    rows = [[f"{f.estimator} {OTHERS}", f.rows, f.measure, f.text, f.source] for f in done.published]
    title = "published by others, on their own rows and splits; nothing of it is measured here"
    return table_blocks(title, ["estimator", "rows", "figure", "value", "source"], rows)


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


def _share(value: float | None) -> str:
    return _text(value, ".1%")


def _recalls(figures: Figures) -> str:
    """Return percent by class, in the order of the classes."""
    if "published" not in figures.classes:
        return "–"
    values = [f"{100 * value:.0f}" for value in figures.classes["published"].recall.values()]
    return " ".join(values) if len(values) <= _CLASSES else f"{len(values)} classes"


def _answered_text(figures: Figures) -> str:
    asked = f"{figures.answered_ok:,}/{figures.ok:,}"
    return asked + (f" + {figures.answered_oom}/{figures.oom} oom" if figures.oom else "")


def _groups_table(done: Benchmark, file: str, by: str) -> tuple[Block, ...]:
    """Errors by group, an estimator a column."""
    groups = {
        of.estimator: by_group(done.scored[file, of.estimator], of.constant, space=done.target.space)
        for of in done.figures
        if of.file == file
    }
    rows = []
    for group in sorted({name for of_estimator in groups.values() for name in of_estimator}):
        of_group = [of_estimator.get(group, (0, NO_ERRORS)) for of_estimator in groups.values()]
        cells = [[error_text(done.relative, value) for value in (off.median, off.p90)] for _, off in of_group]
        rows.append([group, f"{max(count for count, _ in of_group)}", *map(" / ".join, cells)])
    return table_blocks(f"{file} by {by}: median / p90 error, constant added", ["group", "n", *groups], rows)


def _worst_table(done: Benchmark, figures: Figures, n: int) -> tuple[Block, ...]:
    """Return the rows that one estimator is furthest off."""
    constant = figures.constant or 0.0
    rows = []
    for row, error in worst_of(done.scored[figures.file, figures.estimator], constant, n, space=done.target.space):
        if row.label is not None and row.estimate is not None:  # `worst_of` gives rows with both
            shown_error = f"{error:+.1%}" if done.relative else f"{error:+.4f}"
            figures_text = f"{row.label:,.5g}", f"{row.estimate + constant:,.5g}", shown_error
            rows.append([row.name, row.group, *figures_text, row.doubt or ""])
    columns = ["row", "group", f"label [{done.target.unit}]", "estimate", "error", "in doubt"]
    return table_blocks(f"{figures.file}, {figures.estimator}: furthest off, constant added", columns, rows)


def refusals(done: Benchmark) -> list[str]:
    """Return why rows have no answer: the commonest reasons of each estimator and file."""
    refusal_lines = []
    for figures in done.figures:
        where = f"{figures.file}, {figures.estimator}: no answer for"
        commonest = itertools.islice(figures.refusals.items(), _REASONS)
        refusal_lines += [f"{where} {count}: {reason}" for reason, count in commonest]
    return refusal_lines


def benchmark_mapping(done: Benchmark, settings: BenchmarkSettings) -> dict[str, Any]:
    """Return settings, figures, notes and every row with its estimates, as JSON has them."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (file, estimator), scored in done.scored.items():
        for row in scored:
            about = {name: getattr(row, name) for name in ("group", "family", "label", "batch_size")}
            status = "oom" if row.label is None else "ok"
            of_row = {"file": file, "row": row.name, **about, "status": status, "doubt": row.doubt, "answers": {}}
            answers = rows.setdefault((file, row.name), of_row)["answers"]
            answers[estimator] = {name: getattr(row, name) for name in ("estimate", "upper", "reason", "seconds")}
    return {
        "target": done.target.name,
        "unit": done.target.unit,
        "errors": done.error_kind,
        "device": done.device,
        "card_mib": done.card_mib,
        "settings": asdict(settings),
        "bins": {file: {name: asdict(bins) for name, bins in of_file.items()} for file, of_file in done.bins.items()},
        "figures": [asdict(figures) for figures in done.figures],
        "published": [asdict(figure) for figure in done.published],
        "notes": done.notes,
        "rows": list(rows.values()),
    }


# ---- the page


def benchmark_page(done: Benchmark, settings: BenchmarkSettings) -> Page:
    """Return the page's contents: tables of errors and of classes and bounds, the published figures set apart; with
    `by=`, errors by group; the `worst=` rows of each estimator; refusals and plots."""
    by, worst = settings.by, settings.worst
    tables = {
        "errors": errors_table(done),
        "classes": classes_table(done),
        "published": published_table(done),
        "groups": [block for file in done.bins for block in _groups_table(done, file, by)] if by else [],
        "worst": [block for figures in done.figures for block in _worst_table(done, figures, worst)],
    }
    sections = [Section(key, "", tuple(blocks), apart=key == "published") for key, blocks in tables.items() if blocks]
    if reasons := refusals(done):
        sections.append(Section("refusals", "Rows without an answer", (Bullets(tuple(reasons)),)))
    if settings.report is not None:
        sections += [_plots(done, file, f"file-{k}") for k, file in enumerate(done.bins)]
    card = f", card {done.card_mib:,.0f} MiB" if done.card_mib is not None else ""
    return Page(
        title=f"Estimators of {done.target.name}",
        head=(Lead(f"{done.target.name} on {done.device}{card}"), *map(Callout, done.notes)),
        sections=tuple(sections),
    )


def table_blocks(title: str, names: Sequence[str], lines: Sequence[Sequence[str]]) -> tuple[Block, ...]:
    """Return a heading and the table, nothing without rows."""
    if not lines:
        return ()
    columns = tuple(TableColumn(name, "word" if name in WORDS else "figure") for name in names)
    return Heading(title[:1].upper() + title[1:]), Table(columns, tuple(Row(tuple(line)) for line in lines))


def _plots(done: Benchmark, file: str, key: str) -> Section:
    of_file = next(figures for figures in done.figures if figures.file == file)
    oom = f", {of_file.oom:,} that ran out of memory" if of_file.oom else ""
    intro = Lead(f"{of_file.ok + of_file.oom:,} rows{oom}; classes: {done.bins[file]['published'].rule}")
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


@dataclass(frozen=True)
class PaperTable:
    """One table: a row is column -> value. Shares are numbers in [0, 1]; None stands for no figure."""

    name: str
    title: str
    rows: tuple[Mapping[str, Any], ...]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))


def reproduce(
    settings: BenchmarkSettings, ask: Callable[[BenchmarkSettings, Sequence[int]], Benchmark]
) -> tuple[list[PaperTable], list[str]]:
    """Return the paper's tables that have rows, made from the published files, and what a reader has to know. `ask`
    runs one benchmark, with these widths of memory classes in GB.

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
    by_family = _by_family(benchmarks)
    of_memory = _accuracies(by_family, [("memory", f"{width} GB") for width in BIN_WIDTHS_GB])
    of_levels = _accuracies(by_family, [(target, "published") for target in ("smact", "smocc", "drama")])
    tables = [
        PaperTable(
            "memory",
            "Accuracy of memory classes by family and bin width, 3-fold",
            tuple(row for row in of_memory if row["n"] is not None),
        ),
        PaperTable(
            "utilization",
            "Accuracy of utilization classes (low, medium, high) by family, 3-fold",
            of_levels if any(row["n"] for row in of_levels) else (),
        ),
        _models(benchmarks),
        _latency(by_family),
    ]
    return [table for table in tables if table.rows], list(dict.fromkeys(notes))


def _by_family(benchmarks: Sequence[Benchmark]) -> dict[tuple[str, str], list[Figures]]:
    """Return (target, family) -> the figures of each estimator. Rows in doubt count, as they do in the paper."""
    by_family: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    for done in benchmarks:
        for figures in done.figures:
            families = {row.family for row in done.scored[figures.file, figures.estimator]}
            if len(families) == 1 and families <= {*FAMILIES} and not figures.file.endswith(TRUSTED_ALONE):
                by_family[done.target.name, families.pop()].append(figures)
    return by_family


def _accuracies(
    by_family: Mapping[tuple[str, str], Sequence[Figures]], kinds: Sequence[tuple[str, str]]
) -> tuple[Mapping[str, Any], ...]:
    """Return a row for each family and kind, with the accuracy of each estimator and that of the paper.

    Args:
        by_family: Those of `_by_family`.
        kinds: Targets, and the names of their classes: `published`, or a width as `2 GB`.
    """
    rows = []
    for family, (target, bins) in itertools.product(FAMILIES, kinds):
        ours = by_family.get((target, family), ())
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
    return tuple(rows)


def _models(benchmarks: Sequence[Benchmark]) -> PaperTable:
    """Return signed relative errors, and their means and medians without sign, of models that are never fitted on."""
    answers: dict[str, dict[str, Scored]] = defaultdict(dict)
    for of_run in benchmarks:
        for (file, estimator), scored in of_run.scored.items():
            known = of_run.target.is_memory and not file.endswith(TRUSTED_ALONE)
            if known and not {row.family for row in scored} & {*FAMILIES} and any(row.estimate for row in scored):
                answers[estimator] |= {row.name.partition(" ")[2]: row for row in scored}
    labels = {name: row.label for by_name in reversed(answers.values()) for name, row in by_name.items()}
    errors = {
        estimator: {
            name: _Signed(row.estimate / row.label - 1) for name, row in by_name.items() if row.estimate and row.label
        }
        for estimator, by_name in answers.items()
    }
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for by_name in answers.values() for name in by_name):
        label = labels[name]
        signed = {estimator: of.get(name) for estimator, of in errors.items()}
        rows.append({"model": name, "actual [MiB]": label and round(label), **signed})
    for title, summary in (("mean error", mean), ("median error", median)) if rows else ():
        of_all = {estimator: summary(np.abs(list(of.values()))) for estimator, of in errors.items()}
        rows.append({"model": title, "actual [MiB]": None, **of_all})
    return PaperTable("models", "Relative error of well-known models, which nothing is fitted on", tuple(rows))


def _latency(by_family: Mapping[tuple[str, str], Sequence[Figures]]) -> PaperTable:
    times: dict[str, dict[str, _Time]] = defaultdict(dict)
    for family in FAMILIES:
        for figures in by_family.get(("memory", family), ()):
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
    title = "Time of one estimate: ours on one core of this machine, features not remembered"
    return PaperTable("latency", title, tuple(rows))


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


def paper_mapping(tables: Sequence[PaperTable], notes: Sequence[str], settings: BenchmarkSettings) -> dict[str, Any]:
    """Return the tables' rows, as JSON has them."""
    about = {"source": GPUMEMNET, "settings": asdict(settings), "notes": notes}
    return about | {table.name: table.rows for table in tables}


def paper_page(tables: Sequence[PaperTable], notes: Sequence[str]) -> Page:
    """Return the page: each table with its figure."""
    draws: dict[str, Callable[[PaperTable], tuple[Block, ...]]] = {
        "memory": _draw_accuracy,
        "utilization": _draw_accuracy,
        "models": _draw_errors,
    }
    sections = []
    for table in tables:
        rows = [[_cell_text(row.get(name)) for name in table.columns] for row in table.rows]
        drawn = draws[table.name](table) if table.name in draws else ()
        sections.append(Section(table.name, "", (*table_blocks(table.title, table.columns, rows), *drawn)))
    return Page(
        title="The tables of arXiv 2602.17817",
        head=(Lead("Ours beside theirs; theirs are on their own rows and splits"), *map(Callout, notes)),
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
