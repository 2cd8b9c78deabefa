"""Fit the constants of a step beside its kernels' times, and judge them on held-out rows: power under several limits,
activity and occupancy of SMs, a host's time for a launch, bandwidth of collectives on NVLink.

Start reading at `fit_power`, `ActivityFit.fitted`, `fit_hosts` and `fit_links`. The formulas are those of
`featurize.timing.activity` (`kernel_power`, `kernel_activity`), `featurize.timing.kernels.host_ms` and
`featurize.timing.collectives.collective_s`. Launches are fitted to vTrain's steps under Megatron and to Zeus' steps
under eager PyTorch; the spread of machines is fitted to Megatron's own tests.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from conf.errors import UsageError
from featurize.configs.step_features import DTYPE_BYTES
from featurize.device.device_spec import DeviceSpec
from featurize.job.layout import Parallel
from featurize.job.training_settings import EAGER, MEGATRON, Training
from featurize.timing.activity import (
    CLASS_VALUES,
    CLASSES,
    STEP_VALUES,
    ActivityParameters,
    KernelLoad,
    Occupied,
    PowerParameters,
    kernel_activity,
    kernel_power,
    load_power,
    occupied_on,
)
from featurize.timing.collectives import ALL_REDUCE, LinkConstants, collective_s, fabric_of_axis, packaged_links
from featurize.timing.kernels import Calls, HostTime, call_seconds, host_ms, kernel_calls, kernels_on
from featurize.timing.simulation import LearnedEfficiencies, overlap_times, timed_kernels
from learn.fitting.kernel_fit import (
    Descent,
    MeasuredActivity,
    Progress,
    RowLeftOut,
    Values,
    descend,
    describe_gpu,
    join_columns,
    of_rows,
    overlapped_ms,
    query_rows,
    read_each,
    robust,
    row_of_kernels,
    weights_by,
)
from learn.fitting.kernel_formulas import score_of
from learn.fitting.published_jobs import JOBS, ZEUS, megatron_settings, megatron_step, zeus_calls
from learn.judging.evaluate import held_out_by, judged_by_splits
from learn.judging.scores import RowScores, scores_of_errors
from warehouse.exchange.published_tables import OPERATOR

# Start of the fit: an SM without arithmetic, each pipe and the memory draw a part of the board's power.
_BEGIN: Mapping[str, float] = {"sm": 0.3, "fp32": 1.0, "tensor": 1.0, "dram": 0.4, "exponent": 2.0, "feed": 0.5}
_OF_TIMES = 0.5  # weight of a job's slowdown beside its power
_TOLERANCE = 0.05  # relative; larger deviations count in proportion, not squared
_DESCENT = Descent(
    of_priors=2e-2,
    iterations=150,
    rate=0.05,
    last_rate=0.01,
    limits={**dict.fromkeys(("sm", "fp32", "tensor", "dram"), (0.0, 3.0)), "exponent": (1.0, 3.0), "feed": (0.05, 1.5)},
)
SETTINGS = Training(precision="tf32")  # settings of Zeus' jobs
_CELL = "CAST(json_extract_string(origin, '$.value') AS DOUBLE)"
# Job; limits in W at which both power and time are known, ascending, or NULL; by limit the power in W, the time of an
# epoch, and the ms of a step.
_MEASURED = (
    "WITH limits AS (SELECT device_name, json_extract_string(origin, '$.model') AS model, "
    "json_extract_string(origin, '$.dataset') AS dataset, batch_size, "
    "json_extract_string(origin, '$.optimizer') AS optimizer, "
    "CAST(json_extract_string(origin, '$.power_limit_w') AS DOUBLE) AS limit_w, "
    f"last({_CELL} ORDER BY run_id) FILTER (power_w IS NOT NULL) AS watts, "
    f"last({_CELL} ORDER BY run_id) FILTER (power_w IS NULL) AS epoch, "
    "last(step_time_ms ORDER BY run_id) FILTER (step_time_ms IS NOT NULL) AS step_ms, "
    "watts IS NOT NULL AND epoch IS NOT NULL AS known "
    f"FROM runs WHERE source = 'imported' AND job_id = 'import-{ZEUS}' AND status = 'ok' GROUP BY ALL) "
    "SELECT device_name, model, dataset, batch_size, list(limit_w ORDER BY limit_w) FILTER (known), "
    "list(watts ORDER BY limit_w) FILTER (known), list(epoch ORDER BY limit_w) FILTER (known), "
    "list(step_ms ORDER BY limit_w) FILTER (known) "
    "FROM limits GROUP BY device_name, model, dataset, batch_size, optimizer "
    "ORDER BY device_name, model, dataset, batch_size, optimizer"
)


@dataclass(frozen=True, kw_only=True)
class MeasuredPower:
    """One job on one GPU model.

    Args:
        model: Model; its rows are left out together.
        device: The GPU model.
        calls: The kernels of a step.
        power_w: Limit in W -> mean power in W.
        times: Limit in W -> time of an epoch, in any unit.
        step_ms: Time of a step at the highest limit; None where the steps of an epoch are not known.
    """

    model: str
    device: DeviceSpec
    calls: Calls
    power_w: Mapping[float, float]
    times: Mapping[float, float]
    step_ms: float | None


def fit_power(
    rows: Sequence[MeasuredPower], learned: LearnedEfficiencies, progress: Progress
) -> tuple[dict[str, float], list[RowScores]]:
    """Return the section `power` of the file of parameters, fitted on all rows, and the scores of all rows and of
    left-out models and GPU models. With fewer than two GPU models, the section is the packaged one.

    Args:
        rows: Result of `power_rows`.
        learned: The efficiencies behind the kernels' times.
        progress: Called before each fit with a text, the number of completed fits and their total.
    """
    devices = np.array([row.device.name for row in rows])
    if len(np.unique(devices)) < 2:
        return asdict(load_power()), []
    fit = _PowerFit(rows, learned)
    splits = {
        "GPU models left out": held_out_by(devices),
        "models left out": held_out_by(np.array([row.model.partition("/")[0] for row in rows])),
    }
    section, errors = judged_by_splits(fit.fitted, fit.errors, splits, progress, "fitting power")
    return section, [score for split, off in errors.items() for score in _scores(split, off)]


def power_rows(data: str | os.PathLike[str] | None, progress: Progress) -> tuple[list[MeasuredPower], dict[str, int]]:
    """Return the jobs of a data folder with power by limit, and the number of jobs left out by reason.

    Jobs that wait for their input are not read.

    Args:
        data: The data folder; None: the default one.
        progress: Called before each trace with a text, the number of completed traces and their total.
    """
    jobs = [job for job in query_rows(data, _MEASURED) if (job[1], job[2]) in JOBS]
    calls: dict[tuple[Any, ...], Calls] = {}

    def read(job: tuple[Any, ...]) -> MeasuredPower:
        name, model, dataset, batch, limits, power_w, times, step_ms = job
        spec, key = describe_gpu(name), job[:4]
        if limits is None:
            raise RowLeftOut("jobs without both power and time at a limit")
        if key not in calls:
            calls[key] = zeus_calls(model, dataset, batch, spec)
        return MeasuredPower(
            model=f"{model}/{dataset}",
            device=spec,
            calls=calls[key],
            power_w=dict(zip(limits, power_w, strict=True)),
            times=dict(zip(limits, times, strict=True)),
            step_ms=step_ms[-1],
        )

    return read_each(jobs, read, progress)


class _PowerFit:
    """Rows prepared once, and fitted with some of them left out. Axes: kernels x limits, rows x limits."""

    def __init__(self, rows: Sequence[MeasuredPower], learned: LearnedEfficiencies) -> None:
        limits = max(len(row.power_w) for row in rows)
        self._own_w = of_rows(row.device.power_limit_w for row in rows)
        self._idle_w = of_rows(row.device.idle_power_w for row in rows)
        caps, power, slower = (np.full((len(rows), limits), np.nan) for _ in range(3))
        for place, row in enumerate(rows):
            of_row = sorted(row.power_w, reverse=True)
            caps[place, : len(of_row)] = of_row
            power[place, : len(of_row)] = [row.power_w[limit] for limit in of_row]
            slower[place, : len(of_row)] = [row.times[limit] / row.times[of_row[0]] for limit in of_row]
        self._caps = torch.tensor(np.where(np.isnan(caps), caps[:, :1], caps))
        self._known = torch.tensor(np.isfinite(power))
        self._power, self._slower = (torch.tensor(np.nan_to_num(measured, nan=1.0)) for measured in (power, slower))
        self._kinds = np.array([f"{row.device.name} {row.model}" for row in rows])

        timed = [timed_kernels(row.calls, (row.device,), SETTINGS, learned) for row in rows]
        self._load = KernelLoad(
            **{
                name: torch.tensor(np.concatenate([getattr(timed_row.load, name)[0] for timed_row in timed]))[:, None]
                for name in KernelLoad.__dataclass_fields__
            }
        )
        self._row = row_of_kernels(range(len(rows)), [row.calls for row in rows])
        self._busy_ms = (
            torch.tensor(np.concatenate([timed_row.seconds[0] * timed_row.calls.count for timed_row in timed]))[:, None]
            * 1e3
        )
        # The host's time for a launch is not published; the shortest step on a GPU's machine is its upper limit.
        launch_ms: dict[str, float] = {}
        for row in rows:
            if row.step_ms is not None:
                least = row.step_ms / row.calls.launches
                launch_ms[row.device.name] = min(launch_ms.get(row.device.name, least), least)
        self._host_ms = of_rows(row.calls.launches * launch_ms.get(row.device.name, 0.0) for row in rows)[:, None]

    def fitted(self, of: np.ndarray) -> dict[str, float]:
        """Return the values that explain the rows of the mask `of`, (rows,). Every model on every GPU has equal
        weight."""
        weights = weights_by(self._kinds, of, power=1.0)

        def losses(values: Values) -> torch.Tensor:
            power, slower = self._off(values)
            off = self._known * (robust(power, _TOLERANCE) + _OF_TIMES * robust(slower, _TOLERANCE))
            return off.sum(1) / (of_rows(weights) @ self._known.double()).sum()

        values = descend(_tensors(_BEGIN), losses, weights, _DESCENT)
        return {name: round(float(value), 4) for name, value in values.items()}

    def errors(self, section: Mapping[str, float]) -> np.ndarray:
        """Return the relative errors of power and time, (rows, limits, 2), NaN where nothing was measured."""
        off = torch.stack([ratio.exp() - 1 for ratio in self._off(_tensors(section))], dim=2).numpy()
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


def _scores(split: str, off: np.ndarray) -> Iterator[RowScores]:
    """Yield the relative errors of power, and of a job's time relative to the highest limit."""
    for limit, errors in (("the board's own", off[:, :1]), ("lower", off[:, 1:])):
        known = errors[np.isfinite(errors[:, :, 0])]
        power, slower = known.T
        bias = float(np.median(power)) if len(power) else math.nan
        yield scores_of_errors(limit, split, {"power": power, "slower": slower}, power_bias=bias)


