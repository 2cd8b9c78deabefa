"""Scalar features of configs as a numeric table: columns settled at fit time, words turned into codes.

Start reading at `FeatureTable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Number

import numpy as np

from featurize.trial import TrialConfig


@lru_cache(maxsize=100_000)
def _cached(config: TrialConfig) -> Mapping[str, object]:
    from featurize.features import scalar_features

    return scalar_features(config)


def features_of(config: TrialConfig) -> Mapping[str, object]:
    """`featurize.features.scalar_features`, remembered: cross-validation asks for each config many times."""
    return _cached(config)


@dataclass(frozen=True)
class FeatureTable:
    """Which columns, in which order, and the words of the categorical ones.

    A column that a config lacks (another family's field) or a word never seen is NaN: missing, not 0.
    """

    columns: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]  # categorical column -> its words; code = position

    @classmethod
    def learn(cls, configs: Sequence[TrialConfig]) -> FeatureTable:
        """Columns in alphabetical order, so that the order of the rows changes nothing."""
        columns: set[str] = set()
        words: dict[str, set[str]] = {}
        for config in configs:
            for name, value in features_of(config).items():
                columns.add(name)
                if isinstance(value, str):
                    words.setdefault(name, set()).add(value)
        return cls(tuple(sorted(columns)), {name: tuple(sorted(seen)) for name, seen in sorted(words.items())})

    @property
    def categorical(self) -> list[int]:
        """Positions of the categorical columns."""
        return [i for i, name in enumerate(self.columns) if name in self.words]

    def matrix(self, configs: Sequence[TrialConfig]) -> np.ndarray:
        """(n, columns) float64; NaN is missing."""
        codes = {name: {word: i for i, word in enumerate(seen)} for name, seen in self.words.items()}
        table = np.full((len(configs), len(self.columns)), np.nan)
        for i, config in enumerate(configs):
            features = features_of(config)
            for j, name in enumerate(self.columns):
                value = features.get(name)
                if name in codes:
                    table[i, j] = codes[name].get(value, np.nan)
                elif isinstance(value, Number):
                    table[i, j] = float(value)
        return table

    def to_mapping(self) -> dict:
        return {"columns": list(self.columns), "words": {k: list(v) for k, v in self.words.items()}}

    @classmethod
    def from_mapping(cls, mapping: Mapping) -> FeatureTable:
        return cls(tuple(mapping["columns"]), {k: tuple(v) for k, v in mapping["words"].items()})
