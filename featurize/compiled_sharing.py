"""Compares compiled modules: where two run the same graph, as a transformer's blocks, one capture serves both.

Start reading at `AttributeReads`. A module's forward pass is its class, its parameters and inputs, and the attributes
that it reads. A capture notes which ones it read; another module is alike where it has the same values there. An index
of the layer that no one reads therefore keeps no two blocks apart.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from featurize.replacing import replaced

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
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
        self._all_read = False  # code asked for the attributes as a whole

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Within, what any thread reads of the module counts as read."""
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
        """Return whether the forward pass would read the same of another module, members and classes included."""
        if self._all_read or _tree(other) != self._tree:
            return False
        theirs = _paths(other)
        members = dict(other.named_modules())
        for (path, name), value in self._values.items():
            attributes = vars(members[path])
            if name not in attributes or not self._same(value, attributes[name], theirs):
                return False
        return True

    def _same(self, one: object, other: object, theirs: dict[int, str]) -> bool:
        if one is other:
            return True
        if isinstance(one, nn.Module):
            path = self._paths.get(id(one))
            return path is not None and path == theirs.get(id(other))
        if type(one) is not type(other):
            return False
        if isinstance(one, _PLAIN):
            return one == other
        if isinstance(one, list | tuple) and isinstance(other, list | tuple):
            return len(one) == len(other) and all(self._same(a, b, theirs) for a, b in zip(one, other, strict=True))
        if isinstance(one, dict) and isinstance(other, dict):
            return list(one) == list(other) and all(self._same(one[key], other[key], theirs) for key in one)
        if isinstance(one, MethodType) and isinstance(other, MethodType):
            return one.__func__ is other.__func__ and self._same(one.__self__, other.__self__, theirs)
        if isinstance(one, FunctionType) and isinstance(other, FunctionType):
            return one.__code__ is other.__code__ and self._same(_bound(one), _bound(other), theirs)
        if isinstance(one, functools.partial) and isinstance(other, functools.partial):
            mine, its = ((part.func, part.args, part.keywords) for part in (one, other))
            return self._same(mine, its, theirs)
        return False


def _bound(function: FunctionType) -> tuple[object, ...]:
    """Return what a function computes with besides its code: a factory makes another one for each layer."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not set yet
            cells.append(cell)
    return function.__defaults__, function.__kwdefaults__, vars(function), cells


def _paths(module: nn.Module) -> dict[int, str]:
    return {id(member): path for path, member in module.named_modules()}


def _tree(module: nn.Module) -> list[tuple[str, type, tuple[str, ...]]]:
    """Path, class and missing parameters and buffers of each member; one that has two paths appears once."""
    return [
        (
            path,
            type(member),
            tuple(k for part in (member._parameters, member._buffers) for k in part if part[k] is None),
        )
        for path, member in module.named_modules()
    ]
