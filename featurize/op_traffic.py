"""What one dispatched ATen operator moves: bytes that its kernels read and write, elements, and how many are launched.

Start reading at `traffic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from featurize import op_cost
from featurize.operator_traits import Traits
from featurize.tensor_parts import bytes_read


class Traffic(NamedTuple):
    """`elements` are those of the largest tensor, or of all that a for-each operator goes over."""

    reads: int
    writes: int
    elements: int
    launches: int = 1


def traffic(
    traits: Traits, args: Sequence, inputs: Sequence[Tensor], outputs: Sequence[Tensor], changed: Sequence[Tensor]
) -> Traffic:
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
        reads += min(source, op_cost.gathered_bytes(traits.name, args, writes)) - source
        elements = max(t.numel() for t in outputs)
    if traits.adds and isinstance(args[1], Tensor) and args[1].is_sparse:  # into the rows that it holds alone
        rows, target = args[1]._values(), bytes_read(args[0])
        reads, writes = reads + bytes_read(rows) - target, writes + bytes_read(rows) - target
        elements = rows.numel()
    if not traits.foreach:
        return Traffic(reads, writes, elements)
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    sizes = [t.numel() for t in lists[0]]
    launches = op_cost.foreach_launches(len(lists) - (traits.name in op_cost.WITH_STEPS), sizes)
    return Traffic(reads, writes, sum(sizes), launches)


def type_name(tensors: Sequence[Tensor]) -> str:
    """Return the type that an operator is priced in: of its first floating-point tensor, else of its first one."""
    floating = next((t for t in tensors if t.is_floating_point()), tensors[0])
    return dtype_name(floating.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a type's name without `torch.`."""
    return str(dtype).removeprefix("torch.")
