"""Replaces attributes of torch for the rest of a process. Start reading at `replace_attribute`."""

from __future__ import annotations

from typing import Any


def replace_attribute(owner: object, name: str, value: Any) -> None:
    """Set an attribute of a module or class, where the release has it."""
    if hasattr(owner, name):
        setattr(owner, name, value)
