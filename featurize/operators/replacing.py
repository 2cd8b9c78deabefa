"""Changes the process: attributes of modules and classes are others, no garbage is collected.

Start reading at `replaced`, for a while, or at `replace_in`, for the rest of the process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """An attribute of a module or class is another while this lasts."""
    is_own = name in vars(owner)  # Tensor inherits most methods from its C base: what was set is deleted again
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def replaced_if_imported(module: str, path: str, instead: Callable[[Any], Any]) -> Iterator[None]:
    """Replace what stands at a path within a module, as `nms` or `Matcher.__call__`, by what `instead` makes of it,
    while this lasts; nothing where the module is not imported or has no such attribute."""
    owners, _, name = path.rpartition(".")
    owner: Any = sys.modules.get(module)
    if owners:
        owner = getattr(owner, owners, None)
    has_it = hasattr(owner, name)
    with replaced(owner, name, instead(getattr(owner, name))) if has_it else contextlib.nullcontext():
        yield


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