_TRAINING_SHARE = "training_share"  # share of training in runs whose means include the set-up
_BEGIN_OF_ACTIVITY = {"wave": 1.0, "stream_wave": 1.0, "stream_blocks": 0.0, "gap": 0.3, _TRAINING_SHARE: 0.95}
_SMACT_TOLERANCE, _SMOCC_TOLERANCE = 0.03, 0.015  # larger deviations count in proportion, not squared
_MEANS = ("smact", "smocc")
_OF_SMOCC = 2.0  # weight of occupancy beside activity
_DESCENT_OF_ACTIVITY = Descent(
    of_priors=2e-4,
    iterations=400,
    rate=0.03,
    last_rate=0.005,
    limits={"wave": (0.0, 3.0), "stream_wave": (0.0, 3.0), "gap": (0.0, 1.0), _TRAINING_SHARE: (0.85, 1.0)},
)


class ActivityFit:
    """Rows prepared once, and fitted with some of them left out.

    Args:
        rows: The measured jobs.
        learned: The efficiencies behind the kernels' times.
        eager: Constants of the host; None: the packaged ones.
    """

    def __init__(
        self, rows: Sequence[MeasuredActivity], learned: LearnedEfficiencies, eager: HostTime | None = None
    ) -> None:
        hosts = None if eager is None else {EAGER: eager}
        self.rows = rows
        self.family = np.array([row.family for row in rows])
        self._latency_s = learned.latency_s
        parts: list[Occupied] = []
        seconds, steps_s = [], []
        for row in rows:
            kernels = kernels_on(
                row.calls,
                row.device,
                learned.parameters.names,
                channels_last=row.channels_last,
                searched=row.searched,
            )
            seconds.append(call_seconds(kernels, learned.parameters))
            busy_ms = float((row.calls.count * seconds[-1]).sum()) * 1e3
            steps_s.append((overlap_times(busy_ms, host_ms(row.calls, row.device, EAGER, hosts)) + row.input_ms) * 1e-3)
            parts.append(occupied_on(row.calls, kernels, row.device))
        self._occupied = join_columns(parts).map_columns(torch.as_tensor)
        self._seconds = torch.tensor(np.concatenate(seconds))
        self._count = torch.tensor(np.concatenate([row.calls.count for row in rows]))
        self._row = row_of_kernels(range(len(rows)), [row.calls for row in rows])
        self._step_s = of_rows(steps_s)
        self._whole_run = of_rows(row.whole_run for row in rows)
        self._smact, self._smocc = of_rows(row.smact for row in rows), of_rows(row.smocc for row in rows)

    def fitted(
        self, of: np.ndarray, *, iterations: int = _DESCENT_OF_ACTIVITY.iterations
    ) -> tuple[ActivityParameters, float]:
        """Return the parameters that explain the rows of the mask `of`, (rows,), and the share of training in a whole
        run. Every family has the same weight."""

        def losses(values: Values) -> torch.Tensor:
            smact, smocc = self._ratios(_parameters(values, lambda value: value), values[_TRAINING_SHARE])
            off = robust(smact - self._smact, _SMACT_TOLERANCE)
            return off + _OF_SMOCC * robust(smocc - self._smocc, _SMOCC_TOLERANCE)

        begin = {
            "most_warps": torch.log(of_rows(unit_class.most_warps for unit_class in CLASSES.values())),
            "block_warps": torch.zeros(len(CLASSES), dtype=torch.float64),
            **_tensors(_BEGIN_OF_ACTIVITY),
        }
        weights = weights_by(self.family, of, power=1.0)
        values = descend(begin, losses, weights, replace(_DESCENT_OF_ACTIVITY, iterations=iterations))
        return _parameters(values, np.asarray), float(values[_TRAINING_SHARE])

    def errors(self, learned: ActivityParameters, training_share: float) -> np.ndarray:
        """Return estimated minus measured SM activity and occupancy of each row, (rows, 2)."""
        of_torch = _parameters({**learned.by_class, **learned.single}, torch.as_tensor)
        smact, smocc = (ratio.clip(max=1.0) for ratio in self._ratios(of_torch, training_share))
        return torch.stack([smact - self._smact, smocc - self._smocc], dim=1).numpy()

    def _ratios(
        self, learned: ActivityParameters, training_share: torch.Tensor | float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        share, occupancy = kernel_activity(self._occupied, learned, torch)
        active = self._count * (self._seconds - learned.single["gap"] * self._latency_s) * share
        zeros = torch.zeros(len(self.rows), dtype=torch.float64)
        shown = (1 - self._whole_run * (1 - training_share)) / self._step_s
        return (
            zeros.index_add(0, self._row, active) * shown,
            zeros.index_add(0, self._row, active * occupancy) * shown,
        )


def judge_activity(fit: ActivityFit, folds: int, progress: Progress) -> tuple[list[RowScores], ActivityParameters]:
    """Return the scores of each family, and the parameters fitted on all rows.

    Args:
        fit: The rows; each family is judged on fitted rows, and on groups that were left out.
        folds: Parts of the groups that are left out in turn.
        progress: Called before each fit with a text, the number of fits done and their total.
    """
    learned, errors = judged_by_splits(
        fit.fitted,
        lambda learned: fit.errors(*learned),
        {"groups left out": held_out_by(np.array([row.group for row in fit.rows]), folds)},
        progress,
        "fitting activity",
    )
    scores = [
        scores_of_errors(
            str(family), split, {name: off[fit.family == family, column] for column, name in enumerate(_MEANS)}
        )
        for family in np.unique(fit.family)
        for split, off in errors.items()
    ]
    return scores, learned[0]


def _parameters(values: Values, convert: Callable[..., Any]) -> ActivityParameters:
    return ActivityParameters(
        by_class={name: convert(values[name]) for name in CLASS_VALUES},
        single={name: convert(values[name]) for name in STEP_VALUES},
    )


# Label to leave out; ms of the kernels, of the host at a factor of 0 and of 1, and measured ms of a step.
Times = tuple[str, float, float, float, float]

_MOST = 12  # vTrain's steps to trace, each with both kinds of layers
_LEAST = 4
_FACTORS = np.geomspace(0.5, 60.0, 193)
# Data-parallel or tensor-parallel jobs of few micro-batches with so little work that the host is the bottleneck.
_DRAWN = (
    "SELECT origin, device_name, step_time_ms FROM runs WHERE job_id = 'import-vtrain' AND status = 'ok' "
    "AND '1' IN (json_extract_string(origin, '$.tp'), json_extract_string(origin, '$.dp')) "
    "AND CAST(json_extract_string(origin, '$.pp') AS INTEGER) = 1 "
    "AND CAST(json_extract_string(origin, '$.gpus') AS INTEGER) <= 8 "
    "AND CAST(json_extract_string(origin, '$.micro_batch') AS INTEGER) = 1 "
    "AND CAST(json_extract_string(origin, '$.micro_batches') AS DOUBLE) <= 4 ORDER BY md5(run_id) LIMIT ?"
)
# Degrees of freedom and sum of squared deviations, over all tests, of the logarithms of a test's times on different
# machines. The tests are of small models, which hosts bound; the second run of a test is on the same kind of machine.
_TESTED = (
    "SELECT coalesce(sum(machines - 1), 0), sum(machines * variance) FROM "
    "(SELECT count(log_ms) AS machines, var_pop(log_ms) AS variance FROM "
    "(SELECT json_extract_string(origin, '$.test_case') AS test_case, avg(ln(step_time_ms)) AS log_ms FROM runs "
    "WHERE job_id = 'import-megatron' AND status = 'ok' "
    "AND CAST(json_extract_string(origin, '$.hidden') AS INTEGER) <= 1024 "
    "GROUP BY json_extract_string(origin, '$.test_case'), device_name, "
    "replace(json_extract_string(origin, '$.environment'), ' second run', '')) GROUP BY test_case)"
)


def fit_hosts(
    data: str | os.PathLike[str] | None,
    learned: LearnedEfficiencies,
    jobs: Sequence[MeasuredPower],
    hosts: Mapping[str, HostTime],
) -> tuple[dict[str, HostTime], list[RowScores], dict[str, int]]:
    """Return the hosts' constants, the errors of steps with their width or GPU model left out, and the skipped rows.

    Args:
        data: The data folder.
        learned: The efficiencies of kernels.
        jobs: Zeus' jobs; the steps of the smallest batches wait for the host.
        hosts: The packaged constants, returned where the folder has no rows.
    """
    fitted, scores = dict(hosts), []
    ((degrees, squares),) = query_rows(data, _TESTED)
    if degrees >= _LEAST:
        # The factor that 9 of 10 machines stay below, relative to the mean one.
        machines = round(math.exp(NormalDist().inv_cdf(0.9) * math.sqrt(squares / degrees)), 4)
        fitted = {name: replace(host, machines=machines) for name, host in fitted.items()}
    megatron, left_out = _megatron_times(data, learned)
    for name, split, rows, times in (
        (EAGER, "GPU models left out", "Zeus, smallest batches", _eager_times(jobs, learned)),
        (MEGATRON, "widths left out", "vTrain, one stage", megatron),
    ):
        if len(times) >= _LEAST:
            factor, errors = _judged_factor(times, split)
            fitted[name] = replace(fitted[name], factor=factor)
            scores.append(score_of(split, rows, errors[split]))
    return fitted, [score for score in scores if score.count], left_out


def _eager_times(rows: Sequence[MeasuredPower], learned: LearnedEfficiencies) -> list[Times]:
    """Return the entries of `_megatron_times` for the smallest batch of each of Zeus' jobs, labelled by GPU model."""
    timed: dict[tuple[str, str], Times] = {}
    for row in rows:
        if row.step_ms is not None:
            name = row.device.name
            times = _times(name, row.calls, row.device, EAGER, SETTINGS, learned, row.step_ms)
            timed[row.model, name] = min(times, timed.get((row.model, name), times), key=lambda entry: entry[1])
    return list(timed.values())


def _times(
    label: str,
    calls: Calls,
    device: DeviceSpec,
    framework: str,
    settings: Training,
    learned: LearnedEfficiencies,
    measured_ms: float,
) -> Times:
    busy_ms = float((calls.count * timed_kernels(calls, (device,), settings, learned).seconds).sum()) * 1e3
    at_0, at_1 = (host_ms(calls, device, framework, {framework: HostTime(factor=x, machines=1.0)}) for x in (0.0, 1.0))
    return label, busy_ms, at_0, at_1, measured_ms


def _megatron_times(
    data: str | os.PathLike[str] | None, learned: LearnedEfficiencies
) -> tuple[list[Times], dict[str, int]]:
    """Return width, ms of the kernels, of the host at a factor of 0 and of 1, and measured ms of vTrain's steps; and
    the number of rows left out by reason."""

    def read(row: tuple[str, str, float]) -> list[Times]:
        origin, device_name, measured_ms = row
        device, cells = describe_gpu(device_name), json.loads(origin)
        layers, width, heads, samples, split, ranks, batch = (
            int(cells[name]) for name in ("num_layers", "hidden", "heads", "micro_batch", "tp", "dp", "global_batch")
        )
        micro_batches = batch // (ranks * samples)
        times = []
        for fused in (True, False):  # an estimate may be asked for either
            settings = megatron_settings(micro_batches, fused)
            trace = megatron_step(layers, width, heads, samples, micro_batches, split, fused, device)
            calls = kernel_calls(trace.operators)
            times.append(_times(str(width), calls, device, MEGATRON, settings, learned, measured_ms))
        return times

    steps, left_out = read_each(query_rows(data, _DRAWN, [_MOST]), read)
    return [step for times in steps for step in times], left_out


def _off(times: Times, factor: float) -> float:
    """Return the logarithm of estimated over measured time."""
    _, busy_ms, bare_ms, with_one_ms, measured_ms = times
    return math.log(overlap_times(busy_ms, bare_ms + factor * (with_one_ms - bare_ms)) / measured_ms)


def _judged_factor(times: Sequence[Times], split: str) -> tuple[float, dict[str, np.ndarray]]:
    """Return a host's factor, and the logarithms of `_off` by split, each label left out in turn."""
    return judged_by_splits(
        lambda of: _host_factor(list(itertools.compress(times, of))),
        lambda factor: np.array([_off(entry, factor) for entry in times]),
        {split: held_out_by(np.array([entry[0] for entry in times]))},
    )


def _host_factor(times: Sequence[Times]) -> float:
    return round(float(min(_FACTORS, key=lambda factor: sum(abs(_off(entry, factor)) for entry in times))), 2)


_REDUCED = (
    "SELECT device_name, dims, dtype, duration_us FROM kernels "
    f"WHERE operator = '{OPERATOR}' AND source IN ('measured', 'imported') AND duration_us > 0 "
    "ORDER BY device_name, kernel_row"
)
_MOST_RANKS = 8  # ranks of a node
_FIRST_STEP = 0.3  # first step of each logarithm
_CLOSE = 0.02  # logarithm: rows nearer than this count little
_OF_BEGIN = 1e-4  # weight of the start, for constants that the rows do not decide
_ITERATIONS = 300


@dataclass(frozen=True, kw_only=True)
class MeasuredAllReduce:
    """One measured all-reduce between GPUs of one node."""

    device: DeviceSpec
    ranks: int
    nbytes: int
    seconds: float


def fit_links(
    data: str | os.PathLike[str] | None,
) -> tuple[LinkConstants, list[RowScores], dict[str, int]]:
    """Return the constants that explain a data folder's all-reduces, their scores, and the skipped rows.

    Without rows that the constants apply to, they are the packaged ones.

    Args:
        data: The folder; None: the default one. Rows of `warehouse.ingest source=allreduce`.
    """
    rows, left_out = read_each(query_rows(data, _REDUCED), lambda values: _read_measured(*values))
    if not rows:
        return packaged_links(), [], left_out
    devices = np.array([row.device.name for row in rows])
    splits = {
        "GPU models left out": held_out_by(devices),
        "numbers of GPUs left out": held_out_by(np.array([str(row.ranks) for row in rows])),
    }
    constants, ratios = judged_by_splits(
        lambda of: _fit([rows[place] for place in np.flatnonzero(of)]),
        lambda learned: _log_ratios(rows, learned),
        splits,
    )
    scores = [
        score_of(split, f"all-reduces, {device}", values[devices == device])
        for split, values in ratios.items()
        for device in np.unique(devices)
    ]
    return constants, [score for score in scores if score.count], left_out


def _read_measured(device_name: str | None, dims: str, dtype: str, duration_us: float) -> MeasuredAllReduce:
    device, shape = describe_gpu(device_name), json.loads(dims)
    ranks = shape["arguments"]["ranks"]
    if ranks > _MOST_RANKS:
        raise RowLeftOut(f"all-reduces between more than {_MOST_RANKS} GPUs")
    try:
        fabric = fabric_of_axis(device, Parallel(ddp=ranks, gpus_per_node=_MOST_RANKS), ranks, 1)
    except UsageError as error:
        raise RowLeftOut(f"all-reduces on {device.name}: its description has no such node") from error
    if fabric.links != packaged_links():
        raise RowLeftOut(f"all-reduces on {device.name}: not over NVLink up to Ampere")
    return MeasuredAllReduce(
        device=device,
        ranks=ranks,
        nbytes=math.prod(shape["shapes"][0]) * DTYPE_BYTES[dtype],
        seconds=duration_us * 1e-6,
    )


def _log_ratios(rows: Sequence[MeasuredAllReduce], constants: LinkConstants) -> np.ndarray:
    """Return the logarithm of estimated over measured time of each row."""
    fabrics = [fabric_of_axis(row.device, Parallel(ddp=row.ranks), row.ranks, 1, fitted=constants) for row in rows]
    times_s = [collective_s(ALL_REDUCE, row.nbytes, fabric) for row, fabric in zip(rows, fabrics, strict=True)]
    return np.array([math.log(time_s / row.seconds) for row, time_s in zip(rows, times_s, strict=True)])


def _fit(rows: Sequence[MeasuredAllReduce]) -> LinkConstants:
    from scipy.optimize import minimize

    packaged = asdict(packaged_links())

    def constants(logs: np.ndarray) -> LinkConstants:
        values = {name: value * math.exp(log) for (name, value), log in zip(packaged.items(), logs, strict=True)}
        return LinkConstants(**values | {"reached": min(values["reached"], 1.0)})

    def error(logs: np.ndarray) -> float:
        off = _log_ratios(rows, constants(logs))
        return float(np.sqrt(off**2 + _CLOSE**2).mean() + _OF_BEGIN * (logs**2).sum())

    begin = np.zeros(len(packaged))
    corners = np.vstack([begin, -_FIRST_STEP * np.eye(len(begin))])
    options = {"maxiter": _ITERATIONS, "initial_simplex": corners, "xatol": 1e-3, "fatol": 1e-5}
    best = constants(minimize(error, begin, method="Nelder-Mead", options=options).x)
    return LinkConstants(**{name: float(f"{value:.4g}") for name, value in asdict(best).items()})
