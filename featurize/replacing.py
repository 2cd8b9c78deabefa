"""Replaces an attribute of a module or class for a while.

Start reading at `replaced`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def replaced(owner, name: str, value) -> Iterator[None]:
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
