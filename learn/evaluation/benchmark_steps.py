"""`learn.benchmark target=step_time` on measured and imported steps: every formula and estimator on the same rows.

Start reading at `benchmark_steps`. Rows, formulas and what is left out are those of `learn.fit_kernels`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from conf.errors import CommandError, UsageError, unknown_name
from featurize.device_spec import same_device
from learn.estimators import ESTIMATORS
from learn.evaluation.benchmark_answers import Tally, ask_learned
from learn.evaluation.benchmark_figures import Figures, Given, Scored, figures_of
from learn.evaluation.benchmark_result import Benchmark
from learn.evaluation.benchmark_rows import RowSelection
from learn.evaluation.benchmark_settings import BenchmarkSettings
from learn.evaluation.published_ranks import RANKS, ask_ranks
from learn.evaluation.scores import median
from learn.evaluation.splits import TEST_TENTHS, Part
from learn.kernels.fitting import KERNELS, MeasuredTime, TimeFit, held_out_by
from learn.kernels.formulas import AS_IT_COMES, FORMULAS
from learn.kernels.judging import left_out_ratios, subsets
from learn.kernels.rows import FARM, WEIGHTS, measured_rows
from learn.step_store import StepStore
from learn.targets import Bins, get_target, make_bins

_TARGET = "step_time"
_DEFAULTS = (*FORMULAS, "hybrid")
_OPERATORS = 60  # rows of the table `kernels`, of each operator on each GPU model
_OF_SOURCE = {"measured": lambda source: source == FARM, "imported": lambda source: source != FARM}
_NO_CONFIG = "no trial config describes the row"


@dataclass(frozen=True)
class _Asked:
    """One estimator's answers by row, and what its fits took."""

    answers: Mapping[int, Given]
    fit_seconds: float | None = None
    fits: int = 0
    warnings: tuple[str, ...] = field(default=())


def is_of_measured_steps(settings: BenchmarkSettings) -> bool:
    """Return whether a benchmark is about step times that were measured, here or elsewhere, and not simulated ones."""
    import warehouse

    if settings.target != _TARGET or settings.published is not None or settings.source == "simulated":
        return False
    if settings.source is not None:
        return True
    connection = warehouse.connect(settings.data)
    try:
        rows = connection.execute(
            "SELECT DISTINCT source = 'simulated' FROM runs "
            "WHERE status = 'ok' AND group_id IS NULL AND step_time_ms > 0"
        ).fetchall()
    finally:
        connection.close()
    return rows == [(False,)]


def benchmark_steps(settings: BenchmarkSettings, progress: Callable[[int, int], None]) -> Benchmark:
    """Ask every formula and estimator for the time of every measured step, learned without the rows that are left out.

    Rows without a trial config, such as LLM Foundry's, are asked of the formulas alone, and of `ranks`: each GPU's
    estimate in its layout. Single operators of the table
    `kernels` are learned from and judged beside the steps.

    Raises:
        UsageError: Too few steps can be learned from, or a split needs more groups than there are.
    """
    tally = Tally(progress)
    rows, left_out = measured_rows(
        settings.data, _heard(tally), steps=settings.rows, kernels=_OPERATORS, same_shapes=True,
        wanted=lambda row: _is_wanted(row, settings),
    )  # fmt: skip
    fit = TimeFit(rows, WEIGHTS)
    masks = _masks(fit, settings)
    asked = {}
    names = settings.estimators or _DEFAULTS
    learned = [name for name in names if name not in FORMULAS and name != RANKS]
    tally.add(len(masks) * sum(name in FORMULAS for name in names))
    for name in names:
        if name in FORMULAS:
            asked[name] = _ask_formula(name, fit, masks, tally)
    if RANKS in names:
        outside = np.any(masks, axis=0) & fit.steps
        asked[RANKS] = _Asked(ask_ranks(fit.rows, outside, settings.data, tally))
    asked |= _ask_estimators(learned, fit, masks, settings, tally)
    notes = [f"{number:,} rows are left out: {reason}" for reason, number in left_out.items()]
    figures, scored, bins = _counted(fit, {name: asked[name] for name in names}, settings)
    return Benchmark(
        target=get_target(_TARGET),
        device=", ".join(dict.fromkeys(fit.devices[fit.steps].tolist())),
        card_mib=None,
        bins=bins,
        figures=tuple(figures),
        scored=scored,
        published=(),
        notes=(*_notes(settings, masks, names, asked), *notes),
    )


