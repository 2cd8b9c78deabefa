"""The plots of a benchmark's and a fit's page, each as SVG: estimates over labels, errors, classes, reliability.

Start reading at `plots_of`. matplotlib is imported on use; points are drawn as pixels, so that a page stays small.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
    """Return (caption, SVG) of each plot of one file's rows; those without anything to show are left out."""
    drawn = {caption: draw_svg(draw, done, file) for caption, draw in _PLOTS.items()}
    return [(caption, svg) for caption, svg in drawn.items() if svg is not None]


def draw_svg(draw: Callable[..., Figure | None], *about: Any) -> str | None:
    """Return what `draw(plt, *about)` draws; None where it draws nothing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"font.size": 8, "svg.hashsalt": "benchmark", "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context({**style, "axes.axisbelow": True, "axes.grid": True, "grid.color": "0.92"}):
        figure = draw(plt, *about)
        if figure is None:
            return None
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", dpi=130, metadata={"Date": None})
        plt.close(figure)
    return buffer.getvalue().decode()


def _own(done: Benchmark, file: str) -> dict[str, Sequence[Scored]]:
    """Return estimator -> its rows of the file, those with no answer at all left out."""
    rows_of = {f.estimator: done.scored[file, f.estimator] for f in done.figures if f.file == file}
    return {name: rows for name, rows in rows_of.items() if any(row.estimate is not None for row in rows)}


def styles_of(names: Sequence[str]) -> dict[str, dict]:
    """Return name -> colour and dashes."""
    return {
        name: {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _DASHES[i // len(_COLOURS) % len(_DASHES)]}
        for i, name in enumerate(names)
    }


def _panels(plt: ModuleType, names: Iterable[str], width: float, height: float) -> tuple[Figure, dict[str, Any]]:
    """Return a figure with a small panel for each name."""
    names = list(names)
    columns = min(_COLUMNS, len(names))
    lines = math.ceil(len(names) / columns)
    mosaic = np.resize(np.array([*names, *["."] * (lines * columns - len(names))], dtype=object), (lines, columns))
    return plt.subplot_mosaic(mosaic.tolist(), figsize=(width * columns, height * lines), layout="constrained")


def _lines(plt: ModuleType, curves: Mapping[str, tuple[Any, Any]], **shown: Any) -> Figure | None:
    """Draw a line, (x, y), for each name; None without any. `shown` are properties of the axes."""
    if not curves:
        return None
    figure, axes = plt.subplots(figsize=(7.6, 3.9), layout="constrained")
    for (name, points), style in zip(curves.items(), styles_of(list(curves)).values(), strict=True):
        axes.plot(*points, marker=".", markersize=3, linewidth=1.2, label=name, **style)
    axes.set(**shown)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _error_text(done: Benchmark, value: float) -> str:
    return f"{100 * value:+.0f} %" if done.relative else f"{value:+.2f}"


def predicted(plt: ModuleType, done: Benchmark, file: str) -> Figure | None:
    """Draw estimates over labels, a panel an estimator and a colour a family, with the 99 % bound above each point."""
    own = _own(done, file)
    everything = [row for rows in own.values() for row in rows]
    labels = [row.label for row in everything if row.label is not None]
    if not labels:
        return None
    card = max((row.card for row in everything if row.card), default=None)
    low, high = -0.03, 1.03
    if done.relative:
        ooms = any(row.label is None for row in everything)
        low, high = min(labels) / 1.5, max([*labels, card or 0] if ooms else labels) * 1.5
    styles = styles_of(sorted({row.family for row in everything}))
    scale = "log" if done.relative else "linear"
    figure, panels = _panels(plt, own, 2.7, 2.7)
    for name, axes in panels.items():
        answered = [row for row in own[name] if row.estimate is not None]
        x = np.array([row.card or card if row.label is None else row.label for row in answered])
        y = np.clip([row.estimate for row in answered], low, high)
        upper = np.clip([row.upper or row.estimate for row in answered], low, high)
        colours = np.array([styles[row.family]["color"] for row in answered])
        axes.plot([low, high], [low, high], color="0.4", linewidth=0.8, linestyle="--")
        axes.vlines(x, y, upper, color=colours, alpha=0.18, linewidth=0.8, rasterized=True)
        oom = np.array([row.label is None for row in answered])
        for mask, marker in ((~oom, "o"), (oom, ">")):
            style = {"color": colours[mask], "marker": marker, "linewidths": 0, "alpha": 0.5}
            axes.scatter(x[mask], y[mask], s=6, rasterized=True, **style)
        axes.set(xscale=scale, yscale=scale, xlim=(low, high), ylim=(low, high), aspect="equal", title=name)
        if done.relative:
            step = max(1, round(math.log2(high / low) / 4))
            ticks = 2.0 ** np.arange(math.ceil(math.log2(low)), math.log2(high), step)
            texts = [f"{tick:g}" for tick in ticks]
            axes.set(xticks=ticks, yticks=ticks, xticklabels=texts, yticklabels=texts)
            axes.minorticks_off()
    if len(styles) > 1:
        handles = [plt.Line2D([], [], color=style["color"], label=family) for family, style in styles.items()]
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
    unit = "" if done.target.unit == "ratio" else f" [{done.target.unit}]"
    figure.supxlabel(f"label{unit}", fontsize=9)
    figure.supylabel(f"estimate{unit}", fontsize=9)
    return figure


def _cdf(plt: ModuleType, done: Benchmark, file: str) -> Figure | None:
    high = 10.0 if done.relative else 1.0
    curves = {}
    for name, rows in _own(done, file).items():
        errors = np.sort([abs(error) for _, error in signed_errors(rows, None, space=done.target.space)])
        if len(errors):
            share = np.arange(1, len(errors) + 1) / sum(row.label is not None for row in rows)
            curves[name] = np.clip([*errors, high], 1e-3, high), [*share, share[-1]]
    kind = "relative" if done.relative else "absolute"
    shown = {"xscale": "log", "ylim": (0, 1.01), "xlabel": f"{kind} error", "ylabel": "share of the rows"}
    return _lines(plt, curves, **shown)


def _heatmap(key: str, plt: ModuleType, done: Benchmark, file: str) -> Figure | None:
    """Draw the median signed error by what `Scored` has under `key`."""
    own = _own(done, file)
    cells: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, rows in own.items():
        for row, error in signed_errors(rows, None, space=done.target.space):
            if (group := getattr(row, key)) is not None:
                cells[group][name].append(error)
    if not cells:
        return None
    groups, names = sorted(cells), list(own)
    table = np.array([[np.median(cells[g][n]) if cells[g][n] else np.nan for n in names] for g in groups])
    clip = _CLIP[done.target.space]
    size = (max(3.2, 1.6 + 0.62 * len(names)), 1.3 + 0.2 * len(groups))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    texts = {at: _error_text(done, value) for at, value in np.ndenumerate(table) if not math.isnan(value)}
    _cells(axes, table, texts, cmap="RdBu_r", vmin=-clip, vmax=clip)
    counts = {g: max(len(cells[g][name]) for name in names) for g in groups}
    axes.set_yticks(range(len(groups)), [f"{group} (n={counts[group]})" for group in groups])
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
    return figure


def _by_batch(plt: ModuleType, done: Benchmark, file: str) -> Figure | None:
    most = 2 * _CLIP[done.target.space]
    curves = {}
    for name, rows in _own(done, file).items():
        steps: dict[int, list[float]] = defaultdict(list)
        for row, error in signed_errors(rows, None, space=done.target.space):
            steps[2 ** int(math.log2(max(row.batch_size, 1)))].append(error)
        if steps:
            batches = sorted(steps)
            curves[name] = batches, np.clip([np.median(steps[batch]) for batch in batches], -most, most)
    kind = "relative" if done.relative else "absolute"
    figure = _lines(plt, curves, xlabel="batch size, from", ylabel=f"signed {kind} error, median")
    if figure is not None:
        figure.axes[0].set_xscale("log", base=2)
    return figure


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
    side = 2.0 + 0.34 * len(present)
    figure, panels = _panels(plt, classes_of, side, side)
    scores = {f.estimator: f for f in done.figures if f.file == file}
    for name, axes in panels.items():
        true, predicted = classes_of[name]
        counts = np.array([[((true == t) & (predicted == p)).sum() for p in present] for t in present])
        share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        _cells(axes, share, {at: f"{n}" for at, n in np.ndenumerate(counts) if n}, cmap="Blues", vmin=0, vmax=1)
        of = scores[name]
        verdict = NOT_INFORMATIVE if of.own_labels else f"accuracy {of.classes['published'].accuracy:.0%}"
        axes.set(xlabel="told", ylabel="class", title=f"{name}: {verdict}")
        axes.set_xticks(places, labels, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(places, labels)
    return figure


def _cells(axes: Any, table: np.ndarray, texts: Mapping[tuple[int, ...], str], **colours: Any) -> None:
    """Draw a table as coloured cells with their texts."""
    image = axes.imshow(table, aspect="auto", **colours)
    axes.grid(visible=False)
    for (line, column), text in texts.items():
        dark = sum(image.cmap(image.norm(table[line, column]))[:3]) < 1.8
        axes.text(column, line, text, ha="center", va="center", color="white" if dark else "black", fontsize=6.5)


def _reliable(plt: ModuleType, done: Benchmark, file: str) -> Figure | None:
    curves = {
        figures.estimator: (RELIABILITY, list(figures.reliability.values()))
        for figures in done.figures
        if figures.file == file and figures.reliability
    }
    figure = _lines(plt, curves, xlabel="predicted quantile", ylabel="share of labels under it", aspect="equal")
    if figure is not None:
        figure.axes[0].plot([0, 1], [0, 1], color="0.4", linewidth=0.8, linestyle="--")
    return figure


def tightness(plt: ModuleType, done: Benchmark, file: str) -> Figure | None:
    """Draw the share of labels under a bound over how far the bound lies over the label, in the median."""
    curves = {}
    for name, rows in _own(done, file).items() if done.relative else ():
        ok = [row for row in rows if row.label is not None and row.estimate is not None]
        if not ok:
            continue
        label = np.array([row.label for row in ok], dtype=float)
        bounds = [np.array([row.estimate for row in ok], dtype=float) * margin for margin in _MARGINS]
        if all(row.upper is not None and row.quantiles for row in ok):
            name = f"{name}, own bounds"
            levels = [k for k, level in enumerate(RELIABILITY) if 0.5 <= level < 0.99]
            bounds = [np.array([row.quantiles[k] for row in ok]) for k in levels]
            bounds.append(np.array([row.upper for row in ok], dtype=float))
        curves[name] = (
            [float(np.median(bound / label)) - 1 for bound in bounds],
            [float(np.mean(label <= bound)) for bound in bounds],
        )
    over, under = "bound over the need, in the median", "share of the rows under the bound"
    return _lines(plt, curves, xlim=(-0.05, 0.6), ylim=(0.5, 1.005), xlabel=over, ylabel=under)


_PLOTS: Mapping[str, Callable[..., Figure | None]] = {
    "Estimate against label; triangles, at the card, ran out of memory. A line leads to the 99 % bound.": predicted,
    "Share of the rows whose error is at most so large. Rows without an answer keep a line below 100 %.": _cdf,
    "Median of the signed error (estimate over label) by group: blue is too low, red too high.": partial(
        _heatmap, "group"
    ),
    "The same by the operator that makes the most of a network's forward pass.": partial(_heatmap, "operator"),
    "Median of the signed error by batch size, in steps of two.": _by_batch,
    "Rows by their class and the one that was told; the colour is the share of the class.": confusion,
    "Reliability: share of labels at or under each predicted quantile.": _reliable,
    "Coverage over tightness: the share of rows under a bound, and how far it lies over the need. Without bounds of "
    "its own, an estimator's line is its estimate with one margin on top, the same for all rows.": tightness,
}
