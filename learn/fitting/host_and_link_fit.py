"""Fit what surrounds kernels: how long a host takes for a launch, and what collectives reach on NVLink.

Start reading at `fitted_hosts` and at `fitted_links`. Launches are fitted to vTrain's steps under Megatron and to
Zeus' under eager PyTorch, and how far machines differ to the steps that Megatron's own tests take on each of them;
the formula is `featurize.timing.times.host_ms`. Links are fitted to measured all-reduces and judged on GPU models and
counts left out; the formula is `featurize.timing.collectives.collective_s`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from conf.errors import UsageError
from featurize.configs.step_features import DTYPE_BYTES
from featurize.device.device_spec import DeviceSpec
from featurize.job.layout import Parallel
from featurize.job.training_settings import EAGER, MEGATRON, Training
from featurize.timing.calls import Calls, kernel_calls
from featurize.timing.collectives import ALL_REDUCE, LinkConstants, collective_s, fabric_of_axis, packaged_links
from featurize.timing.step_time import LearnedEfficiencies, overlapped, timed_kernels
from featurize.timing.times import HostTime, host_ms
from learn.estimators.kernel_fitting import held_out_by, judged_by_splits
from learn.fitting.kernel_formulas import score_of
from learn.fitting.kernel_rows import RowLeftOut, described, queried, read_each
from learn.fitting.power_and_activity_fit import SETTINGS, MeasuredPower
from learn.fitting.published_jobs import megatron_settings, megatron_step
from learn.judging.scores import RowScores
from warehouse.exchange.published_kernels import OPERATOR

# Left out together; ms of the kernels, of the host at a factor of 0 and of 1, and measured ms of a step.
Times = tuple[str, float, float, float, float]

_MOST = 12  # steps of vTrain's that are traced, each with both kinds of layers
_LEAST = 4
_FACTORS = np.geomspace(0.5, 60.0, 193)
# Replicated, or split within layers, few micro-batches, and so little work in each that hosts are the slower ones.
_DRAWN = (
    "SELECT origin, device_name, step_time_ms FROM runs WHERE job_id = 'import-vtrain' AND status = 'ok' "
    "AND '1' IN (json_extract_string(origin, '$.tp'), json_extract_string(origin, '$.dp')) "
    "AND CAST(json_extract_string(origin, '$.pp') AS INTEGER) = 1 "
    "AND CAST(json_extract_string(origin, '$.gpus') AS INTEGER) <= 8 "
    "AND CAST(json_extract_string(origin, '$.micro_batch') AS INTEGER) = 1 "
    "AND CAST(json_extract_string(origin, '$.micro_batches') AS DOUBLE) <= 4 ORDER BY md5(run_id) LIMIT ?"
)
# Tests of small models, which hosts bound; the second run of a test is on the same kind of machine.
_TESTED = (
    "SELECT json_extract_string(origin, '$.test_case'), avg(ln(step_time_ms)) FROM runs "
    "WHERE job_id = 'import-megatron' AND status = 'ok' "
    "AND CAST(json_extract_string(origin, '$.hidden') AS INTEGER) <= 1024 "
    "GROUP BY json_extract_string(origin, '$.test_case'), device_name, "
    "replace(json_extract_string(origin, '$.environment'), ' second run', '')"
)


def fitted_hosts(
    data: str | os.PathLike[str] | None,
    learned: LearnedEfficiencies,
    jobs: Sequence[MeasuredPower],
    hosts: Mapping[str, HostTime],
) -> tuple[dict[str, HostTime], list[RowScores], dict[str, int]]:
    """Return the hosts' constants, how far steps are off with their width or GPU model left out, and what was left out.

    Args:
        data: The data folder.
        learned: The efficiencies of kernels.
        jobs: Zeus', of which the smallest batches wait for the host.
        hosts: The packaged constants, which stay where the folder has no rows.
    """
    fitted, scores = dict(hosts), []
    machines = _machines(data)
    if machines is not None:
        fitted = {name: replace(host, machines=machines) for name, host in fitted.items()}
    megatron, left_out = _megatron_times(data, learned)
    for name, split, rows, times in (
        (EAGER, "GPU models left out", "Zeus, smallest batches", _eager_times(jobs, learned)),
        (MEGATRON, "widths left out", "vTrain, one stage", megatron),
    ):
        if len(times) >= _LEAST:
            fitted[name] = replace(fitted[name], factor=_factor(times))
            others = {key: [one for one in times if one[0] != key] for key in {one[0] for one in times}}
            off = [_off(one, _factor(others[one[0]])) for one in times if others[one[0]]]
            if off:
                scores.append(score_of(split, rows, np.array(off)))
    return fitted, scores, left_out


def _machines(data: str | os.PathLike[str] | None) -> float | None:
    """Return the factor by which 9 of 10 machines take at most longer for a test than the mean one; None: too few."""
    rows = queried(data, _TESTED)
    of_test = [np.array([log_ms for test, log_ms in rows if test == name]) for name in {test for test, _ in rows}]
    degrees = sum(len(one) - 1 for one in of_test)
    if degrees < _LEAST:
        return None
    spread = math.sqrt(sum(float(np.sum((one - one.mean()) ** 2)) for one in of_test) / degrees)
    return round(math.exp(NormalDist().inv_cdf(0.9) * spread), 4)


def _eager_times(rows: Sequence[MeasuredPower], learned: LearnedEfficiencies) -> list[Times]:
    """Return what `_megatron_times` does, of the smallest batch of each of Zeus' jobs; first the GPU model."""
    timed: dict[tuple[str, str], Times] = {}
    for row in rows:
        if row.step_ms is not None:
            name = row.device.name
            times = _times(name, row.calls, row.device, EAGER, SETTINGS, learned, row.step_ms)
            timed[row.model, name] = min(times, timed.get((row.model, name), times), key=lambda one: one[1])
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
    busy_ms = float((calls.count * timed_kernels(calls, device, settings, learned).seconds).sum()) * 1e3
    at_0, at_1 = (host_ms(calls, device, framework, {framework: HostTime(factor=x, machines=1.0)}) for x in (0.0, 1.0))
    return label, busy_ms, at_0, at_1, measured_ms


