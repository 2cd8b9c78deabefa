"""Activation checkpointing as a setting: applied to a model's repeated blocks, or by the model's own switch.

Start reading at `checkpoint_blocks`; `repeated_blocks` defines the blocks.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from conf.errors import UsageError

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Operators whose results selective checkpointing saves, as they are slow to recompute.
_SAVED = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_cudnn_rnn",
)


def checkpoint_blocks(model: nn.Module, how: str, *, every: int = 1, reentrant: bool = False) -> None:
    """Make the model recompute its blocks' activations in the backward pass. Changes the model.

    Args:
        model: transformers' and timm's models, also inside another module, have their own switch, which is used for
            `full`. For other models, and where these switches do not suffice, the repeated blocks' forward passes are
            wrapped. Key-value caches are switched off, since blocks would fill them twice.
        how: `full`, or `selective`: products and attention are saved, cheap operators are recomputed.
        every: Every n-th block is checkpointed, beginning with the first.
        reentrant: Whether to use the reentrant variant of `torch.utils.checkpoint`.

    Raises:
        UsageError: The model has no repeated blocks, or is one of peft's prefix tuning, which fails with checkpointing
            on a GPU too: its prefixes are in the key-value cache, which checkpointed layers do not use.
    """
    if any(_tunes_a_prefix(module) for module in model.modules()):
        raise UsageError(
            "peft's prefix tuning does not work with checkpointing, on a GPU either: the prefixes stand in the "
            "key-value cache, which checkpointed layers do without; leave checkpointing out"
        )
    _leave_caches_out(model)
    if how == "full" and _by_own_switches(model, every, reentrant):
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise UsageError(
            "checkpointing is for models of repeated blocks, and this one has no nn.ModuleList or nn.Sequential of "
            "them; call torch.utils.checkpoint in its forward pass"
        )
    more: dict[str, Any] = {}
    if how == "selective":
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks[::every]:
        vars(block)["forward"] = _checkpoint(block.forward, reentrant, more)  # shadows the class's method


def _leave_caches_out(model: nn.Module) -> None:
    """Set `use_cache` of transformers' models to false; they do so themselves in each forward pass, with a warning."""
    uncached: dict[int, Any] = {}  # copies: a factory's config is the user's, and outlives the model
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            if id(config) not in uncached:
                uncached[id(config)] = copy.copy(config)
                setattr(uncached[id(config)], "use_cache", False)  # noqa: B010 - a config is of any class
            vars(module)["config"] = uncached[id(config)]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks, in order: members of the outermost nn.ModuleList and nn.Sequential that hold at least two of
    one class, if that class has submodules. Blocks that are nn.Sequential count only where there are no others."""
    return _blocks(model, nested=False) or _blocks(model, nested=True)


def _tunes_a_prefix(module: nn.Module) -> bool:
    configs = getattr(module, "peft_config", None)  # an attribute of peft models, by the adapter's name
    adapters = configs.values() if isinstance(configs, dict) else ()
    return any(getattr(adapter, "peft_type", None) == "PREFIX_TUNING" for adapter in adapters)


def _blocks(module: nn.Module, *, nested: bool) -> list[nn.Module]:
    members = list(module.children())
    if isinstance(module, CONTAINERS):
        counts = Counter(type(member) for member in members if _is_block(member, nested))
        repeated = {kind for kind, count in counts.items() if count >= 2}
        if repeated:
            return [member for member in members if type(member) in repeated]
    return [block for member in members for block in _blocks(member, nested=nested)]


def _is_block(module: nn.Module, nested: bool) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # they have no forward pass
        return False
    return any(True for _ in module.children()) and (nested or not isinstance(module, nn.Sequential))


def _by_own_switches(model: nn.Module, every: int, reentrant: bool) -> bool:
    """Return whether the model, or else any of its members, has a suitable switch, which is then switched on."""
    variant = {"use_reentrant": reentrant}  # passed by position: users' models may name the argument otherwise
    if getattr(model, "supports_gradient_checkpointing", True):
        enable = getattr(model, "activation_checkpointing_enable", None)  # in transformers from 5 on
        if callable(enable):
            enable(variant, **({"every_n_layers": every} if every > 1 else {}))
            return True
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if callable(enable) and every == 1:
            enable(variant)
            return True
    switch = getattr(model, "set_grad_checkpointing", None)
    if callable(switch) and every == 1 and not reentrant:
        switch(True)
        return True
    return any([_by_own_switches(member, every, reentrant) for member in model.children()])


def switch_on(model: nn.Module, name: str) -> None:
    """Make a library's model recompute its blocks by its own switch. Raises `UsageError`, with the model's `name`, if
    it has none that works."""
    refusal = UsageError(f"{name} has no activation_checkpointing")
    try:
        switched = _by_own_switches(model, every=1, reentrant=False)
    except (AttributeError, AssertionError, TypeError, ValueError) as error:  # libraries refuse it in these ways
        raise refusal from error
    if not switched:
        raise refusal


def _checkpoint(forward: Callable[..., Any], reentrant: bool, more: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recompute(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not reentrant:
            return checkpoint(forward, *args, use_reentrant=False, **more, **kwargs)
        names = tuple(kwargs)  # the reentrant variant takes positional arguments only

        def call(*values: Any) -> Any:
            given = len(values) - len(names)
            return forward(*values[:given], **dict(zip(names, values[given:], strict=True)))

        return checkpoint(call, *args, *kwargs.values(), use_reentrant=True)

    return recompute


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = operator._schema.name.removeprefix("aten::")
    return CheckpointPolicy.MUST_SAVE if name in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE
