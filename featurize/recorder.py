"""Sees a training step happen on meta tensors: every operator below autograd, every storage's first sight and end.

Start reading at `Recorder.__torch_dispatch__`; `featurize.trace` runs the step.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from featurize import op_cost
from featurize.accumulation import in_place_overload, references_of_the_last_holder, taken_over
from featurize.flat_parameters import unwrapped_name
from featurize.library_calls import CUBLAS, has_library_calls, library_calls
from featurize.meta_results import MetaResults
from featurize.step_trace import BATCH, Block, Event, Operator, joined
from featurize.tensor_parts import local_tensor, plain_parts, wrap_others
from featurize.values import INDEXED_BY_MASKS, NONZERO, READ, Values
from featurize.waiting_blocks import WaitingBlocks

if TYPE_CHECKING:
    from featurize.cuda_graphs import CudaGraphs
    from featurize.parallel.ranks import Ranks

_next_node = torch.autograd._get_sequence_nr  # of the autograd node that will be made next
_current_node = torch._C._current_autograd_node
KERNEL = object()  # what `Ranks.ran` gives for an operator that this GPU computes


def origin(error: BaseException | None) -> tuple[str, str]:
    """The operator and the module that an error of a recorded step came from, empty where they are not known."""
    while error is not None:
        if "traced_at" in vars(error):
            return vars(error)["traced_at"]
        error = error.__cause__ or error.__context__
    return "", ""


class Recorder(TorchDispatchMode):
    """Records one model's steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.events: list[Event] = []
        self.step, self.phase, self.keep_operators = 0, "setup", False
        self.recomputing = False  # a compiled graph's backward pass runs what its forward pass ran already
        self.graphs: CudaGraphs | None = None  # where compiled parts run as CUDA graphs
        self.ranks: Ranks | None = None  # of a job on several GPUs whose wrapper is PyTorch's own
        self.stream = 0  # on which memory is taken
        self.paused = False  # what runs belongs to another rank
        self._names: dict[int, str] = {}
        self.name_modules(model)
        self._running: list[str] = []  # paths of the modules whose forward pass runs
        self._node_modules: dict[int, str] = {}  # autograd node -> the module whose forward pass made it
        self.decided = 0  # operators whose results known values decided
        self._sizes: list[int] = []
        self._storages: list[int] = []
        self._kinds: list[str | None] = []
        self._makers: list[tuple] = []  # operator, module, library call
        self._streams: list[int] = []
        # storage -> its block, and the reference whose callback tells of its end
        self._live: dict[int, tuple[int, weakref.ref]] = {}
        self._made_by: list[int] = []  # block -> index of the operator that wrote it last
        self._waiting = WaitingBlocks()
        self._batch: list[int] = []
        self._cublas_threads: set[str] = set()
        self._held_alone = references_of_the_last_holder()
        self._traits: dict[object, Traits] = {}
        self._results = MetaResults()
        self.values = Values()
        self.values.module_now = self._module_now

    # -- what the caller says of the step

    def name_modules(self, model: nn.Module) -> None:
        """Call modules by their paths within a model."""
        self._names |= {id(m): unwrapped_name(name) or type(m).__name__ for name, m in model.named_modules()}

    @contextlib.contextmanager
    def modules(self) -> Iterator[None]:
        """While entered, the module whose forward pass runs is known."""
        before = module_hooks.register_module_forward_pre_hook(self._entered)
        # Also where the forward pass raises: a checkpoint ends its recomputation that way, and goes on.
        after = module_hooks.register_module_forward_hook(self._left, always_call=True)
        try:
            with self.values.of_data():
                yield
        finally:
            before.remove()
            after.remove()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Errors name their operator, and nothing is recorded."""
        with _Watch(self):
            yield

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Blocks that exist before the first step."""
        held = _meta_tensors(tensors)
        self.values.learn(held)
        for tensor in held:
            self._see(tensor.untyped_storage(), kind)

    def hold_on_host(self, tensors: Iterable[Tensor]) -> None:
        """Blocks that exist before the first step and take nothing of the device."""
        for tensor in _meta_tensors(tensors):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                block = self._take(0, "parameter", ("", "", None), storage._cdata)
                self._live[storage._cdata] = block, self._watched(storage)

    def new_batch(self, tensors: Sequence[Tensor]) -> None:
        """The step's batch is copied to the device, then the last step's is given back."""
        old, self._batch = self._batch, []
        self.values.learn(tensors, default=1)
        for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.is_meta}.values():
            block = self._take(storage.nbytes(), "batch", ("", "", None), storage._cdata)
            self._live[storage._cdata] = (block, weakref.ref(storage))
            self._batch.append(block)
        for block in old:
            self.give_back(block)

    def name(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what live blocks are."""
        for tensor in _meta_tensors(tensors):
            self._see(tensor.untyped_storage(), kind)
            block = self._live[tensor.untyped_storage()._cdata][0]
            if self._kinds[block] is None:
                self._kinds[block] = kind

    def made(self, tensor: Tensor, by: str) -> None:
        """Note what something other than an operator made."""
        self._see(tensor.untyped_storage(), None, (by, self._module_now(), None))

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Hear that a storage gives its memory back, and takes as much as it is resized to: one block after another
        of the same kind."""
        key = storage._cdata
        if key not in self._live:
            return
        block, _ = self._live[key]
        if self._sizes[block] == nbytes:
            return
        self.give_back(block)
        self._live[key] = self._take(nbytes, self._kinds[block], self._makers[block], key), self._watched(storage)

    def used_on(self, tensor: Tensor, stream: int) -> None:
        """Hear that a stream uses a tensor (`record_stream`)."""
        if (live := self._live.get(tensor.untyped_storage()._cdata)) is not None and stream != self._streams[live[0]]:
            self._waiting.use(live[0])

    def host_waited(self, until: int) -> None:
        """Hear that the host has waited for all that came before an event, by its number."""
        self._waiting.settle(until, len(self.events))

    def begin_step(self, number: int, *, keep_operators: bool) -> None:
        """A step begins. Operators of an earlier one are dropped, so that none counts as a source of this one's."""
        self.step, self.phase, self.keep_operators = number, "forward", keep_operators
        if self.operators:
            self.operators = []
            self._made_by = [made if made == BATCH else -1 for made in self._made_by]

    def begin_phase(self, phase: str) -> None:
        """A phase begins. Before a forward pass, a loop reads the loss of the one before, and so waits for the GPU."""
        self.phase = phase
        if phase == "forward":
            self.host_waited(len(self.events))

    def kind_of(self, block: int) -> str:
        """Return what a block was said to be so far; empty for what nobody named."""
        return self._kinds[block] or ""

    def maker_of(self, block: int) -> tuple[str, str]:
        """Return the operator and the module that made a block."""
        return self._makers[block][:2]

    @property
    def blocks(self) -> int:
        """Return how many blocks were taken so far."""
        return len(self._sizes)

    def block_of(self, tensor: Tensor) -> int:
        """Return the block of a tensor that is recorded."""
        return self._live[local_tensor(tensor).untyped_storage()._cdata][0]

    def size_of(self, block: int) -> int:
        """Return the bytes of a block."""
        return self._sizes[block]

    def storage_of(self, block: int) -> int:
        """Return the address of the storage that took a block; 0 for a workspace."""
        return self._storages[block]

    def signature(self, block: int) -> tuple:
        """Return what is the same for blocks that stand for each other."""
        return self._sizes[block], self._kinds[block], self._makers[block], self._streams[block]

    def take_again(self, block: int) -> int:
        """Note that as much memory is taken as a block has, by the same operator; return the new block."""
        before, self.stream = self.stream, self._streams[block]
        again = self._take(self._sizes[block], self._kinds[block], self._makers[block])
        self.stream = before
        return again

    def block_in(self, storage: int) -> int | None:
        """Return the block that a storage holds, by its address; None where it does not live."""
        live = self._live.get(storage)
        return None if live is None else live[0]

    def hold_in(self, storage: int, block: int) -> None:
        """Hear that a storage that lives, by its address, holds another block from now on."""
        self._storages[block] = storage
        self._live[storage] = block, self._live[storage][1]

    def stand_for(self, block: int, storage: torch.UntypedStorage) -> None:
        """Hear that a block lives as long as a storage."""
        self._storages[block] = storage._cdata
        self._live[storage._cdata] = block, self._watched(storage)

    def stop(self) -> None:
        """End the record: what dies from here on is not the step's doing."""
        self._live.clear()
        self.values.forget()

    def final_blocks(self) -> list[Block]:
        """The blocks, those without a name classified by their lifetime."""
        kept: dict[int, int] = {}  # taken in a forward pass and not given back in the same -> its step
        for event in self.events:
            if event.phase == "forward":
                if event.nbytes > 0:
                    kept[event.block] = event.step
                elif kept.get(event.block) == event.step:
                    del kept[event.block]
        pooled = self.graphs.blocks if self.graphs is not None else ()
        return [
            Block(
                size,
                kind or ("activation" if block in kept else "temporary"),
                operator,
                module,
                call,
                block in pooled,
                stream,
                self._waiting.until(block, len(self.events)),
            )
            for block, (size, kind, (operator, module, call), stream) in enumerate(
                zip(self._sizes, self._kinds, self._makers, self._streams, strict=True)
            )
        ]

    # -- what happens

    def _entered(self, module: nn.Module, _args: object) -> None:
        self._running.append(self._names.get(id(module), type(module).__name__))

    def _left(self, _module: nn.Module, _args: object, _output: object) -> None:
        if (error := sys.exception()) is not None:
            self.note_failure(error)
        if self._running:
            self._running.pop()

    def _module_now(self) -> str:
        if self._running:
            return self._running[-1]
        node = _current_node()
        return self._node_modules.get(node._sequence_nr(), "") if node is not None else ""

    def note_failure(self, error: BaseException, operator: str = "") -> None:
        """An error passes through. The first note of it is the innermost, and stays."""
        # With the error itself: kept here, one that the model catches would keep alive what its frames hold.
        if "traced_at" not in vars(error):
            vars(error)["traced_at"] = operator, self._module_now()

    def traits_of(self, func: OpOverload) -> Traits:
        """What is known of an operator overload."""
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = Traits(func)
        return traits

    def without_masks(self, traits: Traits, args: tuple, nonzero: Callable[[Tensor], Any]) -> tuple:
        """An indexing operator's arguments with places, as `nonzero` finds them, instead of known masks."""
        return self.values.without_masks(args, nonzero, put="put" in traits.name)

    def run(self, func: OpOverload, traits: Traits, args: tuple, kwargs: dict) -> object:
        """What the operator gives on meta tensors, and values where they are read back."""
        if traits.name == READ and self.phase == "optimizer" and args[0].is_meta and args[0].is_floating_point():
            return 1.0  # a norm that scales an update: it decides no size
        decided = self.values.decide(func, traits.name, args, kwargs)
        if decided is not NotImplemented:
            self.decided += 1
            return decided
        out = self._results.of(func, traits.name, args, kwargs)
        if self.ranks is not None and traits.name == "aten::empty":
            return out  # a buffer of a wrapper, most likely: no model reads it
        if traits.mutates or self.follows_values():
            self.values.follow(func, traits.name, args, kwargs, out, traits)
        return out

    def unrecorded(self, func: OpOverload, args: tuple, kwargs: dict) -> object:
        """Run an operator of which nothing is noted but its error."""
        traits = self.traits_of(func)
        try:
            if traits.takes_masks:
                args = self.without_masks(traits, args, lambda mask: self.unrecorded(NONZERO, (mask,), {}))
            return self.run(func, traits, args, kwargs)
        except Exception as error:
            self.note_failure(error, traits.name)
            raise

    def follows_values(self) -> bool:
        """Return whether values of what operators make may be asked for: not within an update."""
        return self.phase != "optimizer"

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.ranks is not None and (ran := self.ranks.ran(func, types, args, kwargs)) is not KERNEL:
            return ran
        if wrap_others(types):
            return NotImplemented  # which runs what it makes of it
        if self.paused:
            return self.unrecorded(func, args, kwargs)
        if self.phase == "backward":
            func = in_place_overload(func, args, kwargs, self._held_alone) or func
            if (kept := taken_over(func, args)) is not None:
                return kept
        traits = self.traits_of(func)
        if traits.composite:  # runs below a tensor that wraps others, where autograd did not take it apart
            with self:
                return func.decompose(*args, **kwargs)
        try:
            if traits.takes_masks:
                args = self.without_masks(traits, args, lambda mask: self.__torch_dispatch__(NONZERO, (), (mask,)))
            out = self.run(func, traits, args, kwargs)
        except Exception as error:
            self.note_failure(error, traits.name)
            raise
        running = self._running
        if running:  # the node's first operator: later ones without a node of their own may be another module's
            self._node_modules.setdefault(_next_node() - 1, running[-1])
        if traits.view:
            return out
        outputs = _meta_tensors((out,))
        inputs = _meta_tensors(args)
        if kwargs:
            inputs += _meta_tensors(kwargs.values())
        if not (inputs or outputs):  # an optimizer's step counter: host arithmetic
            return out
        maker = (traits.name, running[-1] if running else self._module_now(), None)
        for tensor in inputs:  # a constant that the model holds without registering it as a buffer
            self._see(tensor.untyped_storage(), "buffer")
        if isinstance(out, Tensor) and out.is_sparse:  # its indices may be those that it was given
            given = {t.untyped_storage()._cdata for t in inputs}
            outputs = [t for t in outputs if t.untyped_storage()._cdata not in given]
        fresh = False
        for tensor in outputs:
            fresh |= self._see(tensor.untyped_storage(), None, maker)
        if traits.calls_library:
            for call in library_calls(traits.name, args, outputs):
                if call.kind == CUBLAS:  # its handles belong to threads, and keep what they took
                    thread = "backward" if self.phase == "backward" else "forward"
                    if thread in self._cublas_threads:
                        continue
                    self._cublas_threads.add(thread)
                self._take(0, "workspace", (*maker[:2], call))
        if self.keep_operators and traits.kernel and (fresh or traits.mutates):
            self._note(traits, maker[1], args, inputs, outputs)
        return out

    def fused(
        self, func: OpOverload, args: Sequence, inputs: list[Tensor], outputs: Sequence, *,
        into: int | None = None, again: Sequence[Tensor] = (), kept: bool = True, leads: bool = False,
    ) -> int | None:  # fmt: skip
        """Note a kernel that a compiler wrote: an operator, and all that it computes from the inputs on the way.

        Args:
            func: The operator.
            args: Its first argument.
            inputs: What it is computed from.
            outputs: What it makes.
            into: Place of the operator whose kernel computes this one, too.
            again: Of the inputs, what that kernel has read or made already.
            kept: It writes its outputs; False: nothing but the kernel itself reads them.
            leads: The kernel is named after this operator.

        Returns:
            The place of the kernel's operator; None where operators are not kept.
        """
        traits = self.traits_of(func)
        maker = (traits.name, self._running[-1] if self._running else self._module_now(), None)
        made = _meta_tensors(outputs)
        for tensor in inputs:
            self._see(tensor.untyped_storage(), "buffer")
        for tensor in made:
            self._see(tensor.untyped_storage(), None, maker)
        if not self.keep_operators or not made:
            return into
        self._note(traits, maker[1], args, _meta_tensors(inputs), made)
        place, own = len(self.operators) - 1, self.operators[-1]
        own = own._replace(
            bytes_read=max(0, own.bytes_read - sum(map(_nbytes, again))),
            bytes_written=own.bytes_written if kept else 0,
        )
        self.operators[-1] = own
        if into is None:
            return place
        self.operators.pop()
        for tensor in made:
            self._made_by[self._live[tensor.untyped_storage()._cdata][0]] = into
        self.operators[into] = joined(self.operators[into], own, into, leads)
        return into

    def stays(self, tensor: Tensor, pooled: Collection[int]) -> bool:
        """Return whether a CUDA graph reads a tensor where it lies: parameters, buffers and the `pooled` blocks."""
        live = self._live.get(tensor.untyped_storage()._cdata)
        return live is not None and (self._kinds[live[0]] in ("parameter", "buffer") or live[0] in pooled)

    def copied(self, tensors: Sequence[Tensor]) -> int:
        """Note one kernel that copies tensors, and return their bytes (cudagraph_trees: `torch._foreach_copy_`)."""
        total = sum(map(_nbytes, tensors))
        if total and self.keep_operators:
            shapes = tuple(tuple(tensor.shape) for tensor in tensors)
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            self.operators.append(Operator("aten::copy_", self.phase, dtype, shapes, (), 0, total, total, 1))
        return total

    def _note(self, traits: Traits, module: str, args: Sequence, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        changed = [t for i in traits.written for t in _meta_tensors(args[i : i + 1])]
        written = {id(t) for t in changed}
        live, made_by = self._live, self._made_by
        seen: set[int] = set()
        sources: list[int] = []
        reads = writes = elements = 0
        for tensor in inputs:
            sources.append(made_by[live[tensor.untyped_storage()._cdata][0]])
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            nbytes = _nbytes(tensor)
            if id(tensor) in written:
                writes += nbytes
                reads += 0 if traits.write_only else nbytes
            else:
                reads += nbytes
            elements = max(elements, tensor.numel())
        number = len(self.operators)
        for tensor in (*outputs, *changed):
            made_by[live[tensor.untyped_storage()._cdata][0]] = number
        for tensor in outputs:
            if id(tensor) not in seen:
                writes += _nbytes(tensor)
                elements = max(elements, tensor.numel())
        if traits.gathers and isinstance(args[0], Tensor):
            source = _nbytes(args[0])
            reads += min(source, op_cost.gathered_bytes(traits.name, args, writes)) - source
            elements = max(t.numel() for t in outputs)
        if traits.adds and isinstance(args[1], Tensor) and args[1].is_sparse:  # into the rows that it holds alone
            rows, target = args[1]._values(), _nbytes(args[0])
            reads, writes = reads + _nbytes(rows) - target, writes + _nbytes(rows) - target
            elements = rows.numel()
        launches = 1
        if traits.foreach:
            lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
            sizes = [t.numel() for t in lists[0]]
            elements = sum(sizes)
            launches = op_cost.foreach_launches(len(lists) - (traits.name in op_cost.WITH_STEPS), sizes)
        floating = next((t for t in (*outputs, *inputs) if t.is_floating_point()), None)
        dtype = (floating if floating is not None else (outputs or inputs)[0]).dtype
        self.operators.append(
            Operator(
                traits.name,
                self.phase,
                str(dtype).removeprefix("torch."),
                tuple(tuple(t.shape) for t in inputs),
                tuple(tuple(t.shape) for t in outputs),
                op_cost.flops(traits.name, args, outputs, elements),
                reads,
                writes,
                launches,
                module,
                tuple(sources),
                self.phase == "backward" and self._recomputes(),
                self.graphs is not None and self.graphs.is_launched(),
            )
        )

    def _recomputes(self) -> bool:
        """Whether a checkpoint runs its part of the forward pass again, which the engine alone never does: a module's
        forward pass runs, or gradients are recorded."""
        return self.recomputing or bool(self._running) or torch.is_grad_enabled()

    def _see(self, storage: torch.UntypedStorage, kind: str | None, maker: tuple = ("", "", None)) -> bool:
        """Register a storage on first sight; whether it was the first."""
        key = storage._cdata
        if key in self._live:
            return False
        self._live[key] = self._take(storage.nbytes(), kind, maker, key), self._watched(storage)
        return True

    def _watched(self, storage: torch.UntypedStorage) -> weakref.ref:
        def died(_: weakref.ref, key: int = storage._cdata) -> None:
            if (live := self._live.pop(key, None)) is not None:
                self.give_back(live[0])

        return weakref.ref(storage, died)

    def _take(self, nbytes: int, kind: str | None, maker: tuple, storage: int = 0) -> int:
        self._sizes.append(nbytes)
        self._storages.append(storage)
        self._kinds.append(kind)
        self._makers.append(maker)
        self._streams.append(self.stream)
        self._made_by.append(BATCH if kind == "batch" else -1)
        if self.graphs is not None:
            self.graphs.took(len(self._sizes) - 1)
        self.events.append(Event(len(self._sizes) - 1, nbytes, self.step, self.phase))
        return len(self._sizes) - 1

    def give_back(self, block: int) -> None:
        """Note that a block's memory is given back."""
        self._waiting.give_back(block, len(self.events))
        self.events.append(Event(block, -self._sizes[block], self.step, self.phase))


class _Watch(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder, kwargs = self._recorder, kwargs or {}
        if recorder.ranks is not None and (ran := recorder.ranks.ran(func, types, args, kwargs)) is not KERNEL:
            return ran
        return NotImplemented if wrap_others(types) else recorder.unrecorded(func, args, kwargs)


class Traits:
    """What is the same for every call of one operator overload."""

    __slots__ = (
        "adds", "calls_library", "composite", "foreach", "gathers", "kernel", "mutates", "name", "random",
        "takes_masks", "view", "write_only", "written", "written_names",
    )  # fmt: skip

    def __init__(self, func: OpOverload) -> None:
        schema = func._schema
        self.name: str = schema.name
        self.view: bool = func.is_view
        self.written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
        self.written_names = [schema.arguments[i].name for i in self.written]
        self.mutates = bool(self.written)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.takes_masks = self.name in INDEXED_BY_MASKS
        self.kernel = self.name not in op_cost.NO_KERNEL
        self.adds = self.name == "aten::add_"
        self.gathers = self.name in op_cost.GATHERS
        self.write_only = self.name in op_cost.WRITE_ONLY
        self.foreach = self.name.startswith(op_cost.MULTI_TENSOR)
        self.calls_library = has_library_calls(self.name)
        self.composite = self.name.startswith("aten::") and is_composite(func) and not _has_kernel(func, "Meta")


def is_composite(func: OpOverload) -> bool:
    """Return whether an operator is made of others, of which autograd takes it apart."""
    return _has_kernel(func, "CompositeImplicitAutograd")


def _has_kernel(func: OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _meta_tensors(values: Iterable) -> list[Tensor]:
    """Those that have memory of their own; of a sparse one, its indices and its values."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_sparse:
                tensors.extend(_meta_tensors((value._indices(), value._values())))
            elif value.is_meta:
                tensors.extend(plain_parts(value))
        elif isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, Tensor):
                    if item.is_sparse:
                        tensors.extend(_meta_tensors((item,)))
                    elif item.is_meta:
                        tensors.extend(plain_parts(item))
                elif isinstance(item, list | tuple):  # an operator that returns lists among others
                    tensors.extend(_meta_tensors(item))
    return tensors


def _nbytes(tensor: Tensor) -> int:
    """Bytes that reading it once takes; an expanded tensor is no larger than its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
