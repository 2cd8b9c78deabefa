"""The base of estimators that learn nothing: an answer or a reason, and the time it took.

Start reading at `Peer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from conf.cli.extras import advice_for
from conf.plain_text import exception_line
from featurize.device.device_spec import DeviceSpec, describe_device
from featurize.job.training_settings import TrainingSettings
from learn.estimators.protocol import (
    Estimator,
    ResidualPrediction,
    open_state,
    require_rows,
    require_target,
    to_space,
    write_state,
)
from learn.job.training_job import TrainingJob
from learn.rows.cases import Case
from learn.rows.data import Rows
from learn.rows.step_store import StepStore

NO_BOUND = "no bound is calibrated: it gives a point, not a guarantee"


class CannotEstimate(Exception):
    """This method has no answer for this workload; the message says why, naming what it does not cover."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Peak memory of one training job by one method, in MiB as the method defines it, or why there is none.

    seconds   wall time that the answer took, building the model included
    parts     part -> MiB where the method tells its parts apart
    """

    mib: float | None
    reason: str | None = None
    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)


def described(case: Case) -> DeviceSpec:
    """Return the description of the case's device. Raises `CannotEstimate` where there is none."""
    if case.spec is None:
        raise CannotEstimate(f"no description of the device {case.device}: see conf/device")
    return case.spec


def require_covered(settings: TrainingSettings, name: str, covered: Sequence[str], where: str = "") -> None:
    """Raise `CannotEstimate` where a training setting is none of those that a formula covers."""
    value = getattr(settings, name)
    if value not in covered:
        raise CannotEstimate(f"{name}={value} is not covered{where}: the formula is of {' and '.join(covered)}")


class Peer(Estimator):
    """An estimator that learns nothing but the target. It gives a point for the case's own device, and no bound.

    A subclass sets `name` and answers one job by `parts_mib`, and where it takes other targets than memory, by
    `figure`. Neither changes the workload's model, torch's random state or any other global state.
    """

    name: ClassVar[str]
    targets: ClassVar[tuple[str, ...] | None] = ("memory",)
    warning: ClassVar[str] = NO_BOUND

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Self:
        """Note the target; `steps` is not read. Devices that `conf/device` does not describe raise `UsageError`."""
        require_target(type(self), rows.target.name)
        rows = require_rows(rows)
        for device in sorted(set(map(str, rows.device))):
            describe_device(device)
        self.target = rows.target
        return self

    def parts_mib(self, workload: TrainingJob, device: DeviceSpec) -> Mapping[str, float]:
        """Return part -> MiB, which sum to the estimate of peak memory. Raises `CannotEstimate`, and lets no other
        error of the model's out."""
        raise NotImplementedError

    def figure(self, case: Case) -> float:
        """Return the target's figure for one case, in its unit. Raises `CannotEstimate`."""
        described(case)
        answer = _answer(type(self), case)
        if answer.mib is None:
            raise CannotEstimate(answer.reason or "no reason is given")
        return answer.mib

    def predict(self, cases: Sequence[Case], steps: StepStore | None = None) -> ResidualPrediction:
        """Return one point a case; a case without an answer has NaN there and its reason in `refusals`."""
        target = self.require_fitted()
        values, refusals = np.full(len(cases), np.nan), {}
        for i, case in enumerate(cases):
            try:
                values[i] = self.figure(case)
            except CannotEstimate as refusal:
                refusals[i] = str(refusal)
        centre = to_space(values, target.space)
        return ResidualPrediction(centre, np.empty(0), target.space, (self.warning,), refusals)

    def save(self, folder: Path) -> None:
        """Write who it is, its target and its seed."""
        write_state(Path(folder), self, {})

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return what `save` wrote."""
        return open_state(cls, Path(folder))[0]


def analyse(peer: Peer, job: TrainingJob, device: DeviceSpec) -> Answer:
    """Return the estimator's answer for the memory of one job, timed."""
    return timed(lambda: peer.parts_mib(job, device))


def timed(parts_of: Callable[[], Mapping[str, float]]) -> Answer:
    """Return the answer whose parts the call returns, timed; whatever it raises is the reason why there is none."""
    began = time.monotonic_ns()
    parts, mib, reason = {}, None, None
    try:
        parts = dict(parts_of())
        mib = float(sum(parts.values()))
    except CannotEstimate as refusal:
        reason = str(refusal)
    except Exception as error:  # the last resort: a model may raise anything anywhere
        reason = advice_for(error) if isinstance(error, ModuleNotFoundError) else None
        reason = reason or exception_line(error)
    return Answer(mib=mib, reason=reason, seconds=(time.monotonic_ns() - began) / 1e9, parts=parts)


@lru_cache(maxsize=100_000)
def _answer(peer: type[Peer], case: Case) -> Answer:
    """Remembered: cross-validation asks for each case many times."""
    return analyse(peer(), case.job, described(case))
