"""Fit the power of kernels to measured jobs under several power limits, and judge it on held-out ones.

Start reading at `fitted_power`. The formula is `featurize.timing.power.kernel_power`, on torch tensors; the times
of the kernels are those that are known before.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import Training
from featurize.timing.calls import Calls
from featurize.timing.power import KernelLoad, PowerParameters, kernel_power, load_power
from featurize.timing.step_time import LearnedEfficiencies, timed_kernels
from learn.estimators.kernel_fitter import (
    Descent,
    Values,
    descended,
    judged_by_splits,
    of_rows,
    robust,
    row_of_kernels,
    weights_by,
)
from learn.estimators.kernel_fitting import held_out_by, overlapped_ms
from learn.fitting.kernel_rows import RowLeftOut, described, queried, read_each
from learn.fitting.zeus_jobs import JOBS, ZEUS, zeus_calls
from learn.judging.scores import RowScores, spread

# Where the fit begins: an SM without arithmetic, the pipes and the memory each draw a part of what the board may.
_BEGIN: Mapping[str, float] = {"sm": 0.3, "fp32": 1.0, "tensor": 1.0, "dram": 0.4, "exponent": 2.0, "feed": 0.5}
_OF_TIMES = 0.5  # weight of how much longer a job takes, beside its power
_TOLERANCE = 0.05  # relative: what is further off counts in proportion, not squared
_DESCENT = Descent(
    of_priors=2e-2,
    iterations=150,
    rate=0.05,
    last_rate=0.01,
    limits={**dict.fromkeys(("sm", "fp32", "tensor", "dram"), (0.0, 3.0)), "exponent": (1.0, 3.0), "feed": (0.05, 1.5)},
)
SETTINGS = Training(precision="tf32")  # of Zeus' jobs
_CELL = "CAST(json_extract_string(origin, '$.value') AS DOUBLE)"
# Job, limit in W, power in W, time of an epoch, ms of a step.
_MEASURED = (
    "SELECT device_name, json_extract_string(origin, '$.model'), json_extract_string(origin, '$.dataset'), batch_size, "
    "json_extract_string(origin, '$.optimizer'), CAST(json_extract_string(origin, '$.power_limit_w') AS DOUBLE), "
    f"last({_CELL} ORDER BY run_id) FILTER (power_w IS NOT NULL), "
    f"last({_CELL} ORDER BY run_id) FILTER (power_w IS NULL), "
    "last(step_time_ms ORDER BY run_id) FILTER (step_time_ms IS NOT NULL) "
    f"FROM runs WHERE source = 'imported' AND job_id = 'import-{ZEUS}' AND status = 'ok' GROUP BY ALL"
)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class MeasuredPower:
    """One job on one GPU model.

    Args:
        model: Left out together.
        device: The GPU model.
        calls: The kernels of a step.
        power_w: Limit in W -> mean power in W.
        times: Limit in W -> time of an epoch, in any unit.
        step_ms: Of a step at the highest limit; None where the steps of an epoch are not known.
    """

    model: str
    device: DeviceSpec
    calls: Calls
    power_w: Mapping[float, float]
    times: Mapping[float, float]
    step_ms: float | None


def fitted_power(
    rows: Sequence[MeasuredPower], learned: LearnedEfficiencies, progress: Progress
) -> tuple[dict[str, float], list[RowScores]]:
    """Return the section `power` of the file of parameters, and its scores.

    With fewer than two GPU models, the section is the packaged one.

    Args:
        rows: What `power_rows` returns.
        learned: The efficiencies that give the kernels' times.
        progress: Called before each fit with a text, the number done and their total.
    """
    if len({row.device.name for row in rows}) < 2:
        return dataclasses.asdict(load_power()), []
    return judged_power(rows, learned, progress)


def power_rows(data: str | os.PathLike[str] | None, progress: Progress) -> tuple[list[MeasuredPower], dict[str, int]]:
    """Return the jobs of a data folder with power by limit, and how many were left out for which reason.

    Jobs that wait for their input are not asked for.

    Args:
        data: The data folder; None: the default one.
        progress: Called before each trace with a text, the number done and their total.
    """
    jobs: dict[tuple, dict[float, tuple[float | None, ...]]] = defaultdict(dict)
    for *job, limit_w, power_w, time, step_ms in queried(data, _MEASURED):
        if (job[1], job[2]) in JOBS:
            jobs[tuple(job)][limit_w] = power_w, time, step_ms
    calls: dict[tuple, Calls] = {}

    def read(job: tuple[tuple, dict[float, tuple]]) -> MeasuredPower:
        (*alike, _), by_limit = job
        name, model, dataset, batch = key = tuple(alike)
        spec, both = described(name), sorted(limit for limit, cells in by_limit.items() if None not in cells[:2])
        if not both:
            raise RowLeftOut("jobs without both power and time at a limit")
        if key not in calls:
            calls[key] = zeus_calls(model, dataset, batch, spec)
        power_w, times, _ = ({limit: by_limit[limit][at] for limit in both} for at in range(3))
        return MeasuredPower(
            model=f"{model}/{dataset}",
            device=spec,
            calls=calls[key],
            power_w=power_w,
            times=times,
            step_ms=by_limit[both[-1]][2],
        )

    return read_each(sorted(jobs.items()), read, progress)


def judged_power(
    rows: Sequence[MeasuredPower], learned: LearnedEfficiencies, progress: Progress
) -> tuple[dict[str, float], list[RowScores]]:
    """Return the section fitted on all rows, and the scores of all and of left-out models and GPU models."""
    fit = _PowerFit(rows, learned)
    splits = {
        "GPU models left out": held_out_by(np.array([row.device.name for row in rows])),
        "models left out": held_out_by(np.array([row.model.partition("/")[0] for row in rows])),
    }
    section, errors = judged_by_splits(fit.fitted, fit.errors, splits, progress, "fitting power")
    return section, [score for split, off in errors.items() for score in _scores(split, off)]


class _PowerFit:
    """Rows made ready once, to be fitted with some of them left out. Axes: kernels x limits, rows x limits."""

    def __init__(self, rows: Sequence[MeasuredPower], learned: LearnedEfficiencies) -> None:
        limits = max(len(row.power_w) for row in rows)
        self._own_w = of_rows(row.device.power_limit_w for row in rows)
        self._idle_w = of_rows(row.device.idle_power_w for row in rows)
        caps, power, slower = (np.full((len(rows), limits), np.nan) for _ in range(3))
        for at, row in enumerate(rows):
            of_row = sorted(row.power_w, reverse=True)
            caps[at, : len(of_row)] = of_row
            power[at, : len(of_row)] = [row.power_w[limit] for limit in of_row]
            slower[at, : len(of_row)] = [row.times[limit] / row.times[of_row[0]] for limit in of_row]
        self._caps = torch.tensor(np.where(np.isnan(caps), caps[:, :1], caps))
        self._known = torch.tensor(np.isfinite(power))
        self._power, self._slower = (torch.tensor(np.nan_to_num(measured, nan=1.0)) for measured in (power, slower))
        self._kinds = np.array([f"{row.device.name} {row.model}" for row in rows])

        timed = [timed_kernels(row.calls, row.device, SETTINGS, learned) for row in rows]
        self._load = KernelLoad(
            **{
                name: torch.tensor(np.concatenate([getattr(one.load, name) for one in timed]))[:, None]
                for name in KernelLoad.__dataclass_fields__
            }
        )
        self._row = row_of_kernels(range(len(rows)), [row.calls for row in rows])
        self._busy_ms = torch.tensor(np.concatenate([one.seconds * one.calls.count for one in timed]))[:, None] * 1e3
        # What a launch takes the host is not published: the shortest step of a GPU's machine says at most how long.
        launch_ms: dict[str, float] = {}
        for row in rows:
            if row.step_ms is not None:
                least = row.step_ms / row.calls.launches
                launch_ms[row.device.name] = min(launch_ms.get(row.device.name, least), least)
        self._host_ms = of_rows(row.calls.launches * launch_ms.get(row.device.name, 0.0) for row in rows)[:, None]

    def fitted(self, of: np.ndarray) -> dict[str, float]:
        """Return the values that explain the rows of the mask `of`, (rows,). Every model on every GPU counts alike."""
        weights = weights_by(self._kinds, of, power=1.0)

        def losses(values: Values) -> torch.Tensor:
            power, slower = self._off(values)
            off = self._known * (robust(power, _TOLERANCE) + _OF_TIMES * robust(slower, _TOLERANCE))
            return off.sum(1) / (of_rows(weights) @ self._known.double()).sum()

        values = descended(_tensors(_BEGIN), losses, weights, _DESCENT)
        return {name: round(float(value), 4) for name, value in values.items()}

    def errors(self, section: Mapping[str, float]) -> np.ndarray:
        """Return the relative errors of power and of time, (rows, limits, 2), NaN where nothing was measured."""
        off = torch.stack([one.exp() - 1 for one in self._off(_tensors(section))], dim=2).numpy()
        return np.where(self._known.numpy()[:, :, None], off, np.nan)

    def _off(self, values: Values) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logarithms of estimated over measured power and relative time, (rows, limits)."""
        learned = PowerParameters(**values)
        idle_w, own_w = (column[self._row][:, None] for column in (self._idle_w, self._own_w))
        limits_w = torch.cat([self._own_w[:, None], self._caps], 1)[self._row]
        watts, factor = kernel_power(self._load, idle_w, own_w, limits_w, learned, torch)
        busy_ms = self._busy_ms * factor[:, 1:] / factor[:, :1]
        empty = torch.zeros_like(self._caps)
        of_row_ms = empty.index_add(0, self._row, busy_ms)
        above_idle_mj = empty.index_add(0, self._row, busy_ms * (watts[:, 1:] - idle_w))
        step_ms = overlapped_ms(of_row_ms, self._host_ms)
        power_w = self._idle_w[:, None] + above_idle_mj / step_ms
        return (power_w / self._power).log(), (step_ms / step_ms[:, :1] / self._slower).log()


def _tensors(values: Mapping[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def _scores(split: str, off: np.ndarray) -> list[RowScores]:
    """Return how far power, and how much longer a job takes than at the highest limit, are off, relative."""
    scores = []
    for limit, errors in (("the board's own", off[:, :1]), ("lower", off[:, 1:])):
        known = errors[:, :, 0][np.isfinite(errors[:, :, 0])]
        (power, power_p90), (slower, slower_p90) = (spread(errors[:, :, at]) for at in (0, 1))
        figures = {"power_median": power, "power_p90": power_p90}
        figures["power_bias"] = float(np.median(known)) if len(known) else math.nan
        figures |= {"slower_median": slower, "slower_p90": slower_p90}
        scores.append(RowScores(rows=limit, by=split, count=len(known), figures=figures))
    return scores
