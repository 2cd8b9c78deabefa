"""Temporary and lasting replacement of attributes of modules and classes; suspension of garbage collection.

Start reading at `all_replaced`, which is temporary, or at `replace_in`, which lasts as long as the process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Change: TypeAlias = tuple[object, str, object]  # module or class, name of its attribute, the replacement


@contextlib.contextmanager
def all_replaced(changes: Iterable[Change]) -> Iterator[None]:
    """Replace attributes of modules and classes until exit. Each change is made before the next one is requested from
    the iterable."""
    before: list[tuple[object, str, bool, object]] = []
    try:
        for owner, name, value in changes:
            # Tensor inherits most methods from its C base: an attribute that was set here is deleted again.
            original = owner, name, name in vars(owner), getattr(owner, name)
            setattr(owner, name, value)
            before.append(original)
        yield
    finally:
        for owner, name, is_own, value in reversed(before):
            if is_own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)


def replaced(owner: object, name: str, value: object) -> contextlib.AbstractContextManager[None]:
    """Replace an attribute of a module or class until exit."""
    return all_replaced([(owner, name, value)])


def if_imported(module: str, path: str, instead: Callable[[Any], Any]) -> list[Change]:
    """Return the change of an attribute at a path within a module, as `nms` or `Matcher.__call__`, to
    `instead(attribute)`; empty where the module is not imported or has no such attribute."""
    owner: Any = sys.modules.get(module)
    if owner is None:
        return []
    owners, _, name = path.rpartition(".")
    if owners:
        owner = getattr(owner, owners, None)
    return [(owner, name, instead(getattr(owner, name)))] if hasattr(owner, name) else []


def replace_attribute(owner: object, name: str, value: object) -> None:
    """Set an attribute of a module or class, if the release has it."""
    if hasattr(owner, name):
        setattr(owner, name, value)


def replace_in(name: str, *owners: object) -> Callable[[Function], Function]:
    """Return a decorator that installs a function under `name` in modules or classes, if the release has that name.

    The function is called with the original, then with its own arguments.
    """

    def install(function: Function) -> Function:
        for owner in owners:
            if hasattr(owner, name):
                setattr(owner, name, instead_of(getattr(owner, name), function))
        return function

    return install


def instead_of(before: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `before` that calls `function` with `before`, then with its own arguments."""

    @functools.wraps(before)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(before, *args, **kwargs)

    return call


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Suspend garbage collection inside: a collection at a random moment would make two traces differ, and each scans
    all objects of the libraries."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
