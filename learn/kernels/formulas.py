"""Formulas for the time of kernels and steps: the kernel model, as it comes and fitted anew, and other people's.

Start reading at `FORMULAS`. `learn.kernels.judging` asks each for rows that it did not learn from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from featurize.kernel_model.step_time import load_efficiencies
from featurize.kernel_model.times import call_seconds, kernels_on
from learn.kernels.fitting import SHARDED, FittedTimes, TimeFit
from learn.kernels.peers import RooflineByKind, TilesAndWaves, WaveScaling


class Formula(Protocol):
    """A formula, made ready for the rows of a `TimeFit`."""

    def log_ratios(self, of: np.ndarray) -> np.ndarray:
        """Return the logarithm of estimated over measured time of every row, learned from the rows that `of` names.

        NaN where the formula has no answer. Rows outside `of` have no part in what is learned.
        """
        ...


class KernelModel:
    """The kernel model, its efficiencies fitted anew."""

    def __init__(self, fit: TimeFit) -> None:
        self.fit = fit

    def log_ratios(self, of: np.ndarray) -> np.ndarray:
        """As `Formula.log_ratios`."""
        return self.fit.log_ratios(self.fit.fitted(of))


class KernelModelAsItComes:
    """The kernel model with the efficiencies that come along. It learns nothing of the rows."""

    def __init__(self, fit: TimeFit) -> None:
        self.fit = fit

    def log_ratios(self, of: np.ndarray) -> np.ndarray:
        """As `Formula.log_ratios`; the same whatever `of` names."""
        learned = load_efficiencies()
        parameters = learned.parameters
        timing = FittedTimes(parameters=parameters, instrument_ms={}, leftover=dict.fromkeys(SHARDED, learned.sharded))
        estimated = []
        for row, host_ms in zip(self.fit.rows, self.fit.host_ms.tolist(), strict=True):
            kernels = kernels_on(
                row.calls, row.device, parameters.names, channels_last=row.channels_last, searched=row.searched
            )
            busy_ms = float((row.calls.count * call_seconds(kernels, parameters)).sum()) * 1e3
            estimated.append(timing.row_ms(row, busy_ms, host_ms))
        return np.log(np.array(estimated) / self.fit.measured_ms.numpy())


AS_IT_COMES = "trace"  # the estimator of that name gives the same figures
FORMULAS: Mapping[str, Callable[[TimeFit], Formula]] = {
    AS_IT_COMES: KernelModelAsItComes,
    "kernels": KernelModel,
    "roofline": RooflineByKind,
    "habitat": WaveScaling,
    "neusight": TilesAndWaves,
}
