"""Pages about a fit and their plots: estimates over labels, errors, classes, reliability.

Start reading at `write_report`; `plots_of` draws those of a benchmark, with `conf.reports`.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conf.plain_text import count_of
from conf.reports.blocks import (
    Block,
    Callout,
    Chart,
    Charts,
    Drawn,
    Facts,
    Fold,
    Heading,
    Legend,
    Page,
    Section,
    page_bytes,
    table,
)
from conf.reports.charts import DARK_SHADE, SHADES, Axis, GridCell, Margins, Plot, draw_grid
from learn.judging.evaluate import Evaluation, over_folds
from learn.judging.scores import (
    NOT_INFORMATIVE,
    RELIABILITY,
    Benchmark,
    Figures,
    Scored,
    errors_by,
    estimated_classes,
    values_of,
)

_FITTED = "on all rows; the figures are of fits that did not see the rows judged"
ONE_CLASS = "one class"
METRICS = {  # name in `Evaluation.summary` -> in words
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "mean_relative_error": "mean relative error",
    "median_relative_error": "median relative error",
    "p90_relative_error": "90th pct. of relative error",
    "mean_absolute_error": "mean absolute error",
    "p90_absolute_error": "90th pct. of absolute error",
    "underestimates": "share of underestimates",
    "coverage": "labels under the 99 % bound",
    "bound_excess": "bound over label, median excess",
}


def metric_rows(evaluation: Evaluation) -> list[tuple[str, str, str]]:
    """Return (metric, cross-validation as `mean +- std`, held-out test) of each metric, as text.

    A dash stands where there is no figure, `not informative` where the estimator itself has simulated the labels.
    `one class` stands where all rows are of one, which every answer meets.
    """
    if evaluation.figures.own_labels:
        return [("all metrics", NOT_INFORMATIVE, NOT_INFORMATIVE)]
    unit = evaluation.train_rows.target.unit
    one_class = evaluation.one_class
    rows = []
    for name, values in evaluation.summary().items():
        if one_class and name in ("accuracy", "macro_f1"):
            rows.append((METRICS[name], ONE_CLASS, ONE_CLASS))
            continue
        label = METRICS[name] + (f" [{unit}]" if name.endswith("absolute_error") and unit != "ratio" else "")
        rows.append((label, _folds_text(name, values, unit), metric_text(name, values["test"], unit)))
    for name, recall in () if one_class else evaluation.test["recall"].items():
        folds = over_folds(fold["recall"].get(name) for fold in evaluation.cv)
        support = evaluation.test["support"][name]
        rows.append((f"recall of {name} (n={support})", _folds_text("recall", folds, unit), f"{recall:.1%}"))
    return rows


def _folds_text(name: str, values: Mapping[str, float | None], unit: str) -> str:
    mean, std = (metric_text(name, values[of], unit) for of in ("cv_mean", "cv_std"))
    return mean if values["cv_std"] is None else f"{mean} ± {std}"


def metric_text(name: str, value: float | None, unit: str) -> str:
    """Return a metric as text: absolute errors in the target's unit, others in percent."""
    if value is None or not name.endswith("absolute_error"):
        return "–" if value is None else f"{value:.1%}"
    return f"{value:.4f}" if unit == "ratio" else f"{value:,.1f}"


_FACTS = """- **Estimator**: `{estimator}` (`learn/estimators/hybrid.py`), seed {seed}.
- **Features**: version `{feature_version}`.
- **Made with**: {environment}.
- **Rows**: {sources}; of devices: {devices}.

| target | rows by family | out of memory |
|---|---|---|
{rows}

30 % of the rows are held out, with their near-copies (3-fold mean in brackets). Absolute errors: MiB, or the ratio.

| | {targets} |
|---|---|---|---|
{figures}

"""
_KNOW = """## What they know

- **Trained on**: published measurements of one A100-SXM4-40GB of a DGX Station A100, PyTorch 2.4.1,
  CUDA 12.2, fp32: GPUMemNet's sets (arXiv 2602.17817){timm}. No row of them is packaged.
{own}- **Not measured**: other GPUs, half precision, other optimizers than Adam{optimizer},
  `torch.compile`, several GPUs. Estimates for these carry warnings, the trace's figure, and a bound by causes.
"""
_OWN = """- **And on** {measured:,} runs that the farm measured (`datasets/README.md`).
  What follows in this list is said of the published rows.
"""


