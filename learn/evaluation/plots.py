"""The plots of a benchmark's and a fit's page, each as SVG: estimates over labels, errors, classes, reliability.

Start reading at `plots_of`. matplotlib is imported on use; points are drawn as pixels, so that a page stays small.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from learn.evaluation.benchmark_figures import RELIABILITY, Scored, signed_errors, told_classes
from learn.evaluation.scores import NOT_INFORMATIVE

if TYPE_CHECKING:
    from types import ModuleType

    from matplotlib.figure import Figure

    from learn.evaluation.benchmark_figures import Benchmark

_COLUMNS = 4  # of small panels
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8a6d3b")  # Okabe-Ito
_DASHES = ("-", "--", ":", "-.")
_CLASSES = 24  # more than that are no picture
_MARGINS = np.linspace(0.5, 4.0, 141)  # on top of estimates without a bound of their own
_CLIP = {"log": 0.5, "ratio": 0.3}  # error at which the colours end


def plots_of(done: Benchmark, file: str) -> list[tuple[str, str]]:
    """(caption, SVG) of each plot of one file's rows; those without anything to show are left out."""
    drawn = []
    for caption, draw in (
        (
            "Estimate against label; triangles, at the card, ran out of memory. A line leads to the 99 % bound.",
            predicted,
        ),
        ("Share of the rows whose error is at most so large. Rows without an answer keep a line below 100 %.", _cdf),
        ("Median of the signed error (estimate over label) by group: blue is too low, red too high.", _by_group),
        ("The same by the operator that makes the most of a network's forward pass.", _by_operator),
        ("Median of the signed error by batch size, in steps of two.", _by_batch),
        ("Rows by their class and the one that was told; the colour is the share of the class.", confusion),
        ("Reliability: share of labels at or under each predicted quantile; the star is the 99 % bound.", _reliable),
        (
            "Coverage over tightness: the share of rows under a bound, and how far it lies over the need. Solid: the "
            "estimator's own bounds; dashed: its estimate with one margin on top, the same for all rows.",
            tightness,
        ),
    ):
        svg = draw_svg(draw, done, file)
        if svg is not None:
            drawn.append((caption, svg))
    return drawn


