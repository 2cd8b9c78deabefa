"""Replaces attributes of modules and classes.

Start reading at `replaced`, for a while, or at `replace_attribute`, for the rest of the process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """An attribute of a module or class is another while this lasts."""
    own = name in vars(owner)  # Tensor inherits most methods from its C base: what was set is deleted again
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
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
