"""Show a benchmark: a bar while it runs, a page of tables and plots for people, JSON for programs.

Start reading at `benchmark_page`, which the terminal shows, too (`conf.reports.terminal`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conf.cli.command_line import terminal_bar
from conf.files.outputs import write_output
from conf.reports.blocks import (
    Block,
    Bullets,
    Callout,
    Facts,
    Heading,
    Lead,
    Page,
    Row,
    Section,
    Table,
    TableColumn,
)
from learn.judging.report import plots_of
from learn.judging.scores import NOT_INFORMATIVE, Benchmark, Figures, by_group, worst_of
from learn.rows.data import MIB_PER_GB, TARGETS, Bins

if TYPE_CHECKING:
    from learn.commands.benchmark_rows import BenchmarkSettings

OTHERS = "(published)"  # behind the name of an estimator whose figures are published ones
# Columns of words; the others hold figures.
WORDS = {
    *("rows", "estimator", "figure", "source", "family", "bins", "target", "model", "of"),
    *("group", "row", "in doubt"),
}
_PLAIN_EVERY_S = 10.0
_CLASSES = 8  # beyond this many classes, recalls are in the files only
_REASONS = 5  # an estimator's refusals on a file that are shown; `out=` holds all


class BenchmarkProgress:
    """A context manager on stderr: a bar on a terminal, else a line every ten seconds; estimators as they are done."""

    def __init__(self, target: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._clock = f"benchmark of {target}", clock
        self._relative = target in TARGETS and TARGETS[target].space == "log"
        self._began = self._printed = clock()
        self._running = terminal_bar(self._label, remaining=True)

    def __enter__(self) -> BenchmarkProgress:
        self._bar = self._running.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._running.__exit__(*raised)

    def update(self, done: int, of: int) -> None:
        """Show that `done` of `of` steps are taken."""
        if self._bar is not None:
            self._bar(completed=done, total=of)
        elif done and (self._clock() - self._printed >= _PLAIN_EVERY_S or done == of):
            self._printed = self._clock()
            left = (self._printed - self._began) / done * (of - done)
            print(f"{self._label}: {done}/{of} steps, {left:.0f} s left", file=sys.stderr)

    def show(self, figures: Sequence[Figures]) -> None:
        """Print the figures of an estimator that has answered, a line for each file."""
        for of_file in figures:
            median, p90 = (error_text(self._relative, value) for value in (of_file.raw.median, of_file.raw.p90))
            scores = of_file.classes.get("published")
            figures_text = f"median {median}, p90 {p90}, accuracy {_share(getattr(scores, 'accuracy', None))}"
            if of_file.own_labels:
                figures_text = NOT_INFORMATIVE
            print(
                f"{of_file.file}, {of_file.estimator}: answered {_answered_text(of_file)}, {figures_text}",
                file=sys.stderr,
            )


def headline(done: Benchmark) -> str:
    card = f", card {done.card_mib:,.0f} MiB" if done.card_mib is not None else ""
    return f"{done.target.name} on {done.device}{card}"


Cell = Callable[["Figures"], str]


def errors_table(done: Benchmark) -> tuple[Block, ...]:
    """Return how far off estimates are, by file and estimator."""

    def error(value: float | None) -> str:
        return error_text(done.relative, value)

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
        cells["fit right"] = lambda figures: _share(figures.fit_right)
        cells["by bound"] = lambda figures: _share(figures.fit_right_bound)
    times: dict[str, Cell] = {
        "s each": lambda figures: _text(figures.median_seconds, ".2f", ".4f", below=0.1),
        "s a fit": lambda figures: _text(figures.fit_seconds, ".2f", ".4f", below=0.1),
    }
    kind = "relative" if done.relative else "absolute"
    title = f"{kind} errors; +c: with one constant per file added"
    return _figures_table(title, done, {"answered": _answered_text}, cells, times)


def classes_table(done: Benchmark) -> tuple[Block, ...]:
    """Return classes and bounds, by file and estimator."""

    def score(bins: str, name: str) -> Cell:
        return lambda figures: _share(getattr(figures.classes.get(bins), name, None))

    def bound(name: str) -> Cell:
        return lambda figures: _share(getattr(figures.bound, name, None))

    cells = {"accuracy": score("published", "accuracy"), "macro F1": score("published", "macro_f1")}
    cells["macro recall"] = score("published", "macro_recall")
    if done.target.is_memory:
        cells |= {"accuracy 1 GB": score("ours", "accuracy"), "macro F1 1 GB": score("ours", "macro_f1")}
    cells |= {"under bound": bound("coverage"), "above it": bound("above"), "bound over label": bound("excess")}
    cells["recall by class"] = _recalls
    rules = {file: _rule(done, bins["published"]) for file, bins in done.bins.items()}
    rules_text = "; ".join(f"{file}: {rule}" for file, rule in rules.items())
    if len(set(rules.values())) == 1:
        rules_text = next(iter(rules.values()))
    title = f"classes as published ({rules_text}), and the {100 * done.level:g} % bound"
    return _figures_table(title, done, {}, cells, {})


def _figures_table(
    title: str, done: Benchmark, before: Mapping[str, Cell], cells: Mapping[str, Cell], after: Mapping[str, Cell]
) -> tuple[Block, ...]:
    """Return a row for each file and estimator. `cells` stay empty where the labels are the estimator's own."""
    rows = []
    for figures in done.figures:
        texts = [cell(figures) for cell in cells.values()]
        if figures.own_labels:
            texts = [NOT_INFORMATIVE, *["–"] * (len(cells) - 1)]
        around = [[cell(figures) for cell in of.values()] for of in (before, after)]
        rows.append([figures.file, figures.estimator, *around[0], *texts, *around[1]])
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
    file_figures = [figures for figures in done.figures if figures.file == file]
    groups = {
        f.estimator: by_group(done.scored[file, f.estimator], f.constant, space=done.target.space) for f in file_figures
    }
    rows = []
    for group in sorted({name for of_file in groups.values() for name in of_file}):
        n = max(of_file[group][0] for of_file in groups.values() if group in of_file)
        cells = []
        for figures in file_figures:
            _, errors = groups[figures.estimator].get(group, (0, None))
            both = (errors.median, errors.p90) if errors else (None, None)
            cells.append(" / ".join(error_text(done.relative, value) for value in both))
        rows.append([group, f"{n}", *cells])
    title = f"{file} by {by}: median / p90 error, constant added"
    return table_blocks(title, ["group", "n", *(figures.estimator for figures in file_figures)], rows)


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
        reasons = list(figures.refusals.items())
        where = f"{figures.file}, {figures.estimator}: no answer for"
        refusal_lines += [f"{where} {count}: {reason}" for reason, count in reasons[:_REASONS]]
        if more := reasons[_REASONS:]:
            refusal_lines.append(f"{where} {sum(n for _, n in more)} for other reasons")
    return refusal_lines


