"""Wrappers around modules: compiled ones, which `compiled` follows, and parallel ones, which no trace does.

Start reading at `unwrapped`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

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
    paths = (path for path, module in model.named_modules() if is_compiled(module))
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


def compiled_function(value: object) -> Callable[..., Any] | None:
    """Return the function that torch.compile made this one of; None for what it did not make."""
    return getattr(value, "_torchdynamo_orig_callable", None) if isinstance(value, FunctionType | MethodType) else None


def compiled_functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the compiled functions among a module's attributes, as they were before. Methods are this module's own,
    also in a copy."""
    functions: dict[str, Callable[..., Any]] = {}
    for name, value in vars(module).items():
        function = compiled_function(value) if name != _COMPILED_CALL else None
        if isinstance(function, MethodType) and isinstance(module, type(function.__self__)):
            function = MethodType(function.__func__, module)
        if function is not None:
            functions[name] = function
    return functions


def uncompiled_copy(module: nn.Module) -> nn.Module:
    """Return a copy of the module alone that is not compiled, with the same members."""
    inner = _compiled_inside(module)
    return copy.copy(module if inner is None else inner)  # a copy leaves `nn.Module.compile` behind


_COMPILED_CALL = "_compiled_call_impl"  # of nn.Module.compile


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile or `nn.Module.compile` was called on this module itself."""
    return _compiled_inside(module) is not None or getattr(module, _COMPILED_CALL, None) is not None


def _compiled_inside(module: nn.Module) -> nn.Module | None:
    kind = type(module)  # compared by name: importing torch._dynamo takes a second
    by_call = kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
    return module.get_submodule("_orig_mod") if by_call else None


def _parallel_inside(module: nn.Module) -> nn.Module | None:
    return module.get_submodule("module") if isinstance(module, nn.DataParallel) else None
