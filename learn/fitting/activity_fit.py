"""Fit what kernels keep busy to measured SM activity and occupancy, and judge it on held-out jobs.

Start reading at `ActivityFit.fitted`. The formula is `featurize.timing.activity.kernel_activity`, on torch
tensors; the times of the kernels are those that are known before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from featurize.device.device_spec import DeviceSpec
from featurize.job.training_settings import EAGER
from featurize.timing.activity import (
    CLASS_VALUES,
    CLASSES,
    STEP_VALUES,
    ActivityParameters,
    Occupied,
    kernel_activity,
    occupied_on,
)
from featurize.timing.calls import Calls
from featurize.timing.host import HostTime, host_ms
from featurize.timing.step_time import LearnedEfficiencies, overlapped
from featurize.timing.times import call_seconds, kernels_on
from learn.estimators.kernel_fitter import (
    Descent,
    Values,
    descended,
    joined,
    judged_by_splits,
    of_rows,
    robust,
    row_of_kernels,
    weights_by,
)
from learn.estimators.kernel_fitting import held_out_by
from learn.judging.scores import RowScores, spread

_TRAINING_SHARE = "training_share"  # of the time over which others took means: their set-up is in it
_BEGIN = {"wave": 1.0, "stream_wave": 1.0, "stream_blocks": 0.0, "gap": 0.3, _TRAINING_SHARE: 0.95}
_SMACT_TOLERANCE, _SMOCC_TOLERANCE = 0.03, 0.015  # what is further off counts in proportion, not squared
_OF_SMOCC = 2.0  # weight of occupancy beside activity
_DESCENT = Descent(
    of_priors=2e-4,
    iterations=400,
    rate=0.03,
    last_rate=0.005,
    limits={"wave": (0.0, 3.0), "stream_wave": (0.0, 3.0), "gap": (0.0, 1.0), _TRAINING_SHARE: (0.85, 1.0)},
)


@dataclass(frozen=True, kw_only=True)
class MeasuredActivity:
    """One measured job.

    Args:
        family, group: Families count alike; near-copies of a group are left out together.
        device: The GPU model.
        calls: The kernels of a step.
        smact, smocc: Means over the run, in [0, 1].
        input_ms: What the input pipeline adds to a step.
        whole_run: The means are of the whole run, its set-up included, and not of steps alone.
        channels_last, searched: As in `kernels_on`.
    """

    family: str
    group: str
    device: DeviceSpec
    calls: Calls
    smact: float
    smocc: float
    input_ms: float
    whole_run: bool = False
    channels_last: bool = False
    searched: bool = False


class ActivityFit:
    """Rows made ready once, to be fitted with some of them left out.

    Args:
        rows: What was measured.
        learned: The efficiencies that give the kernels' times.
        eager: Of the host; None: the packaged constants.
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
            steps_s.append((overlapped(busy_ms, host_ms(row.calls, row.device, EAGER, hosts)) + row.input_ms) * 1e-3)
            parts.append(occupied_on(row.calls, kernels, row.device))
        self._occupied = joined(parts).converted(torch.as_tensor)
        self._seconds = torch.tensor(np.concatenate(seconds))
        self._count = torch.tensor(np.concatenate([row.calls.count for row in rows]))
        self._row = row_of_kernels(range(len(rows)), [row.calls for row in rows])
        self._step_s = of_rows(steps_s)
        self._whole_run = of_rows(row.whole_run for row in rows)
        self._smact, self._smocc = of_rows(row.smact for row in rows), of_rows(row.smocc for row in rows)

    def fitted(self, of: np.ndarray, *, iterations: int = _DESCENT.iterations) -> tuple[ActivityParameters, float]:
        """Return the parameters that explain the rows of the mask `of`, (rows,), and the share of a whole run that is
        training. Every family has the same weight."""

        def losses(values: Values) -> torch.Tensor:
            smact, smocc = self._ratios(_parameters(values, lambda value: value), values[_TRAINING_SHARE])
            off = robust(smact - self._smact, _SMACT_TOLERANCE)
            return off + _OF_SMOCC * robust(smocc - self._smocc, _SMOCC_TOLERANCE)

        weights = weights_by(self.family, of, power=1.0)
        values = descended(_begin(), losses, weights, replace(_DESCENT, iterations=iterations))
        return _parameters(values, np.asarray), float(values[_TRAINING_SHARE])

    def errors(self, learned: ActivityParameters, training_share: float) -> np.ndarray:
        """Return estimated less measured SM activity and occupancy of each row, (rows, 2)."""
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


def judged_activity(
    fit: ActivityFit, folds: int, progress: Callable[[str, int, int], None]
) -> tuple[list[RowScores], ActivityParameters]:
    """Return the scores of each family, and the parameters fitted on all rows.

    Args:
        fit: The rows; each family is judged on rows that were learned from, and on groups that were left out.
        folds: Parts of the groups that are left out in turn.
        progress: Called before each fit with a text, the number of fits done and their total.
    """
    splits = {"groups left out": held_out_by(np.array([row.group for row in fit.rows]), folds)}
    learned, errors = judged_by_splits(
        fit.fitted, lambda learned: fit.errors(*learned), splits, progress, "fitting activity"
    )
    scores = [
        _score(str(family), split, of_rows[fit.family == family])
        for family in np.unique(fit.family)
        for split, of_rows in errors.items()
    ]
    return scores, learned[0]


def _score(family: str, split: str, errors: np.ndarray) -> RowScores:
    """Return how far SM activity and occupancy are off, absolute."""
    (smact, smact_p90), (smocc, smocc_p90) = spread(errors[:, 0]), spread(errors[:, 1])
    figures = {"smact_median": smact, "smact_p90": smact_p90, "smocc_median": smocc, "smocc_p90": smocc_p90}
    return RowScores(rows=family, by=split, count=len(errors), figures=figures)


def _begin() -> dict[str, torch.Tensor]:
    by_class = {
        "most_warps": torch.log(of_rows(one.most_warps for one in CLASSES.values())),
        "block_warps": torch.zeros(len(CLASSES), dtype=torch.float64),
    }
    return by_class | {name: torch.tensor(value, dtype=torch.float64) for name, value in _BEGIN.items()}


def _parameters(values: Values, convert: Callable) -> ActivityParameters:
    return ActivityParameters(
        by_class={name: convert(values[name]) for name in CLASS_VALUES},
        single={name: convert(values[name]) for name in STEP_VALUES},
    )
