"""Fit what collectives reach on NVLink to measured all-reduces, and judge it on GPU models and counts left out.

Start reading at `fitted_links`. The formula is `featurize.timing.collectives.collective_s`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conf.errors import UsageError
from featurize.configs.opgraph import DTYPE_BYTES
from featurize.device.device_spec import DeviceSpec
from featurize.job.layout import Parallel
from featurize.timing.collectives import ALL_REDUCE, LinkConstants, collective_s, fabric_of_axis, packaged_links
from learn.estimators.kernel_fitter import judged_by_splits
from learn.estimators.kernel_fitting import held_out_by
from learn.fitting.kernel_judging import score_of
from learn.fitting.kernel_rows import RowLeftOut, described, queried, read_each
from learn.judging.scores import RowScores
from warehouse.exchange.published_kernels import OPERATOR

_MOST_RANKS = 8  # of a node
_FIRST_STEP = 0.3  # of each logarithm
_TOLERANCE = 0.02  # logarithm: rows nearer than this count little
_OF_BEGIN = 1e-4  # weight of staying where the fit begins: of what the rows do not tell
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