def _megatron_times(
    data: str | os.PathLike[str] | None, learned: LearnedEfficiencies
) -> tuple[list[Times], dict[str, int]]:
    """Return width, ms of the kernels, of the host at a factor of 0 and of 1, and measured ms of vTrain's steps; and
    how many were left out for which reason."""

    def read(row: tuple[str, str, float]) -> list[Times]:
        origin, device_name, measured_ms = row
        device, cells = described(device_name), json.loads(origin)
        layers, width, heads, samples, split, ranks, batch = (
            int(cells[name]) for name in ("num_layers", "hidden", "heads", "micro_batch", "tp", "dp", "global_batch")
        )
        micro_batches = batch // (ranks * samples)
        times = []
        for fused in (True, False):  # which of the two an estimate is asked of is not known
            settings = megatron_settings(micro_batches, fused)
            trace = megatron_step(layers, width, heads, samples, micro_batches, split, fused, device)
            calls = kernel_calls(trace.operators)
            times.append(_times(str(width), calls, device, MEGATRON, settings, learned, measured_ms))
        return times

    steps, left_out = read_each(queried(data, _DRAWN, [_MOST]), read)
    return [one for times in steps for one in times], left_out


def _off(one: Times, factor: float) -> float:
    """Return the logarithm of estimated over measured time."""
    _, busy_ms, bare_ms, with_one_ms, measured_ms = one
    return math.log(overlapped(busy_ms, bare_ms + factor * (with_one_ms - bare_ms)) / measured_ms)


def _factor(times: Sequence[Times]) -> float:
    return round(float(min(_FACTORS, key=lambda factor: sum(abs(_off(one, factor)) for one in times))), 2)