def _heard(tally: Tally) -> Callable[[str, int, int], None]:
    """Return a callback that counts rows; it is called before each row is traced."""

    def heard(_label: str, done: int, of: int) -> None:
        if not done:
            tally.add(of)
        tally.step()

    return heard


def _is_wanted(row: MeasuredTime, settings: BenchmarkSettings) -> bool:
    return (
        (settings.source is None or _OF_SOURCE[settings.source](row.source))
        and settings.family in ("all", row.group)
        and (settings.device_name is None or same_device(row.device.name, settings.device_name))
    )


def _masks(fit: TimeFit, settings: BenchmarkSettings) -> list[np.ndarray]:
    """Return the masks of the rows that are left out in turn."""
    steps = fit.steps
    if settings.split != "leave_one_out":
        families = np.unique(fit.groups[steps])
        few = len(families) <= settings.folds  # then parts of several families could leave nothing to learn from
        folds = 10 if settings.split == "holdout" else None if few else settings.folds
        masks = [mask for _, mask in held_out_by(fit.groups, folds)]
        masks = [np.any(masks[:TEST_TENTHS], axis=0)] if settings.split == "holdout" else masks
        masks = [mask for mask in masks if mask.any()]
        if not masks or any(mask[steps].all() for mask in masks):
            raise UsageError(
                f"split={settings.split}: the steps are of too few families ({', '.join(families)}) to leave some out"
            )
        return masks
    labels = {
        "device": fit.devices,
        "family": fit.groups,
        "source": np.where(steps, fit.sources, KERNELS),
    }
    if settings.by not in labels:
        raise unknown_name("by of measured step times", settings.by, labels)
    of_steps = np.unique(labels[settings.by][steps])
    if len(of_steps) < 2:
        raise UsageError(
            f"split=leave_one_out by={settings.by}: all steps are of {settings.by} {of_steps[0]}; it takes two or more"
        )
    return [mask for _, mask in held_out_by(labels[settings.by])]


def _ask_formula(name: str, fit: TimeFit, masks: Sequence[np.ndarray], tally: Tally) -> _Asked:
    marks: list[int] = []  # ns, before each fit and after the last one

    def heard() -> None:
        if marks:
            tally.step()
        marks.append(time.monotonic_ns())

    ratios = left_out_ratios(FORMULAS[name](fit), masks, heard)
    heard()
    outside = np.any(masks, axis=0)
    answers = {
        at: Given(estimate=row.measured_ms * math.exp(ratios[at]))
        if math.isfinite(ratios[at])
        else Given(estimate=None, reason="the rows that it learned from do not cover this one")
        for at, row in enumerate(fit.rows)
        if outside[at]
    }
    learns = name != AS_IT_COMES
    return _Asked(answers, median(np.diff(marks) / 1e9) if learns else None, len(masks) if learns else 0)


def _ask_estimators(
    names: Sequence[str], fit: TimeFit, masks: Sequence[np.ndarray], settings: BenchmarkSettings, tally: Tally
) -> dict[str, _Asked]:
    """Fit estimators of trial configs on the same rows, as far as these have one."""
    if not names:
        return {}
    outside = np.flatnonzero(np.any(masks, axis=0) & fit.steps).tolist()
    refused = dict.fromkeys(outside, Given(estimate=None, reason=_NO_CONFIG))
    try:
        selection, place = _selection(fit, settings)
    except CommandError as error:
        reason = f"cannot be fitted: {error}"
        return {name: _Asked(dict.fromkeys(outside, Given(estimate=None, reason=reason))) for name in names}
    parts = [
        Part(f"part {number}", np.flatnonzero(~mask[place]), np.flatnonzero(mask[place]))
        for number, mask in enumerate(masks, start=1)
        if mask[place].any()
    ]
    bins = {source: selection.bins(source) for source in dict.fromkeys(selection.file.tolist())}
    steps = StepStore(settings.data)
    steps.prepare(selection.rows.cases, workers=settings.workers)
    asked = {}
    for name in names:
        tally.add(sum(1 + len(part.outside) for part in parts))
        learned = ask_learned(name, selection, parts, bins, settings.seed, tally, steps)
        answers = refused | {int(place[at]): given for at, given in learned.answers.items()}
        asked[name] = _Asked(answers, learned.fit_seconds, learned.fits, learned.warnings)
    return asked


