"""What a recorder has to know of an operator overload before it runs: read once from its schema and tables.

Start reading at `Traits`.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from featurize import op_cost
from featurize.library_calls import has_library_calls
from featurize.values import INDEXED_BY_MASKS


class Traits:
    """What is the same for every call of one operator overload."""

    __slots__ = (
        "adds",
        "calls_library",
        "composite",
        "foreach",
        "gathers",
        "kernel",
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
