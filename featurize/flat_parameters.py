"""Parameters and modules' names under FSDP1, read from its attributes. Its own modules are not imported.

Start reading at `whole_elements`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

_WRAPPED = "_fsdp_wrapped_module"  # attribute of a wrapper: what it wraps


def whole_elements(models: Iterable[nn.Module], *, on_meta: bool = False) -> int:
    """Count the elements of models' parameters: of those that ranks share, all of them.

    Args:
        models: One that is part of another counts once.
        on_meta: Only parameters on meta count.
    """
    counts: dict[int, int] = {}
    for model in models:
        counts |= {id(p): p.numel() for p in model.parameters() if not _is_flat(p) and (p.is_meta or not on_meta)}
        for module in model.modules():
            flat = getattr(vars(module).get("_handle"), "flat_param", None)
            if flat is not None:
                counts[id(flat)] = sum(flat._numels)
    return sum(counts.values())


def _is_flat(parameter: Tensor) -> bool:
    """Return whether it is a flat parameter, or a view of one."""
    return hasattr(parameter, "_fsdp_flattened") or hasattr(parameter, "_is_flat_param")


def unwrapped_name(path: str) -> str:
    """Return a module's path without those of wrappers around it."""
    return ".".join(part for part in path.split(".") if part != _WRAPPED)
