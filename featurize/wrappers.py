"""Wrappers that a trace does not follow, so that an estimate can warn of them: compiled and parallel modules.

Start reading at `remarks`.
"""

from __future__ import annotations

from torch import nn

COMPILED = (
    "the model is compiled (torch.compile) and is estimated as eager: compiled steps usually take less memory and time"
)
PARALLEL = (
    "the model is an nn.DataParallel and is estimated on one GPU with the whole batch: on several, the first one also "
    "gathers the outputs"
)


def remarks(model: nn.Module) -> tuple[str, ...]:
    """Return a sentence for each kind of wrapper in the model whose effect the trace leaves out."""
    modules = list(model.modules())
    notes = []
    if any(_is_compiled(module) for module in modules):
        notes.append(COMPILED)
    if any(isinstance(module, nn.DataParallel) for module in modules):
        notes.append(PARALLEL)
    return tuple(notes)


def _is_compiled(module: nn.Module) -> bool:
    kind = type(module)  # compared by name: importing torch._dynamo takes a second
    by_call = kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")
    return by_call or getattr(module, "_compiled_call_impl", None) is not None  # nn.Module.compile
