"""Small configs of any family, drawn from its own search space, so that a new family is tested by being added.

Start reading at `small_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from featurize.configs.features import feature_columns
from featurize.configs.space import Limits, Space, default_space, parse_space, sample
from featurize.job.training_settings import FITTED_OPTIMIZERS, PRECISIONS, TrialConfig

SHARE = 8  # every range is cut to its lower eighth
LIMITS = Limits(max_parameters=30_000_000, max_memory_mib=2000)
# Every combination of the training settings, which the spaces hold constant by default.
TRAINING = {
    "optimizer": list(FITTED_OPTIMIZERS),
    "precision": list(PRECISIONS),
    "activation_checkpointing": [False, True],
    "channels_last": [False, True],
}


def small_config(family: str, index: int) -> TrialConfig:
    """The config of that index in the lower eighth of `conf/arch/FAMILY.yaml`, with any training settings."""
    small = {name: _cut(spec) for name, spec in default_space(family).items()}
    return sample(parse_space(family, {**small, **TRAINING}), seed=0, index=index, limits=LIMITS)


def own_space(family: str) -> Space:
    """The search space of `conf/arch/FAMILY.yaml`."""
    return parse_space(family, default_space(family))


def _cut(spec: Any) -> Any:
    if not isinstance(spec, Mapping):
        return spec
    span = spec["high"] - spec["low"]
    return {**spec, "high": spec["low"] + (span // SHARE if isinstance(span, int) else span / SHARE)}


def assert_ratios_hold(found, spec, ratios):
    """Check that a priced step's utilization and power keep to their ranges."""
    for ratio in ratios:
        assert 0 <= getattr(found, ratio) <= 1, (ratio, spec.name)
    assert found.smocc <= found.smact <= found.gpu_util
    assert spec.idle_power_w <= found.power_w <= spec.power_limit_w


def scalar_features(config: TrialConfig) -> dict[str, float | str]:
    """The features of one config, as `feature_columns` has them: numbers, or text for what is categorical."""
    values = {name: column.tolist()[0] for name, column in feature_columns([config]).items()}
    return {name: value for name, value in values.items() if isinstance(value, str) or value == value}
