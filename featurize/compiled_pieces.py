"""Cuts the graph of a compiled model where DistributedDataParallel's buckets of gradients end.

Start reading at `in_pieces`. Dynamo compiles each piece by itself, so that the gradients of one are complete, and are
reduced, while the backward pass of the one before it runs (torch/_dynamo/backends/distributed.py: `DDPOptimizer`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module
from torch.utils._python_dispatch import TorchDispatchMode

Compile = Callable[[Callable[..., Any], int], Callable[..., Any]]


def in_pieces(
    forward: Callable[..., list[Tensor]],
    tensors: Sequence[Tensor],
    weights: int,
    limits: Sequence[float],
    compiled: Compile,
) -> Callable[..., Any] | None:
    """Return what runs a forward pass in compiled pieces; None where it stays in one.

    It stays where its parameters fill one bucket, and where a part of it runs without gradients, which a graph of
    operators does not tell.

    Args:
        forward: Takes `tensors`, on the meta device, and returns tensors.
        tensors: The parameters and buffers, then the inputs.
        weights: How many of them are parameters and buffers.
        limits: Bytes of the first bucket and of all later ones, as `limits_of` of
            `featurize.parallel.data_parallel` gives them.
        compiled: Compiles a function of which so many first arguments are parameters and buffers.
    """
    modes = _GradModes()

    def watched(*given: Tensor) -> list[Tensor]:
        with modes:
            return forward(*given)

    whole = make_fx(watched)(*tensors)
    whole.graph.eliminate_dead_code()
    inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
    sizes = {
        node: tensor.untyped_storage().nbytes()
        for node, tensor in zip(inputs[:weights], tensors, strict=False)
        if tensor.requires_grad
    }
    pieces = piece_of_nodes(whole.graph, sizes, limits)
    if modes.without_gradients or len(set(pieces.values())) < 2:
        return None
    split = split_module(whole, None, lambda node: pieces[node])  # type: ignore[arg-type]  # no root module is needed
    names = {node.name for node in inputs[:weights]}
    for node in split.graph.nodes:
        if node.op == "call_module":
            order = sorted(range(len(node.args)), key=lambda place: node.args[place].name not in names)
            count = sum(one.name in names for one in node.args)
            piece = _Piece(split.get_submodule(node.target), order, count, compiled)
            split.add_submodule(node.target, piece)
    return split


def piece_of_nodes(graph: Graph, sizes: dict[Node, int], limits: Sequence[float]) -> dict[Node, int]:
    """Return the piece in which each operator runs, from 0, the first one.

    From the last operator backwards, a piece takes operators until the parameters that they read reach the limit.

    Args:
        graph: Of one forward pass.
        sizes: Input of the graph that holds a parameter with a gradient -> its bytes.
        limits: Bytes of the last piece's parameters, and of all others'.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: number for number, node in enumerate(graph.nodes)}
    of_reader: dict[Node, list[Node]] = {}
    for node in nodes:
        # A weight's transpose and its cast go with the product that reads them.
        reader = node
        while _only_of_weights(reader, sizes) and reader.users:
            reader = min(reader.users, key=place.__getitem__)
        of_reader.setdefault(reader, []).append(node)
    number, filled, members = 0, 0, set[Node]()
    from_last: dict[Node, int] = {}
    for reader in reversed(nodes):
        if reader not in of_reader:
            continue
        leaves = any(user not in members for node in members for user in node.users)
        if filled >= limits[min(number, len(limits) - 1)] and leaves:
            number, filled, members = number + 1, 0, set()
        for node in of_reader[reader]:
            filled += sum(sizes.get(source, 0) for source in node.all_input_nodes)
            from_last[node] = number
            members.add(node)
    if number and not filled:  # operators without parameters before the first one
        from_last = {node: min(one, number - 1) for node, one in from_last.items()}
        number -= 1
    return {node: number - one for node, one in from_last.items()}


def _only_of_weights(node: Node, sizes: dict[Node, int]) -> bool:
    sources = node.all_input_nodes
    return len(sources) == 1 and (sources[0] in sizes or _only_of_weights(sources[0], sizes))


class _Piece(torch.nn.Module):
    """One compiled piece. Its parameters come first, as AOTAutograd wants them."""

    def __init__(self, graph: torch.nn.Module, order: list[int], weights: int, compiled: Compile) -> None:
        super().__init__()
        assert isinstance(graph, GraphModule)
        self._order = order
        back = sorted(range(len(order)), key=order.__getitem__)

        def function(*sorted_arguments: Any) -> list[Any]:
            self._alone = not isinstance(results := graph(*(sorted_arguments[at] for at in back)), list | tuple)
            return [results] if self._alone else list(results)

        self._compiled = compiled(function, weights)

    def forward(self, *arguments: Any) -> Any:
        results = self._compiled(*(arguments[at] for at in self._order))
        return results[0] if self._alone else results


class _GradModes(TorchDispatchMode):
    """Notices operators that run without gradients."""

    without_gradients = False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.without_gradients |= not torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))
