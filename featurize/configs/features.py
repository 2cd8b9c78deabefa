"""Scalar features of trial configs, without torch, for estimators that read tables.

Start reading at `feature_columns`. All features follow from the configs' fields and their layer plans, in some 15
microseconds a config in large batches. `FEATURES_VERSION` is stored with artifacts and features, so that outdated ones
are recognised.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType, NoneType, SimpleNamespace

import numpy as np

from conf.units import MIB
from featurize.families import get_family, layers_of
from featurize.job.layers import Layer, NetworkBlock
from featurize.job.training_settings import ACTIVATIONS, OPTIMIZERS, TrialConfig

# Kinds counted separately; activations are counted together, all others under "other". The list is fixed, so that the
# columns of a joint table do not depend on its families.
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
_KIND_OF = {kind: KINDS.index(kind) for kind in KINDS} | dict.fromkeys(ACTIVATIONS, KINDS.index("activation"))
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


def feature_columns(configs: Sequence[TrialConfig]) -> dict[str, np.ndarray]:
    """Return name -> (n,) floats, or words, of n configs of one family. Raises as the family's `layers`.

    The configs' fields under their own names (a field that the family lacks, or that is not a scalar, is absent; NaN or
    None where only some configs have it), and

    layers, parameters, output_elements, flops    totals of the plan, per sample; `batch_*` for the batch
    max_*, mean_*                                 the largest and the mean of a single layer
    count_KIND, elements_KIND, parameters_KIND    for every kind of `KINDS`
    *_mib                                         fp32 mebibytes: weights, optimizer_state, batch_output
    log_*                                         natural logarithm of 1 + x
    rough_memory_mib                              `featurize.job.layers.rough_memory_mib`
    """
    of_fields = _fields(configs)
    columns = of_fields | _plan_columns(configs, of_fields)
    batch, parameters = columns["batch_size"], columns["parameters"]
    for name in ("output_elements", "max_output_elements", "flops"):
        columns[f"batch_{name}"] = batch * columns[name]
    states = np.array([OPTIMIZERS[config.optimizer].states for config in configs])
    columns["mean_output_elements"] = columns["output_elements"] / np.maximum(columns["layers"], 1.0)
    columns["weights_mib"] = 4 * parameters / MIB
    columns["optimizer_state_mib"] = 4 * parameters * states / MIB
    columns["batch_output_mib"] = 4 * columns["batch_output_elements"] / MIB
    columns["rough_memory_mib"] = 4 * ((2 + states) * parameters + columns["batch_output_elements"]) / MIB
    columns["flops_per_element"] = columns["flops"] / np.maximum(columns["output_elements"], 1.0)
    for name in _LOGGED:  # math.log1p, as numpy's logarithm differs between processors
        columns[f"log_{name}"] = np.array([math.log1p(value) for value in columns[name].tolist()])
    return {name: column.astype(float) if column.dtype == bool else column for name, column in columns.items()}


def _fields(configs: Sequence[TrialConfig]) -> dict[str, np.ndarray]:
    """Return field -> (n,) floats, bools or words, for the fields that hold such values."""
    columns = {"family": np.array([config.family for config in configs], dtype=object)}
    for name in (field.name for field in fields(configs[0])):
        values = [getattr(config, name) for config in configs]
        kinds = set(map(type, values)) - {NoneType}
        if kinds == {bool} and None not in values:
            columns[name] = np.array(values)
        elif kinds and all(issubclass(kind, int | float) for kind in kinds):
            columns[name] = np.array(values, dtype=float)
        elif kinds and all(issubclass(kind, str) for kind in kinds):
            columns[name] = np.array(values, dtype=object)
    return columns


def _plan_columns(configs: Sequence[TrialConfig], of_fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    n, most = len(configs), np.zeros((2, len(configs)))
    parts = list(_entries(configs, of_fields))
    place, kind, numbers = (np.concatenate(columns, axis=-1) for columns in zip(*parts, strict=True))
    count, elements, parameters, flops = numbers
    for row, of_layer in zip(most, (elements, parameters), strict=True):
        np.maximum.at(row, place, np.where(count > 0, of_layer, 0.0))

    def sums(weights: np.ndarray) -> np.ndarray:
        """Return (kinds, n) sums over the layers of each kind."""
        return np.bincount(kind * n + place, count * weights, len(KINDS) * n).reshape(len(KINDS), n)

    of_kinds = {"count": sums(np.ones(len(place))), "elements": sums(elements), "parameters": sums(parameters)}
    layers, all_elements, all_parameters = (values.sum(0) for values in of_kinds.values())
    return {
        "layers": layers,
        "parameters": all_parameters,
        "output_elements": all_elements,
        "flops": np.bincount(place, count * flops, n),
        "max_output_elements": most[0],
        "max_parameters": most[1],
        **{f"{of}_{name}": row for of, rows in of_kinds.items() for name, row in zip(KINDS, rows, strict=True)},
    }


def _entries(configs: Sequence[TrialConfig], of_fields: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield layers of the configs: (m,) indices of the configs, (m,) indices of the kinds in `KINDS`, and (4, m)
    counts, output elements, parameters and FLOPs."""
    family = get_family(configs[0].family)
    if hasattr(family, "layers"):
        for place, config in enumerate(configs):
            plan = family.layers(config)
            of_layers = [(1, layer.output_elements, layer.parameters, layer.flops) for layer in plan]
            yield (
                np.full(len(plan), place),
                np.array([_kind(layer) for layer in plan], int),
                np.array(of_layers, float).reshape(-1, 4).T,
            )
        return
    blocks: dict[str, list[tuple[int, ...]]] = defaultdict(list)  # each preceded by its config's index
    for place, config in enumerate(configs):
        for block in family.blocks(config):
            blocks[block.kind].append((place, *block[1:]))
    for kind, rows in blocks.items():
        of_rows, *of_blocks = np.array(rows, dtype=float).T
        block, places = NetworkBlock(kind, *of_blocks), of_rows.astype(int)
        of_configs = SimpleNamespace(**{name: column[places] for name, column in of_fields.items()})
        layers = family.block_layers(of_configs, block)
        numbers = np.empty((4, len(layers), len(places)))
        for index, layer in enumerate(layers):
            numbers[0, index] = layer.present * block.times
            numbers[1, index], numbers[2, index], numbers[3, index] = (
                layer.output_elements,
                layer.parameters,
                layer.flops,
            )
        kinds = np.repeat([_kind(layer) for layer in layers], len(places))
        yield np.tile(places, len(layers)), kinds, numbers.reshape(4, -1)


