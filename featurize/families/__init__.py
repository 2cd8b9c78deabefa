"""The family table: every module in this folder whose name has no leading underscore is a family.

A family module is imported without torch and holds

    Config          frozen dataclass, subclass of `featurize.job.training_settings.TrialConfig`
    blocks(config)  -> list[featurize.job.layers.NetworkBlock]: the network in the order of the forward pass
    block_layers(config, block)
                    -> list[featurize.job.layers.Layer]: a block's forward pass per sample; the numbers of `config` and
                    `block` may be arrays, for many configs at once
    layers(config)  -> list[featurize.job.layers.Layer], in place of both, where a library's code defines the network
    build(config)   -> torch.nn.Module (imports torch inside); parameters on the current default device
    batch(config, device)
                    -> (inputs: tuple[Tensor, ...], targets: Tensor) of random data on `device`
    repair(values, draw)
                    -> values: turns raw sampled values into a config that can be built (see below)
    identity(config)
                    -> str, optional: identifies its network, where the family has `layers`
    kind(config)    -> str, optional: groups its networks; else family and topology
    loss(config)    -> function of (output, targets) -> scalar tensor, optional; else cross entropy
    SAMPLED_ONLY    key of the search space that only `repair` consumes -> its allowed values, optional

`repair(values: dict, draw: Callable[[str], float]) -> dict` resolves dependent dimensions of a sampled point (heads
that divide the embedding, ...) and may change the dict; `draw(name)` returns a further uniform number in [0, 1) that
depends only on the sampled point and `name`. Values that it cannot repair stay, and `Config`'s validation rejects them.
`repaired` calls it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from conf.errors import BOOLEAN, Allowed, require_one_of
from featurize.job.training_settings import TrialConfig, rules_of

if TYPE_CHECKING:
    from featurize.job.layers import Layer


@functools.cache  # needed for each config that is parsed
def family_names() -> tuple[str, ...]:
    """Return the known families, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def get_family(name: str) -> ModuleType:
    """Return the family's module. Raises `UsageError`, with the known names, for an unknown one."""
    require_one_of("family", name, family_names())
    return importlib.import_module(f"{__name__}.{name}")


@functools.cache  # needed for each value of a search space
def key_rules(family: str) -> Mapping[str, tuple[Allowed, ...]]:
    """Return the keys of a family's search space, each with its allowed values: the fields of its config, and keys that
    only `repaired` consumes. A family with `dropout` also has the switch `use_dropout`."""
    module = get_family(family)
    rules = rules_of(module.Config)
    switch = {"use_dropout": BOOLEAN} if "dropout" in rules else {}
    sampled_only = {**switch, **getattr(module, "SAMPLED_ONLY", {})}
    return {**rules, **{name: (allowed,) for name, allowed in sampled_only.items()}}


def repaired(family: str, values: Mapping[str, Any], draw: Callable[[str], float]) -> dict[str, Any]:
    """Return a sampled point as the fields of the family's config, by its `repair`. `use_dropout` false is rate 0."""
    values = dict(values)
    if values.pop("use_dropout", True) is False:
        values["dropout"] = 0.0
    fields: dict[str, Any] = get_family(family).repair(values, draw)
    return fields


def layers_of(config: TrialConfig) -> list[Layer]:
    """Return the config's layer plan, in the order of the forward pass, per sample. Raises as the family's `layers`."""
    family = get_family(config.family)
    if hasattr(family, "layers"):
        layers: list[Layer] = family.layers(config)
        return layers
    blocks = family.blocks(config)
    return [layer for block in blocks for layer in family.block_layers(config, block) * block.times if layer.present]


def loss_of(config: TrialConfig) -> Callable[..., Any] | None:
    """Return the family's loss function; None: cross entropy, as in `training_step`."""
    loss = getattr(get_family(config.family), "loss", None)
    return None if loss is None else loss(config)
