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

from conf.errors import UsageError
from featurize.device_spec import DeviceSpec
from featurize.trial import TrialConfig
from learn.data import Rows
from learn.estimators import ResidualPrediction, require_rows, require_target, to_space
from learn.targets import Target, get_target
from learn.workload import Workload, of_config

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
        first = next(iter(str(error).strip().splitlines()), "")
        parts, mib, reason = {}, None, f"{type(error).__name__}: {first}"
    return Answer(mib=mib, reason=reason, seconds=(time.monotonic_ns() - began) / 1e9, parts=parts)


class DeviceEstimator:
    """Behind the Estimator Protocol, what learns nothing but the target and the device. A point, and no bound.

    A subclass sets `name`, `targets` and `warning`, and answers one config by `figure`.
    """

    name: ClassVar[str]
    targets: ClassVar[tuple[str, ...] | None]
    warning: ClassVar[str]

    def __init__(self, seed: int = 0) -> None:
        self.seed = int(seed)
        self.target: Target | None = None
        self.device: str | None = None

    def fit(self, rows: Rows) -> Self:
        """Note the target and the device, of which there must be one, described in `conf/device`: else `UsageError`."""
        from learn.traced import describe_device

        require_target(type(self), rows.target.name)
        rows = require_rows(rows)
        devices = sorted(set(map(str, rows.device)))
        if len(devices) > 1:
            raise UsageError(
                f"estimator={self.name} answers for one device, and the rows are of {', '.join(devices)}; "
                "device_name= picks one"
            )
        self.target, self.device = rows.target, describe_device(devices[0]).name
        return self

    def figure(self, config: TrialConfig) -> float:
        """The target's figure for one config, in its unit. Raises `CannotEstimate`."""
        raise NotImplementedError

    def predict(self, configs: Sequence[TrialConfig]) -> ResidualPrediction:
        """One point a config; a config without an answer has NaN there and its reason in `refusals`."""
        if self.target is None:
            raise RuntimeError("fit or load the estimator before predicting")
        values, refusals = np.full(len(configs), np.nan), {}
        for i, config in enumerate(configs):
            try:
                values[i] = self.figure(config)
            except CannotEstimate as refusal:
                refusals[i] = str(refusal)
        centre = to_space(values, self.target.space)
        return ResidualPrediction(centre, np.empty(0), self.target.space, (self.warning,), refusals)

    def save(self, folder: Path) -> None:
        state = {"estimator": self.name, "target": self.target.name, "device": self.device, "seed": self.seed}
        (Path(folder) / "estimator.json").write_text(json.dumps(state, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        state = json.loads((Path(folder) / "estimator.json").read_text())
        loaded = cls(state["seed"])
        loaded.target, loaded.device = get_target(state["target"]), state["device"]
        return loaded


class AnalyticalEstimator(DeviceEstimator):
    """A `MemoryAnalysis` as an estimator of peak memory; a subclass sets `name` and `method`."""

    targets: ClassVar[tuple[str, ...] | None] = ("memory",)
    warning: ClassVar[str] = NO_BOUND
    method: ClassVar[type[MemoryAnalysis]]

    def figure(self, config: TrialConfig) -> float:
        answer = _answer(self.method, config, self.device)
        if answer.mib is None:
            raise CannotEstimate(answer.reason)
        return answer.mib


@lru_cache(maxsize=100_000)
def _answer(method: type[MemoryAnalysis], config: TrialConfig, device: str) -> Answer:
    """Remembered: cross-validation asks for each config many times."""
    from learn.traced import describe_device

    return analyse(method(), of_config(config), describe_device(device))
