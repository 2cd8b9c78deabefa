"""Changes the process: attributes of modules and classes are others, no garbage is collected.

Start reading at `all_replaced`, for a while, or at `replace_in`, for the rest of the process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Change: TypeAlias = tuple[object, str, object]  # module or class, name of its attribute, what stands there instead


@contextlib.contextmanager
def all_replaced(changes: Iterable[Change]) -> Iterator[None]:
    """Attributes of modules and classes are others while this lasts. Each change is made before the next one is asked
    for."""
    before: list[tuple[object, str, bool, object]] = []
    try:
        for owner, name, value in changes:
            # Tensor inherits most methods from its C base: what was set is deleted again.
            held = owner, name, name in vars(owner), getattr(owner, name)
            setattr(owner, name, value)
            before.append(held)
        yield
    finally:
        for owner, name, is_own, value in reversed(before):
            if is_own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)


def replaced(owner: object, name: str, value: object) -> contextlib.AbstractContextManager[None]:
    """An attribute of a module or class is another while this lasts."""
    return all_replaced([(owner, name, value)])


def if_imported(module: str, path: str, instead: Callable[[Any], Any]) -> list[Change]:
    """Return the change of what stands at a path within a module, as `nms` or `Matcher.__call__`, to what `instead`
    makes of it; none where the module is not imported or has no such attribute."""
    owner: Any = sys.modules.get(module)
    if owner is None:
        return []
    owners, _, name = path.rpartition(".")
    if owners:
        owner = getattr(owner, owners, None)
    return [(owner, name, instead(getattr(owner, name)))] if hasattr(owner, name) else []


def replace_attribute(owner: object, name: str, value: object) -> None:
    """Set an attribute of a module or class, where the release has it."""
    if hasattr(owner, name):
        setattr(owner, name, value)


def replace_in(name: str, *owners: object) -> Callable[[Function], Function]:
    """Return a decorator that installs a function under `name` in modules or classes, where the release has that name.

    The function is called with what was there before, then with its own arguments.
    """

    def install(function: Function) -> Function:
        for owner in owners:
            if hasattr(owner, name):
                setattr(owner, name, instead_of(getattr(owner, name), function))
        return function

    return install


def instead_of(before: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for a function: it calls another one with that function, then with its own arguments."""

    @functools.wraps(before)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(before, *args, **kwargs)

    return call


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage within: a collection at a random moment would make two traces differ, and each goes through
    all objects of the libraries."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
