"""Scalar features of cases as a numeric table: columns settled at fit time, words turned into codes.

Start reading at `FeatureTable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from conf.errors import CommandError, UsageError
from featurize.device_spec import DeviceSpec
from featurize.trial import TrialConfig
from learn.cases import Case


@lru_cache(maxsize=100_000)
def config_features(config: TrialConfig) -> Mapping[str, object]:
    """`featurize.features.scalar_features`, remembered: cross-validation asks for each config many times."""
    from featurize.features import scalar_features

    return scalar_features(config)


def case_features(case: Case) -> Mapping[str, object]:
    """What is known of a case without tracing it: its config's features, and its device's description where there is
    one (`gpu_*`). A module has no config: `UsageError`."""
    if case.config is None:
        raise UsageError("it reads trial configs only, and this is a module")
    features = config_features(case.config)
    return {**features, **_device_features(case.spec)} if case.spec is not None else features


def why_not(case: Case) -> str | None:
    """Why a case has no such features, or None: a module, or a config whose layers cannot be had."""
    try:
        case_features(case)
    except CommandError as error:
        return str(error)
    return None


@lru_cache(maxsize=256)
def _device_features(spec: DeviceSpec) -> Mapping[str, float]:
    from featurize.device_spec import device_features

    return device_features(spec)


@dataclass(frozen=True)
class FeatureTable:
    """Which columns, in which order, and the words of the categorical ones.

    A column that a config lacks (another family's field) or a word never seen is NaN: missing, not 0.
    """

    columns: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]  # categorical column -> its words; code = position

    @classmethod
    def learn(cls, cases: Sequence[Case]) -> FeatureTable:
        """Columns in alphabetical order, so that the order of the rows changes nothing."""
        columns: set[str] = set()
        words: dict[str, set[str]] = {}
        for case in cases:
            for name, value in case_features(case).items():
                columns.add(name)
                if isinstance(value, str):
                    words.setdefault(name, set()).add(value)
        return cls(tuple(sorted(columns)), {name: tuple(sorted(seen)) for name, seen in sorted(words.items())})

    @property
    def categorical(self) -> list[int]:
        """Positions of the categorical columns."""
        return [i for i, name in enumerate(self.columns) if name in self.words]

    def matrix(self, cases: Sequence[Case]) -> np.ndarray:
        """(n, columns) float64; NaN is missing."""
        codes = {name: {word: i for i, word in enumerate(seen)} for name, seen in self.words.items()}
        table = np.full((len(cases), len(self.columns)), np.nan)
        for i, case in enumerate(cases):
            features = case_features(case)
            for j, name in enumerate(self.columns):
                value = features.get(name)
                if name in codes:
                    table[i, j] = codes[name].get(str(value), np.nan) if isinstance(value, str) else np.nan
                elif isinstance(value, int | float | np.number):
                    table[i, j] = float(value)
        return table

    def to_mapping(self) -> dict:
        return {"columns": list(self.columns), "words": {k: list(v) for k, v in self.words.items()}}

    @classmethod
    def from_mapping(cls, mapping: Mapping) -> FeatureTable:
        return cls(tuple(mapping["columns"]), {k: tuple(v) for k, v in mapping["words"].items()})
