"""`python -m learn.benchmark`: every estimator on the same rows, in one table, or the tables of arXiv 2602.17817.

Start reading at `benchmark`; `entry` prints. `learn.commands.benchmark_rows` chooses the rows and asks for answers, and
`benchmark_steps` is for measured steps; in `learn.judging`, `evaluate` says who is fitted on what, `scores` counts, and
`benchmark_view` makes the pages. Only published figures with a known source (`learn.judging.scores`) stand beside ours.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from conf.cli.command_line import StepBar, command
from conf.errors import UsageError
from conf.files.disk_cache import user_folder
from conf.files.outputs import write_output
from conf.reports.blocks import print_page, write_page
from learn.commands.benchmark_rows import (
    STEP_FORMULAS,
    AskedRows,
    BenchmarkSettings,
    Tally,
    ask_free,
    ask_learned,
    of_published,
    of_runs,
)
from learn.estimators.protocol import TRAINING_FREE, get_estimator
from learn.judging.benchmark_view import (
    OTHERS,
    benchmark_mapping,
    benchmark_page,
    paper_mapping,
    paper_page,
    print_figures,
    reproduce,
)
from learn.judging.evaluate import NEVER_FITTED, Part, classes_of, keys_of, parts_of
from learn.judging.scores import Asked, Benchmark, Figures, Given, described, judge
from learn.rows.data import SLOWDOWN, Bins, make_bins
from learn.rows.step_store import StepStore, with_suspects
from warehouse.files.folder import DataFolder


def benchmark(
    settings: BenchmarkSettings,
    *,
    progress: Callable[[int, int], None] = lambda completed, total: None,
    finished: Callable[[Sequence[Figures]], None] = lambda figures: None,
    widths_gb: Sequence[int] = (),
) -> Benchmark:
    """Ask every estimator for every row. A row without an answer is counted with its reason and stops nothing.

    Estimators that learn answer for rows that they, and near-copies, were not fitted on: `split` says which. Same
    settings and rows, same figures, times aside. Raises `UsageError` for settings that fit no rows.
    `progress(completed, total)` is called for every traced step that is computed, every fit and every answer,
    `finished(figures)` for each estimator's figures, one for each file, when it has answered; the slowest ones come
    last. `widths_gb` are widths of further memory classes.
    """
    from learn.commands.benchmark_steps import benchmark_steps, is_of_measured_steps

    if settings.target == SLOWDOWN:
        from learn.commands.sharing import benchmark_slowdowns

        return benchmark_slowdowns(settings, progress)
    if is_of_measured_steps(settings):
        return benchmark_steps(settings, progress)
    if formulas := [name for name in settings.estimators or () if name in STEP_FORMULAS]:
        raise UsageError(
            f"estimators={', '.join(formulas)}: for measured or imported steps only; pass source=measured or "
            "source=imported"
        )
    names = settings.names
    free = [name for name in names if name in TRAINING_FREE]
    learned = [name for name in names if name not in TRAINING_FREE]
    is_of_runs = settings.published is None
    rows, row_notes = of_runs(settings) if is_of_runs else of_published(settings, learned=bool(learned))
    bins = {file: rows.bins(file, widths_gb) for file in dict.fromkeys(rows.file.tolist())}
    # All estimators are asked about the same held-out rows; else those that learn nothing are asked about all rows.
    parts = _parts(settings, rows, bins) if learned or settings.split == "holdout" else ()
    index = np.sort(np.concatenate([part.outside for part in parts])) if parts else np.flatnonzero(rows.asked)

    tally = Tally(progress)
    notes = [*_notes_of_parts(settings, parts, learned), *row_notes]
    traces = any(get_estimator(name).needs_trace for name in learned)
    steps = StepStore(cache_folder(settings) if traces else None)
    if traces:
        if computed := steps.prepare(rows.cases, workers=settings.workers, progress=tally.traced):
            notes.append(
                f"{computed} traced steps computed; their features are kept in {cache_folder(settings).features}"
            )
        known_doubts, rows = rows.doubt, with_suspects(rows, steps)
        doubted = Counter(rows.file[rows.doubt != known_doubts].tolist())
        notes += [
            f"{file}: {doubted[file]} more rows are in doubt: traces or rows of the same network contradict them"
            for file in bins
            if doubted[file]
        ]
        if settings.doubtful == "drop":
            index = index[rows.doubt[index] == ""]
    elif rows.target.is_memory:
        notes.append("labels were not compared with traces, which no learned estimator that is asked reads")
    tally.step(0, of=len(index) * len(names) + len(parts) * len(learned))

    judge_all = partial(judge, rows.target, _sets(settings, rows, index, steps), bins)
    asked: dict[str, Asked] = {}
    for name in learned:
        asked[name] = ask_learned(name, rows, parts, bins, settings.seed, tally, steps)
        finished(judge_all({name: asked[name]}))
        notes += [f"{name}: {text}" for text in _alike(asked[name].warnings)]
    for name, given in ask_free(rows, index, free, settings, tally, steps):
        asked[name] = given
        finished(judge_all({name: given}))

    cards = set(rows.card_mib[index].tolist())
    return Benchmark(
        target=rows.target,
        device=", ".join(dict.fromkeys(rows.device[index].tolist())),
        card_mib=cards.pop() if rows.target.is_memory and len(cards) == 1 else None,
        figures=judge_all({name: asked[name] for name in names} | _published_estimates(rows, index)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _parts(settings: BenchmarkSettings, rows: AskedRows, bins: Mapping[str, Mapping[str, Bins]]) -> tuple[Part, ...]:
    if settings.split == "holdout":  # the very rows that learn.fit holds out
        exact = rows.exact if len(rows.exact) else rows
        whole = make_bins(rows.target, exact.label, rows.family, ceiling_mib=rows.ceiling_mib)
        strata = classes_of(rows, whole)
    else:
        strata = np.zeros(len(rows), dtype=int)
        for file, file_bins in bins.items():
            inside = rows.file == file
            strata[inside] = strata.max() + 1 + classes_of(rows.subset(inside), file_bins["published"])
    return parts_of(
        rows,
        strata,
        how=settings.split,
        folds=settings.folds,
        by=settings.by,
        seed=settings.seed,
        fitted_on=rows.fitted_on,
        asked=rows.asked,
    )


def cache_folder(settings: BenchmarkSettings) -> DataFolder:
    """Return where features are kept: the data folder. For published files one is made only if it is named; without
    one, `gpufarm` in the user's cache folder serves."""
    folder = DataFolder.resolve(settings.data)
    if settings.data is not None and settings.published is not None:
        folder.create()
    if settings.published is None or folder.root.is_dir():
        return folder
    return DataFolder.resolve(user_folder())


