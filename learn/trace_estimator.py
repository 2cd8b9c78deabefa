"""The estimator that needs no training: the traced step, simulated on the rows' device. A point, and no bound.

Start reading at `TraceEstimator.predict`; `learn.traced` does the work.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from conf.errors import UsageError
from featurize.trial import TrialConfig
from learn.data import Rows
from learn.estimators import ResidualPrediction, require_rows, to_space
from learn.targets import Target, get_target

NO_BOUND = "the trace alone has no calibrated bound: it gives a point, not a guarantee"


class TraceEstimator:
    """`fit` learns nothing but the target and the device. Tracing takes from milliseconds to seconds a config."""

    name: ClassVar[str] = "trace"

    def __init__(self, seed: int = 0) -> None:
        self.seed = int(seed)
        self.target: Target | None = None
        self.device: str | None = None

    def fit(self, rows: Rows) -> Self:
        """Note the target and the device, of which there must be one, described in `conf/device`: else `UsageError`."""
        from learn.traced import describe_device

        rows = require_rows(rows)
        devices = sorted(set(map(str, rows.device)))
        if len(devices) > 1:
            raise UsageError(f"the trace is priced for one device, and the rows are of {', '.join(devices)}")
        self.target, self.device = rows.target, describe_device(devices[0]).name
        return self

    def predict(self, configs: Sequence[TrialConfig]) -> ResidualPrediction:
        from learn.traced import step_of_config

        if self.target is None:
            raise RuntimeError("fit or load the estimator before predicting")
        values = [getattr(step_of_config(c, self.device).step, self.target.column) for c in configs]
        centre = to_space(np.array(values, dtype=float), self.target.space)
        return ResidualPrediction(centre, np.empty(0), self.target.space, (NO_BOUND,))

    def save(self, folder: Path) -> None:
        state = {"estimator": self.name, "target": self.target.name, "device": self.device, "seed": self.seed}
        (Path(folder) / "estimator.json").write_text(json.dumps(state, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        state = json.loads((Path(folder) / "estimator.json").read_text())
        loaded = cls(state["seed"])
        loaded.target, loaded.device = get_target(state["target"]), state["device"]
        return loaded
