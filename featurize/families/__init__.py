"""The family table: every module in this folder whose name has no leading underscore is a family.

A family module is imported without torch and holds

    Config          frozen dataclass, subclass of `featurize.job.training_settings.TrialConfig`; `family`: the file
    blocks(config)  -> list[featurize.job.layers.NetworkBlock]: the network in the order of the forward pass
    block_layers(config, block)
                    -> list[featurize.job.layers.Layer]: a block's forward pass per sample; the numbers of `config` and
                    `block` may be arrays, for many configs at once
    layers(config)  -> list[featurize.job.layers.Layer], in place of both, where the library's own code knows
    build(config)   -> torch.nn.Module (imports torch inside); parameters on the current default device
    batch(config, device)
                    -> (inputs: tuple[Tensor, ...], targets: Tensor) of random data on `device`
    repair(values, draw)
                    -> values: turns raw sampled values into a config that can be built (see below)
    identity(config)
                    -> str, optional: what distinguishes its network from others, where it has `layers`
    kind(config)    -> str, optional: what its networks are grouped by; else family and topology
    loss(config)    -> function of (output, targets) giving a scalar tensor, optional; else cross entropy

`repair(values: dict, draw: Callable[[str], float]) -> dict` resolves dependent dimensions of a sampled point (heads
that divide the embedding, ...); `draw(name)` returns a further uniform number in [0, 1) that depends only on the
sampled point and `name`. What can't be repaired is left as it is and rejected by `Config`'s validation.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from conf.errors import unknown_name

if TYPE_CHECKING:
    from featurize.job.layers import Layer
    from featurize.job.training_settings import TrialConfig


@functools.cache  # asked for each config that is parsed
def family_names() -> tuple[str, ...]:
    """Return the known families, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")))


def get_family(name: str) -> ModuleType:
    """Return the family's module. An unknown name raises `UsageError` listing the known ones."""
    if name not in family_names():
        raise unknown_name("family", name, family_names())
    return importlib.import_module(f"{__name__}.{name}")


def layers_of(config: TrialConfig) -> list[Layer]:
    """Return the config's layer plan, in the order of the forward pass, per sample. Raises what the family's `layers`
    does."""
    family = get_family(config.family)
    if hasattr(family, "layers"):
        layers: list[Layer] = family.layers(config)
        return layers
    blocks = family.blocks(config)
    return [layer for block in blocks for layer in family.block_layers(config, block) * block.times if layer.present]


def loss_of(config: TrialConfig) -> Callable[..., Any] | None:
    """Return the loss that the config's family trains with; None: cross entropy, as `training_step` takes it."""
    loss = getattr(get_family(config.family), "loss", None)
    return None if loss is None else loss(config)
