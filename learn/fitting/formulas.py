"""Formulas for the time of kernels and steps: the kernel model, as it comes and fitted anew, and other people's.

Start reading at `Formula`, which each class keeps, then `FORMULAS`. Other people's are written from their papers; the
docstring says where one differs from it. `learn.fitting.kernel_judging` asks each for rows that it did not learn from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from featurize.timing.step_time import load_efficiencies
from learn.estimators.kernel_fitter import Descent, Values, descended, robust
from learn.estimators.kernel_fitting import SHARDED, TOLERANCE, FittedTimes, TimeFit, overlapped_ms
from learn.estimators.kernel_sizes import Instruments, sizes_of
from learn.peers.habitat import WaveScaling
from learn.peers.neusight import TilesAndWaves

_USUAL_SHARE = 0.6
_DESCENT = Descent(
    of_priors=1e-4,
    firmness={"instrument": 0.0},
    iterations=300,
    rate=0.03,
    last_rate=0.03,
    limits={"share": (-math.inf, 0.0)},
)


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
        leftover = dict.fromkeys(SHARDED, learned.sharded)
        return self.fit.log_ratios(FittedTimes(parameters=learned.parameters, instrument_ms={}, leftover=leftover))


class RooflineByKind:
    """The roofline with one learned share of it for each kind of kernel on each kind of units.

    A share is at most 1. Time of a step: the longer of GPU and host, as ours. A kind that no row holds has 0.6.
    """

    def __init__(self, fit: TimeFit) -> None:
        self.fit = fit
        sizes = sizes_of(fit.rows)
        busy_ms = np.zeros((len(fit.rows), sizes.kinds))
        np.add.at(busy_ms, (sizes.row, sizes.kind), sizes.count * sizes.roofline_s * 1e3)
        self.busy_ms = torch.tensor(busy_ms)
        self.instruments = Instruments(fit.rows)

    def log_ratios(self, of: np.ndarray) -> np.ndarray:
        """As `Formula.log_ratios`."""
        usual = torch.full((self.busy_ms.shape[1],), math.log(_USUAL_SHARE), dtype=torch.float64)
        begin = {"share": usual, "instrument": self.instruments.begin}

        def losses(values: Values) -> torch.Tensor:
            return robust(self._log_ratios(values), TOLERANCE)

        return self._log_ratios(descended(begin, losses, self.fit.row_weights(of), _DESCENT)).numpy()

    def _log_ratios(self, values: Values) -> torch.Tensor:
        busy_ms = self.busy_ms @ torch.exp(-values["share"])
        one_kernel_ms = busy_ms + torch.exp(values["instrument"])[self.instruments.operator]
        steps_ms = overlapped_ms(busy_ms, self.fit.host_ms)
        return torch.log(torch.where(self.fit.one_kernel, one_kernel_ms, steps_ms) / self.fit.measured_ms)


AS_IT_COMES = "trace"  # the estimator of that name gives the same figures
FORMULAS: Mapping[str, Callable[[TimeFit], Formula]] = {
    AS_IT_COMES: KernelModelAsItComes,
    "kernels": KernelModel,
    "roofline": RooflineByKind,
    "habitat": WaveScaling,
    "neusight": TilesAndWaves,
}
