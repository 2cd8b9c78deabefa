"""The record of a step on meta tensors: its operators, and a memory block for each storage, from first use to its end.

Start reading at `BlockRecord` and `OperatorRecord`; `featurize.recording.recorder` reports to them what runs. Recorded
parts can be repeated for other blocks (`BlockRecord.repeat`): passes of micro-batches, steps on batches of one
shape. `ModuleStack` knows the module that runs, or that ran what the backward pass computes, and where a step failed.

CUDA graphs of a compiled model (`CudaGraphs`, `compile=reduce-overhead`) are one launch each. Inputs that are not
parameters, buffers or results of another graph are copied into them first; memory of their pool cannot be used by
operators that run eagerly, and vice versa. Source: torch/_inductor/cudagraph_trees.py.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from featurize.operators.library_calls import CUBLAS, LIBRARY_CALLS, LibraryCall
from featurize.operators.table import (
    GATHERS,
    MULTI_TENSOR,
    WITH_STEPS,
    WRITE_ONLY,
    flops,
    foreach_launches,
    gathered_bytes,
)
from featurize.operators.tensor_parts import bytes_read, local_tensor, meta_tensors
from featurize.recording.step_trace import BATCH, Block, Event, Operator, joined

GRAPHED = (
    "the compiled model runs as CUDA graphs: the host launches each graph once, loss and optimizer stay eager; their "
    "memory pool is not shared with what runs eagerly, which the bound includes and the figure does not"
)
AUTOTUNED = "torch.compile: kernels of max-autotune are estimated as those of the default mode; no search is modelled"


class CudaGraphs:
    """The graphs of one trace. While a graph runs, `Recorder` asks this about each operator and block."""

    def __init__(self) -> None:
        self._input_bytes: dict[Hashable, int] = {}
        self._launched: bool | None = None  # the graph that runs; None: none does

    @contextlib.contextmanager
    def replay(self, graph: Hashable, input_bytes: int) -> Iterator[None]:
        """Run one graph inside the block: its operators are launched together. `graph` identifies it, `input_bytes`
        were copied into it."""
        self._input_bytes[graph] = input_bytes
        before, self._launched = self._launched, False
        try:
            yield
        finally:
            self._launched = before

    @property
    def runs(self) -> bool:
        """Return whether a graph is running: allocations are then in the pool."""
        return self._launched is not None

    def is_launched(self) -> bool:
        """Return whether the current operator is launched together with one before it."""
        launched = self._launched
        if launched is not None:
            self._launched = True
        return bool(launched)

    @property
    def input_bytes(self) -> int | None:
        """Bytes of the inputs that are copied into the graphs; None where no graph ran."""
        return sum(self._input_bytes.values()) if self._input_bytes else None


Maker: TypeAlias = tuple[str, str, LibraryCall | None]  # operator, module, library call
NOBODY: Maker = ("", "", None)


class RecordMoment(NamedTuple):
    """A moment of a record: the number of events and of blocks before it."""

    events: int
    blocks: int


class Stretch(NamedTuple):
    """Part of a record that can be repeated.

    events    in their order
    entering  blocks from before that it frees
    leaving   blocks that it allocates and leaves alive; without workspaces, which are never freed
    """

    events: tuple[Event, ...]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]


class BlockRecord:
    """Records when blocks are allocated and freed, and by which operator of which module.

    `step`, `phase` and `stream` are those of the next event. `graphs` is set where compiled parts run as CUDA
    graphs. `live_bytes` are alive now, `peak_live_bytes` is the maximum since it was last set.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.step, self.phase = 0, "setup"
        self.stream = 0  # stream on which memory is allocated
        self.graphs: CudaGraphs | None = None
        self.nowhere = 0  # > 0: allocations take no memory of the device
        self.live_bytes = self.peak_live_bytes = 0
        self.blocks: list[Block] = []  # so far: a block's kind is empty until it is named
        self.storages: list[int] = []  # address of the storage of each block; 0 for a workspace
        # storage -> its block, and the reference whose callback runs at its end
        self.live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        # Blocks that another stream may still use when they are freed return to the allocator only when that use is
        # over (c10/cuda/CUDACachingAllocator.cpp: `recordStream`, `process_events`). Moments are numbers of events. The
        # host is assumed to run ahead of the GPU: it knows that work is over once it has waited for something after it.
        self._used: set[int] = set()  # by a stream other than the block's own
        self._waiting: dict[int, int] = {}  # block -> when it was freed
        self._until: dict[int, int] = {}  # block -> when it returns to the allocator
        self._batch: list[int] = []  # its storages
        # A script's threads allocate at the same time; the end of a storage may interrupt any of these.
        self._lock = threading.RLock()

    # -- the caller's notes on tensors

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Record blocks of tensors on meta that exist before the first step."""
        for tensor in tensors:
            self.see(tensor.untyped_storage(), kind)

    def hold_on_host(self, tensors: Iterable[Tensor]) -> None:
        """Record blocks that exist before the first step and take no memory of the device."""
        self.nowhere += 1
        self.hold(meta_tensors(tensors), "parameter")
        self.nowhere -= 1

    def new_batch(self, tensors: Sequence[Tensor]) -> None:
        """Record that the step's batch is copied to the device, and that the previous step's batch is then freed."""
        old = [self.live[key][0] for key in self._batch]
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.is_meta}
        for key, storage in storages.items():
            self.live[key] = self.take(storage.nbytes(), "batch", NOBODY, key), weakref.ref(storage)
        self._batch = list(storages)
        for block in old:
            self.give_back(block)

    def await_in_batch(self) -> Callable[[Tensor], None]:
        """Allocate the block of the batch's last tensor, which does not exist yet. Return a function that sets the
        tensor."""
        position, block = len(self.events), self.take(0, "batch", NOBODY)

        def arrived(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            self.blocks[block], self.storages[block] = self.blocks[block]._replace(nbytes=nbytes), key
            self.events[position] = self.events[position]._replace(nbytes=nbytes)
            self.live_bytes += nbytes
            self.live[key] = block, weakref.ref(storage)
            self._batch.append(key)

        return arrived

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of these tensors' blocks."""
        for tensor in meta_tensors(tensors):
            self.see(tensor.untyped_storage(), kind)
            self.name_block(self.live[tensor.untyped_storage()._cdata][0], kind)

    def name_block(self, block: int, kind: str) -> None:
        """Set the kind of a block that has none."""
        if not self.blocks[block].kind:
            self.blocks[block] = self.blocks[block].named(kind)

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Record that a storage frees its memory, and allocates as much as it is resized to: successive blocks of the
        same kind."""
        key = storage._cdata
        if key not in self.live:
            return
        block, _ = self.live[key]
        previous = self.blocks[block]
        if previous.nbytes == nbytes:
            return
        self.give_back(block)
        maker = previous.operator, previous.module, previous.call
        self.live[key] = self.take(nbytes, previous.kind, maker, key), self._watched(storage)

    def used_on(self, tensor: Tensor, stream: int) -> None:
        """Record that a stream uses a tensor (`record_stream`)."""
        block = self.block_in(tensor.untyped_storage()._cdata)
        if block is not None and stream != self.blocks[block].stream:
            self._used.add(block)

    def make_host_wait(self, until: int) -> None:
        """Record that the host has waited for everything before an event, given by its number."""
        with self._lock:
            for block in [block for block, given_back in self._waiting.items() if given_back < until]:
                del self._waiting[block]
                self._until[block] = len(self.events)

    # -- queries about blocks

    def block_of(self, tensor: Tensor) -> int:
        """Return the block of a recorded tensor."""
        return self.live[local_tensor(tensor).untyped_storage()._cdata][0]

    def stays(self, tensor: Tensor) -> bool:
        """Return whether a CUDA graph reads a tensor in place: parameters, buffers and the pool's blocks."""
        block = self.block_in(tensor.untyped_storage()._cdata)
        return block is not None and (self.blocks[block].kind in ("parameter", "buffer") or self.blocks[block].pooled)

    def block_in(self, storage: int) -> int | None:
        """Return the block of a storage, given by its address; None if it is not alive."""
        live = self.live.get(storage)
        return None if live is None else live[0]

    def blocks_in(self, tensors: Iterable[Tensor]) -> set[int]:
        """Return the blocks of those of the tensors that are recorded."""
        keys = [tensor.untyped_storage()._cdata for tensor in meta_tensors(tensors)]
        return {self.live[key][0] for key in keys if key in self.live}

    def final(self) -> tuple[tuple[Event, ...], tuple[Block, ...]]:
        """Return the events so far and their blocks; those without a kind are classified by their lifetime."""
        with self._lock:
            events, blocks = tuple(self.events), self.blocks.copy()
            given_back = self._until | dict.fromkeys(self._waiting, len(events))
        for block, until in given_back.items():
            blocks[block] = blocks[block]._replace(kept_until=until)
        return events, self.named_by_lifetime(blocks, events)

    def named_by_lifetime(self, blocks: Sequence[Block], events: Iterable[Event]) -> tuple[Block, ...]:
        """Return the blocks; those without a kind are classified by their lifetime in these events."""
        kept: dict[int, int] = {}  # allocated in a forward pass that does not free it -> its step
        for event in events:
            if event.phase == "forward":
                if event.nbytes > 0:
                    kept[event.block] = event.step
                elif kept.get(event.block) == event.step:
                    del kept[event.block]
        unnamed = {place for place, block in enumerate(self.blocks) if not block.kind}
        return tuple(
            block.named("activation" if place in kept else "temporary") if place in unnamed else block
            for place, block in enumerate(blocks)
        )

    # -- blocks that stand for others

    def mark(self) -> RecordMoment:
        """Return the current moment."""
        return RecordMoment(len(self.events), len(self.blocks))

    def since(self, mark: RecordMoment) -> Stretch:
        """Return the part of the record since a moment."""
        events = tuple(self.events[mark.events :])
        times = Counter(event.block for event in events)
        return Stretch(
            events,
            entering=tuple(block for block in times if block < mark.blocks),
            leaving=tuple(
                block
                for block, count in times.items()
                if block >= mark.blocks and count == 1 and self.blocks[block].kind != "workspace"
            ),
        )

    def repeat(self, stretch: Stretch, entering: Mapping[int, int]) -> dict[int, int]:
        """Record that the events of a stretch happen again, in the current step.

        Args:
            stretch: A stretch of this record.
            entering: Block that the stretch frees -> the one that is freed now.

        Returns:
            Block of the stretch -> the one that stands for it, including those of `entering`.
        """
        known = dict(entering)
        for event in stretch.events:
            block, self.phase = event.block, event.phase
            if block in known:
                self.give_back(known[block])
            elif (call := self.blocks[block].call) is None or call.kind != CUBLAS:  # cuBLAS's handles take once
                known[block] = self._enter(self.blocks[block], 0)
        return known

    def hold_in(self, storage: int, block: int) -> None:
        """Record that a living storage, given by its address, holds another block from now on."""
        self.storages[block] = storage
        self.live[storage] = block, self.live[storage][1]

    def stand_for(self, block: int, storage: torch.UntypedStorage) -> None:
        """Record that a block lives as long as a storage."""
        self.storages[block] = storage._cdata
        self.live[storage._cdata] = block, self._watched(storage)

    # -- blocks are allocated and freed

    def see(self, storage: torch.UntypedStorage, kind: str, maker: Maker = NOBODY) -> bool:
        """Register a storage unless it is known. Return whether it was new."""
        key = storage._cdata
        if key in self.live:
            return False
        self.live[key] = self.take(storage.nbytes(), kind, maker, key), self._watched(storage)
        return True

    def _watched(self, storage: torch.UntypedStorage) -> weakref.ref[torch.UntypedStorage]:
        def died(_: weakref.ref[torch.UntypedStorage], key: int = storage._cdata) -> None:
            if (live := self.live.pop(key, None)) is not None:
                self.give_back(live[0])

        return weakref.ref(storage, died)

    def take(self, nbytes: int, kind: str, maker: Maker, storage: int = 0) -> int:
        """Record that a block is allocated, and return it. `kind` is empty where it is not known yet."""
        pooled = self.graphs is not None and self.graphs.runs
        return self._enter(Block(0 if self.nowhere else nbytes, kind, *maker, pooled, self.stream), storage)

    def _enter(self, block: Block, storage: int) -> int:
        with self._lock:
            number = len(self.blocks)
            self.blocks.append(block)
            self.storages.append(storage)
            self.live_bytes += block.nbytes
            self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
            self.events.append(Event(number, block.nbytes, self.step, self.phase))
        return number

    def give_back(self, block: int) -> None:
        """Record that a block is freed."""
        nbytes = self.blocks[block].nbytes
        with self._lock:
            self.live_bytes -= nbytes
            if block in self._used:
                self._waiting[block] = len(self.events)
            self.events.append(Event(block, -nbytes, self.step, self.phase))