def _selection(fit: TimeFit, settings: BenchmarkSettings) -> tuple[RowSelection, np.ndarray]:
    """Return the rows that have a trial config, and the place of each among those of the fit."""
    from learn.data import load_rows

    rows = load_rows(settings.data, _TARGET, source=tuple(_OF_SOURCE), trust=settings.trust)
    place_of = {row.run_id: at for at, row in enumerate(fit.rows) if row.run_id}
    rows = rows.subset([at for at, run_id in enumerate(rows.run_ids) if run_id in place_of])
    if not len(rows):
        raise UsageError(_NO_CONFIG)
    place = np.array([place_of[run_id] for run_id in rows.run_ids])
    everything = np.ones(len(rows), dtype=bool)
    selection = RowSelection(
        rows, fit.sources[place], rows.run_ids, everything, everything, rows.cases, ({},) * len(rows), ()
    )
    return selection, place


def _counted(
    fit: TimeFit, asked: Mapping[str, _Asked], settings: BenchmarkSettings
) -> tuple[list[Figures], dict[tuple[str, str], list[Scored]], dict[str, dict[str, Bins]]]:
    target = get_target(_TARGET)
    groups = {"device": fit.devices, "source": fit.sources}.get(settings.by or "", fit.groups)
    figures, scored, bins = [], {}, {}
    outside = np.zeros(len(fit.rows), dtype=bool)
    outside[[at for of in asked.values() for at in of.answers]] = True
    for title, mask in subsets(fit):
        members = np.flatnonzero(mask & outside).tolist()
        if not members:
            continue
        labels = np.array([fit.rows[at].measured_ms for at in members])
        bins[title] = {"published": make_bins(target, labels, fit.groups[members])}
        for name, of in asked.items():
            own = [
                _scored(fit.rows[at], str(groups[at]), of.answers[at])
                for at in members
                if at in of.answers
            ]  # fmt: skip
            if not own:  # single operators are no training jobs, which is all that estimators answer for
                continue
            scored[title, name] = own
            figures.append(
                figures_of(
                    title, name, own, bins=bins[title], space=target.space, learned=name not in (AS_IT_COMES, RANKS),
                    fit_seconds=of.fit_seconds, fits=of.fits,
                )
            )  # fmt: skip
    return figures, scored, bins


def _scored(row: MeasuredTime, group: str, given: Given) -> Scored:
    return Scored(
        **{**vars(given), "classes": {}}, name=row.run_id or row.name, group=group, label=row.measured_ms,
        family=row.group, source="measured" if row.source == FARM else "imported",
    )  # fmt: skip


def _notes(
    settings: BenchmarkSettings, masks: Sequence[np.ndarray], names: Sequence[str], asked: Mapping[str, _Asked]
) -> list[str]:
    from featurize.kernel_model.step_time import load_efficiencies

    how = {
        "cv": f"families of networks in {len(masks)} parts, each part left out in turn",
        "holdout": "families of networks held out, 30 % of them",
        "leave_one_out": f"each {settings.by} left out in turn",
    }[settings.split]
    notes = [f"{how}: estimators that learn answer for each row from a fit without it"]
    if AS_IT_COMES in names:
        rows = ", ".join(f"{number:,} {source}" for source, number in load_efficiencies().fitted_on.items())
        notes.append(
            f"{AS_IT_COMES} is the packaged kernel model, learned from rows like these ({rows}): its figures "
            "are not held out. kernels is the same model, fitted without the rows that are left out"
        )
    for name, of in asked.items():
        if name in ESTIMATORS:
            notes += [f"{name}: {text}" for text in dict.fromkeys(of.warnings)]
    return notes