def write_json(path: str, done: Benchmark, settings: BenchmarkSettings) -> None:
    """Write settings, figures, notes and every row with its estimates, replacing `path` in one step."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (file, estimator), scored in done.scored.items():
        for row in scored:
            about = {name: getattr(row, name) for name in ("group", "family", "label", "batch_size")}
            status = "oom" if row.label is None else "ok"
            of_row = {"file": file, "row": row.name, **about, "status": status, "doubt": row.doubt, "answers": {}}
            answers = rows.setdefault((file, row.name), of_row)["answers"]
            answers[estimator] = {name: getattr(row, name) for name in ("estimate", "upper", "reason", "seconds")}
    report = {
        "target": done.target.name,
        "unit": done.target.unit,
        "errors": "relative" if done.relative else "absolute",
        "device": done.device,
        "card_mib": done.card_mib,
        "settings": asdict(settings),
        "bins": {file: {name: asdict(bins) for name, bins in of_file.items()} for file, of_file in done.bins.items()},
        "figures": [asdict(figures) for figures in done.figures],
        "published": [asdict(figure) for figure in done.published],
        "notes": done.notes,
        "rows": list(rows.values()),
    }
    write_output(path, (json.dumps(report, indent=1) + "\n").encode())


# ---- the page


def benchmark_page(done: Benchmark, settings: BenchmarkSettings) -> Page:
    """Return the page's contents: tables of errors and of classes and bounds, the published figures set apart; with
    `by=`, errors by group; the `worst=` rows of each estimator; refusals, plots and settings."""
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
    given = {name: value for name, value in asdict(settings).items() if value is not None}
    rows = [(name, ", ".join(value) if isinstance(value, tuple) else str(value)) for name, value in given.items()]
    return Page(
        title=f"Estimators of {done.target.name}",
        head=(Lead(headline(done)), *map(Callout, done.notes)),
        sections=(*sections, Section("settings", "Settings", (Facts(tuple(rows)),))),
    )


def table_blocks(title: str, names: Sequence[str], lines: Sequence[Sequence[str]]) -> tuple[Block, ...]:
    """Return a heading and the table, nothing without rows; a name of rows stands once, where its rows begin."""
    grouped = names[0] in ("rows", "family")
    rows: list[Row] = []
    previous: str | None = None
    for line in lines:
        first = grouped and line[0] != previous
        shown = line if first or not grouped else ["", *line[1:]]
        previous = line[0]
        marks = ("first" if first else "", "others" if grouped and line[1].endswith(OTHERS) else "")
        rows.append(Row(tuple(shown), " ".join(filter(None, marks))))
    columns = tuple(TableColumn(name, "word" if name in WORDS else "figure") for name in names)
    return (Heading(title[:1].upper() + title[1:]), Table(columns, tuple(rows))) if rows else ()


def _plots(done: Benchmark, file: str, key: str) -> Section:
    of_file = next(figures for figures in done.figures if figures.file == file)
    oom = f", {of_file.oom:,} that ran out of memory" if of_file.oom else ""
    intro = Lead(f"{of_file.ok + of_file.oom:,} rows{oom}; classes: {done.bins[file]['published'].rule}")
    return Section(key, file, (intro, *plots_of(done, file)), name=file)