def _kind(layer: Layer) -> int:
    """Return the index in `KINDS`; for many configs, the kind of an activation is an array of names."""
    return _KIND_OF.get(layer.kind if isinstance(layer.kind, str) else "activation", KINDS.index("other"))


def group_key(config: TrialConfig) -> str:
    """Return the identity of the architecture, `FAMILY-` and 16 hex digits: equal for configs whose networks have the
    same layers of the same sizes, whatever the batch size, the training settings and the dropout. Near-copies share it,
    so that a split keeps them together. A family whose plan is slow to compute defines `identity` in place of its
    layers."""
    family = get_family(config.family)
    if hasattr(family, "identity"):
        identity = family.identity(config)
    else:
        identity = "".join(
            f"{layer.kind} {layer.output_elements} {layer.parameters} {layer.flops}\n"
            for layer in layers_of(config)
            if layer.kind != "dropout"
        )
    return f"{config.family}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


# Raise it when the value or name of a feature changes, of a trial config or of a traced step.
# `tests/learn/test_golden_features.py` fails when values move and this number does not.
FEATURES_VERSION = 5

HISTORY = MappingProxyType(
    {
        1: "Features as of November 2026, the first with a number; the hashes of source text before it end here.",
        2: "Traced steps have `job_scenario_*`: memory under other assumptions about cuDNN's workspaces.",
        3: "Times, activity and power of traced steps (`job_priced_*`) come from the learned kernel model.",
        4: "Times, activity and power follow kernels measured alone, the framework's host and measured power.",
        5: "Megatron's host follows its layers' passes; fp32 convolutions count the workspaces of Winograd transforms.",
    }
)

FEATURES_STAMP = str(FEATURES_VERSION)  # as stored in artifacts


def is_current(stamp: object) -> bool:
    """Return whether a stored stamp is that of this code's features."""
    return stamp == FEATURES_STAMP
