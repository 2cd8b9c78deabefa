"""The operators of a step that is seen: what each moves and computes, and which ones its inputs come from.

Start reading at `OperatorRecord`; `_traffic` and `featurize.operators.table` price one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from featurize.operators.library_calls import LIBRARY_CALLS
from featurize.operators.table import (
    GATHERS,
    INDEXED_BY_MASKS,
    MULTI_TENSOR,
    NO_KERNEL,
    WITH_STEPS,
    WRITE_ONLY,
    flops,
    foreach_launches,
    gathered_bytes,
)
from featurize.operators.tensor_parts import bytes_read, meta_tensors
from featurize.recording.block_record import BlockRecord
from featurize.recording.module_stack import ModuleStack
from featurize.recording.step_trace import BATCH, Operator, joined


class Traits:
    """Properties that are the same for every call of one operator overload."""

    __slots__ = (
        "adds",
        "composite",
        "foreach",
        "gathers",
        "kernel",
        "library_calls",
        "mutates",
        "name",
        "random",
        "takes_masks",
        "view",
        "write_only",
        "written",
        "written_names",
    )

    def __init__(self, func: OpOverload) -> None:
        schema = func._schema
        self.name: str = schema.name
        self.view: bool = func.is_view
        self.written = [i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
        self.written_names = [schema.arguments[i].name for i in self.written]
        self.mutates = bool(self.written)
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.takes_masks = self.name in INDEXED_BY_MASKS
        self.kernel = self.name not in NO_KERNEL
        self.adds = self.name == "aten::add_"
        self.gathers = self.name in GATHERS
        self.write_only = self.name in WRITE_ONLY
        self.foreach = self.name.startswith(MULTI_TENSOR)
        self.library_calls = LIBRARY_CALLS.get(self.name)
        self.composite = self.name.startswith("aten::") and is_composite(func) and not _has_kernel(func, "Meta")


@functools.cache
def traits_of(func: OpOverload) -> Traits:
    """Return the traits of an operator overload."""
    return Traits(func)


def is_composite(func: OpOverload) -> bool:
    """Return whether an operator is made of others, of which autograd takes it apart."""
    return _has_kernel(func, "CompositeImplicitAutograd")


def _has_kernel(func: OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


class OperatorRecord:
    """Notes operators by the blocks that they read and make, while `keep_operators` says so.

    Args:
        memory: The blocks.
        stack: The modules that run.
    """

    def __init__(self, memory: BlockRecord, stack: ModuleStack) -> None:
        self._memory, self._stack = memory, stack
        self.operators: list[Operator] = []
        self.keep_operators = False
        self.made_by: dict[int, int] = {}  # block -> place of the operator that wrote it last, or `BATCH`
        self._again = False  # a compiled graph computes what was computed already

    @contextlib.contextmanager
    def computing_again(self, again: bool) -> Iterator[None]:
        """Say that what a compiled graph runs within was computed already in this step, where `again` says so."""
        before, self._again = self._again, self._again or again
        try:
            yield
        finally:
            self._again = before

    def begin_step(self, *, keep_operators: bool) -> None:
        """A step begins. Operators of an earlier one are dropped, so that none counts as a source of this one's."""
        self.keep_operators = keep_operators
        if self.operators:
            self.operators = []
            self.made_by = {block: made for block, made in self.made_by.items() if made == BATCH}

    def fused(
        self,
        func: OpOverload,
        args: Sequence,
        inputs: list[Tensor],
        outputs: Sequence,
        *,
        into: int | None = None,
        again: Sequence[Tensor] = (),
        kept: bool = True,
        leads: bool = False,
    ) -> int | None:
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
        traits = traits_of(func)
        maker = (traits.name, self._stack.now(), None)
        made = meta_tensors(outputs)
        for tensor in inputs:
            self._memory.see(tensor.untyped_storage(), "buffer")
        for tensor in made:
            self._memory.see(tensor.untyped_storage(), None, maker)
        if not self.keep_operators or not made:
            return into
        self.note(traits, maker[1], args, meta_tensors(inputs), made)
        place, own = len(self.operators) - 1, self.operators[-1]
        own = own._replace(
            bytes_read=max(0, own.bytes_read - sum(map(bytes_read, again))),
            bytes_written=own.bytes_written if kept else 0,
        )
        self.operators[-1] = own
        if into is None:
            return place
        self.operators.pop()
        for tensor in made:
            self.made_by[self._memory.live[tensor.untyped_storage()._cdata][0]] = into
        self.operators[into] = joined(self.operators[into], own, into, leads)
        return into

    def copied(self, tensors: Sequence[Tensor]) -> int:
        """Note one kernel that copies tensors, and return their bytes (cudagraph_trees: `torch._foreach_copy_`)."""
        total = sum(map(bytes_read, tensors))
        if total and self.keep_operators:
            shapes = tuple(tuple(tensor.shape) for tensor in tensors)
            dtype = _dtype_name(tensors[0].dtype)
            self.operators.append(Operator("aten::copy_", self._memory.phase, dtype, shapes, (), 0, total, total, 1))
        return total

    def note(self, traits: Traits, module: str, args: Sequence, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Note an operator of a module; tensors on meta of its arguments, and what it made."""
        memory, made_by = self._memory, self.made_by
        live, phase = memory.live, memory.phase
        changed = [t for i in traits.written for t in meta_tensors(args[i : i + 1])]
        read = [live[tensor.untyped_storage()._cdata][0] for tensor in inputs]
        sources = [made_by.get(block, BATCH if memory.kinds[block] == "batch" else -1) for block in read]
        number = len(self.operators)
        for tensor in (*outputs, *changed):
            made_by[live[tensor.untyped_storage()._cdata][0]] = number
        reads, writes, elements, launches = _traffic(traits, args, inputs, outputs, changed)
        self.operators.append(
            Operator(
                traits.name,
                phase,
                _type_name((*outputs, *inputs)),
                tuple(tuple(t.shape) for t in inputs),
                tuple(tuple(t.shape) for t in outputs),
                flops(traits.name, args, outputs, elements),
                reads,
                writes,
                launches,
                module,
                tuple(sources),
                phase == "backward" and self._recomputes(),
                memory.graphs is not None and memory.graphs.is_launched(),
            )
        )

    def _recomputes(self) -> bool:
        """Return whether a checkpoint runs its part of the forward pass again, which the engine alone never does: a
        module's forward pass runs, or gradients are recorded."""
        return self._again or bool(self._stack.running) or torch.is_grad_enabled()


class _Traffic(NamedTuple):
    """`elements` are those of the largest tensor, or of all that a for-each operator goes over."""

    reads: int
    writes: int
    elements: int
    launches: int = 1


def _traffic(
    traits: Traits, args: Sequence, inputs: Sequence[Tensor], outputs: Sequence[Tensor], changed: Sequence[Tensor]
) -> _Traffic:
    """Return what an operator moves: each tensor once, however often it is given.

    Args:
        traits: Of the operator.
        args: As it was called.
        inputs: On meta, of its arguments.
        outputs: On meta, of its results.
        changed: The inputs that it writes to.
    """
    written = {id(tensor) for tensor in changed}
    seen: set[int] = set()
    reads = writes = elements = 0
    for tensor in inputs:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        nbytes = bytes_read(tensor)
        if id(tensor) in written:
            writes += nbytes
            reads += 0 if traits.write_only else nbytes
        else:
            reads += nbytes
        elements = max(elements, tensor.numel())
    for tensor in outputs:
        if id(tensor) not in seen:
            writes += bytes_read(tensor)
            elements = max(elements, tensor.numel())
    if traits.gathers and isinstance(args[0], Tensor):
        source = bytes_read(args[0])
        reads += min(source, gathered_bytes(traits.name, args, writes)) - source
        elements = max(t.numel() for t in outputs)
    if traits.adds and isinstance(args[1], Tensor) and args[1].is_sparse:  # into the rows that it holds alone
        rows, target = args[1]._values(), bytes_read(args[0])
        reads, writes = reads + bytes_read(rows) - target, writes + bytes_read(rows) - target
        elements = rows.numel()
    if not traits.foreach:
        return _Traffic(reads, writes, elements)
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    sizes = [t.numel() for t in lists[0]]
    launches = foreach_launches(len(lists) - (traits.name in WITH_STEPS), sizes)
    return _Traffic(reads, writes, sum(sizes), launches)


def _type_name(tensors: Sequence[Tensor]) -> str:
    """Return the type that an operator is priced in: of its first floating-point tensor, else of its first one."""
    floating = next((t for t in tensors if t.is_floating_point()), tensors[0])
    return _dtype_name(floating.dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    """Return a type's name without `torch.`."""
    return str(dtype).removeprefix("torch.")
