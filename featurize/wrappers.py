"""Wrappers around modules: compiled ones, which `featurize.compiled` follows, and parallel ones, which no trace does.

Start reading at `unwrapped`.
"""

from __future__ import annotations

from torch import nn

PARALLEL = (
    "the model is an nn.DataParallel and is estimated on one GPU with the whole batch: on several, the first one also "
    "gathers the outputs"
)


def remarks(model: nn.Module) -> tuple[str, ...]:
    """Return a sentence for each kind of wrapper in the model whose effect the trace leaves out."""
    return (PARALLEL,) if any(isinstance(module, nn.DataParallel) for module in model.modules()) else ()


def compiled_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the compiled modules, as they are in the `unwrapped` model. Ask before a copy is made: the
    copy of a module that `nn.Module.compile` compiled is not compiled any more."""
    if (inner := _compiled_inside(model)) is not None:
        return ("",)
    if (inner := _parallel_inside(model)) is not None:
        return compiled_modules(inner)
    paths = (path for path, module in model.named_modules() if _is_compiled(module))
    return tuple(".".join(part for part in path.split(".") if part != "_orig_mod") for path in paths)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without the compiled modules in it, which would compile while they are traced, and without an
    nn.DataParallel around it. Changes the model."""
    while (inner := _compiled_inside(model) or _parallel_inside(model)) is not None:
        model = inner
    for module in list(model.modules()):
        if getattr(module, _COMPILED_CALL, None) is not None:
            setattr(module, _COMPILED_CALL, None)
        for name, member in list(module.named_children()):
            if (inner := _compiled_inside(member)) is not None:
                setattr(module, name, inner)
    return model


_COMPILED_CALL = "_compiled_call_impl"  # of nn.Module.compile


def _is_compiled(module: nn.Module) -> bool:
    return _compiled_inside(module) is not None or getattr(module, _COMPILED_CALL, None) is not None


def _compiled_inside(module: nn.Module) -> nn.Module | None:
    kind = type(module)  # compared by name: importing torch._dynamo takes a second
    by_call = kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
    return module.get_submodule("_orig_mod") if by_call else None


def _parallel_inside(module: nn.Module) -> nn.Module | None:
    return module.get_submodule("module") if isinstance(module, nn.DataParallel) else None
