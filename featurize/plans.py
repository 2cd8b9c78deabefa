"""The layer plan of a trial config's network. Start reading at `plan_of`; torch is imported when a plan is read."""

from __future__ import annotations

import dataclasses
import functools

from conf.errors import UsageError
from featurize.families import get_family
from featurize.layers import SAMPLES, Layer
from featurize.trial_config import TrialConfig

# A config's network at the settings that any has: sgd goes with whatever a family asks of optimizers.
_PLAIN = {
    "batch_size": SAMPLES,
    "optimizer": "sgd",
    "precision": "fp32",
    "activation_checkpointing": False,
    "cudnn_benchmark": False,
    "channels_last": False,
    "parallel": None,
}


def plan_of(config: TrialConfig) -> tuple[Layer, ...]:
    """Return the layer plan of a config's network, which does not depend on its training settings.

    It is read off the module, without memory, and remembered: some milliseconds for a network that is new, tenths of a
    second for a library's. Imports torch.

    Raises:
        UsageError: A library's model cannot be had, or does not run on its inputs.
    """
    family = get_family(config.family)
    if hasattr(family, "layers"):
        return tuple(family.layers(config))
    return _plan_of_network(dataclasses.replace(config, **_PLAIN))


@functools.lru_cache(maxsize=20_000)
def _plan_of_network(config: TrialConfig) -> tuple[Layer, ...]:
    from featurize.plan_of_module import built_on_meta, plan_of_module

    family = get_family(config.family)
    inputs, _ = family.batch(config, "meta")
    model = built_on_meta(lambda: family.build(config))
    try:
        return tuple(plan_of_module(model, inputs)[0])
    except (RuntimeError, AssertionError) as error:
        sizes = ", ".join("x".join(map(str, x.shape[1:])) for x in inputs)
        raise UsageError(
            f"{config.family}: {getattr(config, 'model', 'the network')!r} does not run on inputs of {sizes}: {error}"
        ) from error