def _published_estimates(rows: AskedRows, index: np.ndarray) -> dict[str, Asked]:
    """Return published estimates of exactly these rows, where a file holds them."""
    records = {i: rows.records[i] for i in index.tolist()}
    estimates: dict[str, Asked] = {}
    for name in sorted({name for row in records.values() for name in row.estimates}):
        with_it = {row.file for row in records.values() if name in row.estimates}
        answers = {
            i: Given(estimate=row.estimates.get(name), reason="not published for this row")
            for i, row in records.items()
            if row.file in with_it
        }
        estimates[f"{name} {OTHERS}"] = Asked(answers=answers)
    return estimates


def _notes_of_parts(settings: BenchmarkSettings, parts: Sequence[Part], learned: Sequence[str]) -> list[str]:
    fitted = [part for part in parts if part.name != NEVER_FITTED]
    asked = sum(len(part.outside) for part in fitted)
    if fitted and settings.split == "holdout":
        return [f"asked: {asked} rows that are held out; learned estimators saw the other {fitted[0].inside.sum()}"]
    if not (fitted and learned):
        return []
    how = f"{settings.folds}-fold" if settings.split == "cv" else f"each {settings.by} left out in turn"
    return [
        f"{how}: learned estimators answer for each of {asked} rows from a fit on the others, near-copies left out; "
        f"{len(fitted)} fits an estimator"
    ]


def _alike(warnings: Sequence[str]) -> list[str]:
    """Return one of those that differ by their numbers only."""
    by_shape: dict[str, str] = {}
    for text in warnings:
        by_shape.setdefault(re.sub(r"[\d.]+", "#", text), text)
    return list(by_shape.values())


def _sets(
    settings: BenchmarkSettings, rows: AskedRows, index: np.ndarray, steps: StepStore
) -> dict[str, dict[int, dict[str, Any]]]:
    """Return file -> row -> its entry of `Scored`."""
    groups = keys_of(rows, settings.by or "module")
    sets: dict[str, dict[int, dict[str, Any]]] = {}
    for i in index.tolist():
        row = rows.records[i]
        about = {"name": row.title, "group": str(groups[i]), "operator": steps.main_operator(row.case)}
        sets.setdefault(row.file, {})[i] = described(row, rows.target) | about
    return sets


def entry(settings: BenchmarkSettings) -> int:
    """Print the tables of the benchmark, and write the files that are asked for."""

    def ask(settings: BenchmarkSettings, widths_gb: Sequence[int] = ()) -> Benchmark:
        show = partial(print_figures, settings.target)
        with StepBar(f"benchmark of {settings.target}") as bar:
            return benchmark(settings, progress=partial(bar.update, ""), finished=show, widths_gb=widths_gb)

    if settings.paper:
        tables, notes = reproduce(settings, ask)
        page, answer = paper_page(tables, notes), paper_mapping(tables, notes, settings)
    else:
        done = ask(settings)
        page, answer = benchmark_page(done, settings), benchmark_mapping(done, settings)
    print_page(page)
    if settings.out is not None:
        write_output(settings.out, (json.dumps(answer, indent=1, default=asdict) + "\n").encode())
    if settings.report is not None:
        write_page(settings.report, page)
    return 0


if __name__ == "__main__":
    command("benchmark", entry)
