"""Checkpoints inside a compiled model: marks on the captured graph, as torch.compile reads them.

Start reading at `marked`. A compiled model does not run a checkpoint's hooks. Its operators are captured with the mark
"compute again", and AOTAutograd's partitioner then saves the inputs of the checkpoint alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint as library
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

from featurize.replacing import replaced


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Within, `torch.utils.checkpoint.checkpoint` of either variant runs its function once and marks what it runs."""
    from torch._functorch import partitioners

    numbers = itertools.count()

    def without_hooks(
        _function: Callable[..., Any],
        _preserve: bool = True,
        context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
        *_: Any,
        **__: Any,
    ) -> Iterator[None]:
        with _computed_again(next(numbers), context_fn):
            yield

    def without_hooks_by_name(
        function: Callable[..., Any],
        _args: Any,
        _kwargs: Any,
        *,
        context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
        **_: Any,
    ) -> Iterator[None]:
        return without_hooks(function, context_fn=context_fn)

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            with _computed_again(next(numbers), noop_context_fn):
                return function(*args)

    name, newer = "_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"
    with (
        # From 2.15 on `checkpoint` calls the newer one, whose settings have names.
        replaced(library, newer, without_hooks_by_name)
        if hasattr(library, newer)
        else replaced(library, name, without_hooks),
        replaced(library, "CheckpointFunction", Reentrant),
        # Keeps the state of a GPU's random numbers, some bytes, and knows no meta tensors.
        replaced(
            partitioners, "functionalize_rng_ops", lambda _joint, forward, backward, _symbols: (forward, backward)
        ),
    ):
        yield


@contextlib.contextmanager
def _computed_again(number: int, context_fn: Callable[[], tuple[Any, Any]]) -> Iterator[None]:
    """Mark the nodes that are captured within. A selective checkpoint's own mode says which of them are saved."""
    from torch.fx import traceback

    mode, _ = context_fn()
    if hasattr(mode, "ac_graph_id"):
        mode.ac_graph_id = number
    with traceback.preserve_node_meta():  # which restores the marks in the end
        traceback.current_meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=number)
        with mode:
            yield


def mark_cheap(joint: torch.fx.GraphModule, names: frozenset[str]) -> None:
    """Mark the operators of these names in a captured graph: none of their results is saved."""
    for node in joint.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in names:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