def model_card(metas: Mapping[str, Mapping[str, Any]], about: str) -> str:
    """Return the card of models: what their `meta.json` says, by target, and the other prose of the card `about`."""

    def figure(name: str, meta: Mapping[str, Any]) -> str:
        test, cv = (metric_text(name, meta["metrics"][name][of], meta["unit"]) for of in ("test", "cv_mean"))
        return f"{test} ({cv})"

    first = next(iter(metas.values()))
    figures = [(words, *(figure(name, meta) for meta in metas.values())) for name, words in METRICS.items()]
    families = {target: _counted(meta["rows"]["family"]) for target, meta in metas.items()}
    facts = _FACTS.format(
        **{name: first[name] for name in ("estimator", "seed", "feature_version")},
        environment=", ".join(f"{name} {version}" for name, version in sorted(first["environment"].items()) if version),
        sources=_counted(first["rows"]["source"]),
        devices=_counted(first["rows"]["device"]),
        rows="\n".join(f"| {name} | {families[name]} | {meta['rows']['censored']:,} |" for name, meta in metas.items()),
        targets=" | ".join(metas),
        figures="\n".join(f"| {' | '.join(cells)} |" for cells in figures),
    )
    with_timm = any("timm" in meta["rows"]["family"] for meta in metas.values())
    measured = first["rows"]["source"].get("measured", 0)
    known = _KNOW.format(
        timm=" and timm models" if with_timm else "",
        optimizer=" (timm: taken for SGD with momentum)" if with_timm else "",
        own=_OWN.format(measured=measured) if measured else "",
    )
    return about[: about.index("- **Estimator**")] + facts + known + about[about.index("- **Utilization**") :]


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def write_report(folder: Path, evaluation: Evaluation, meta: Mapping[str, Any]) -> None:
    """Write `report.html` into `folder`."""
    (folder / "report.html").write_bytes(page_bytes(_page(evaluation, meta)))


def _where(evaluation: Evaluation) -> str:
    sources = " + ".join(evaluation.train_rows.count("source"))
    return f"{sources} on {', '.join(evaluation.train_rows.count('device'))}"


def _page(evaluation: Evaluation, meta: Mapping[str, Any]) -> Page:
    facts = {
        "rows": ", ".join(f"{n} {name}" for name, n in meta["rows"]["status"].items()),
        "families": ", ".join(f"{name} {n}" for name, n in meta["rows"]["family"].items()),
        "labels": _where(evaluation),
        "train / test rows": f"{len(evaluation.train_rows)} / {len(evaluation.test_rows)}, no group in both",
        "bins": meta["bins"]["rule"],
        "seed": str(meta["seed"]),
        "features": meta["feature_version"],
        "fitted": f"{meta['created_at']}, {meta.get('fitted', _FITTED)}",
    }
    notes = tuple(map(Callout, meta["warnings"]))
    judged = (evaluation.figures,)
    done = Benchmark(target=evaluation.test_rows.target, device=_where(evaluation), figures=judged)
    return Page(
        title=f"{meta['target']}: {meta['estimator']}",
        head=(Fold(f"{count_of(len(notes), 'note')} on these figures", notes),) if notes else (),
        sections=(
            Section(
                "figures",
                "Figures",
                (table(("metric", "*cross-validation (3 folds)", "*held-out test"), metric_rows(evaluation)),),
            ),
            Section("pictures", "Held-out test", (*confusion(done, judged), *predicted(done, judged))),
            Section("facts", "Data and settings", (Facts(tuple(facts.items())),)),
        ),
    )


_COLOURS = ("k1", "k5", "k4", "k2", "k6", "k3", "k7", "k0")
_DASHES = ("", " dashed", " dotted")
_CLASSES = 24  # more than that make no picture
_MARGINS = np.linspace(0.5, 4.0, 141)  # on top of estimates without a bound of their own
_CLIP = {"log": 0.5, "ratio": 0.3}  # error at which the colours end
_SHARES = Axis(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))
_PANEL = Margins(width=290, height=290, left=58, right=12, top=24, bottom=40)
Line = Sequence[tuple[float, float]]


