"""Scalar features of a trial config, without torch: what a table-based estimator sees of a job before it runs.

Start reading at `scalar_features`. All of it follows from the config and its layer plan, in well under a millisecond.
"""

from __future__ import annotations

import hashlib
import math

from conf.units import MIB
from featurize.families import get_family
from featurize.layers import Layer, rough_memory_mib
from featurize.trial_config import ACTIVATIONS, OPTIMIZERS, TrialConfig

# Kinds counted one by one; activations are counted together, anything else under "other". The list is fixed, so that
# the columns of a joint table don't depend on the families in it.
KINDS = (
    "linear",
    "conv2d",
    "batchnorm1d",
    "batchnorm2d",
    "layernorm",
    "dropout",
    "embedding",
    "position",
    "attention",
    "add",
    "concat",
    "pad2d",
    "max_pool2d",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "mean_pool",
    "softmax",
    "activation",
    "other",
)
_KIND_OF = {**{kind: kind for kind in KINDS}, **dict.fromkeys(ACTIVATIONS, "activation")}
_LOGGED = (
    "batch_size",
    "parameters",
    "output_elements",
    "flops",
    "max_output_elements",
    "max_parameters",
    "batch_output_elements",
    "batch_flops",
    "batch_max_output_elements",
    "rough_memory_mib",
)


def scalar_features(config: TrialConfig) -> dict[str, float | str]:
    """name -> number, or text for what is categorical. The config's own fields under their own names (a field that a
    family lacks is absent), and

    layers, parameters, output_elements, flops    totals of the plan, per sample; `batch_*` for the batch
    max_*, mean_*                                 of a single layer
    count_KIND, elements_KIND, parameters_KIND    for every kind of `KINDS`
    *_mib                                         fp32 mebibytes: weights, optimizer_state, batch_output
    log_*                                         natural logarithm of 1 + x
    rough_memory_mib                              `featurize.layers.rough_memory_mib`
    """
    features: dict[str, float | str] = {"family": config.family}
    for name, value in config.to_mapping().items():
        if isinstance(value, str):
            features[name] = value
        elif isinstance(value, int | float):  # None and lists are no scalars: absent
            features[name] = float(value)
    plan = get_family(config.family).layers(config)
    of_plan = _plan_features(plan, config.batch_size)
    parameters, elements = of_plan["parameters"], of_plan["batch_output_elements"]
    of_plan["weights_mib"] = 4 * parameters / MIB
    of_plan["optimizer_state_mib"] = 4 * parameters * OPTIMIZERS[config.optimizer].states / MIB
    of_plan["batch_output_mib"] = 4 * elements / MIB
    of_plan["rough_memory_mib"] = rough_memory_mib(plan, config.batch_size, config.optimizer)
    of_plan["flops_per_element"] = of_plan["flops"] / max(of_plan["output_elements"], 1.0)
    numbers = {"batch_size": float(config.batch_size), **of_plan}
    logarithms = {f"log_{name}": math.log1p(numbers[name]) for name in _LOGGED}
    return {**features, **of_plan, **logarithms}


def _plan_features(plan: list[Layer], batch_size: int) -> dict[str, float]:
    counts, elements, parameters = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    flops = most_elements = most_parameters = 0
    for layer in plan:
        kind = _KIND_OF.get(layer.kind, "other")
        counts[kind] += 1
        elements[kind] += layer.output_elements
        parameters[kind] += layer.parameters
        flops += layer.flops
        most_elements = max(most_elements, layer.output_elements)
        most_parameters = max(most_parameters, layer.parameters)
    all_elements, all_parameters = sum(elements.values()), sum(parameters.values())
    features: dict[str, float] = {
        "layers": len(plan),
        "parameters": all_parameters,
        "output_elements": all_elements,
        "flops": flops,
        "max_output_elements": most_elements,
        "max_parameters": most_parameters,
        "mean_output_elements": all_elements / max(len(plan), 1),
        "batch_output_elements": batch_size * all_elements,
        "batch_max_output_elements": batch_size * most_elements,
        "batch_flops": batch_size * flops,
    }
    for kind in KINDS:
        features[f"count_{kind}"] = counts[kind]
        features[f"elements_{kind}"] = elements[kind]
        features[f"parameters_{kind}"] = parameters[kind]
    return {name: float(value) for name, value in features.items()}


def group_key(config: TrialConfig) -> str:
    """Identity of the architecture: equal for configs whose networks have the same layers of the same sizes, whatever
    the batch size, the training settings and the dropout. Near-copies share it, so that a split keeps them together:
    `FAMILY-` and 16 hex digits. A family whose plan takes long says by `identity` what its networks are told by."""
    digest = hashlib.sha256()
    family = get_family(config.family)
    if hasattr(family, "identity"):
        digest.update(family.identity(config).encode())
        return f"{config.family}-{digest.hexdigest()[:16]}"
    for layer in family.layers(config):
        if layer.kind != "dropout":
            digest.update(f"{layer.kind} {layer.output_elements} {layer.parameters} {layer.flops}\n".encode())
    return f"{config.family}-{digest.hexdigest()[:16]}"
