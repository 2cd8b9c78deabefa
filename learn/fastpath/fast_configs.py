"""Trial configs that the fast path is distilled on: the families' search spaces, as the farm samples them and wider.

Start reading at `distillation_cases`.
"""

from __future__ import annotations

import importlib.resources
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from conf.errors import UsageError, unknown_name
from featurize.families import get_family
from featurize.layers import rough_memory_mib
from featurize.trial import FITTED_OPTIMIZERS, PRECISIONS, TrialConfig
from learn.cases import DEFAULT_DEVICE, Case

FAMILIES = ("cnn", "mlp", "transformer")
# GPU models of the cases: more would spread them thinner.
DISTILLED_DEVICES = (
    "A100-SXM4-40GB", "B200-SXM-180GB", "H100-SXM5-80GB", "H200-SXM-141GB", "RTX-3090", "RTX-4090", "RTX-5090", "T4",
    "V100-SXM2-32GB",
)  # fmt: skip
LIMIT_MIB = 120 * 1024  # of `featurize.layers.rough_memory_mib`
MAX_ATTEMPTS = 1000
# Instead of what conf/arch says: a scheduler's jobs differ more in how they are trained than a published sweep does. A
# value listed twice is drawn twice as often.
_WIDER: Mapping[str, Any] = {
    "batch_size": {"low": 1, "high": 1024},
    "optimizer": ("adam", *FITTED_OPTIMIZERS),
    "precision": ("fp32", "fp32", *PRECISIONS),
    "activation_checkpointing": (False, False, False, True),
    "cudnn_benchmark": (False, False, False, True),
    "channels_last": (False, False, False, True),
    "softmax": (False, True),
    "use_dropout": (False, True),
    "growth_rate": {"low": 12, "high": 64},
}


def distillation_cases(n: int, seed: int = 0) -> tuple[Case, ...]:
    """Return `distillation_configs(n, seed)` in the usual training loop, on `DISTILLED_DEVICES`.

    Every other four rounds of the families run on the GPU model that was measured, the rest on the others in turn.
    """
    others = [name for name in DISTILLED_DEVICES if name != DEFAULT_DEVICE]
    cases = []
    for place, config in enumerate(distillation_configs(n, seed)):
        turn = place // len(FAMILIES) // 4
        device = others[turn // 2 % len(others)] if turn % 2 else DEFAULT_DEVICE
        cases.append(Case(config, device, training_loop=True))
    return tuple(cases)


def distillation_configs(n: int, seed: int = 0, families: tuple[str, ...] = FAMILIES) -> tuple[TrialConfig, ...]:
    """Return `n` configs, the families in turn; each depends on `seed` and its own place alone.

    Every other round of the families draws from the search space of `conf/arch`, as `farm.submit` does by default. The
    rest draw from a wider one, evenly or on a logarithmic scale in turn; a config whose rough need is above `LIMIT_MIB`
    is drawn again there. Raises `UsageError` for n < 1 and unknown families.
    """
    if n < 1:
        raise UsageError(f"n must be >= 1, got {n}")
    for family in families:
        if family not in FAMILIES:
            raise unknown_name("family", family, FAMILIES)
    return tuple(_config(families[i % len(families)], i // len(families), seed) for i in range(n))


def _config(family: str, index: int, seed: int) -> TrialConfig:
    module = get_family(family)
    for attempt in range(MAX_ATTEMPTS):

        def draw(name: str, attempt: int = attempt) -> float:
            return random.Random(f"{seed} {family} {index} {attempt} {name}").random()

        wider = index % 2 == 1
        values = {
            name: _value(spec, draw(name), log=index % 4 == 1 if wider else _drawn_on_log_scale(spec))
            for name, spec in _space(family, wider=wider).items()
        }
        try:
            config = module.Config(**module.repair(values, draw))
        except UsageError:  # a batch of 1 with batch norm
            continue
        if not wider or rough_memory_mib(module.layers(config), config.batch_size, config.optimizer) <= LIMIT_MIB:
            return config
    raise AssertionError(f"{family}: no config below {LIMIT_MIB} MiB in {MAX_ATTEMPTS} attempts")


@cache
def _space(family: str, *, wider: bool) -> Mapping[str, Any]:
    """name -> a constant, a sequence of choices, or {low, high, step, scale}."""
    import yaml

    text = (importlib.resources.files("conf") / "arch" / f"{family}.yaml").read_text(encoding="utf-8")
    space = yaml.safe_load(text)["space"]
    return {name: _WIDER.get(name, spec) if wider else spec for name, spec in space.items()}


def _drawn_on_log_scale(spec: Any) -> bool:
    """Whether the farm draws a range of `conf/arch` on a logarithmic scale, as the files' own comments say."""
    if not isinstance(spec, Mapping):
        return False
    scale = spec.get("scale", "auto")
    return scale == "log" or (scale == "auto" and spec["low"] > 0 and spec["high"] / spec["low"] >= 100)


def _value(spec: Any, u: float, *, log: bool):
    if isinstance(spec, list | tuple):
        return spec[int(u * len(spec))]
    if not isinstance(spec, Mapping):
        return spec
    low, high = spec["low"], spec["high"]
    whole = isinstance(low, int) and isinstance(high, int)
    top = high + 1 if whole else high
    value = low * (top / low) ** u if log else low + (top - low) * u
    if step := spec.get("step"):
        value = low + (value - low) // step * step
    return min(int(value), high) if whole else value
