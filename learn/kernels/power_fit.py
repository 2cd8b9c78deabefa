"""Fit the power of kernels to measured jobs under several power limits, and judge it on held-out ones.

Start reading at `fitted_power`. The formula is `featurize.kernel_model.power.kernel_power`, on torch tensors; the times
of the kernels are those that are known before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from featurize.device_spec import DeviceSpec
from featurize.kernel_model.calls import Calls
from featurize.kernel_model.power import KernelLoad, PowerParameters, kernel_power, load_power
from featurize.kernel_model.step_time import LearnedEfficiencies, timed_kernels
from featurize.training_settings import Training
from learn.kernels.columns import row_of_kernels
from learn.kernels.descent import Values, descended, robust
from learn.kernels.fitting import overlapped_ms
from learn.kernels.rows import RowLeftOut, described, read_each
from learn.kernels.zeus import JOBS, ZEUS, zeus_calls

# Where the fit begins: an SM without arithmetic, the pipes and the memory each draw a part of what the board may.
_BEGIN: Mapping[str, float] = {"sm": 0.3, "fp32": 1.0, "tensor": 1.0, "dram": 0.4, "exponent": 2.0, "feed": 0.5}
_LIMITS = {"sm": (0.0, 3.0), "fp32": (0.0, 3.0), "tensor": (0.0, 3.0), "dram": (0.0, 3.0), "exponent": (1.0, 3.0),
           "feed": (0.05, 1.5)}  # fmt: skip
_OF_TIMES = 0.5  # weight of how much longer a job takes, beside its power
_TOLERANCE = 0.05  # relative: what is further off counts in proportion, not squared
_OF_PRIORS = 2e-2
_ITERATIONS, _RATE, _LAST_RATE = 150, 0.05, 0.01
SETTINGS = Training(precision="tf32")  # of Zeus' jobs
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


@dataclass(frozen=True, kw_only=True)
class PowerScore:
    """How far power is off, relative.

    Args:
        split: What was left out.
        limit: Which limits are judged.
        count: Rows.
        power, slower: Median and 90th percentile; `slower`: how much longer a job takes than at the highest limit.
        bias: Median with its sign, of power.
    """

    split: str
    limit: str
    count: int
    power: tuple[float, float]
    slower: tuple[float, float]
    bias: float


def fitted_power(
    rows: Sequence[MeasuredPower], learned: LearnedEfficiencies, progress: Progress
) -> tuple[dict[str, float], list[PowerScore]]:
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
    import warehouse

    with contextlib.closing(warehouse.connect(data)) as connection:
        measured = connection.execute(
            "SELECT device_name, batch_size, origin, power_w, step_time_ms FROM runs "
            "WHERE source = 'imported' AND job_id = ? AND status = 'ok' ORDER BY run_id", [f"import-{ZEUS}"],
        ).fetchall()  # fmt: skip
    jobs: dict[tuple, tuple[dict, dict, dict]] = defaultdict(lambda: ({}, {}, {}))
    for device, batch, origin, power_w, step_ms in measured:
        cells = json.loads(origin)
        if (cells["model"], cells["dataset"]) in JOBS:
            power, times, steps = jobs[device, cells["model"], cells["dataset"], batch, cells["optimizer"]]
            limit = float(cells["power_limit_w"])
            (times if power_w is None else power)[limit] = float(cells["value"])
            if step_ms is not None:
                steps[limit] = step_ms
    calls: dict[tuple, Calls] = {}

    def read(job: tuple[tuple, tuple[dict, dict, dict]]) -> MeasuredPower:
        (*alike, _), (power, times, steps) = job
        name, model, dataset, batch = key = tuple(alike)
        spec, both = described(name), sorted(power.keys() & times.keys())
        if not both:
            raise RowLeftOut("jobs without both power and time at a limit")
        if key not in calls:
            calls[key] = zeus_calls(model, dataset, batch, spec)
        return MeasuredPower(
            model=f"{model}/{dataset}", device=spec, calls=calls[key], power_w={w: power[w] for w in both},
            times={w: times[w] for w in both}, step_ms=steps.get(both[-1]),
        )  # fmt: skip

    return read_each(sorted(jobs.items()), read, progress)


def judged_power(
    rows: Sequence[MeasuredPower], learned: LearnedEfficiencies, progress: Progress
) -> tuple[dict[str, float], list[PowerScore]]:
    """Return the section fitted on all rows, and the scores of all and of left-out models and GPU models."""
    models, devices = [np.array([getter(row) for row in rows]) for getter in (_model_of, lambda row: row.device.name)]
    splits = [("GPU models left out", devices), ("models left out", models)]
    fit = _PowerFit(rows, learned)
    total = 1 + sum(len(np.unique(names)) for _, names in splits)
    everything = np.ones(len(rows), dtype=bool)
    progress("fitting power", 0, total)
    section = fit.fitted(everything)
    errors = {"learned from": fit.errors(section)}
    done = 1
    for split, names in splits:
        left_out = np.full_like(errors["learned from"], np.nan)
        for name in np.unique(names):
            progress("fitting power", done, total)
            done += 1
            here = names == name
            if here.all():  # nothing is left to learn from
                continue
            left_out[:, here] = fit.errors(fit.fitted(~here))[:, here]
        errors[split] = left_out
    return section, [score for split, off in errors.items() for score in _scores(split, off, fit.own)]


class _PowerFit:
    """Rows made ready once, to be fitted with some of them left out. Axes: kernels x limits, rows x limits."""

    def __init__(self, rows: Sequence[MeasuredPower], learned: LearnedEfficiencies) -> None:
        limits = max(len(row.power_w) for row in rows)
        self._own_w = torch.tensor([row.device.power_limit_w for row in rows], dtype=torch.float64)
        self._idle_w = torch.tensor([row.device.idle_power_w for row in rows], dtype=torch.float64)
        caps, power, slower = (np.full((len(rows), limits), np.nan) for _ in range(3))
        for at, row in enumerate(rows):
            of_row = sorted(row.power_w, reverse=True)
            caps[at, : len(of_row)] = of_row
            power[at, : len(of_row)] = [row.power_w[limit] for limit in of_row]
            slower[at, : len(of_row)] = [row.times[limit] / row.times[of_row[0]] for limit in of_row]
        self._caps = torch.tensor(np.where(np.isnan(caps), caps[:, :1], caps))
        self._known = torch.tensor(np.isfinite(power))
        self._power, self._slower = (torch.tensor(np.nan_to_num(measured, nan=1.0)) for measured in (power, slower))
        self.own = np.arange(limits)[None, :] == np.zeros((len(rows), 1))
        kinds = np.array([f"{row.device.name} {row.model}" for row in rows])
        self._weight = torch.tensor([1 / (kinds == kind).sum() for kind in kinds])

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
        host_ms = [row.calls.launches * launch_ms.get(row.device.name, 0.0) for row in rows]
        self._host_ms = torch.tensor(host_ms, dtype=torch.float64)[:, None]

    def fitted(self, of: np.ndarray) -> dict[str, float]:
        """Return the values that explain the rows of the mask `of`, (rows,). Every model on every GPU counts alike."""
        begin = {name: torch.tensor(value, dtype=torch.float64) for name, value in _BEGIN.items()}
        weight = torch.where(torch.tensor(of), self._weight, 0.0)[:, None]
        weight = weight / (weight * self._known).sum()

        def error(values: Values) -> torch.Tensor:
            power, slower = self._off(values)
            return (weight * self._known * (robust(power, _TOLERANCE) + _OF_TIMES * robust(slower, _TOLERANCE))).sum()

        values = descended(
            begin, error, of_priors=_OF_PRIORS, iterations=_ITERATIONS, rate=_RATE, last_rate=_LAST_RATE, limits=_LIMITS
        )
        return {name: round(float(value), 4) for name, value in values.items()}

    def errors(self, section: Mapping[str, float]) -> np.ndarray:
        """Return the relative errors of power and of time, (2, rows, limits), NaN where nothing was measured."""
        power, slower = self._off({name: torch.tensor(value, dtype=torch.float64) for name, value in section.items()})
        off = torch.stack([power.exp() - 1, slower.exp() - 1]).numpy()
        return np.where(self._known.numpy(), off, np.nan)

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


def _scores(split: str, off: np.ndarray, own: np.ndarray) -> list[PowerScore]:
    scores = []
    for limit, here in (("the board's own", own), ("lower", ~own)):
        power, slower = (errors[here & np.isfinite(errors)] for errors in off)
        scores.append(
            PowerScore(
                split=split, limit=limit, count=len(power), power=_spread(power), slower=_spread(slower),
                bias=float(np.median(power)) if len(power) else float("nan"),
            )
        )  # fmt: skip
    return scores


def _spread(errors: np.ndarray) -> tuple[float, float]:
    size = np.abs(errors)
    return (float(np.median(size)), float(np.quantile(size, 0.9))) if len(size) else (float("nan"), float("nan"))


def _model_of(row: MeasuredPower) -> str:
    return row.model.partition("/")[0]