class Traits:
    """Properties that all calls of one operator overload share."""

    def __init__(self, func: OpOverload) -> None:
        schema = func._schema
        self.name: str = schema.name
        self.view: bool = func.is_view
        self.written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
        self.written_names = [schema.arguments[i].name for i in self.written]
        self.mutates = bool(self.written)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.foreach = self.name.startswith(MULTI_TENSOR)
        self.library_calls = LIBRARY_CALLS.get(self.name)
        self.composite = self.name.startswith("aten::") and is_composite(func) and not _has_kernel(func, "Meta")


@functools.cache
def traits_of(func: OpOverload) -> Traits:
    """Return the traits of an operator overload."""
    return Traits(func)


@functools.cache
def is_composite(func: OpOverload) -> bool:
    """Return whether an operator is composed of others, into which autograd decomposes it."""
    return _has_kernel(func, "CompositeImplicitAutograd")


def _has_kernel(func: OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


class OperatorRecord:
    """Records operators by the blocks that they read and write, while `keep_operators` is set.

    Args:
        memory: The blocks.
        stack: The modules that run.
    """

    def __init__(self, memory: BlockRecord, stack: ModuleStack) -> None:
        self._memory, self._stack = memory, stack
        self.operators: list[Operator] = []
        self.keep_operators = False
        self.made_by: dict[int, int] = {}  # block -> index of the operator that wrote it last, or `BATCH`
        self._again = False  # a compiled graph recomputes values

    @contextlib.contextmanager
    def computing_again(self, again: bool) -> Iterator[None]:
        """Treat the operators of a compiled graph inside the block as recomputed in this step, if `again`."""
        before, self._again = self._again, self._again or again
        try:
            yield
        finally:
            self._again = before

    def begin_step(self, *, keep_operators: bool) -> None:
        """Begin a step. Operators of earlier steps are dropped, so that none counts as a source of this step's."""
        self.keep_operators = keep_operators
        if self.operators:
            self.operators = []
            self.made_by = {block: made for block, made in self.made_by.items() if made == BATCH}

    def fused(
        self,
        func: OpOverload,
        args: Sequence[Any],
        inputs: list[Tensor],
        outputs: Sequence[Any],
        *,
        into: int | None = None,
        again: Sequence[Tensor] = (),
        kept: bool = True,
        leads: bool = False,
    ) -> int | None:
        """Record an operator that is part of a compiler-generated kernel, with all that it computes from the inputs.

        Args:
            func: The operator.
            args: The operator's first argument.
            inputs: Tensors that it is computed from.
            outputs: Tensors that it computes.
            into: Index of the operator whose kernel computes this one, too.
            again: Those inputs that the kernel has already read or computed.
            kept: It writes its outputs; False: only the kernel itself reads them.
            leads: The kernel is named after this operator.

        Returns:
            The index of the kernel's operator; None where operators are not kept.
        """
        traits = traits_of(func)
        maker = (traits.name, self._stack.now(), None)
        made = meta_tensors(outputs)
        for tensor in inputs:
            self._memory.see(tensor.untyped_storage(), "buffer")
        for tensor in made:
            self._memory.see(tensor.untyped_storage(), "", maker)
        if not self.keep_operators or not made:
            return into
        self.note(traits, maker[1], args, meta_tensors(inputs), made)
        place, operator = len(self.operators) - 1, self.operators[-1]
        operator = operator._replace(
            bytes_read=max(0, operator.bytes_read - sum(map(bytes_read, again))),
            bytes_written=operator.bytes_written if kept else 0,
        )
        self.operators[-1] = operator
        if into is None:
            return place
        self.operators.pop()
        for tensor in made:
            self.made_by[self._memory.live[tensor.untyped_storage()._cdata][0]] = into
        self.operators[into] = joined(self.operators[into], operator, into, leads)
        return into

    def copied(self, tensors: Sequence[Tensor]) -> int:
        """Record one kernel that copies tensors, and return their bytes (cudagraph_trees: `torch._foreach_copy_`)."""
        total = sum(map(bytes_read, tensors))
        if total and self.keep_operators:
            shapes = tuple(tuple(tensor.shape) for tensor in tensors)
            dtype = _dtype_name(tensors[0].dtype)
            self.operators.append(Operator("aten::copy_", self._memory.phase, dtype, shapes, (), 0, total, total, 1))
        return total

    def note(
        self, traits: Traits, module: str, args: Sequence[Any], inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Record an operator of a module, with the tensors on meta among its arguments and results."""
        memory, made_by = self._memory, self.made_by
        live, phase = memory.live, memory.phase
        changed = [t for i in traits.written for t in meta_tensors(args[i : i + 1])]
        read = [live[tensor.untyped_storage()._cdata][0] for tensor in inputs]
        sources = [made_by.get(block, BATCH if memory.blocks[block].kind == "batch" else -1) for block in read]
        number = len(self.operators)
        for tensor in (*outputs, *changed):
            made_by[live[tensor.untyped_storage()._cdata][0]] = number
        reads, writes, elements, launches = _traffic(traits, args, inputs, outputs, changed)
        tensors = (*outputs, *inputs)  # priced in the type of the first floating-point one, else of the first one
        typed = next((t for t in tensors if t.is_floating_point()), tensors[0])
        # A checkpoint runs its part of the forward pass again inside the backward pass, which by itself runs no
        # module's forward pass and records no gradients.
        recomputes = phase == "backward" and (self._again or bool(self._stack.running) or torch.is_grad_enabled())
        self.operators.append(
            Operator(
                traits.name,
                phase,
                _dtype_name(typed.dtype),
                tuple([tuple(t.shape) for t in inputs]),
                tuple([tuple(t.shape) for t in outputs]),
                flops(traits.name, args, outputs, elements),
                reads,
                writes,
                launches,
                module,
                tuple(sources),
                recomputes,
                memory.graphs is not None and memory.graphs.is_launched(),
            )
        )


def _traffic(
    traits: Traits, args: Sequence[Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor], changed: Sequence[Tensor]
) -> tuple[int, int, int, int]:
    """Return the bytes that an operator reads and writes, each tensor counted once; the elements of the largest tensor,
    or of all tensors that a for-each operator handles; its launches.

    Args:
        traits: The operator's traits.
        args: As it was called.
        inputs: On meta, of its arguments.
        outputs: On meta, of its results.
        changed: The inputs that it writes to.
    """
    nbytes = {id(tensor): bytes_read(tensor) for tensor in inputs}
    made = [tensor for tensor in outputs if id(tensor) not in nbytes]
    changed_bytes = sum(nbytes.get(key, 0) for key in {id(tensor) for tensor in changed}) if changed else 0
    reads = sum(nbytes.values()) - (changed_bytes if traits.name in WRITE_ONLY else 0)
    writes = changed_bytes + sum(map(bytes_read, made))
    elements = max([tensor.numel() for tensor in (*inputs, *made)], default=0)
    if traits.name in GATHERS and isinstance(args[0], Tensor):
        source = bytes_read(args[0])
        reads += min(source, gathered_bytes(traits.name, args, writes)) - source
        elements = max(t.numel() for t in outputs)
    if traits.name == "aten::add_" and isinstance(args[1], Tensor) and args[1].is_sparse:
        # Only the rows that it holds are written.
        rows, target = args[1]._values(), bytes_read(args[0])
        reads, writes = reads + bytes_read(rows) - target, writes + bytes_read(rows) - target
        elements = rows.numel()
    if not traits.foreach:
        return reads, writes, elements, 1
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    sizes = [t.numel() for t in lists[0]]
    launches = foreach_launches(len(lists) - (traits.name in WITH_STEPS), sizes)
    return reads, writes, sum(sizes), launches


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    """Return a type's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


_WRAPPED = "_fsdp_wrapped_module"  # attribute of FSDP1's wrapper: what it wraps
_next_node = torch.autograd._get_sequence_nr  # number of the autograd node that will be made next
_current_node = torch._C._current_autograd_node


def origin(error: BaseException | None) -> tuple[str, str]:
    """Return the operator and the module that an error of a recorded step came from, empty where they are not known."""
    while error is not None:
        if "traced_at" in vars(error):
            operator, module = vars(error)["traced_at"]
            return operator, module
        error = error.__cause__ or error.__context__
    return "", ""


class ModuleStack:
    """The paths of the modules whose forward pass runs, the outermost first (`running`)."""

    def __init__(self, model: nn.Module) -> None:
        self.running: list[str] = []
        self.last = ""  # path of the module that was entered last
        self._paths: dict[int, str] = {}
        self._node_modules: dict[int, str] = {}  # autograd node -> the module whose forward pass made it
        self.add(model)

    def add(self, model: nn.Module) -> None:
        """Call modules by their paths within a model, without those of wrappers around it."""
        for name, module in model.named_modules():
            path = ".".join(part for part in name.split(".") if part != _WRAPPED)
            self._paths[id(module)] = path or type(module).__name__

    def knows(self, module: nn.Module) -> bool:
        """Return whether a module has a path."""
        return id(module) in self._paths

    def enter(self, module: nn.Module, *_hook: object) -> None:
        """Record that a module's forward pass begins."""
        self.last = self._paths.get(id(module), type(module).__name__)
        self.running.append(self.last)

    def leave(self, *_hook: object) -> None:
        """Record that the innermost forward pass ends, or fails."""
        if (error := sys.exception()) is not None:
            self.note_failure(error)
        if self.running:
            self.running.pop()

    def now(self) -> str:
        """Return the path of the module that computes now; empty where none is known."""
        if self.running:
            return self.running[-1]
        node = _current_node()
        return self._node_modules.get(node._sequence_nr(), "") if node is not None else ""

    def ran(self) -> None:
        """Record that an operator ran in a forward pass: the autograd node that it may have created is the module's."""
        # The node's first operator: later ones without a node of their own may be another module's.
        self._node_modules.setdefault(_next_node() - 1, self.running[-1])

    def note_failure(self, error: BaseException, operator: str = "") -> None:
        """Record an error that passes through. The first record is that of the innermost module, and stays."""
        # On the error itself: stored here, an error that the model catches would keep alive what its frames hold.
        if "traced_at" not in vars(error):
            vars(error)["traced_at"] = operator, self.now()
