"""Reports of a fit: its figures as text, and a page that shows them with plots.

Start reading at `write_report`; `learn.judging.plots` and `conf.reports` draw.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from conf.reports.blocks import Callout, Facts, Fold, Page, Section, table
from conf.reports.page_text import count_of
from conf.reports.render import page_bytes
from learn.judging.benchmark_figures import Benchmark, told_classes
from learn.judging.evaluate import PUBLISHED, TEST, Evaluation
from learn.judging.plots import confusion, predicted
from learn.judging.scores import NOT_INFORMATIVE

_FITTED = "on all rows; the figures are of fits that did not see the rows judged"
ONE_CLASS = "one class"
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
    if evaluation.figures.own_labels:
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
    for name, recall in () if one_class else evaluation.test["recall"].items():
        folds = [fold["recall"][name] for fold in evaluation.cv if name in fold["recall"]]
        cv = f"{np.mean(folds):.1%}" if folds else "–"
        if len(folds) > 1:
            cv += f" ± {np.std(folds, ddof=1):.1%}"
        rows.append((f"recall of {name} (n={evaluation.test['support'][name]})", cv, f"{recall:.1%}"))
    return rows


def write_report(folder: Path, evaluation: Evaluation, meta: Mapping) -> None:
    """Write `report.html` and `test_predictions.csv` into `folder`."""
    _write_predictions(folder / "test_predictions.csv", evaluation)
    page = _page(evaluation, meta)
    (folder / "report.html").write_bytes(page_bytes(page))


def _where(evaluation: Evaluation) -> str:
    sources = " + ".join(evaluation.train_rows.count("source"))
    return f"{sources} on {', '.join(evaluation.train_rows.count('device'))}"


def _write_predictions(path: Path, evaluation: Evaluation) -> None:
    labels = evaluation.bins.labels
    classes = zip(*told_classes(evaluation.scored, PUBLISHED, evaluation.bins), strict=True)
    rows = zip(evaluation.scored, evaluation.test_rows.records, classes, strict=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run_id", "family", "label", "censored", "point", "upper", "class", "predicted_class"])
        for scored, row, (true, predicted_class) in rows:
            upper = "" if scored.upper is None else f"{scored.upper:.6g}"
            cells = int(row.censored), f"{scored.estimate:.6g}", upper, labels[true], labels[predicted_class]
            writer.writerow([row.run_id, row.family, f"{row.label:.6g}", *cells])


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
    done = Benchmark(
        target=evaluation.test_rows.target,
        device=_where(evaluation),
        card_mib=None,
        bins={TEST: {PUBLISHED: evaluation.bins}},
        figures=(evaluation.figures,),
        scored={(TEST, evaluation.figures.estimator): evaluation.scored},
        published=(),
        notes=(),
    )
    return Page(
        title=f"{meta['target']}: {meta['estimator']}",
        head=(Fold(f"{count_of(len(notes), 'note')} on these figures", notes),) if notes else (),
        sections=(
            Section("figures", "Figures", (table(heads, metric_rows(evaluation)),)),
            Section("pictures", "Held-out test", (*confusion(done, TEST), *predicted(done, TEST))),
            Section("facts", "Data and settings", (Facts(tuple(facts.items())),)),
        ),
    )