_MOST_RANKS = 8  # ranks of a node
_FIRST_STEP = 0.3  # first step of each logarithm
_TOLERANCE = 0.02  # logarithm: rows nearer than this count little
_OF_BEGIN = 1e-4  # weight of staying where the fit begins: where the rows do not decide
_ITERATIONS = 300


@dataclass(frozen=True, kw_only=True)
class MeasuredAllReduce:
    """One measured all-reduce between GPUs of one node."""

    device: DeviceSpec
    ranks: int
    nbytes: int
    seconds: float

    def log_ratio(self, fitted: LinkConstants) -> float:
        """Return the logarithm of estimated over measured time."""
        fabric = fabric_of_axis(self.device, Parallel(ddp=self.ranks), self.ranks, 1, fitted=fitted)
        return math.log(collective_s(ALL_REDUCE, self.nbytes, fabric) / self.seconds)


def fitted_links(
    data: str | os.PathLike[str] | None,
) -> tuple[LinkConstants, list[RowScores], dict[str, int]]:
    """Return the constants that explain a data folder's all-reduces, their scores, and what was left out.

    Without rows that the constants hold for, they are the packaged ones.

    Args:
        data: The folder; None: the default one. Rows of `warehouse.ingest source=allreduce`.
    """
    rows, left_out = measured_all_reduces(data)
    if not rows:
        return packaged_links(), [], left_out
    devices = np.array([row.device.name for row in rows])
    splits = {
        "GPU models left out": held_out_by(devices),
        "numbers of GPUs left out": held_out_by(np.array([str(row.ranks) for row in rows])),
    }
    constants, ratios = judged_by_splits(
        lambda of: _fitted([rows[at] for at in np.flatnonzero(of)]), lambda learned: _log_ratios(rows, learned), splits
    )
    scores = [
        score_of(split, f"all-reduces, {device}", values[devices == device])
        for split, values in ratios.items()
        for device in np.unique(devices)
    ]
    return constants, [score for score in scores if score.count], left_out


def measured_all_reduces(data: str | os.PathLike[str] | None) -> tuple[list[MeasuredAllReduce], dict[str, int]]:
    """Return the all-reduces of the table `kernels` that the constants hold for, and what was left out.

    They are of up to eight GPUs of a node that NVLink joins, up to Ampere.

    Args:
        data: The folder; None: the default one.
    """
    measured = queried(
        data,
        "SELECT device_name, dims, dtype, duration_us FROM kernels "
        f"WHERE operator = '{OPERATOR}' AND source IN ('measured', 'imported') AND duration_us > 0 "
        "ORDER BY device_name, kernel_row",
    )
    return read_each(measured, lambda values: _measured(*values))


def _measured(device_name: str | None, dims: str, dtype: str, duration_us: float) -> MeasuredAllReduce:
    device, shape = described(device_name), json.loads(dims)
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
    return np.array([row.log_ratio(constants) for row in rows])


def _fitted(rows: Sequence[MeasuredAllReduce]) -> LinkConstants:
    from scipy.optimize import minimize

    packaged = dataclasses.asdict(packaged_links())

    def constants(logs: np.ndarray) -> LinkConstants:
        values = {name: value * math.exp(log) for (name, value), log in zip(packaged.items(), logs, strict=True)}
        return LinkConstants(**values | {"reached": min(values["reached"], 1.0)})

    def error(logs: np.ndarray) -> float:
        off = _log_ratios(rows, constants(logs))
        return float(np.sqrt(off**2 + _TOLERANCE**2).mean() + _OF_BEGIN * (logs**2).sum())

    begin = np.zeros(len(packaged))
    corners = np.vstack([begin, -_FIRST_STEP * np.eye(len(begin))])
    options = {"maxiter": _ITERATIONS, "initial_simplex": corners, "xatol": 1e-3, "fatol": 1e-5}
    best = constants(minimize(error, begin, method="Nelder-Mead", options=options).x)
    return LinkConstants(**{name: float(f"{value:.4g}") for name, value in dataclasses.asdict(best).items()})
