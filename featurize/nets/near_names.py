"""Names near one that does not exist: of a module's attributes, and of the modules that can be imported.

Start reading at `near_names`; `library_names` knows how a model of timm, torchvision or transformers is spelled.
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


def library_names(module: str, name: str) -> str:
    """Return `; write timm.models:resnet50` for a name that the library knows under another spelling; else empty.

    Args:
        module: What was imported, as `timm`.
        name: What it does not have.
    """
    package = module.partition(".")[0]
    spellings = _SPELLINGS[package](name) if package in _SPELLINGS else []
    return f"; write {' or '.join(spellings)}" if spellings else ""


def _of_timm(name: str) -> list[str]:
    import timm

    if not timm.is_model(name):
        return []
    own = [f"timm.models:{name}"] if hasattr(timm.models, name) else []
    return [*own, f"timm:create_model with arguments {{model_name: {name}}}"]


def _of_torchvision(name: str) -> list[str]:
    from torchvision import models

    if name not in models.list_models():
        return []
    return [f"{models.get_model_builder(name).__module__.rpartition('.')[0]}:{name}"]


def _of_transformers(name: str) -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    kind = name.rpartition("/")[2].partition("-")[0].lower()  # also of a checkpoint, as bert-base-uncased
    classes = [table.get(kind) for table in (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_MAPPING_NAMES)]
    return [f"transformers:{one}" for one in dict.fromkeys(classes) if isinstance(one, str)]


_SPELLINGS = {"timm": _of_timm, "torchvision": _of_torchvision, "transformers": _of_transformers}


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
