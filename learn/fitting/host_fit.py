"""Fit how long a host takes for a launch: Megatron's to vTrain's steps, eager PyTorch's to Zeus'; and how far machines
differ, to the steps that Megatron's own tests take on each of them.

Start reading at `fitted_hosts`. The formula is `featurize.timing.host.host_ms`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import EAGER, MEGATRON, Training
from featurize.timing.calls import Calls, kernel_calls
from featurize.timing.host import HostTime, host_ms
from featurize.timing.step_time import LearnedEfficiencies, overlapped, timed_kernels
from learn.fitting.kernel_judging import score_of
from learn.fitting.kernel_rows import described, queried, read_each
from learn.fitting.megatron_jobs import megatron_settings, megatron_step
from learn.fitting.power_fit import SETTINGS, MeasuredPower
from learn.judging.scores import RowScores

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
