"""Published steps of jobs on several GPUs, each asked of `learn.estimate` with its ranks.

Start reading at `ask_ranks`. The rows are LLM Foundry's, whose models are sharded by FSDP.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conf.errors import CommandError, UsageError, shown
from conf.plain_text import first_line
from featurize.device_spec import DeviceSpec
from featurize.families import gpt
from learn.estimation.estimating import estimate
from learn.estimation.job_estimate import Estimate
from learn.evaluation.benchmark_answers import Tally
from learn.evaluation.benchmark_figures import Given
from learn.kernels.fitting import MeasuredTime
from learn.kernels.mpt import LLM_FOUNDRY, SIZES, fused_mpt_loss, mpt_config

RANKS = "ranks"  # name of this estimator
_PRECISIONS = ("amp_bf16", "bf16")  # Composer's newer and older name for the same
# FSDP's strategies: whether weights are given back between forward and backward pass.
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
# Composer's mixed precision with amp_bf16 -> types of gathered weights and reduced gradients (`get_mixed_precision`).
_TYPES = {"PURE": ("bf16", "bf16"), "DEFAULT": ("bf16", "fp32")}


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
        layout is not estimated."""
        done = self.estimated(device)
        if done.step_time_ms is None:
            raise UsageError("the step has no time")
        return done.step_time_ms / self.accumulation

    def estimated(self, device: DeviceSpec) -> Estimate:
        """Return the estimate of one rank.

        MPT's layer norms compute in the type of what they are given (`low_precision_layernorm`), as everything does
        where FSDP's types alone decide: there is no autocast.
        """
        (tokens,), target = gpt.batch(self.config, "meta")
        return estimate(
            lambda: gpt.build(self.config), tokens, target=target, loss=fused_mpt_loss, device=device,
            parallel=self.parallel, optimizer="adamw", accumulation=self.accumulation, estimator="trace",
        )  # fmt: skip


def rank_job_of(cells: Mapping[str, str]) -> RankJob:
    """Return the job of a row of LLM Foundry.

    Args:
        cells: Of the published file, by column.

    Raises:
        UsageError: A model, precision, strategy or type that is not known.
    """
    choices = {
        "Model": (cells["Model"].lower(), SIZES), "Precision": (cells["Precision"], _PRECISIONS),
        "Sharding Strategy": (cells.get("Sharding Strategy"), _RESHARDS), "MP Mode": (cells.get("MP Mode"), _TYPES),
    }  # fmt: skip
    if unknown := [f"{name} {shown(value)}" for name, (value, known) in choices.items() if value not in known]:
        raise UsageError(f"{LLM_FOUNDRY}: no job is known with {', '.join(unknown)}")
    weights, gradients = _TYPES[cells["MP Mode"]]
    return RankJob(
        config=mpt_config(
            cells["Model"].lower(), int(cells["SeqLen (T)"]), int(cells["MicroBatchSize"]),
            recompute=cells["Activation Checkpointing"] == "True",
        ),
        accumulation=int(cells["GradAccum"]),
        parallel={
            "fsdp": int(cells["# GPUs"]), "reshard_after_forward": _RESHARDS[cells["Sharding Strategy"]],
            "param_dtype": weights, "reduce_dtype": gradients,
        },
    )  # fmt: skip


def ask_ranks(
    rows: Sequence[MeasuredTime], outside: np.ndarray, data: str | os.PathLike[str] | None, tally: Tally
) -> dict[int, Given]:
    """Return the time of each row's micro-step, by the place of the row.

    Args:
        rows: The measured steps.
        outside: Mask of those that are asked about.
        data: The data folder, whose column `origin` has the published cells.
        tally: Hears of each row.
    """
    import warehouse

    with contextlib.closing(warehouse.connect(data)) as connection:
        asked = connection.execute("SELECT run_id, origin FROM runs WHERE job_id = ?", [f"import-{LLM_FOUNDRY}"])
        cells_of = dict(asked.fetchall())
    answers = {}
    places = np.flatnonzero(outside).tolist()
    tally.add(len(places))
    for at in places:
        row = rows[at]
        answers[at] = Given(estimate=None, reason="no ranks are published of the row")
        if row.run_id in cells_of:
            answers[at] = _given(json.loads(cells_of[row.run_id]), row.device)
        tally.step()
    return answers


def _given(cells: Mapping[str, str], device: DeviceSpec) -> Given:
    try:
        return Given(estimate=rank_job_of(cells).micro_step_ms(device))
    except CommandError as error:
        return Given(estimate=None, reason=first_line(error))
