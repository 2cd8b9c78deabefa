"""The call and the command `learn.fit`: fit one estimator, judge it on held-out rows, keep it as an artifact.

Start reading at `fit`; `entry` prints a table of held-out figures and the artifact's path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from conf.cli.command_line import StepBar
from conf.cli.settings import Checked, data_key, key
from conf.errors import UsageError
from conf.reports.blocks import Callout, Lead, print_blocks, table
from featurize.job.code_names import trust_key
from learn.estimators.protocol import ESTIMATORS, OF_CONFIGS, PREFERRED, get_estimator, require_target
from learn.fitting.artifacts import save_judged
from learn.judging.evaluate import CV_FOLDS, Evaluation, evaluate, remarks
from learn.judging.report import metric_rows
from learn.rows.data import BIN_WIDTHS_GB, SLOWDOWN, TARGETS, get_target, load_rows, make_bins
from learn.rows.step_store import StepStore, with_suspects


@dataclass(frozen=True, kw_only=True)
class FitSettings(Checked):
    """The target to fit, and its rows. Raises `UsageError` that names every bad key together.

      python -m learn.fit target=memory
      python -m learn.fit target=drama family=cnn source=measured
      python -m learn.fit target=memory bin_gb=1 device_name=A100-SXM4-40GB

    30 % of the rows are held out, the rest is cross-validated in 3 folds; near-copies of a configuration stay on one
    side of every split. The artifact, models/TARGET/VERSION/ in the data folder, holds the model (fitted on all rows),
    meta.json, report.json and report.html with two plots.

    target=slowdown learns from the table collocations how much jobs slow each other down on one GPU; it takes data,
    source and device_name alone.

      python -m learn.fit target=slowdown data=pairs
    """

    target: str = key(help="what to estimate", choices=(*TARGETS, SLOWDOWN))
    estimator: str | None = key(
        None,
        "default hybrid, or lightgbm where all rows are simulated",
        choices=tuple(ESTIMATORS),
    )
    family: str = key("all", "one family, or all")
    source: str | tuple[str, ...] | None = key(
        None, "measured, simulated or imported; needed where the rows are of several", "text | list of text | null"
    )
    device_name: str | None = key(
        None, "as in runs.device_name; default all, needed where conf/device does not describe them all"
    )
    bin_gb: int | None = key(
        None, "width of the memory classes; default 1 for family=mlp, else 8", choices=BIN_WIDTHS_GB
    )
    snapshot: str | None = key(
        None, "name of one whose rows are taken instead of the folder's as it is; meta.json says which"
    )
    seed: int = key(0, "seed of splits and fits; same data and seed, same model", "int 0 to 2147483647")
    data: str | None = data_key()
    trust: tuple[str, ...] = trust_key()

    def problems(self) -> Iterator[str]:
        if self.target == SLOWDOWN:
            yield from foreign_keys(self, ("target", "source", "device_name", "data", "seed"))
        elif self.bin_gb is not None and not get_target(self.target).is_memory:
            yield f"bin_gb is for target=memory; target={self.target} has bins low, medium, high"


def foreign_keys(settings: Any, taken: Sequence[str], of: str = f"target={SLOWDOWN}") -> list[str]:
    """Return a problem that names the keys that are set although `of` does not take them."""
    set_keys = [
        field.name
        for field in fields(settings)
        if field.name not in taken and getattr(settings, field.name) not in (field.default, ())
    ]
    return [f"{', '.join(set_keys)}: {of} takes {', '.join(taken[1:])} alone"] if set_keys else []


@dataclass(frozen=True)
class Fit:
    """Result of a fit: the artifact's folder, its `meta.json`, and the evaluation behind the figures."""

    path: Path
    meta: dict[str, Any]
    evaluation: Evaluation


