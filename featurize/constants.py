"""Values of the small index and mask tensors that a model makes of constants alone, so that it can read them back.

Start reading at `Constants.follow`. A step on meta tensors has no values; but positions (`torch.arange`), comparisons
of them and the like are the same in every step, and model code asks for them (`if mask.all():`).
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

LARGEST = 2**18  # elements
_KINDS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FACTORIES = frozenset(
    f"aten::{name}"
    for name in ("arange", "zeros", "ones", "full", "scalar_tensor", "zeros_like", "ones_like", "full_like")
)
READ = "aten::_local_scalar_dense"


class Constants:
    """meta tensor -> its values on the CPU, as long as the tensor lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, Tensor]] = {}
        self._sharing: dict[int, set[int]] = {}  # storage -> the known tensors that are views of it

    def read(self, tensor: Tensor) -> bool | int | float | None:
        """The value of a tensor of one element, None if it is not known."""
        values = self._of(tensor)
        return None if values is None else values.item()

    def follow(self, func, name: str, args: tuple, kwargs: dict, out, mutates: bool) -> None:
        """Note what an operator has given. Only one new small tensor of whole numbers or truths can be followed."""
        if mutates:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and not value.is_sparse:
                    for key in self._sharing.pop(value.untyped_storage()._cdata, ()):
                        self._known.pop(key, None)
            return
        if not (isinstance(out, Tensor) and out.dtype in _KINDS and out.is_meta and out.numel() <= LARGEST):
            return
        try:
            given, named = self._on_cpu(args), {key: self._on_cpu(value) for key, value in kwargs.items()}
        except LookupError:
            return
        if name not in _FACTORIES and not any(_holds_tensor(value) for value in args):
            return
        if "device" in named:
            named["device"] = torch.device("cpu")
        try:
            values = func(*given, **named)
        except (RuntimeError, TypeError, NotImplementedError):  # of a device, a layout that the CPU does not have
            return
        if func.is_view:
            values = values.clone()
        key = id(out)
        self._known[key] = weakref.ref(out, lambda _: self._known.pop(key, None)), values
        self._sharing.setdefault(out.untyped_storage()._cdata, set()).add(key)

    def _of(self, tensor: Tensor) -> Tensor | None:
        found = self._known.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _on_cpu(self, value):
        if isinstance(value, Tensor):
            if not value.is_meta:
                return value
            values = self._of(value)
            if values is None:
                raise LookupError
            return values
        if isinstance(value, list | tuple):
            return type(value)(map(self._on_cpu, value))
        return value


def _holds_tensor(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_holds_tensor, value)))
