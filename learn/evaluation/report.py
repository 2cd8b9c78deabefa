"""Reports of a fit: the confusion matrix, predicted against measured, and a page that shows both.

Start reading at `write_report`. matplotlib is imported on use and draws to files only; `conf.reports` draws the page.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from conf.reports.blocks import Callout, Facts, Fold, Page, Picture, Pictures, Section, table
from conf.reports.page_text import count_of
from conf.reports.render import render_page
from learn.evaluation.evaluate import Evaluation
from learn.evaluation.scores import NOT_INFORMATIVE

_FITTED = "on all rows; the figures are of fits that did not see the rows judged"
ONE_CLASS = "one class"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe-Ito
_NAMES = {
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
    if evaluation.own_labels:
        return [("all metrics", NOT_INFORMATIVE, NOT_INFORMATIVE)]
    unit = evaluation.train_rows.target.unit
    rows = []
    one_class = evaluation.one_class
    for name, values in evaluation.summary().items():
        if one_class and name in ("accuracy", "macro_f1"):
            rows.append((_NAMES[name], ONE_CLASS, ONE_CLASS))
            continue
        absolute = name.endswith("absolute_error")

        def say(value, absolute=absolute) -> str:
            if value is None:
                return "–"
            return (f"{value:.4f}" if unit == "ratio" else f"{value:,.1f}") if absolute else f"{value:.1%}"

        spread = f" ± {say(values['cv_std'])}" if values["cv_std"] is not None else ""
        label = _NAMES[name] + (f" [{unit}]" if absolute and unit != "ratio" else "")
        rows.append((label, f"{say(values['cv_mean'])}{spread}", say(values["test"])))
    for name, recall in () if one_class else evaluation.test.recall.items():
        folds = [m.recall[name] for m in evaluation.cv if name in m.recall]
        cv = f"{np.mean(folds):.1%}" if folds else "–"
        if len(folds) > 1:
            cv += f" ± {np.std(folds, ddof=1):.1%}"
        rows.append((f"recall of {name} (n={evaluation.test.support[name]})", cv, f"{recall:.1%}"))
    return rows


def write_report(folder: Path, evaluation: Evaluation, meta: Mapping) -> None:
    """Write `report.html` with its images, and these and `test_predictions.csv` as files, into `folder`."""
    folder = Path(folder)
    confusion_plot(folder / "confusion.png", evaluation, meta)
    predicted_plot(folder / "predicted.png", evaluation, meta)
    _write_predictions(folder / "test_predictions.csv", evaluation)
    page = _page(evaluation, meta, (folder / "confusion.png", folder / "predicted.png"))
    (folder / "report.html").write_bytes(render_page(page).encode("utf-8", errors="replace"))


def confusion_plot(path: Path, evaluation: Evaluation, meta: Mapping) -> None:
    """Counts in the cells, colour by share of the true class's row; only classes that occur, all labelled."""
    plt = _pyplot()
    true, predicted = evaluation.true_class, evaluation.predicted_class
    shown = np.unique(np.concatenate([true, predicted]))
    counts = np.array([[int(((true == t) & (predicted == p)).sum()) for p in shown] for t in shown])
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    labels = [evaluation.bins.labels[i] for i in shown]

    side = max(4.2, 0.62 * len(shown) + 2.4)
    figure, axes = plt.subplots(figsize=(side + 0.9, side), layout="constrained")
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    size = 11 if len(shown) <= 8 else 8
    for (row, column), count in np.ndenumerate(counts):
        if count:
            colour = "white" if share[row, column] > 0.55 else "black"
            axes.text(column, row, f"{count}", ha="center", va="center", color=colour, fontsize=size)
    tilt = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if len(shown) > 4 else {}
    axes.set_xticks(range(len(shown)), labels, fontsize=size, **tilt)
    axes.set_yticks(range(len(shown)), labels, fontsize=size)
    axes.set_xlabel("predicted")
    axes.set_ylabel(_measured(evaluation))
    axes.set_xticks(np.arange(len(shown) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(shown) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.set_label("share of the row")
    metrics = evaluation.test
    scores = f"accuracy {metrics.accuracy:.0%}, macro F1 {metrics.macro_f1:.2f}"
    _title(figure, evaluation, meta, metrics.n, NOT_INFORMATIVE if evaluation.own_labels else scores)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def predicted_plot(path: Path, evaluation: Evaluation, meta: Mapping) -> None:
    """Predicted over measured, a colour a family, with the identity and the 99 % bound as a tick above each point."""
    plt = _pyplot()
    target = evaluation.test_rows.target
    exact = ~evaluation.test_rows.censored
    label, point = evaluation.test_rows.label[exact], evaluation.point[exact]
    upper = None if evaluation.upper is None else evaluation.upper[exact]
    family = evaluation.test_rows.family[exact]

    figure, axes = plt.subplots(figsize=(6.4, 6.0), layout="constrained")
    size = float(np.clip(4000 / max(len(label), 1), 6, 22))
    for i, name in enumerate(sorted(set(evaluation.train_rows.family) | set(family))):
        of_family, colour = family == name, _COLOURS[i % len(_COLOURS)]
        if not of_family.any():
            continue
        if upper is not None:
            axes.vlines(label[of_family], point[of_family], upper[of_family], color=colour, alpha=0.18, linewidth=1.2)
        axes.scatter(
            label[of_family], point[of_family], s=size, color=colour, alpha=0.8, linewidths=0,
            label=f"{name} (n={of_family.sum()})",
        )  # fmt: skip
    everything = np.concatenate([label, point])
    if target.space == "log" and everything.size:
        low, high = everything.min() / 1.25, everything.max() * 1.25
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plain_log_ticks(axes, low, high)
    else:
        low, high = -0.02, 1.02
    axes.plot([low, high], [low, high], color="0.35", linewidth=1, linestyle="--", label="predicted = label")
    if upper is not None:
        axes.plot([], [], color="0.5", alpha=0.5, linewidth=1.2, label="up to the 99 % bound")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal")
    unit = "" if target.unit == "ratio" else f" [{target.unit}]"
    axes.set_xlabel(f"{_measured(evaluation)} {target.column}{unit}")
    axes.set_ylabel(f"predicted {target.column}{unit}")
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", fontsize=9, framealpha=0.9)
    metrics = evaluation.test
    scores = [] if (error := metrics.median_relative_error) is None else [f"median relative error {error:.1%}"]
    if metrics.coverage is not None:
        scores.append(f"{metrics.coverage:.1%} of labels under the 99 % bound")
    scores = [NOT_INFORMATIVE] if evaluation.own_labels else scores
    _title(figure, evaluation, meta, int(exact.sum()), ", ".join(scores))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _plain_log_ticks(axes, low: float, high: float) -> None:
    """Numbers instead of powers of ten; 1-2-5 steps where the range is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    steps = (1.0,) if high / low > 1e4 else (1.0, 2.0, 5.0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=steps))
        axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.6g}"))
        axis.set_minor_formatter(NullFormatter())


def _title(figure, evaluation: Evaluation, meta: Mapping, n: int, figures: str) -> None:
    import textwrap

    where = textwrap.fill(_where(evaluation), 62)
    text = f"{meta['target']} by {meta['estimator']}: held-out test, n={n}\n{where}\n{figures}"
    figure.suptitle(text.strip(), fontsize=10)


def _measured(evaluation: Evaluation) -> str:
    """What the label is: measured, simulated or imported."""
    return " + ".join(evaluation.train_rows.count("source"))


def _where(evaluation: Evaluation) -> str:
    return f"{_measured(evaluation)} on {', '.join(evaluation.train_rows.count('device'))}"


def _write_predictions(path: Path, evaluation: Evaluation) -> None:
    rows, labels = evaluation.test_rows, evaluation.bins.labels
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run_id", "family", "label", "censored", "point", "upper", "class", "predicted_class"])
        for i in range(len(rows)):
            writer.writerow([
                rows.run_ids[i], rows.family[i], f"{rows.label[i]:.6g}", int(rows.censored[i]),
                f"{evaluation.point[i]:.6g}", "" if evaluation.upper is None else f"{evaluation.upper[i]:.6g}",
                labels[evaluation.true_class[i]], labels[evaluation.predicted_class[i]],
            ])  # fmt: skip


def _page(evaluation: Evaluation, meta: Mapping, images: Sequence[Path]) -> Page:
    facts = {
        "rows": ", ".join(f"{n} {name}" for name, n in meta["rows"]["status"].items()),
        "families": ", ".join(f"{name} {n}" for name, n in meta["rows"]["family"].items()),
        "labels": _where(evaluation),
        "train / test rows": f"{len(evaluation.train_rows)} / {len(evaluation.test_rows)}, no group in both",
        "bins": meta["bins"]["rule"],
        "seed": str(meta["seed"]),
        "features": meta["feature_version"],
        "data": meta["data_fingerprint"],
        "fitted": f"{meta['created_at']}, {meta.get('fitted', _FITTED)}",
    }
    notes = tuple(map(Callout, meta["warnings"]))
    heads = ("metric", "*cross-validation (3 folds)", "*held-out test")
    pictures = tuple(Picture(path.read_bytes(), "image/png", path.stem) for path in images)
    return Page(
        title=f"{meta['target']}: {meta['estimator']}",
        head=(Fold(f"{count_of(len(notes), 'note')} on these figures", notes),) if notes else (),
        sections=(
            Section("figures", "Figures", (table(heads, metric_rows(evaluation)),)),
            Section("pictures", "Held-out test", (Pictures(pictures),)),
            Section("facts", "Data and settings", (Facts(tuple(facts.items())),)),
        ),
        pictures=True,
    )