def fit(
    settings: FitSettings,
    *,
    now: datetime | None = None,
    progress: Callable[[str, int, int], None] = lambda _step, _done, _of: None,
) -> Fit:
    """Fit an estimator, judge it on held-out rows, and keep it as `models/TARGET/VERSION/` in the data folder.

    The figures are from fits that had not seen the rows they are judged on. The stored model is fitted on all rows.

    Args:
        settings: What to fit, on which rows.
        now: Time that names the version; time-zone aware. None is the current time.
        progress: Called as `progress(step, completed, total)` before each step: first for each traced job,
            then fits and the report; 0 of 0 where the number is not known yet.

    Returns:
        The artifact's folder, its `meta.json`, and the evaluation behind the figures.

    Raises:
        UsageError: There are too few rows, rows of several sources, or an estimator without the target.
            Nothing is written then.
    """
    if settings.target == SLOWDOWN:
        raise UsageError("target=slowdown: call learn.fit_slowdowns, which fits to groups of jobs")
    now = now or datetime.now(UTC)
    if settings.estimator is not None:
        require_target(get_estimator(settings.estimator), settings.target)
    progress("reading rows", 0, 0)
    rows = load_rows(
        settings.data,
        settings.target,
        settings.family,
        settings.source,
        settings.device_name,
        snapshot=settings.snapshot,
        trust=settings.trust,
    )
    # The hybrid, which starts from the trace, repeats the labels of simulated rows without learning anything; an
    # estimator that reads configurations alone learns from them.
    name = settings.estimator or (OF_CONFIGS if set(rows.source) == {"simulated"} else PREFERRED)
    kind = get_estimator(name)
    store = StepStore(settings.data)
    if kind.needs_trace:
        store.prepare(rows.cases, progress=partial(progress, "tracing jobs"))
        rows = with_suspects(rows, store)
    bins = make_bins(rows.target, rows.exact.label, rows.family, bin_gb=settings.bin_gb, ceiling_mib=rows.ceiling_mib)
    total, counter = CV_FOLDS + 3, itertools.count()  # the held-out test, the fit on all rows, the report
    evaluation = evaluate(
        name,
        rows,
        bins,
        settings.seed,
        lambda step: progress(step, next(counter), total),
        steps=store,
    )
    progress("fit on all rows", total - 2, total)
    estimator = kind(seed=settings.seed).fit(rows, store)

    notes = []
    if settings.estimator is None and name != PREFERRED:
        notes.append(
            f"estimator={name} by default: the labels of simulated rows are the trace's own figures, which {PREFERRED} "
            "repeats; choose another with estimator=NAME"
        )
    notes += estimator.predict(rows.cases[:1], store).warnings  # one case: only the model's warnings are wanted
    notes += [f"of the held-out figures: {text}" for text in evaluation.warnings if text not in notes]
    notes += remarks(kind, rows, bins)
    if settings.snapshot is not None:
        notes.append(
            f"fitted on the snapshot {settings.snapshot}; as the newest of its target it is what answers from now on"
        )
    progress("drawing the report", total - 1, total)
    path, meta = save_judged(
        settings.data,
        estimator,
        rows,
        evaluation,
        settings.seed,
        now,
        fitted_on="all",
        about={"warnings": notes, "snapshot": settings.snapshot},
    )
    return Fit(path, meta, evaluation)


def entry(settings: FitSettings) -> int:
    """Fit with the settings, and print the figures and the artifact's path. Returns the exit code."""
    if settings.target == SLOWDOWN:
        from learn.commands.sharing import fit_entry

        return fit_entry(settings)
    with StepBar(settings.target) as bar:
        fitted = fit(settings, progress=bar.update)
    rows = fitted.meta["rows"]
    families = ", ".join(f"{name} {n}" for name, n in rows["family"].items())
    print_blocks(
        Lead(
            f"{settings.target} by {fitted.meta['estimator']}: {rows['train'] + rows['test']} rows ({families}), "
            f"{', '.join(rows['source'])}, {', '.join(rows['device'])}"
        ),
        table(("metric", "3-fold CV", f"held out (n={rows['test']})"), metric_rows(fitted.evaluation)),
        Lead(f"bins: {fitted.meta['bins']['rule']}"),
        *map(Callout, fitted.meta["warnings"]),
        Lead(f"artifact: {fitted.path}"),
    )
    return 0
