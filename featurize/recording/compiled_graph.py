"""Replays one graph of a compiled region as Inductor would run it: which values get memory, and until when.

Start reading at `GraphReplay`; `featurize.recording.compiled` captures the graphs. Inductor writes its kernels for the
target GPU, so four rules approximate what it fuses:

1. Matrix products, convolutions, attention and all operators that no rule mentions are kernels of their own.
2. A pointwise result gets memory only where such a kernel, the graph's output or a write needs it, or where it reads
   more buffers than Inductor inlines. Otherwise its consumers compute it from the buffers that it reads.
3. A reduction's result always gets memory, and so does the result of a gather; its input need not.
4. A buffer is freed after its last reader. A fused kernel's result reuses a buffer of its size that ends there.

Values that `fused_groups` combines are one kernel, which reads each buffer once: the rules of Inductor's
scheduler, based on sizes alone (torch/_inductor/scheduler.py: `fuse_nodes`,
`can_fuse`; torch/_inductor/codegen/simd.py: `SIMDScheduling.can_fuse`).
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from featurize.operators.table import GATHERS, INDEXING, POINTWISE, REDUCTION, SCATTER, VIEW, fused_part

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from featurize.recording.block_record import CudaGraphs
    from featurize.recording.recorder import Recorder

# torch/_inductor/config.py: realize_reads_threshold, for a value with several readers; realize_acc_reads_threshold.
_MOST_READS_SHARED = 4
_MOST_READS = 8
_INPUT, _VIEW, _INLINE, _KERNEL, _EXTERN = "input", "view", "inline", "kernel", "extern"

MAX_FUSED = 64  # torch/_inductor/config.py: max_fusion_size
# A reduction of more elements to one value is two kernels (torch/_inductor/ir.py: Reduction.num_splits).
_SPLIT_FROM = 8192


class GraphReplay:
    """A forward or backward graph, called as AOTAutograd calls a backend's result: with one list, which is emptied."""

    _boxed_call = True

    def __init__(
        self, graph_module: GraphModule, recorder_now: Callable[[], Recorder | None], graphs: CudaGraphs | None
    ) -> None:
        """`recorder_now` returns the current recorder; `graphs`: the CUDA graphs that it runs as, if it does."""
        self._constants = graph_module
        self._recorder_now, self._graphs = recorder_now, graphs
        self._nodes = list(graph_module.graph.nodes)
        for node in self._nodes:
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise NotImplementedError(f"its graph calls {node.target}, which is not modelled")
        self._schedule_kernels()

    def _schedule_kernels(self) -> None:
        """Decide which values have memory, what each kernel reads and which values end with it."""
        self._roles = {node: _role(node) for node in self._nodes}
        self._bases: dict[Node, Node] = {}  # value -> the one whose memory it shares
        self._views: dict[Node, list[Node]] = {}  # the reverse
        users: dict[Node, set[Node]] = {node: set() for node in self._nodes}
        for node in self._nodes:
            role, sources = self._roles[node], node.all_input_nodes
            writes = role == _KERNEL and _mutates(node)
            self._bases[node] = base = self._bases[sources[0]] if role == _VIEW or writes else node
            if base is not node:
                self._views.setdefault(base, []).append(node)
            for source in sources if role != _VIEW else ():
                users[self._bases[source]].add(node)
            for source in sources if role in (_EXTERN, "output") else sources[:1] if writes else ():
                if self._roles[self._bases[source]] == _INLINE:
                    self._roles[self._bases[source]] = _KERNEL
        # The buffers from which a value is computed. In order, since a value with too many becomes a buffer itself.
        self._reads: dict[Node, dict[Node, None]] = {}  # without order, two replays would free in different orders
        last: dict[Node, Node] = {}
        for node in self._nodes:
            if self._roles[node] in (_INPUT, _VIEW):
                continue
            reads: dict[Node, None] = {}
            for source in node.all_input_nodes:
                base = self._bases[source]
                reads |= self._reads[base] if self._roles[base] == _INLINE else {base: None}
            self._reads[node] = reads
            most = _MOST_READS_SHARED if len(users[node]) > 1 else _MOST_READS
            if self._roles[node] == _INLINE and len(reads) > most:
                self._roles[node] = _KERNEL
            if self._roles[node] != _INLINE:
                last.update(dict.fromkeys(reads, node))
        self._ends: dict[Node, list[Node]] = {node: [] for node in self._nodes}
        for base, node in last.items():
            self._ends[node].append(base)
        self._unread = {n for n in self._nodes if self._bases[n] is n and self._roles[n] != _INLINE and n not in last}
        self._plan_kernels(users)

    def _plan_kernels(self, users: dict[Node, set[Node]]) -> None:
        """Decide which values one kernel computes, and which of them only that kernel reads."""
        run = [node for node in self._nodes if self._roles[node] in (_KERNEL, _EXTERN)]
        groups = fused_groups([self._work(node) for node in run])
        self._group = {run[index]: number for number, group in enumerate(groups) for index in group}
        self._local = {
            node
            for node in run
            if (readers := {user for made in self._made(node) for user in users[made] if user not in self._made(node)})
            and all(self._group.get(user) == self._group[node] for user in readers)
        }

    def _work(self, node: Node) -> Work:
        reads = tuple(self._reads[node])
        if self._roles[node] == _EXTERN or fused_part(_name(node)) == SCATTER:
            return Work(places=0, fusible=False, reads=reads, makes=self._made(node))
        places = _elements(node)
        reduced = _elements(node.all_input_nodes[0]) if _reduces(node) and node.all_input_nodes else places
        return Work(
            places=places,
            depth=max(1, reduced // max(1, places)),
            trailing=_reduces_last(node),
            reads=reads,
            makes=self._made(node),
        )

    def _made(self, node: Node) -> tuple[Node, ...]:
        """Return the buffers that a kernel writes; each of several results is one."""
        parts = (user for user in node.users if user.target is operator.getitem and self._roles[user] == _INPUT)
        return (self._bases[node], *parts)

    def __call__(self, args: list[Any]) -> list[Any]:
        recorder, graphs = self._recorder_now(), self._graphs
        if recorder is None or graphs is None:
            return self._run(args)
        stays = recorder.memory.stays  # copied inputs get no name: it would keep them alive while the graph runs
        copied = recorder.log.copied(
            [argument for argument in args if isinstance(argument, Tensor) and not stays(argument)]
        )
        with graphs.replay(self, copied):
            return self._run(args)

    def _run(self, args: list[Any]) -> list[Any]:
        noted: dict[int, _Noted] = {}
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        values: dict[Node, Any] = dict(zip(inputs, args, strict=True))
        args.clear()
        for node in self._nodes:
            role = self._roles[node]
            if role == "output":
                return [values.get(output) if isinstance(output, torch.fx.Node) else output for output in node.args[0]]
            if role == _VIEW and node.all_input_nodes[0] in values and node not in values:
                with torch._C._DisableTorchDispatch():
                    values[node] = _call(node, values)
            elif role == _KERNEL:
                self._run_fused(node, values, noted)
            elif role == _EXTERN:
                self._run_extern(node, values)
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(self._constants)
            if node in self._unread and role != _EXTERN:
                values.pop(node, None)
        raise AssertionError("a graph ends with its output")

    def _run_extern(self, node: Node, values: dict[Node, Any]) -> None:
        recorder = self._recorder_now()
        again = "recompute" in node.meta
        with contextlib.nullcontext() if recorder is None else recorder.log.computing_again(again):
            result = _call(node, values)
        self._keep(node, result, values)
        del result
        self._end(self._ends[node], values)

    def _run_fused(self, node: Node, values: dict[Node, Any], noted: dict[int, _Noted]) -> None:
        sources = [base for base in self._reads[node] if isinstance(values.get(base), Tensor)]
        inputs = [values[base] for base in sources]
        first = values.get(node.all_input_nodes[0]) if node.all_input_nodes else None
        if first is None and inputs and _name(node) in GATHERS:  # from values that the same kernel computes
            first = max(inputs, key=lambda tensor: tensor.numel())
        if _mutates(node):
            values[node] = made = first
        else:
            made = self._taken_over(node, sources, values)
            with torch._C._DisableTorchDispatch():
                made = _like(node.meta["val"]) if made is None else made
            self._keep(node, made, values)
        if (recorder := self._recorder_now()) is not None:
            assert isinstance(node.target, torch._ops.OpOverload)  # `_role` calls nothing else a kernel
            kernel = noted.setdefault(self._group[node], _Noted())
            again = [values[base] for base in sources if base in kernel.buffers]
            results = made if isinstance(made, tuple) else (made,)
            kernel.operator = recorder.log.fused(
                node.target,
                (first,),
                inputs,
                results,
                into=kernel.operator,
                again=again,
                kept=node not in self._local,
                leads=_reduces(node),
            )
            kernel.buffers.update(sources, self._made(node))
            del again, results
        del inputs, first, made
        self._end(self._ends[node], values)

    def _taken_over(self, node: Node, sources: list[Node], values: dict[Node, Any]) -> Tensor | None:
        """Return the result in the memory of a buffer of this graph that ends here, if there is one of its size."""
        meant = node.meta["val"]
        if not isinstance(meant, Tensor) or meant.device.type != "meta":
            return None
        nbytes = meant.untyped_storage().nbytes()
        for base in sources:
            if base in self._ends[node] and base.op != "placeholder" and base.op != "get_attr":
                storage = values[base].untyped_storage()
                if storage.nbytes() == nbytes:
                    with torch._C._DisableTorchDispatch():
                        empty = torch.empty(0, dtype=meant.dtype, device="meta")
                        return empty.set_(storage, 0, meant.shape, meant.stride())
        return None

    def _keep(self, node: Node, result: Any, values: dict[Node, Any]) -> None:
        """Keep each of several results until its own end."""
        if isinstance(result, tuple | list):
            for user in node.users:
                place = user.args[1] if user.target is operator.getitem else None
                if isinstance(place, int) and user not in self._unread:
                    values[user] = result[place]
        elif node not in self._unread:
            values[node] = result

    def _end(self, bases: list[Node], values: dict[Node, Any]) -> None:
        for base in bases:
            values.pop(base, None)
            for view in self._views.get(base, ()):
                values.pop(view, None)


@dataclass
class _Noted:
    """A kernel of several values: its index among the recorder's operators, and what it has read or computed so far."""

    operator: int | None = None
    buffers: set[Node] = field(default_factory=set)


def _elements(node: Node) -> int:
    value = node.meta.get("val")
    value = value[0] if isinstance(value, tuple | list) and value else value
    return value.numel() if isinstance(value, Tensor) else 1


def _reduces(node: Node) -> bool:
    return fused_part(_name(node)) == REDUCTION


def _reduces_last(node: Node) -> bool:
    """Return whether a reduction is over the last dimensions of its input."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if not _reduces(node) or dims is None or dims == []:
        return True
    if not isinstance(dims, int | list | tuple) or not node.all_input_nodes:
        return False
    value = node.all_input_nodes[0].meta.get("val")
    rank = value.dim() if isinstance(value, Tensor) else 1
    reduced = {dim % max(1, rank) for dim in ([dims] if isinstance(dims, int) else dims) if isinstance(dim, int)}
    return reduced == set(range(rank - len(reduced), rank))


def _role(node: Node) -> str:
    match node.op:
        case "placeholder" | "get_attr":
            return _INPUT
        case "output":
            return "output"
    if node.target is operator.getitem:
        source = node.args[0]  # other results are set with the operator that returns them
        return _VIEW if isinstance(source, torch.fx.Node) and _role(source) == _VIEW else _INPUT
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return _EXTERN
    part = fused_part(target._schema.name)
    if target.is_view or part == VIEW:
        return _VIEW
    if target._schema.name == "aten::scatter" and _into_constant(node):
        return _INLINE
    if part in (REDUCTION, INDEXING, SCATTER):
        return _KERNEL
    if part == POINTWISE or torch.Tag.pointwise in target.tags:
        return _INLINE if not _mutates(node) else _KERNEL
    return _EXTERN


def _into_constant(node: Node) -> bool:
    """Return whether one number is scattered into one element of each row of a constant, as in the gradient of a loss
    of class indices. Inductor compares each element with the index instead (torch/_inductor/fx_passes/joint_graph.py:
    scatter_upon_const_tensor)."""
    if len(node.args) < 4 or isinstance(node.args[3], torch.fx.Node):
        return False
    base, dim, index = node.args[:3]
    if not isinstance(base, torch.fx.Node) or not isinstance(index, torch.fx.Node) or not isinstance(dim, int):
        return False
    places = list(base.meta["val"].shape)
    places[dim] = 1
    return _name(base) == "aten::full" and list(index.meta["val"].shape) == places


def _name(node: Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _mutates(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _call(node: Node, values: dict[Node, Any]) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _like(meant: Any) -> Any:
    """Return new tensors like the compiler's own."""
    if isinstance(meant, Tensor):
        return torch.empty_strided(meant.shape, meant.stride(), dtype=meant.dtype, device=meant.device)
    return tuple(map(_like, meant)) if isinstance(meant, tuple | list) else meant


@dataclass(frozen=True)
class Work:
    """One kernel, in the order in which the graph computes its values.

    places    elements of its result, or rows that it reduces
    depth     elements that each of them is reduced from; 1 without a reduction
    trailing  the reduced dimensions are the last ones, so that pointwise work on the same rows can join
    fusible   False: a product, convolution, attention or a library call
    reads     buffers that it reads
    makes     buffers that it writes
    """

    places: int
    depth: int = 1
    trailing: bool = True
    fusible: bool = True
    reads: tuple[Hashable, ...] = ()
    makes: tuple[Hashable, ...] = ()


@dataclass
class _Group:
    """Kernels that run as one."""

    members: list[int] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    after: int = 0  # bits of the groups that must run before, directly or indirectly


def fused_groups(kernels: Sequence[Work]) -> list[tuple[int, ...]]:
    """Return which of the kernels run as one, each group in order.

    A kernel joins the group with which it shares a buffer, if they iterate over the same elements and no other kernel
    must run between them. Of several groups, it joins the one with which it shares most.
    """
    groups: list[_Group] = []
    made_by: dict[Hashable, int] = {}
    of_buffer: dict[Hashable, dict[int, None]] = {}  # groups that read or write it
    for index, kernel in enumerate(kernels):
        waits_for = [made_by[buffer] for buffer in kernel.reads if buffer in made_by]
        # A group that changes a buffer waits for all that read or write it.
        waits_for += [group for buffer in kernel.makes for group in of_buffer.get(buffer, ())]
        before = sum(1 << group for group in set(waits_for))
        shared: Counter[int] = Counter()
        for buffer in dict.fromkeys((*kernel.reads, *kernel.makes)):
            shared.update(
                group for group in of_buffer.get(buffer, ()) if kernel.fusible and groups[group].work[0].fusible
            )
        ranked = sorted(shared, key=lambda group: (-shared[group], -group))
        place = next((group for group in ranked if _joins(kernel, group, groups, before)), len(groups))
        if place == len(groups):
            groups.append(_Group())
        _join(groups, place, index, kernel, before)
        made_by |= dict.fromkeys(kernel.makes, place)
        for buffer in (*kernel.reads, *kernel.makes):
            of_buffer.setdefault(buffer, {})[place] = None
    return [tuple(group.members) for group in groups]


def _joins(kernel: Work, place: int, groups: Sequence[_Group], before: int) -> bool:
    """Return whether a kernel can run within a group: nothing that it waits for waits for the group."""
    group, bit = groups[place], 1 << place
    # A group with a reduction iterates over its rows and depth.
    leader = next((work for work in group.work if work.depth != 1), group.work[0])
    if len(group.members) >= MAX_FUSED or not _same_places(kernel, leader):
        return False
    wholes = [work for work in group.work if work.places == 1]
    is_split = kernel.places * kernel.depth != 1 and any(work.depth > _SPLIT_FROM for work in wholes)
    # A kernel of many elements waits for the one value to which the group reduces many.
    if is_split and any(buffer in kernel.reads for work in wholes for buffer in work.makes):
        return False
    return not any(groups[group_index].after & bit for group_index in _bit_places(before & ~bit))


def _same_places(work: Work, other: Work) -> bool:
    if work.depth == other.depth:
        return work.places == other.places and (work.depth == 1 or work.trailing == other.trailing)
    if work.depth != 1 and other.depth != 1:
        return False
    pointwise, reduction = (work, other) if work.depth == 1 else (other, work)
    elements = reduction.places * reduction.depth
    return pointwise.places == reduction.places or (reduction.trailing and pointwise.places == elements)


def _join(groups: list[_Group], place: int, index: int, kernel: Work, before: int) -> None:
    group, bit = groups[place], 1 << place
    group.members.append(index)
    group.work.append(kernel)
    for group_index in _bit_places(before & ~bit):
        group.after |= 1 << group_index | groups[group_index].after
    for other in groups:
        if other.after & bit:
            other.after |= group.after


def _bit_places(bits: int) -> list[int]:
    return [place for place in range(bits.bit_length()) if bits >> place & 1]
