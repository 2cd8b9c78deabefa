"""Fit how long a host takes for a launch: Megatron's to vTrain's steps, eager PyTorch's to SM activity.

Start reading at `fitted_hosts`. The formula is `featurize.kernel_model.host.host_ms`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from featurize.kernel_model.calls import kernel_calls
from featurize.kernel_model.host import HostTime, host_ms
from featurize.kernel_model.step_time import LearnedEfficiencies, overlapped, timed_kernels
from featurize.training_settings import EAGER, MEGATRON
from learn.kernels.activity_fit import ActivityFit, MeasuredActivity
from learn.kernels.judging import TimeScore, score_of
from learn.kernels.megatron_jobs import megatron_settings, megatron_step
from learn.kernels.rows import LEAST_ROWS, described, read_each

_MOST = 16  # steps of vTrain's that are traced
_LEAST = 8
_MOST_JOBS = 400  # of a family, whose activity is fitted anew for each factor
_FACTORS = np.geomspace(4.0, 40.0, 93)
_EAGER_FACTORS = np.arange(2.0, 9.0, 0.5)
# Replicated, or split within layers, few micro-batches, and so little work in each that hosts are the slower ones.
_DRAWN = (
    "SELECT origin, device_name, step_time_ms FROM runs WHERE job_id = 'import-vtrain' AND status = 'ok' "
    "AND '1' IN (json_extract_string(origin, '$.tp'), json_extract_string(origin, '$.dp')) "
    "AND CAST(json_extract_string(origin, '$.pp') AS INTEGER) = 1 "
    "AND CAST(json_extract_string(origin, '$.gpus') AS INTEGER) <= 8 "
    "AND CAST(json_extract_string(origin, '$.micro_batch') AS INTEGER) <= 2 "
    "AND CAST(json_extract_string(origin, '$.micro_batches') AS DOUBLE) <= 4 ORDER BY md5(run_id) LIMIT ?"
)


def fitted_hosts(
    data: str | os.PathLike[str] | None,
    learned: LearnedEfficiencies,
    jobs: Sequence[MeasuredActivity],
    hosts: Mapping[str, HostTime],
) -> tuple[dict[str, HostTime], list[TimeScore], dict[str, int]]:
    """Return the hosts' constants, how far vTrain's steps are off with their width left out, and what was left out.

    Args:
        data: The data folder.
        learned: The efficiencies of kernels.
        jobs: With measured SM activity; fewer than `LEAST_ROWS` leave eager PyTorch's constant as it is.
        hosts: The packaged constants, which stay where the folder has no rows.
    """
    fitted, scores = dict(hosts), []
    if len(jobs) >= LEAST_ROWS:
        fitted[EAGER] = replace(hosts[EAGER], factor=_eager_factor(jobs, learned))
    times, left_out = _megatron_times(data, learned)
    if len(times) >= _LEAST:
        fitted[MEGATRON] = replace(hosts[MEGATRON], factor=_factor(times))
        off = []
        for width in {one[0] for one in times}:
            others = [one for one in times if one[0] != width]
            if others:
                off += [_off(one, _factor(others)) for one in times if one[0] == width]
        scores.append(score_of("widths left out", "vTrain, one stage", np.array(off)))
    return fitted, scores, left_out


def _eager_factor(jobs: Sequence[MeasuredActivity], learned: LearnedEfficiencies) -> float:
    """Return the factor with which SM activity is least off, its own parameters fitted beside; families weigh alike."""
    of_family = {name: [job for job in jobs if job.family == name] for name in {job.family for job in jobs}}
    jobs = [job for alike in of_family.values() for job in alike[:: math.ceil(len(alike) / _MOST_JOBS)]]
    everything = np.ones(len(jobs), dtype=bool)

    def error(factor: float) -> float:
        fit = ActivityFit(jobs, learned, HostTime(factor=factor, machines=1.0))
        off = np.abs(fit.errors(*fit.fitted(everything))[0])
        return float(np.mean([np.mean(off[fit.family == family]) for family in np.unique(fit.family)]))

    return float(min(_EAGER_FACTORS, key=error))


def _megatron_times(
    data: str | os.PathLike[str] | None, learned: LearnedEfficiencies
) -> tuple[list[tuple[float, ...]], dict[str, int]]:
    """Return width, ms of the kernels, of the host at a factor of 0 and of 1, and measured ms of vTrain's steps; and
    how many were left out for which reason."""
    import warehouse

    with contextlib.closing(warehouse.connect(data)) as connection:
        rows = connection.execute(_DRAWN, [_MOST]).fetchall()

    def read(row: tuple[str, str, float]) -> tuple[float, ...]:
        origin, device_name, measured_ms = row
        device, cells = described(device_name), json.loads(origin)
        layers, width, heads, samples, split, ranks, batch = (
            int(cells[name]) for name in ("num_layers", "hidden", "heads", "micro_batch", "tp", "dp", "global_batch")
        )
        settings = megatron_settings(batch // (ranks * samples))
        trace = megatron_step(layers, width, heads, samples, settings.accumulation, split, device)
        calls = kernel_calls(trace.operators)
        busy_ms = float((calls.count * timed_kernels(calls, device, settings, learned).seconds).sum()) * 1e3
        at = [host_ms(calls, device, MEGATRON, {MEGATRON: HostTime(factor=x, machines=1.0)}) for x in (0.0, 1.0)]
        return width, busy_ms, *at, measured_ms

    return read_each(rows, read)


def _off(one: Sequence[float], factor: float) -> float:
    """Return the logarithm of estimated over measured time."""
    _, busy_ms, bare_ms, with_one_ms, measured_ms = one
    return math.log(overlapped(busy_ms, bare_ms + factor * (with_one_ms - bare_ms)) / measured_ms)


def _factor(times: Sequence[Sequence[float]]) -> float:
    return round(float(min(_FACTORS, key=lambda factor: sum(abs(_off(one, factor)) for one in times))), 2)
