"""The layer plan: what a family's forward pass is made of, per sample.

The same granularity as GPUMemNet's `Activations-Params` tuples (arXiv 2602.17817), with true sizes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from conf.errors import UsageError
from conf.units import MIB
from featurize.families import get_family
from featurize.trial_config import OPTIMIZERS, TrialConfig

SAMPLES = 2  # that a plan is read from: batch norm in training refuses a single value a channel
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


@dataclass(frozen=True, slots=True)
class Layer:
    """One module of the forward pass.

    kind: `linear`, `conv2d`, `batchnorm2d`, `relu`, `dropout`, `attention`, ...; `output_elements` per sample;
    `parameters` counted once, in the layer that owns them; `flops` per sample, forward, a multiply-add counts 2.
    """

    kind: str
    output_elements: int
    parameters: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a plan. Elements, parameters and FLOPs; not bytes."""

    layers: int
    parameters: int
    output_elements: int
    flops: int


def totals(plan: Iterable[Layer]) -> Totals:
    """Sum a plan."""
    plan = list(plan)
    return Totals(
        layers=len(plan),
        parameters=sum(layer.parameters for layer in plan),
        output_elements=sum(layer.output_elements for layer in plan),
        flops=sum(layer.flops for layer in plan),
    )


def rough_memory_mib(plan: Iterable[Layer], batch_size: int, optimizer: str) -> float:
    """Return a quick upper-side guess for the sampling ceiling: fp32 weights, gradients, optimizer state, and every
    layer's output kept once. No context, no workspace, no allocator. Not an estimator: see `learn`."""
    sums = totals(plan)
    copies = 2 + OPTIMIZERS[optimizer].states  # with weights and gradients
    return 4 * (copies * sums.parameters + batch_size * sums.output_elements) / MIB


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
