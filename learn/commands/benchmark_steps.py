"""`learn.benchmark target=step_time` on measured and imported steps: every formula and estimator on the same rows.

Start reading at `benchmark_steps`. Rows, formulas and what is left out are those of `learn.fit_kernels`. `ask_ranks`
asks `learn.estimate` about LLM Foundry's jobs on several GPUs, sharded by FSDP, with their ranks.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from conf.errors import CommandError, UsageError, first_line, require_one_of, shown
from featurize.device.device_spec import DeviceSpec, same_device
from featurize.families import gpt
from learn.commands.benchmark_rows import BenchmarkSettings, Tally, ask_learned, asked_rows
from learn.estimation.estimating import estimate
from learn.estimators.protocol import ESTIMATORS
from learn.fitting.kernel_fit import FARM, WEIGHTS, MeasuredTime, TimeFit, measured_rows, query_rows
from learn.fitting.kernel_formulas import (
    AS_IT_COMES,
    FORMULAS,
    labels_by,
    subsets,
)
from learn.fitting.published_jobs import LLM_FOUNDRY, SIZES, fused_mpt_loss, mpt_config
from learn.judging.evaluate import TEST_TENTHS, Part, held_out_by
from learn.judging.scores import Asked, Benchmark, Given, judge, median
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
    return query_rows(
        settings.data,
        "SELECT DISTINCT source = 'simulated' FROM runs WHERE status = 'ok' AND group_id IS NULL AND step_time_ms > 0",
    ) == [(False,)]


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
        wanted=lambda row: (
            (settings.source is None or _OF_SOURCE[settings.source](row.source))
            and settings.family in ("all", row.group)
            and (settings.device_name is None or same_device(row.device.name, settings.device_name))
        ),
    )
    tally.step()  # of the last row, before which it was called last
    fit = TimeFit(rows, WEIGHTS)
    parts = _parts(fit, settings)
    outside = np.concatenate([part.outside for part in parts])
    outside_steps = np.sort(outside[fit.steps[outside]])
    names = settings.estimators or _DEFAULTS
    formulas = [name for name in names if name in FORMULAS]
    tally.step(0, of=len(parts) * len(formulas))
    asked = {name: _ask_formula(name, fit, parts, tally) for name in formulas}
    if RANKS in names:
        asked[RANKS] = Asked(answers=ask_ranks(fit.rows, outside_steps, settings.data, tally))
    learned = [name for name in names if name not in asked]
    asked |= _ask_estimators(learned, fit, parts, outside_steps, settings, tally)
    target = get_target(_TARGET)
    sets = _sets(fit, np.sort(outside), settings.by)
    bins = {
        title: {
            "published": make_bins(target, np.array([about["label"] for about in rows.values()]), fit.groups[[*rows]])
        }
        for title, rows in sets.items()
    }
    notes = [f"{number:,} rows are left out: {reason}" for reason, number in left_out.items()]
    return Benchmark(
        target=target,
        device=", ".join(dict.fromkeys(fit.devices[fit.steps].tolist())),
        figures=judge(target, sets, bins, {name: asked[name] for name in names}),
        notes=tuple(dict.fromkeys([*_notes(settings, len(parts), names, asked), *notes])),
    )


def _parts(fit: TimeFit, settings: BenchmarkSettings) -> list[Part]:
    """Return the fits: all rows but those that are left out in turn."""
    steps = fit.steps
    by = settings.by if settings.split == "leave_one_out" and settings.by else "family"
    require_one_of("by of measured step times", by, STEP_GROUPINGS)
    labels = labels_by(fit, by)
    of_steps = np.unique(labels[steps])
    if settings.split == "leave_one_out" and len(of_steps) < 2:
        raise UsageError(f"split=leave_one_out by={by}: all steps are of {by} {of_steps[0]}; it takes two or more")
    many = len(of_steps) > settings.folds  # else parts of several families could leave nothing to learn from
    folds = {"holdout": 10, "cv": settings.folds if many else None, "leave_one_out": None}[settings.split]
    masks = held_out_by(labels, folds)
    masks = [np.any(masks[:TEST_TENTHS], axis=0)] if settings.split == "holdout" else masks
    masks = [mask for mask in masks if mask.any()]
    if not masks or any(mask[steps].all() for mask in masks):
        raise UsageError(
            f"split={settings.split}: the steps are of too few families ({', '.join(of_steps)}) to leave some out"
        )
    return [Part("", ~mask, np.flatnonzero(mask)) for mask in masks]


def _ask_formula(name: str, fit: TimeFit, parts: Sequence[Part], tally: Tally) -> Asked:
    formula = FORMULAS[name](fit)
    answers: dict[int, Given] = {}
    seconds: list[float] = []
    for part in parts:
        began = time.monotonic_ns()
        ratios = formula(part.inside)
        seconds.append((time.monotonic_ns() - began) / 1e9)
        tally.step()  # its answers take no time: a step is a fit
        for place in part.outside.tolist():
            if math.isfinite(ratios[place]):
                answers[place] = Given(estimate=fit.rows[place].measured_ms * math.exp(ratios[place]))
            else:
                answers[place] = Given(estimate=None, reason="the rows that it learned from do not cover this one")
    if name == AS_IT_COMES:
        return Asked(answers=answers)
    return Asked(answers=answers, learns=True, fit_seconds=median(np.array(seconds)))


def _ask_estimators(
    names: Sequence[str],
    fit: TimeFit,
    parts: Sequence[Part],
    outside_steps: np.ndarray,
    settings: BenchmarkSettings,
    tally: Tally,
) -> dict[str, Asked]:
    """Fit estimators of trial configs on the same rows, as far as these have one."""
    if not names:
        return {}
    refused = dict.fromkeys(outside_steps.tolist(), Given(estimate=None, reason=_NO_CONFIG))
    try:
        rows = load_rows(settings.data, _TARGET, source=tuple(_OF_SOURCE), trust=settings.trust)
        place_of = {row.run_id: position for position, row in enumerate(fit.rows) if row.run_id}
        rows = rows.subset([position for position, run_id in enumerate(rows.run_ids) if run_id in place_of])
        if not len(rows):
            raise UsageError(_NO_CONFIG)
    except CommandError as error:
        reason = Given(estimate=None, reason=f"cannot be fitted: {error}")
        return dict.fromkeys(names, Asked(answers=dict.fromkeys(refused, reason), learns=True))
    place = np.array([place_of[run_id] for run_id in rows.run_ids])
    of_steps = asked_rows(rows, fit.sources[place])
    own = [Part("", part.inside[place], np.flatnonzero(np.isin(place, part.outside))) for part in parts]
    own = [part for part in own if len(part.outside)]
    steps = StepStore(settings.data)
    steps.prepare(rows.cases, workers=settings.workers)
    asked = {}
    for name in names:
        tally.step(0, of=sum(1 + len(part.outside) for part in own))
        learned = ask_learned(name, of_steps, own, {}, settings.seed, tally, steps)
        answers = {int(place[position]): given for position, given in learned.answers.items()}
        asked[name] = replace(learned, answers=refused | answers, latency={})
    return asked


def _sets(fit: TimeFit, outside: np.ndarray, by: str | None) -> dict[str, dict[int, dict[str, Any]]]:
    """Return title -> row -> its entry of `Scored`.

    Single operators are not training jobs, which is all that estimators answer for: they have no answers there.
    """
    groups = {"device": fit.devices, "source": fit.sources}.get(by or "", fit.groups)
    sets = {
        title: {
            place: {
                "name": fit.rows[place].run_id or fit.rows[place].name,
                "group": str(groups[place]),
                "label": fit.rows[place].measured_ms,
                "family": fit.rows[place].group,
                "source": "measured" if fit.rows[place].source == FARM else "imported",
            }
            for place in outside[mask[outside]].tolist()
        }
        for title, mask in subsets(fit)
    }
    return {title: rows for title, rows in sets.items() if rows}


def _notes(settings: BenchmarkSettings, parts: int, names: Sequence[str], asked: Mapping[str, Asked]) -> list[str]:
    from featurize.timing.simulation import load_efficiencies

    how = {
        "cv": f"families of networks in {parts} parts, each part left out in turn",
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


def micro_step_ms(cells: Mapping[str, str], device: DeviceSpec) -> float:
    """Return the time in ms of a micro-step on one rank of a row of LLM Foundry, as its published throughput gives it.

    MPT's layer norms compute in the type of what they are given (`low_precision_layernorm`), as everything does where
    FSDP's types alone decide: there is no autocast.

    Args:
        cells: Cells of the published file, by column.
        device: The GPU model.

    Raises:
        UsageError: A model, precision, strategy or type that is not known, or a layout that is not estimated.
    """
    choices = {
        "Model": (cells["Model"].lower(), SIZES),
        "Precision": (cells["Precision"], _PRECISIONS),
        "Sharding Strategy": (cells.get("Sharding Strategy"), _RESHARDS),
        "MP Mode": (cells.get("MP Mode"), _TYPES),
    }
    if unknown := [f"{name} {shown(value)}" for name, (value, known) in choices.items() if value not in known]:
        raise UsageError(f"{LLM_FOUNDRY}: no job is known with {', '.join(unknown)}")
    config, accumulation = mpt_config(cells), int(cells["GradAccum"])
    (tokens,), target = gpt.batch(config, "meta")
    weights, gradients = _TYPES[cells["MP Mode"]]
    answer = estimate(
        lambda: gpt.build(config),
        tokens,
        target=target,
        loss=fused_mpt_loss,
        device=device,
        parallel={
            "fsdp": int(cells["# GPUs"]),
            "reshard_after_forward": _RESHARDS[cells["Sharding Strategy"]],
            "param_dtype": weights,
            "reduce_dtype": gradients,
        },
        optimizer="adamw",
        accumulation=accumulation,
        estimator="trace",
    )
    if answer.step_time_ms is None:
        raise UsageError("the step has no time")
    return answer.step_time_ms / accumulation


def ask_ranks(
    rows: Sequence[MeasuredTime], places: np.ndarray, data: str | os.PathLike[str] | None, tally: Tally
) -> dict[int, Given]:
    """Return the time of each row's micro-step, by the place of the row.

    Args:
        rows: The measured steps.
        places: Positions of those that are asked about.
        data: The data folder, whose column `origin` has the published cells.
        tally: Is called for each row.
    """
    cells_of = dict(query_rows(data, "SELECT run_id, origin FROM runs WHERE job_id = ?", [f"import-{LLM_FOUNDRY}"]))
    answers = {}
    tally.step(0, of=len(places))
    for place in places.tolist():
        row = rows[place]
        answers[place] = Given(estimate=None, reason="no ranks are published of the row")
        if row.run_id in cells_of:
            try:
                answers[place] = Given(estimate=micro_step_ms(json.loads(cells_of[row.run_id]), row.device))
            except CommandError as error:
                answers[place] = Given(estimate=None, reason=first_line(error))
        tally.step()
    return answers