def plots_of(done: Benchmark, file: str) -> tuple[Block, ...]:
    """Return the plots of one file's rows, each under its heading; those without anything to show are left out."""
    answering = [figures for figures in done.by_file[file] if figures.answered]
    blocks: list[Block] = []
    for caption, draw in _PLOTS.items():
        if drawn := draw(done, answering):
            blocks += [Heading(caption), *drawn]
    return tuple(blocks)


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Return name -> colour class, with dashes where there are more names than colours."""
    styles = [f"{colour}{dashes}" for dashes in _DASHES for colour in _COLOURS]
    return {name: styles[k % len(styles)] for k, name in enumerate(names)}


def _lines(curves: Mapping[str, Line], x_axis: Axis, y_axis: Axis, x_title: str, y_title: str) -> tuple[Block, ...]:
    """Draw a line of points for each name, as far as it lies between the axes; nothing without any."""
    if not curves:
        return ()
    plot = Plot(x_axis, y_axis, Margins(width=760, height=340, top=30, bottom=46))
    plot.grid()
    plot.ticks_below(x_title)
    plot.text("axis", 4, 14, y_title, "start")
    colours = colours_of(curves)
    for name, points in curves.items():
        inside = [(x, y) for x, y in points if x_axis.low <= x <= x_axis.high and y_axis.low <= y <= y_axis.high]
        plot.line(f"line {colours[name]}", inside, name)
    return Legend(colours), Drawn(plot.picture(f"{y_title} over {x_title}: {', '.join(curves)}"))


def predicted(done: Benchmark, answering: Sequence[Figures]) -> tuple[Block, ...]:
    """Draw estimates over labels, a panel an estimator and a colour a family, with a line to the 99 % bound."""
    everything = [row for figures in answering for row in figures.rows]
    labels = [row.label for row in everything if row.label is not None]
    if not labels:
        return ()
    card = max((row.card for row in everything if row.card), default=0.0)
    axis = _SHARES
    if done.relative:
        highest = max([*labels, card] if len(labels) < len(everything) else labels)
        axis = Axis.log(min(labels) / 1.5, highest * 1.5)
    colours = colours_of(sorted({row.family for row in everything}))
    unit = "" if done.target.unit == "ratio" else f", {done.target.unit}"
    charts = []
    for figures in answering:
        plot = Plot(axis, axis, _PANEL)
        plot.grid()
        plot.ticks_below(f"label{unit}")
        plot.text("axis", 4, 12, f"estimate{unit}", "start")
        plot.line("limit", [(axis.low, axis.low), (axis.high, axis.high)], "estimate and label are equal")
        for family, css in colours.items():
            _draw_points(plot, css, [row for row in figures.rows if row.family == family], card)
        label = f"{figures.estimator}: estimates of {len(figures.rows)} rows over their labels"
        charts.append(Chart(figures.estimator, plot.picture(label)))
    return Legend(colours), Charts(tuple(charts))


def _draw_points(plot: Plot, css: str, rows: Sequence[Scored], card: float) -> None:
    """Draw a dot for each row, a triangle at the card for one that ran out of memory, and lines to the bounds."""
    paths: dict[str, list[str]] = defaultdict(list)  # one path for many rows keeps a page small
    low, high = plot.y_axis.low, plot.y_axis.high
    for row in rows:
        if row.estimate is None:
            continue
        x = plot.x(row.card or card if row.label is None else row.label)
        y, bound = (plot.y(min(max(value, low), high)) for value in (row.estimate, row.upper or row.estimate))
        paths["bounds"].append(f"M{x:.1f} {y:.1f}V{bound:.1f}")
        mark = f"M{x:.1f} {y:.1f}h0" if row.label is not None else f"M{x - 3:.1f} {y - 3:.1f}l6 3l-6 3z"
        paths["points" if row.label is not None else "marks"].append(mark)
    for kind, places in paths.items():
        plot.path(f"{kind} {css}", "".join(places))


def _heatmap(key: str, done: Benchmark, answering: Sequence[Figures]) -> tuple[Block, ...]:
    """Draw the median signed error by what `Scored` has under `key`."""
    cells = {
        figures.estimator: errors_by(operator.attrgetter(key), figures.rows, None, done.target.space)
        for figures in answering
    }
    groups, names = sorted(set().union(*cells.values())), list(cells)
    if not groups:
        return ()

    def cell(i: int, k: int) -> GridCell | None:
        errors = cells[names[k]].get(groups[i])
        if errors is None:
            return None
        error = float(np.median(errors))
        text = f"{100 * error:+.0f} %" if done.relative else f"{error:+.2f}"
        level = min(3, math.ceil(3 * abs(error) / _CLIP[done.target.space]))
        css = f"{'high' if error > 0 else 'low'}{level}" if level else "even"
        return GridCell(css, f"{groups[i]}, {names[k]}: {text}, {len(errors)} rows", text, ink="dark")

    rows_text = [f"{group} (n={max(len(of.get(group, ())) for of in cells.values())})" for group in groups]
    return (Drawn(draw_grid(rows_text, names, cell, f"Median signed error by {key} and estimator")),)


def _by_batch(done: Benchmark, answering: Sequence[Figures]) -> tuple[Block, ...]:
    curves: dict[str, Line] = {}
    for figures in answering:
        # Each batch size counts as the highest power of two up to it.
        by_batch = errors_by(
            lambda row: 2 ** int(math.log2(max(row.batch_size, 1))), figures.rows, None, done.target.space
        )
        if by_batch:
            curves[figures.estimator] = [(batch, float(np.median(errors))) for batch, errors in by_batch.items()]
    points = [point for line in curves.values() for point in line] or [(1.0, 0.0)]
    batches = sorted({batch for batch, _ in points})
    x_axis = Axis(batches[0], max(2 * batches[0], batches[-1]), tuple(batches), is_log=True)
    most = 2 * _CLIP[done.target.space]  # what is further off leaves the picture
    low, high = (limit(0.0, *(error for _, error in points)) for limit in (min, max))
    y_axis = Axis.of(max(-most, low), min(most, high))
    return _lines(curves, x_axis, y_axis, "batch size, from", f"signed {done.error_kind} error, median")


def confusion(done: Benchmark, answering: Sequence[Figures]) -> tuple[Block, ...]:
    """Draw how many rows of each class were estimated to be in which, coloured by the share of the class; a panel an
    estimator. Nothing where there are more classes than can be read."""
    if not answering:
        return ()
    pairs = [estimated_classes(figures.answered, "published", figures.bins["published"]) for figures in answering]
    present = np.unique(np.concatenate(pairs, axis=None))
    if len(present) > _CLASSES:
        return ()
    labels = [answering[0].bins["published"].labels[k] for k in present]
    charts = []
    for figures, (true, estimated) in zip(answering, pairs, strict=True):
        counts = np.array([[((true == t) & (estimated == p)).sum() for p in present] for t in present])
        name = figures.estimator
        accuracy = f"accuracy {figures.classes['published'].accuracy:.0%}"
        label = f"{name}: rows by their true and their estimated class"
        svg = draw_grid(labels, labels, partial(_confusion_cell, counts, labels), label, "class", "estimated")
        charts.append(Chart(f"{name}: {NOT_INFORMATIVE if figures.own_labels else accuracy}", svg))
    return (Charts(tuple(charts)),)


def _confusion_cell(counts: np.ndarray, labels: Sequence[str], i: int, k: int) -> GridCell:
    count = int(counts[i, k])
    level = math.ceil(SHADES * count / max(int(counts[i].sum()), 1))
    title = f"{count:,} rows of {labels[i]} were estimated to be in {labels[k]}"
    return GridCell(f"h{level}", title, f"{count}" if count else "", ink="over" if level >= DARK_SHADE else "on")


def _reliable(done: Benchmark, answering: Sequence[Figures]) -> tuple[Block, ...]:
    curves: dict[str, Line] = {
        figures.estimator: list(zip(RELIABILITY, figures.reliability.values(), strict=True))
        for figures in answering
        if figures.reliability
    }
    if curves:
        curves["as predicted"] = [(0.0, 0.0), (1.0, 1.0)]
    return _lines(curves, _SHARES, _SHARES, "predicted quantile", "share of labels under it")


def tightness(done: Benchmark, answering: Sequence[Figures]) -> tuple[Block, ...]:
    """Draw the share of labels under a bound over how far the bound lies over the label, in the median."""
    curves: dict[str, Line] = {}
    for figures in answering if done.relative else ():
        ok = figures.exact
        if not ok:
            continue
        name, label = figures.estimator, values_of(ok, "label")
        bounds = [values_of(ok, "estimate") * margin for margin in _MARGINS]
        if all(row.upper is not None and row.quantiles for row in ok):
            name = f"{name}, own bounds"
            levels = [k for k, level in enumerate(RELIABILITY) if 0.5 <= level < 0.99]
            bounds = [*values_of(ok, "quantiles").T[levels], values_of(ok, "upper")]
        curves[name] = [(float(np.median(bound / label)) - 1, float(np.mean(label <= bound))) for bound in bounds]
    over, under = "bound over the need, in the median", "share of the rows under the bound"
    return _lines(curves, Axis.within(-0.05, 0.6), Axis(0.5, 1.0, (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)), over, under)


_PLOTS: Mapping[str, Callable[[Benchmark, Sequence[Figures]], tuple[Block, ...]]] = {
    "Estimate against label; triangles, at the card, ran out of memory. A line leads to the 99 % bound.": predicted,
    "Median of the signed error (estimate over label) by group: blue is too low, red too high.": partial(
        _heatmap, "group"
    ),
    "The same by the operator that makes the most of a network's forward pass.": partial(_heatmap, "operator"),
    "Median of the signed error by batch size, in steps of two.": _by_batch,
    "Rows by their true and their estimated class; the colour is the share of the class.": confusion,
    "Reliability: share of labels at or under each predicted quantile.": _reliable,
    "Coverage over tightness: the share of rows under a bound, and how far it lies over the need. Without bounds of "
    "its own, an estimator's line is its estimate with one margin on top, the same for all rows.": tightness,
}
