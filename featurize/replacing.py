"""Changes the process: attributes of modules and classes are others, no garbage is collected.

Start reading at `replaced`, for a while, or at `replace_attribute`, for the rest of the process.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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


def replace_attribute(owner: object, name: str, value: object) -> None:
    """Set an attribute of a module or class, where the release has it."""
    if hasattr(owner, name):
        setattr(owner, name, value)


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
