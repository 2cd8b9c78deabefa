"""A model with fewer of its repeated blocks, where these are all alike.

Start reading at `alike_blocks`; `featurize.deeper` makes the deep model's trace of those of two shallow ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from featurize import attention
from featurize.checkpointing import CONTAINERS, repeated_blocks
from featurize.skeleton import build_on_meta, on_meta
from featurize.wrappers import compiled_modules, remarks


def built_to_shorten(factory: Callable[[], nn.Module]) -> nn.Module | None:
    """Return a model on the meta device, which nobody else holds. None where its copy would lose what a trace notes."""
    model = attention.building(lambda: build_on_meta(factory))
    return None if remarks(model) or compiled_modules(model) else on_meta(model)


def alike_blocks(model: nn.Module) -> int:
    """Return the number of repeated blocks; 0 where they are not all alike, or not in one container.

    Blocks are alike that are printed alike, and whose parameters and buffers have the same names, shapes, types and
    need of gradients. No two share a parameter.
    """
    blocks = repeated_blocks(model)
    if not blocks or container_of(model, blocks) is None:
        return 0
    if any(_described(block) != _described(blocks[0]) for block in blocks[1:]):
        return 0
    own = [id(one) for block in blocks for _name, one in block.named_parameters(remove_duplicate=False)]
    mine = set(own)
    held = [id(one) for _name, one in model.named_parameters(remove_duplicate=False)]
    shared = len(mine) < len(own) or len([one for one in held if one in mine]) > len(own)
    return 0 if shared else len(blocks)


def with_blocks(model: nn.Module, count: int) -> nn.Module:
    """Return a copy with the first `count` repeated blocks. The original is left as it is.

    Args:
        model: One of which `alike_blocks` returns a number.
        count: At most that number.
    """
    short = on_meta(model)
    blocks = repeated_blocks(short)
    container = container_of(short, blocks)
    assert container is not None, "blocks are in one container"
    left_out = {id(block) for block in blocks[count:]}
    kept = {name: one for name, one in container._modules.items() if id(one) not in left_out}
    if not isinstance(container, nn.ModuleDict):
        kept = {str(place): one for place, one in enumerate(kept.values())}
    container._modules = kept
    return short


def container_of(model: nn.Module, blocks: list[nn.Module]) -> nn.Module | None:
    wanted = {id(block) for block in blocks}
    for module in model.modules():
        if isinstance(module, CONTAINERS) and wanted <= {id(member) for member in module.children()}:
            return module
    return None


def _described(block: nn.Module) -> tuple[Any, ...]:
    tensors = (*block.named_parameters(), *block.named_buffers())
    return repr(block), [(name, one.shape, one.dtype, one.requires_grad) for name, one in tensors]
