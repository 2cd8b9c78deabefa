"""Compiled modules in a trace: graphs as torch.compile would capture and split them, replayed on meta tensors.

Start reading at `CompiledRegions`; `featurize.recording.compiled_graph` runs a captured graph. AOTAutograd traces the
joint graph of a region's forward and backward pass, its min-cut partitioner chooses what is saved. Imports torch's
compiler when the first region is captured, not before. `AttributeReads` lets repeated blocks share a capture,
`in_pieces` cuts a graph where DistributedDataParallel's buckets end, `marked` marks what checkpoints recompute.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call
from torch.utils import _pytree as pytree, checkpoint as library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

from conf.errors import exception_line
from featurize.nets.checkpointing import repeated_blocks
from featurize.operators.own_operators import DEQUANTIZATIONS
from featurize.operators.replacing import all_replaced, if_imported, replaced
from featurize.recording.block_record import GRAPHED, CudaGraphs
from featurize.recording.compiled_graph import GraphReplay
from featurize.recording.skeleton import (
    closed_over,
    compiled_function,
    compiled_functions,
    is_compiled,
    uncompiled_copy,
)

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

    from featurize.recording.recorder import Recorder

MODELLED = (
    "the model is compiled (torch.compile): AOTAutograd's partitioner chose what is saved for the backward pass, while "
    "fusion and buffer reuse of Inductor are approximated: the figures are less sure than those of an eager model"
)
AS_EAGER = (
    "the model is compiled (torch.compile) and is estimated as eager: compiled steps usually take less memory and time"
)
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_KNOWN = (Tensor, *_PLAIN)
_MOST_REASONS = 2
_Capture = Callable[[list[Tensor]], Any]  # the graphs of one region, called with parameters, buffers and inputs


class CompiledRegions:
    """The compiled modules of one model. Set the `recorder` before the step; without one, the modules run eagerly.

    Args:
        model: Its compiled modules' forward passes are replaced.
        names: The compiled modules; "" is the model itself.
        blocks_alone: Repeated blocks are compiled one by one, as where checkpoints around them divide the graph.
        graphs: The CUDA graphs that their graphs run as, if they do; its notes are among `notes`.
        buckets: Bytes of DistributedDataParallel's first bucket and of all later ones, where it wraps the model: each
            graph is cut there, as Dynamo's DDPOptimizer does.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        *,
        blocks_alone: bool = False,
        graphs: CudaGraphs | None = None,
        buckets: Sequence[float] | None = None,
    ) -> None:
        self.recorder: Recorder | None = None
        self.graphs, self.buckets = graphs, buckets
        self.capturing = False
        self.followed: set[str] = set()  # modules and functions that were captured
        self.failed: dict[str, str] = {}  # those that were not -> the reason
        # Kind of inputs -> the capture for them, or why there is none; for each set of modules that read the same.
        self.known: dict[Hashable, list[tuple[AttributeReads, _Capture | str]]] = {}
        paths = {module: path for path, module in model.named_modules()}
        chosen: dict[nn.Module, None] = {}
        for name in names:
            module = model.get_submodule(name)
            blocks = repeated_blocks(module)
            if not (blocks_alone and blocks):
                chosen[module] = None
            chosen |= dict.fromkeys(blocks)  # also for where the whole model cannot be captured
        self._any = False
        for module in chosen:  # shadows the class's method
            vars(module)["forward"] = self._region(module, module.forward, _name_module(paths[module]))
        for path, module in model.named_modules():
            for name, function in compiled_functions(module).items():
                vars(module)[name] = self._function(function, f"function {name!r} of {_name_module(path)}")

    def loss(self, loss: Callable[..., Tensor] | None) -> Callable[..., Tensor] | None:
        """Return the replacement of a loss that is compiled, or that calls compiled functions. Does not change the
        loss itself."""
        if isinstance(loss, nn.Module):
            inner, compiled = uncompiled_copy(loss), is_compiled(loss)
            vars(inner).update(
                {n: self._function(f, f"function {n!r} of the loss") for n, f in compiled_functions(inner).items()}
            )
            return self._region(inner, inner.forward, "the loss") if compiled else inner
        if loss is not None and (original := compiled_function(loss)) is not None:
            return self._function(original, "the loss")
        return loss

    def _function(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        owner = getattr(function, "__self__", None)
        return self._region(owner if isinstance(owner, nn.Module) else nn.Module(), function, name)

    def _region(self, module: nn.Module, forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the replacement of a forward pass. It keeps one capture for each combination of shapes, types and
        constants of the inputs."""
        self._any = True
        holder = _Holder(module, forward)
        captured: dict[Hashable, _Capture | None] = {}

        @functools.wraps(forward)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            recorder = self.recorder_now()
            if recorder is None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            leaves, structure = pytree.tree_flatten((args, kwargs))
            held = {**dict(holder.named_parameters()), **dict(holder.named_buffers())}
            tensors = [*held.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
            code = getattr(forward, "__func__", forward)
            key = (code, str(structure), _repeats(tensors), *held, *map(_signature, (*leaves, *held.values())))
            if key not in captured:
                captured[key] = self._capture(holder, name, key, list(held), leaves, structure, tensors)
            capture = captured[key]
            if capture is None:
                return forward(*args, **kwargs)
            # Its graphs run without gradients and below no module's hooks: they do not show a checkpoint's second pass.
            with recorder.log.computing_again(recorder.memory.phase == "backward"):
                return capture(tensors)

        return compiled

    def _capture(
        self,
        holder: _Holder,
        name: str,
        key: Hashable,
        names: list[str],
        leaves: list[Any],
        structure: pytree.TreeSpec,
        tensors: list[Tensor],
    ) -> _Capture | None:
        """Return the capture for these inputs; None where it fails, which is noted."""
        known = self.known.setdefault(key, [])
        capture = next((capture for reads, capture in known if reads.alike(holder.module)), None)
        if unknown := [leaf for leaf in leaves if not isinstance(leaf, _KNOWN)]:
            capture = f"it takes a {type(unknown[0]).__name__}, which is not a tensor"
        elif capture is None:
            reads = AttributeReads(holder.module)
            self.capturing = True
            try:
                # Saved-tensor hooks (of a checkpoint around this) and dispatch modes are per thread: none here.
                with ThreadPoolExecutor(1) as thread, _capturable(), reads.noted():
                    capture = thread.submit(_captured, holder, names, leaves, structure, self, tensors).result()
            except Exception as error:  # the compiler and a model may raise anything
                capture = exception_line(error)
            finally:
                self.capturing = False
            known.append((reads, capture))
        if isinstance(capture, str):
            self.failed.setdefault(name, capture)
            return None
        self.followed.add(name)
        return capture

    def recorder_now(self) -> Recorder | None:
        """Return the current recorder; None while a graph is captured."""
        return None if self.capturing else self.recorder

    def notes(self) -> tuple[str, ...]:
        """Return notes on how exact the trace of the compiled modules is, and why some were not captured."""
        if not self._any:
            return ()
        reasons = tuple(f"torch.compile: {name} is not captured: {why}" for name, why in self.failed.items())
        graphed = self.graphs is not None and self.graphs.input_bytes is not None
        return (MODELLED if self.followed else AS_EAGER, *[GRAPHED] * graphed, *reasons[:_MOST_REASONS])


class _Holder(nn.Module):
    """The original module, for `torch.func.functional_call`."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._as_it_was = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_it_was(*args, **kwargs)


def _captured(
    holder: nn.Module,
    names: list[str],
    leaves: list[Any],
    structure: pytree.TreeSpec,
    regions: CompiledRegions,
    tensors: list[Tensor],
) -> _Capture:
    """Return the compiled function of one region for inputs of one kind, its graphs captured and run once. Raises
    any error of the model and of the compiler."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.replace_random import replace_random_passes

    # From 2.7 on; earlier partitioners do not ask which inputs stay alive.
    takes_alive = "static_lifetime_input_indices" in signature(min_cut_rematerialization_partition).parameters
    constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    results: dict[str, Any] = {}  # results of the last call of `forward`

    def forward(*tensors: Tensor) -> list[Tensor]:
        given = iter(tensors[len(names) :])
        pairs = zip(constants, is_tensor, strict=True)
        args, kwargs = pytree.tree_unflatten([next(given) if is_one else c for c, is_one in pairs], structure)
        weights = dict(zip(names, tensors, strict=False))
        with disable_saved_tensors_hooks("a compiled module with saved-tensor hooks in it"):
            result = functional_call(holder, weights, args, kwargs)
        outputs, results["structure"] = pytree.tree_flatten(result)
        results["leaves"] = [(leaf, list(_tensors_in(leaf, {}))) for leaf in outputs]
        return [tensor for _, inside in results["leaves"] for tensor in inside]

    def partition(alive: list[int], joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        if any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in joint.graph.nodes):
            replace_random_passes(joint)  # as Inductor does: a seed is saved instead of random numbers
        for node in joint.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in DEQUANTIZATIONS:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE  # its result is not saved
        known = {"static_lifetime_input_indices": alive} if takes_alive else {}
        return min_cut_rematerialization_partition(joint, inputs, "inductor", num_fwd_outputs=num_fwd_outputs, **known)

    def compiled(function: Callable[..., Any], weights: int) -> Callable[..., Any]:
        alive = list(range(weights))  # in any case: saving them costs nothing
        return aot_function(
            function,
            lambda graph, _inputs: GraphReplay(graph, regions.recorder_now, regions.graphs),
            partition_fn=functools.partial(partition, alive),
            decompositions=dict(select_decomp_table()),
            num_params_buffers=weights,
            keep_inference_input_mutations=True,  # as Inductor's: the graph's kernels write running statistics
            enable_log=False,  # it prints the graphs, even if no one reads them
        )

    function = None
    if regions.buckets is not None:
        function = in_pieces(forward, tensors, len(names), regions.buckets, compiled)
    function = function or compiled(forward, len(names))
    outputs = [output for output in function(*tensors) if output.requires_grad]
    inputs = [tensor for tensor in tensors if tensor.requires_grad]
    if inputs and not outputs:
        raise RuntimeError("the graph loses the gradient")
    if inputs:
        gradients = [torch.empty_like(output) for output in outputs]
        with _without_hooks(inputs):
            torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)

    def capture(tensors: list[Tensor]) -> Any:
        outputs = iter(function(*tensors))
        leaves = [
            copy.deepcopy(leaf, {id(inner): next(outputs) for inner in inside}) for leaf, inside in results["leaves"]
        ]
        return pytree.tree_unflatten(leaves, results["structure"])

    return capture


@contextlib.contextmanager
def _without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Disable the hooks on gradients of these tensors inside the block: those of `fully_shard` on a module's outputs
    would begin and end a backward pass of the whole model."""
    hooks = [(tensor._backward_hooks, dict(tensor._backward_hooks)) for tensor in tensors if tensor._backward_hooks]
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, kept in hooks:
            registered.update(kept)


@contextlib.contextmanager
def _capturable() -> Iterator[None]:
    """Prepare for a capture inside the block. Losses of class indices call the operators that they are composed of:
    composite ones have no gradient on meta tensors during a capture. `torch.tensor` on meta gives a tensor of the
    graph. `torch.compiler` reports that it compiles: models then skip code that reads values."""
    functions = torch._C._nn
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    entropy: Callable[..., Tensor] = functions.cross_entropy_loss
    likelihood: Callable[..., Tensor] = functions.nll_loss_nd

    def nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> Tensor:
        if x.dim() not in (1, 2, 4):
            return likelihood(x, target, weight, reduction, ignored)
        kernel = torch.ops.aten.nll_loss2d_forward if x.dim() == 4 else torch.ops.aten.nll_loss_forward
        loss: Tensor = kernel(x, target, weight, reduction, ignored)[0]
        return loss

    def cross_entropy(
        x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, smoothing: float
    ) -> Tensor:
        if smoothing or target.is_floating_point():
            return entropy(x, target, weight, reduction, ignored, smoothing)
        return nll_loss(torch.log_softmax(x, min(1, x.dim() - 1)), target, weight, reduction, ignored)

    made_of_data = torch.tensor

    def tensor(*args: Any, **kwargs: Any) -> Tensor:
        made = made_of_data(*args, **kwargs)
        return torch.empty(made.shape, dtype=made.dtype, device="meta") if made.is_meta else made

    changes = (
        (functions, "cross_entropy_loss", cross_entropy),
        (functions, "nll_loss_nd", nll_loss),
        (torch, "tensor", tensor),
        (torch.compiler, "_is_compiling_flag", True),
        # Without a GPU, CUDA builds of 2.11 keep a guard of the thread that captures, and the next one's use of it
        # crashes the process. Graphs of meta tensors need none.
        *if_imported("torch._C", "_ensureCUDADeviceGuardSet", lambda _: lambda: None),
    )
    with (
        all_replaced(changes),
        marked(),
        _use_lazy_graph_module(True),  # no one runs the Python code of the graphs
    ):
        yield


def _tensors_in(value: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    """Yield the tensors in a result: itself, or those inside a key-value cache and other objects."""
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        yield value
        return
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()
    for member in (*members, *getattr(value, "__dict__", {}).values()):
        yield from _tensors_in(member, seen)


def _signature(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return type(value), value if isinstance(value, _KNOWN) else None


def _repeats(tensors: list[Tensor]) -> tuple[int, ...]:
    """Return for each tensor the index of its first occurrence: the graph has it once."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors))


def _name_module(name: str) -> str:
    return f"module {name!r}" if name else "the model"


_COMPARED = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
# Parameters and buffers are the graph's inputs; members are compared path by path.
_COMPARED_APART = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_plain_attribute = object.__getattribute__


class AttributeReads:
    """The attributes that a forward pass reads of a module and its members.

    Args:
        module: The module whose graph is captured.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tree = _tree(module)
        self._paths = _paths(module)
        self._values: dict[tuple[str, str], object] = {}
        self._all_read = False  # code read the attributes as a whole

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Count any thread's reads of the module inside the block."""
        paths, values = self._paths, self._values

        def read(module: nn.Module, name: str) -> Any:
            value = _plain_attribute(module, name)
            path = paths.get(id(module))
            if path is None:
                return value
            if name == "__dict__":
                self._all_read |= not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.nn.")
            elif name not in _COMPARED_APART and name in _plain_attribute(module, "__dict__"):
                values.setdefault((path, name), value)
            return value

        with replaced(nn.Module, "__getattribute__", read):
            yield

    def alike(self, other: nn.Module) -> bool:
        """Return whether the forward pass would read the same from another module, including members and classes."""
        if self._all_read or _tree(other) != self._tree:
            return False
        theirs = _paths(other)
        members = dict(other.named_modules())
        for (path, name), value in self._values.items():
            attributes = vars(members[path])
            if name not in attributes or not self._same(value, attributes[name], theirs):
                return False
        return True

    def _same(self, ours: object, other: object, theirs: dict[int, str]) -> bool:
        if ours is other:
            return True
        if isinstance(ours, nn.Module):
            path = self._paths.get(id(ours))
            return path is not None and path == theirs.get(id(other))
        if type(ours) is not type(other):
            return False
        same = functools.partial(self._same, theirs=theirs)
        match ours, other:
            case _ if isinstance(ours, _COMPARED):
                return ours == other
            case list() | tuple(), list() | tuple():
                return len(ours) == len(other) and all(map(same, ours, other))
            case dict(), dict():
                return list(ours) == list(other) and all(map(same, ours.values(), other.values()))
            case MethodType(), MethodType():
                return ours.__func__ is other.__func__ and same(ours.__self__, other.__self__)
            case FunctionType(), FunctionType():
                return ours.__code__ is other.__code__ and same(closed_over(ours), closed_over(other))
            case functools.partial(), functools.partial():
                mine, its = ((part.func, part.args, part.keywords) for part in (ours, other))
                return same(mine, its)
        return False


def _paths(module: nn.Module) -> dict[int, str]:
    return {id(member): path for path, member in module.named_modules()}


def _tree(module: nn.Module) -> list[tuple[str, type, tuple[str, ...]]]:
    """Return path, class and missing parameters and buffers of each member; one that has two paths appears once."""
    return [
        (
            path,
            type(member),
            tuple(k for part in (member._parameters, member._buffers) for k in part if part[k] is None),
        )
        for path, member in module.named_modules()
    ]


Compile = Callable[[Callable[..., Any], int], Callable[..., Any]]


def in_pieces(
    forward: Callable[..., list[Tensor]],
    tensors: Sequence[Tensor],
    weights: int,
    limits: Sequence[float],
    compiled: Compile,
) -> Callable[..., Any] | None:
    """Return a function that runs a forward pass in compiled pieces; None where it stays in one piece.

    It does so where its parameters fill one bucket, and where a part of it runs without gradients, which a graph of
    operators does not show.

    Args:
        forward: Takes `tensors`, on the meta device, and returns tensors.
        tensors: The parameters and buffers, then the inputs.
        weights: How many of them are parameters and buffers.
        limits: Bytes of the first bucket and of all later ones, as returned by `limits_of` of
            `featurize.training.rank`.
        compiled: Compiles a function whose first arguments, of the given number, are parameters and buffers.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.passes.split_module import split_module

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
            count = sum(argument.name in names for argument in node.args)
            piece = _Piece(split.get_submodule(node.target), order, count, compiled)
            split.add_submodule(node.target, piece)
    return split


def piece_of_nodes(graph: Graph, sizes: dict[Node, int], limits: Sequence[float]) -> dict[Node, int]:
    """Return the piece in which each operator runs; 0 is the first piece.

    From the last operator backwards, a piece takes operators until the parameters that they read reach the limit.

    Args:
        graph: The graph of one forward pass.
        sizes: Input of the graph that holds a parameter with a gradient -> its bytes.
        limits: Bytes of the parameters of the last piece, and of all others.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: number for number, node in enumerate(graph.nodes)}
    of_reader: dict[Node, list[Node]] = {}
    for node in nodes:
        # A weight's transpose and its cast belong to the piece of the product that reads them.
        reader = node
        while _only_of_weights(reader, sizes) and reader.users:
            reader = min(reader.users, key=place.__getitem__)
        of_reader.setdefault(reader, []).append(node)
    number = filled = 0
    members: set[Node] = set()
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
    if number and not filled:  # operators without parameters before the first piece
        from_last = {node: min(piece, number - 1) for node, piece in from_last.items()}
        number -= 1
    return {node: number - piece for node, piece in from_last.items()}


def _only_of_weights(node: Node, sizes: dict[Node, int]) -> bool:
    sources = node.all_input_nodes
    return len(sources) == 1 and (sources[0] in sizes or _only_of_weights(sources[0], sizes))


class _Piece(nn.Module):
    """One compiled piece. Its parameters come first, as AOTAutograd expects."""

    def __init__(self, graph: nn.Module, order: list[int], weights: int, compiled: Compile) -> None:
        super().__init__()
        self._order = order
        back = sorted(range(len(order)), key=order.__getitem__)
        self._compiled = compiled(lambda *given: graph(*(given[place] for place in back)), weights)

    def forward(self, *arguments: Any) -> Any:
        return self._compiled(*(arguments[place] for place in self._order))


class _GradModes(TorchDispatchMode):
    """Detects operators that run without gradients."""

    without_gradients = False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.without_gradients |= not torch.is_grad_enabled()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Make `torch.utils.checkpoint.checkpoint` of either variant run its function once and mark its operators."""
    from torch._functorch import partitioners

    numbers = itertools.count()

    def without_hooks(
        _function: Callable[..., Any],
        _preserve_or_args: Any = (),
        given: Any = noop_context_fn,  # from 2.15 on the function's keyword arguments
        *_: Any,
        context_fn: Callable[[], tuple[Any, Any]] | None = None,
        **__: Any,
    ) -> Iterator[None]:
        with _computed_again(next(numbers), context_fn or (given if callable(given) else noop_context_fn)):
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            with _computed_again(next(numbers), noop_context_fn):
                return function(*args)

    name, newer = "_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"
    with (
        # From 2.15 on `checkpoint` calls the newer one, whose settings have names.
        replaced(library, newer if hasattr(library, newer) else name, without_hooks),
        replaced(library, "CheckpointFunction", Reentrant),
        # Saves the state of a GPU's random numbers, some bytes, and does not support meta tensors.
        replaced(
            partitioners, "functionalize_rng_ops", lambda _joint, forward, backward, _symbols: (forward, backward)
        ),
    ):
        yield


@contextlib.contextmanager
def _computed_again(number: int, context_fn: Callable[[], tuple[Any, Any]]) -> Iterator[None]:
    """Mark the nodes that are captured inside. A selective checkpoint's own mode decides which of them are saved."""
    from torch.fx import traceback

    mode, _ = context_fn()
    if hasattr(mode, "ac_graph_id"):
        mode.ac_graph_id = number
    with traceback.preserve_node_meta():  # it restores the marks in the end
        traceback.current_meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=number)
        with mode:
            yield
