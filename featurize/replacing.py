"""Replaces attributes of modules and classes.

Start reading at `replaced`, for a while, or at `replace_attribute`, for the rest of the process.
"""

from __future__ import annotations

import contextlib
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
