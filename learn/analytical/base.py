"""What every estimator that learns nothing has in common: an answer or a reason, and the time it took.

Start reading at `MemoryAnalysis`; `AnalyticalEstimator` puts one behind the Estimator Protocol.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Protocol, Self

import numpy as np

from conf.extras import advice_for
from conf.plain_text import exception_line
from featurize.device_spec import DeviceSpec
from learn.cases import Case
from learn.data import Rows
from learn.estimators import Estimator, ResidualPrediction, require_rows, require_target, to_space
from learn.step_store import StepStore
from learn.targets import Target, get_target
from learn.workload import Workload

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


class MemoryAnalysis(Protocol):
    """One method. Stateless; `parts_mib` raises `CannotEstimate`, and never lets another error of the model's out.

    It leaves the workload's model, torch's random state and every other global state as it found them.
    """

    name: ClassVar[str]

    def parts_mib(self, workload: Workload, device: DeviceSpec) -> Mapping[str, float]:
        """Part -> MiB, which sum to the method's estimate of peak memory. Raises `CannotEstimate`."""
        ...


def analyse(method: MemoryAnalysis, workload: Workload, device: DeviceSpec) -> Answer:
    """The method's answer for one job, timed."""
    began = time.monotonic_ns()
    try:
        parts = dict(method.parts_mib(workload, device))
        mib, reason = float(sum(parts.values())), None
    except CannotEstimate as refusal:
        parts, mib, reason = {}, None, str(refusal)
    except Exception as error:  # the last resort: a model may raise anything anywhere
        advice = advice_for(error) if isinstance(error, ModuleNotFoundError) else None
        parts, mib, reason = {}, None, advice or exception_line(error)
    return Answer(mib=mib, reason=reason, seconds=(time.monotonic_ns() - began) / 1e9, parts=parts)


def described(case: Case) -> DeviceSpec:
    """Return the description of the case's device. Raises `CannotEstimate` where there is none."""
    if case.spec is None:
        raise CannotEstimate(f"no description of the device {case.device}: see conf/device")
    return case.spec


class TrainingFreeEstimator(Estimator):
    """Behind the Estimator Protocol, what learns nothing but the target. A point for the case's own device, no bound.

    A subclass sets `name`, `targets` and `warning`, and answers one case by `figure`.
    """

    name: ClassVar[str]
    targets: ClassVar[tuple[str, ...] | None]
    warning: ClassVar[str]

    def __init__(self, seed: int = 0) -> None:
        self.seed = int(seed)
        self.target: Target | None = None

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Self:
        """Note the target; `steps` is not read. Devices that `conf/device` does not describe raise `UsageError`."""
        from featurize.device_spec import describe_device

        require_target(type(self), rows.target.name)
        rows = require_rows(rows)
        for device in sorted(set(map(str, rows.device))):
            describe_device(device)
        self.target = rows.target
        return self

    @property
    def fitted_target(self) -> Target:
        """The target that it was fitted to. Raises `RuntimeError` before that."""
        if self.target is None:
            raise RuntimeError("fit or load the estimator before predicting")
        return self.target

    def figure(self, case: Case) -> float:
        """The target's figure for one case, in its unit. Raises `CannotEstimate`."""
        raise NotImplementedError

    def predict(self, cases: Sequence[Case], steps: StepStore | None = None) -> ResidualPrediction:
        """One point a case; a case without an answer has NaN there and its reason in `refusals`."""
        target = self.fitted_target
        values, refusals = np.full(len(cases), np.nan), {}
        for i, case in enumerate(cases):
            try:
                values[i] = self.figure(case)
            except CannotEstimate as refusal:
                refusals[i] = str(refusal)
        centre = to_space(values, target.space)
        return ResidualPrediction(centre, np.empty(0), target.space, (self.warning,), refusals)

    def save(self, folder: Path) -> None:
        state = {"estimator": self.name, "target": self.fitted_target.name, "seed": self.seed}
        (Path(folder) / "estimator.json").write_text(json.dumps(state, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        state = json.loads((Path(folder) / "estimator.json").read_text())
        loaded = cls(state["seed"])
        loaded.target = get_target(state["target"])
        return loaded


class AnalyticalEstimator(TrainingFreeEstimator):
    """A `MemoryAnalysis` as an estimator of peak memory; a subclass sets `name` and `method`."""

    targets: ClassVar[tuple[str, ...] | None] = ("memory",)
    warning: ClassVar[str] = NO_BOUND
    method: ClassVar[type[MemoryAnalysis]]

    def figure(self, case: Case) -> float:
        described(case)
        answer = _answer(self.method, case)
        if answer.mib is None:
            raise CannotEstimate(answer.reason or "no reason is given")
        return answer.mib


@lru_cache(maxsize=100_000)
def _answer(method: type[MemoryAnalysis], case: Case) -> Answer:
    """Remembered: cross-validation asks for each case many times."""
    return analyse(method(), case.workload, described(case))
