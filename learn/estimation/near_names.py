"""Names near one that does not exist: of a module's attributes, and of the modules that can be imported.

Start reading at `near_names`.
"""

from __future__ import annotations

import difflib
import pkgutil
import sys
from collections.abc import Iterable

_MOST = 5


def near_names(name: str, known: Iterable[str]) -> str:
    """Return `; near names: a, b` of the known names that resemble `name`; empty where none does."""
    near = difflib.get_close_matches(name, list(known), n=_MOST, cutoff=0.6)
    return f"; near names: {', '.join(near)}" if near else ""


def near_modules(name: str, missing: str | None) -> str:
    """Return `near_names` of the modules beside `missing`, the part of the dotted `name` that is not there.

    Empty where `missing` is another module: one that the module itself imports. Imports nothing.
    """
    if missing is None or not (name == missing or name.startswith(f"{missing}.")):
        return ""
    parent, _, last = missing.rpartition(".")
    paths = getattr(sys.modules.get(parent), "__path__", ()) if parent else None
    prefix = f"{parent}." if parent else ""
    near = near_names(last, (module.name for module in pkgutil.iter_modules(paths)))
    return near.replace(": ", f": {prefix}").replace(", ", f", {prefix}") if near else ""
