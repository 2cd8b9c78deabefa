"""`learn.benchmark target=step_time` on measured and imported steps: every formula and estimator on the same rows.

Start reading at `benchmark_steps`. Rows, formulas and what is left out are those of `learn.fit_kernels`. A `RankJob` is
one of LLM Foundry's jobs on several GPUs, sharded by FSDP: `learn.estimate` is asked about it with its ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import warehouse
from conf.errors import CommandError, UsageError, shown, unknown_name
from conf.plain_text import first_line
from featurize.device.device_spec import DeviceSpec, same_device
from featurize.families import gpt
from learn.commands.benchmark_rows import BenchmarkSettings, RowSelection, Tally, ask_learned
from learn.estimation.estimating import estimate
from learn.estimators.kernel_fitting import MeasuredTime, TimeFit
from learn.estimators.protocol import ESTIMATORS
from learn.fitting.kernel_formulas import (
    AS_IT_COMES,
    FORMULAS,
    labels_by,
    left_out_by,
    subsets,
)
from learn.fitting.kernel_rows import FARM, WEIGHTS, measured_rows
from learn.fitting.published_jobs import LLM_FOUNDRY, SIZES, fused_mpt_loss, mpt_config
from learn.judging.evaluate import TEST_TENTHS, Part, left_out_errors
from learn.judging.scores import Asked, Benchmark, Given, judged, median
from learn.rows.data import get_target, load_rows, make_bins
from learn.rows.step_store import StepStore

RANKS = "ranks"  # name of this estimator
_PRECISIONS = ("amp_bf16", "bf16")  # Composer's newer and older name for the same
# FSDP's strategies: whether weights are given back between forward and backward pass.
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
# Composer's mixed precision with amp_bf16 -> types of gathered weights and reduced gradients (`get_mixed_precision`).
_TYPES = {"PURE": ("bf16", "bf16"), "DEFAULT": ("bf16", "fp32")}
_TARGET = "step_time"
_DEFAULTS = (*FORMULAS, "hybrid")
_OPERATORS = 60  # rows of the table `kernels`, of each operator on each GPU model
_OF_SOURCE = {"measured": lambda source: source == FARM, "imported": lambda source: source != FARM}
STEP_GROUPINGS = ("device", "family", "source")
_NO_CONFIG = "no trial config describes the row"


def is_of_measured_steps(settings: BenchmarkSettings) -> bool:
    """Return whether a benchmark is about step times that were measured, here or elsewhere, and not simulated ones."""
    if settings.target != _TARGET or settings.published is not None or settings.source == "simulated":
        return False
    if settings.source is not None:
        return True
    query = (
        "SELECT DISTINCT source = 'simulated' FROM runs WHERE status = 'ok' AND group_id IS NULL AND step_time_ms > 0"
    )
    with contextlib.closing(warehouse.connect(settings.data)) as connection:
        return bool(connection.execute(query).fetchall() == [(False,)])


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
        settings.data,
        lambda _text, done, of: tally.traced(done, of),
        steps=settings.rows,
        kernels=_OPERATORS,
        same_shapes=True,
        wanted=lambda row: _is_wanted(row, settings),
    )
    tally.step()  # of the last row, before which it was called last
    fit = TimeFit(rows, WEIGHTS)
    masks = _masks(fit, settings)
    names = settings.estimators or _DEFAULTS
    formulas = [name for name in names if name in FORMULAS]
    learned = [name for name in names if name not in (*FORMULAS, RANKS)]
    tally.add(len(masks) * len(formulas))
    asked = {name: _ask_formula(name, fit, masks, tally) for name in formulas}
    if RANKS in names:
        outside = np.any(masks, axis=0) & fit.steps
        asked[RANKS] = Asked(answers=ask_ranks(fit.rows, outside, settings.data, tally))
    asked |= _ask_estimators(learned, fit, masks, settings, tally)
    notes = [f"{number:,} rows are left out: {reason}" for reason, number in left_out.items()]
    target = get_target(_TARGET)
    sets = _sets(fit, asked, settings.by)
    bins = {
        title: {
            "published": make_bins(target, np.array([about["label"] for about in rows.values()]), fit.groups[[*rows]])
        }
        for title, rows in sets.items()
    }
    figures, scored = judged(sets, {name: asked[name] for name in names}, bins, target.space)
    return Benchmark(
        target=target,
        device=", ".join(dict.fromkeys(fit.devices[fit.steps].tolist())),
        card_mib=None,
        bins=bins,
        figures=tuple(figures),
        scored=scored,
        published=(),
        notes=(*_notes(settings, masks, names, asked), *notes),
    )


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
        masks = left_out_by(fit, "family", folds)
        masks = [np.any(masks[:TEST_TENTHS], axis=0)] if settings.split == "holdout" else masks
        masks = [mask for mask in masks if mask.any()]
        if not masks or any(mask[steps].all() for mask in masks):
            raise UsageError(
                f"split={settings.split}: the steps are of too few families ({', '.join(families)}) to leave some out"
            )
        return masks
    if settings.by not in STEP_GROUPINGS:
        raise unknown_name("by of measured step times", settings.by, STEP_GROUPINGS)
    of_steps = np.unique(labels_by(fit, settings.by)[steps])
    if len(of_steps) < 2:
        raise UsageError(
            f"split=leave_one_out by={settings.by}: all steps are of {settings.by} {of_steps[0]}; it takes two or more"
        )
    return left_out_by(fit, settings.by)


def _ask_formula(name: str, fit: TimeFit, masks: Sequence[np.ndarray], tally: Tally) -> Asked:
    formula, seconds = FORMULAS[name](fit), []

    def without(mask: np.ndarray) -> np.ndarray:
        began = time.monotonic_ns()
        ratios = formula(~mask)
        seconds.append((time.monotonic_ns() - began) / 1e9)
        tally.step()
        return ratios

    ratios = left_out_errors(np.empty(len(fit.rows)), masks, without)
    outside = np.any(masks, axis=0)
    answers = {
        place: Given(estimate=row.measured_ms * math.exp(ratios[place]))
        if math.isfinite(ratios[place])
        else Given(estimate=None, reason="the rows that it learned from do not cover this one")
        for place, row in enumerate(fit.rows)
        if outside[place]
    }
    if name == AS_IT_COMES:
        return Asked(answers=answers)
    return Asked(answers=answers, learns=True, fit_seconds=median(np.array(seconds)), fits=len(masks))


def _ask_estimators(
    names: Sequence[str], fit: TimeFit, masks: Sequence[np.ndarray], settings: BenchmarkSettings, tally: Tally
) -> dict[str, Asked]:
    """Fit estimators of trial configs on the same rows, as far as these have one."""
    if not names:
        return {}
    outside = np.flatnonzero(np.any(masks, axis=0) & fit.steps).tolist()
    refused = dict.fromkeys(outside, Given(estimate=None, reason=_NO_CONFIG))
    try:
        selection, place = _selection(fit, settings)
    except CommandError as error:
        reason = f"cannot be fitted: {error}"
        answers = dict.fromkeys(outside, Given(estimate=None, reason=reason))
        return {name: Asked(answers=answers, learns=True) for name in names}
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
        answers = {int(place[position]): replace(given, classes={}) for position, given in learned.answers.items()}
        asked[name] = replace(learned, answers=refused | answers, latency={})
    return asked


def _selection(fit: TimeFit, settings: BenchmarkSettings) -> tuple[RowSelection, np.ndarray]:
    """Return the rows that have a trial config, and the place of each among those of the fit."""
    rows = load_rows(settings.data, _TARGET, source=tuple(_OF_SOURCE), trust=settings.trust)
    place_of = {row.run_id: position for position, row in enumerate(fit.rows) if row.run_id}
    rows = rows.subset([position for position, run_id in enumerate(rows.run_ids) if run_id in place_of])
    if not len(rows):
        raise UsageError(_NO_CONFIG)
    place = np.array([place_of[run_id] for run_id in rows.run_ids])
    everything = np.ones(len(rows), dtype=bool)
    selection = RowSelection(
        rows, fit.sources[place], rows.run_ids, everything, everything, (None,) * len(rows), ({},) * len(rows), ()
    )
    return selection, place


def _sets(fit: TimeFit, asked: Mapping[str, Asked], by: str | None) -> dict[str, dict[int, dict[str, Any]]]:
    """Return title -> row -> its entry of `Scored`.

    Single operators are not training jobs, which is all that estimators answer for: they have no answers there.
    """
    groups = {"device": fit.devices, "source": fit.sources}.get(by or "", fit.groups)
    outside = np.zeros(len(fit.rows), dtype=bool)
    outside[[place for of in asked.values() for place in of.answers]] = True
    sets = {
        title: {
            place: {
                "name": fit.rows[place].run_id or fit.rows[place].name,
                "group": str(groups[place]),
                "label": fit.rows[place].measured_ms,
                "family": fit.rows[place].group,
                "source": "measured" if fit.rows[place].source == FARM else "imported",
            }
            for place in np.flatnonzero(mask & outside).tolist()
        }
        for title, mask in subsets(fit)
    }
    return {title: rows for title, rows in sets.items() if rows}


def _notes(
    settings: BenchmarkSettings, masks: Sequence[np.ndarray], names: Sequence[str], asked: Mapping[str, Asked]
) -> list[str]:
    from featurize.timing.step_time import load_efficiencies

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


# ---- jobs on several GPUs


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """One rank of a published job.

    config        the model and a micro-batch
    accumulation  micro-steps of a step
    parallel      the ranks, as `learn.estimate` takes them
    """

    config: gpt.Config
    accumulation: int
    parallel: Mapping[str, Any]

    def micro_step_ms(self, device: DeviceSpec) -> float:
        """Return the step's time by its micro-steps, as published throughput has it. Raises `UsageError` where the
        layout is not estimated.

        MPT's layer norms compute in the type of what they are given (`low_precision_layernorm`), as everything does
        where FSDP's types alone decide: there is no autocast.
        """
        (tokens,), target = gpt.batch(self.config, "meta")
        answer = estimate(
            lambda: gpt.build(self.config),
            tokens,
            target=target,
            loss=fused_mpt_loss,
            device=device,
            parallel=self.parallel,
            optimizer="adamw",
            accumulation=self.accumulation,
            estimator="trace",
        )
        if answer.step_time_ms is None:
            raise UsageError("the step has no time")
        return answer.step_time_ms / self.accumulation


def rank_job_of(cells: Mapping[str, str]) -> RankJob:
    """Return the job of a row of LLM Foundry.

    Args:
        cells: Cells of the published file, by column.

    Raises:
        UsageError: A model, precision, strategy or type that is not known.
    """
    choices = {
        "Model": (cells["Model"].lower(), SIZES),
        "Precision": (cells["Precision"], _PRECISIONS),
        "Sharding Strategy": (cells.get("Sharding Strategy"), _RESHARDS),
        "MP Mode": (cells.get("MP Mode"), _TYPES),
    }
    if unknown := [f"{name} {shown(value)}" for name, (value, known) in choices.items() if value not in known]:
        raise UsageError(f"{LLM_FOUNDRY}: no job is known with {', '.join(unknown)}")
    weights, gradients = _TYPES[cells["MP Mode"]]
    return RankJob(
        config=mpt_config(cells),
        accumulation=int(cells["GradAccum"]),
        parallel={
            "fsdp": int(cells["# GPUs"]),
            "reshard_after_forward": _RESHARDS[cells["Sharding Strategy"]],
            "param_dtype": weights,
            "reduce_dtype": gradients,
        },
    )


def ask_ranks(
    rows: Sequence[MeasuredTime], outside: np.ndarray, data: str | os.PathLike[str] | None, tally: Tally
) -> dict[int, Given]:
    """Return the time of each row's micro-step, by the place of the row.

    Args:
        rows: The measured steps.
        outside: Mask of those that are asked about.
        data: The data folder, whose column `origin` has the published cells.
        tally: Is called for each row.
    """
    with contextlib.closing(warehouse.connect(data)) as connection:
        asked = connection.execute("SELECT run_id, origin FROM runs WHERE job_id = ?", [f"import-{LLM_FOUNDRY}"])
        cells_of = dict(asked.fetchall())
    answers = {}
    places = np.flatnonzero(outside).tolist()
    tally.add(len(places))
    for place in places:
        row = rows[place]
        answers[place] = Given(estimate=None, reason="no ranks are published of the row")
        if row.run_id in cells_of:
            try:
                answers[place] = Given(estimate=rank_job_of(json.loads(cells_of[row.run_id])).micro_step_ms(row.device))
            except CommandError as error:
                answers[place] = Given(estimate=None, reason=first_line(error))
        tally.step()
    return answers
