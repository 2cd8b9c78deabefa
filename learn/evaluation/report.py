"""Reports of a fit: its figures as text, and a page that shows them with plots.

Start reading at `write_report`; `learn.evaluation.plots` and `conf.reports` draw.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from conf.reports.blocks import Callout, Facts, Fold, Page, Picture, Pictures, Section, table
from conf.reports.page_text import count_of
from conf.reports.render import render_page
from learn.evaluation.benchmark_figures import Benchmark, Scored, figures_of
from learn.evaluation.evaluate import Evaluation
from learn.evaluation.plots import confusion, draw_svg, predicted
from learn.evaluation.scores import NOT_INFORMATIVE

_FITTED = "on all rows; the figures are of fits that did not see the rows judged"
ONE_CLASS = "one class"
_TEST = "held-out test"
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
    """Write `report.html` and `test_predictions.csv` into `folder`."""
    _write_predictions(folder / "test_predictions.csv", evaluation)
    page = _page(evaluation, meta)
    (folder / "report.html").write_bytes(render_page(page).encode("utf-8", errors="replace"))


def _as_benchmark(evaluation: Evaluation, estimator: str) -> Benchmark:
    """Return the held-out test as a benchmark of one estimator on one set of rows, which plots show."""
    rows, bins = evaluation.test_rows, {"published": evaluation.bins}
    scored = [
        Scored(
            name=row.run_id,
            group=row.family,
            label=None if row.censored else row.label,
            estimate=float(evaluation.point[i]),
            upper=None if evaluation.upper is None else float(evaluation.upper[i]),
            classes={"published": int(evaluation.predicted_class[i])},
            card=row.device_memory_mib if rows.target.is_memory else None,
            family=row.family,
            source=row.source,
        )
        for i, row in enumerate(rows.records)
    ]
    figures = figures_of(_TEST, estimator, scored, bins=bins, space=rows.target.space, learned=True)
    return Benchmark(
        rows.target, _where(evaluation), None, {_TEST: bins}, (figures,), {(_TEST, estimator): scored}, (), ()
    )


def _measured(evaluation: Evaluation) -> str:
    """Return where the labels come from: measured, simulated or imported."""
    return " + ".join(evaluation.train_rows.count("source"))


def _where(evaluation: Evaluation) -> str:
    return f"{_measured(evaluation)} on {', '.join(evaluation.train_rows.count('device'))}"


def _write_predictions(path: Path, evaluation: Evaluation) -> None:
    rows, labels = evaluation.test_rows, evaluation.bins.labels
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run_id", "family", "label", "censored", "point", "upper", "class", "predicted_class"])
        for i in range(len(rows)):
            writer.writerow(
                [
                    rows.run_ids[i],
                    rows.family[i],
                    f"{rows.label[i]:.6g}",
                    int(rows.censored[i]),
                    f"{evaluation.point[i]:.6g}",
                    "" if evaluation.upper is None else f"{evaluation.upper[i]:.6g}",
                    labels[evaluation.true_class[i]],
                    labels[evaluation.predicted_class[i]],
                ]
            )


def _page(evaluation: Evaluation, meta: Mapping) -> Page:
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
    done = _as_benchmark(evaluation, meta["estimator"])
    drawn = ((draw.__name__, draw_svg(draw, done, _TEST)) for draw in (confusion, predicted))
    pictures = tuple(Picture(svg.encode(), "image/svg+xml", name) for name, svg in drawn if svg is not None)
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