def draw_svg(draw: Callable[..., Figure | None], *about: Any) -> str | None:
    """Return what `draw(plt, *about)` draws; None where it draws nothing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(
        {
            "font.size": 8,
            "svg.hashsalt": "benchmark",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
        }
    ):
        figure = draw(plt, *about)
        if figure is None:
            return None
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", dpi=130, metadata={"Date": None})
        plt.close(figure)
    return buffer.getvalue().decode()


def _own(done: Benchmark, file: str) -> dict[str, Sequence[Scored]]:
    """Estimator -> its rows of the file, those with no answer at all left out."""
    rows_of = {f.estimator: done.scored[file, f.estimator] for f in done.figures if f.file == file}
    return {name: rows for name, rows in rows_of.items() if any(row.estimate is not None for row in rows)}


def styles_of(names: Sequence[str]) -> dict[str, dict]:
    """Return name -> colour and dashes."""
    return {
        name: {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _DASHES[i // len(_COLOURS) % len(_DASHES)]}
        for i, name in enumerate(names)
    }


def _panels(plt, n: int, width: float, height: float):
    columns = min(_COLUMNS, n)
    lines = math.ceil(n / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(width * columns, height * lines), layout="constrained", squeeze=False
    )
    flat = list(axes.flat)
    for spare in flat[n:]:
        spare.set_visible(False)
    return figure, flat[:n]


def predicted(plt: ModuleType, done: Benchmark, file: str) -> Figure | None:
    """Draw estimates over labels, a panel an estimator and a colour a family, with the 99 % bound above each point."""
    own = _own(done, file)
    labels = [row.label for rows in own.values() for row in rows if row.label is not None]
    if not own or not labels:
        return None
    card = max((row.card for rows in own.values() for row in rows if row.card), default=None)
    ooms = any(row.label is None for rows in own.values() for row in rows)
    low, high = -0.03, 1.03
    if done.relative:
        low, high = min(labels) / 1.5, max([*labels, card or 0] if ooms else labels) * 1.5
    unit = "" if done.target.unit == "ratio" else f" [{done.target.unit}]"
    families = sorted({row.family for rows in own.values() for row in rows})
    figure, panels = _panels(plt, len(own), 2.7, 2.7)
    for axes, (name, rows) in zip(panels, own.items(), strict=True):
        axes.plot([low, high], [low, high], color="0.4", linewidth=0.8, linestyle="--")
        size = float(np.clip(1500 / max(len(rows), 1), 2, 10))
        for family, style in styles_of(families).items():
            answered = [row for row in rows if row.estimate is not None and row.family == family]
            x = [row.card or card if row.label is None else row.label for row in answered]
            y = np.clip([row.estimate for row in answered], low, high)
            upper = np.clip([row.upper or row.estimate for row in answered], low, high)
            axes.vlines(x, y, upper, color=style["color"], alpha=0.18, linewidth=0.8, rasterized=True)
            for out_of_memory, marker in ((False, "o"), (True, ">")):
                shown = [k for k, row in enumerate(answered) if (row.label is None) == out_of_memory]
                axes.scatter(
                    [x[k] for k in shown],
                    y[shown],
                    s=size,
                    marker=marker,
                    color=style["color"],
                    alpha=0.5,
                    linewidths=0,
                    rasterized=True,
                    label=None if out_of_memory or not shown else family,
                )
        if done.relative:
            axes.set(xscale="log", yscale="log")
            _plain_ticks(axes, low, high)
        axes.set(xlim=(low, high), ylim=(low, high), aspect="equal", title=name)
        axes.grid(color="0.93", linewidth=0.6)
        if len(families) > 1 and len(own) == 1:
            axes.legend(loc="upper left", fontsize=6)
    figure.supxlabel(f"label{unit}", fontsize=9)
    figure.supylabel(f"estimate{unit}", fontsize=9)
    return figure


def _plain_ticks(axes, low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    steps = (1.0, 2.0, 5.0) if high / low < 60 else (1.0, 3.0) if high / low < 600 else (1.0,)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=steps))
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1000:g}k" if v >= 1000 else f"{v:g}"))
        axis.set_minor_formatter(NullFormatter())


def _cdf(plt, done: Benchmark, file: str):
    own = _own(done, file)
    curves = {}
    for name, rows in own.items():
        errors = np.sort([abs(error) for _, error in signed_errors(rows, None, space=done.target.space)])
        if len(errors):
            curves[name] = errors, sum(row.label is not None for row in rows)
    if not curves:
        return None
    figure, axes = plt.subplots(figsize=(7.6, 3.9), layout="constrained")
    low, high = (1e-3, 10.0) if done.relative else (1e-3, 1.0)
    for (name, (errors, n)), style in zip(curves.items(), styles_of(list(curves)).values(), strict=True):
        share = np.arange(1, len(errors) + 1) / n
        axes.step(
            [low, *np.clip(errors, low, high), high],
            [0, *share, share[-1]],
            where="post",
            label=name,
            linewidth=1.3,
            **style,
        )
    axes.set(xscale="log", xlim=(low, high), ylim=(0, 1.01))
    ticks = [tick for tick in (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 10) if low <= tick <= high]
    axes.set_xticks(ticks, [_error(done, tick) for tick in ticks])
    axes.set_yticks(np.linspace(0, 1, 6), [f"{share:.0%}" for share in np.linspace(0, 1, 6)])
    axes.minorticks_off()
    return _finished(figure, axes, "error", "share of the rows")


def _by_group(plt, done: Benchmark, file: str):
    return _heatmap(plt, done, file, lambda row: row.group)


def _by_operator(plt, done: Benchmark, file: str):
    return _heatmap(plt, done, file, lambda row: row.operator)


def _heatmap(plt, done: Benchmark, file: str, key: Callable[[Scored], str | None]):
    own = _own(done, file)
    cells: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, rows in own.items():
        for row, error in signed_errors(rows, None, space=done.target.space):
            if (group := key(row)) is not None:
                cells[group][name].append(error)
    if not cells:
        return None
    groups, names = sorted(cells), list(own)
    table = np.array([[np.median(cells[g][n]) if cells[g][n] else np.nan for n in names] for g in groups])
    clip = _CLIP[done.target.space]
    figure, axes = plt.subplots(
        figsize=(max(3.2, 1.6 + 0.62 * len(names)), 1.3 + 0.2 * len(groups)), layout="constrained"
    )
    axes.set_facecolor("0.93")  # of cells without rows
    axes.imshow(table, cmap="RdBu_r", vmin=-clip, vmax=clip, aspect="auto")
    for (line, column), value in np.ndenumerate(table):
        if not math.isnan(value):
            colour = "white" if abs(value) > 0.75 * clip else "black"
            axes.text(column, line, _signed(done, value), ha="center", va="center", color=colour, fontsize=6.5)
    counts = {g: max(len(cells[g][name]) for name in names) for g in groups}
    axes.set_yticks(range(len(groups)), [f"{group} (n={counts[group]})" for group in groups])
    axes.set_xticks(range(len(names)), names, rotation=35, ha="left", rotation_mode="anchor")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _by_batch(plt, done: Benchmark, file: str):
    own = _own(done, file)
    lines = {}
    for name, rows in own.items():
        steps: dict[int, list[float]] = defaultdict(list)
        for row, error in signed_errors(rows, None, space=done.target.space):
            steps[int(math.log2(max(row.batch_size, 1)))].append(error)
        if steps:
            lines[name] = {step: float(np.median(errors)) for step, errors in sorted(steps.items())}
    if not lines:
        return None
    figure, axes = plt.subplots(figsize=(7.6, 3.3), layout="constrained")
    most = 2 * _CLIP[done.target.space]
    limit = float(np.clip(1.2 * max(abs(error) for points in lines.values() for error in points.values()), 0.1, most))
    for (name, points), style in zip(lines.items(), styles_of(list(lines)).values(), strict=True):
        axes.plot(
            list(points),
            np.clip(list(points.values()), -limit, limit),
            marker="o",
            markersize=3,
            linewidth=1.2,
            label=name,
            **style,
        )
    axes.axhline(0, color="0.4", linewidth=0.8)
    doublings = sorted({step for points in lines.values() for step in points})
    axes.set_xticks(doublings, [f"{2**step:,}" for step in doublings])
    ticks = np.linspace(-limit, limit, 5)
    axes.set_yticks(ticks, [_signed(done, t) + (" or more" if abs(t) == most else "") for t in ticks])
    axes.set_ylim(-1.06 * limit, 1.06 * limit)
    return _finished(figure, axes, "batch size, from", "signed error, median")


def confusion(plt: ModuleType, done: Benchmark, file: str) -> Figure | None:
    """Draw how many rows of each class were told to be in which, coloured by the share of the class; a panel an
    estimator. None where there are more classes than can be read."""
    bins = done.bins[file]["published"]
    classes_of = {
        name: told_classes([row for row in rows if row.estimate is not None], "published", bins)
        for name, rows in _own(done, file).items()
    }
    present = sorted({int(k) for pair in classes_of.values() for classes in pair for k in classes})
    if not classes_of or len(present) > _CLASSES:
        return None
    labels, places = [bins.labels[k] for k in present], range(len(present))
    figure, panels = _panels(plt, len(classes_of), *(2.0 + 0.34 * len(present),) * 2)
    scores = {f.estimator: f for f in done.figures if f.file == file}
    for axes, (name, (true, predicted)) in zip(panels, classes_of.items(), strict=True):
        counts = np.array([[((true == t) & (predicted == p)).sum() for p in present] for t in present])
        share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
        for (line, column), count in np.ndenumerate(counts):
            if count:
                colour = "white" if share[line, column] > 0.55 else "black"
                axes.text(column, line, f"{count}", ha="center", va="center", color=colour, fontsize=6.5)
        of = scores[name]
        verdict = NOT_INFORMATIVE if of.own_labels else f"accuracy {of.classes['published'].accuracy:.0%}"
        axes.set(xlabel="told", ylabel="class", title=f"{name}: {verdict}")
        axes.set_xticks(places, labels, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(places, labels)
        axes.tick_params(length=0)
    return figure


def _reliable(plt, done: Benchmark, file: str):
    figures = [f for f in done.figures if f.file == file and f.reliability]
    if not figures:
        return None
    figure, axes = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.4", linewidth=0.8, linestyle="--")
    for own, style in zip(figures, styles_of([f.estimator for f in figures]).values(), strict=True):
        shares = [own.reliability[f"{q:g}"] for q in RELIABILITY]
        axes.plot(RELIABILITY, shares, marker="o", markersize=3, linewidth=1.2, label=own.estimator, **style)
        if own.bound is not None:
            axes.plot([0.99], [own.bound.coverage], marker="*", markersize=9, color=style["color"])
    percents = np.linspace(0, 1, 6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(percents, [f"{share:.0%}" for share in percents])
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), aspect="equal")
    return _finished(figure, axes, "predicted quantile", "share of labels under it")


def tightness(plt: ModuleType, done: Benchmark, file: str) -> Figure | None:
    """Draw the share of labels under a bound over how far the bound lies over the label, in the median."""
    if not done.relative:
        return None
    curves = {name: curve for name, rows in _own(done, file).items() if (curve := _tightness_of(rows)) is not None}
    if not curves:
        return None
    figure, axes = plt.subplots(figsize=(6.8, 3.8), layout="constrained")
    for (name, (bounded, points)), style in zip(curves.items(), styles_of(list(curves)).values(), strict=True):
        line = {"linestyle": "-", "marker": "o", "linewidth": 1.6} if bounded else {"linestyle": "--", "linewidth": 1.0}
        axes.plot(*zip(*points, strict=True), markersize=3, label=name, color=style["color"], **line)
    axes.axhline(0.99, color="0.6", linewidth=0.8, linestyle=":")
    axes.set(xlim=(-0.05, 0.6), ylim=(0.5, 1.005))
    axes.set_xticks(ticks := [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [f"{tick:.0%}" for tick in ticks])
    axes.set_yticks(ticks := [0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99], [f"{tick:.0%}" for tick in ticks])
    return _finished(figure, axes, "bound over the need, in the median", "share of the rows under the bound")


def _tightness_of(rows: Sequence[Scored]) -> tuple[bool, list[tuple[float, float]]] | None:
    """Return whether the bounds are the estimator's own, and (excess, coverage) of each; None without an answer."""
    ok = [row for row in rows if row.label is not None and row.estimate is not None]
    if not ok:
        return None
    label = np.array([row.label for row in ok], dtype=float)
    bounded = all(row.upper is not None and row.quantiles for row in ok)
    if bounded:
        levels = [k for k, level in enumerate(RELIABILITY) if 0.5 <= level < 0.99]
        bounds = [np.array([row.quantiles[k] for row in ok]) for k in levels]
        bounds.append(np.array([row.upper for row in ok], dtype=float))
    else:
        bounds = [np.array([row.estimate for row in ok], dtype=float) * margin for margin in _MARGINS]
    return bounded, [(float(np.median(bound / label)) - 1, float(np.mean(label <= bound))) for bound in bounds]


def _finished(figure: Figure, axes: Any, x: str, y: str) -> Figure:
    axes.set(xlabel=x, ylabel=y)
    axes.grid(color="0.92", linewidth=0.6)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _error(done: Benchmark, value: float) -> str:
    return f"{100 * value:g} %" if done.relative else f"{value:g}"


def _signed(done: Benchmark, value: float) -> str:
    return f"{100 * value:+.0f} %" if done.relative else f"{value:+.2f}"
