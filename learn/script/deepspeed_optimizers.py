"""DeepSpeed's optimizers in a script, and what an engine makes of any optimizer: one for a rank's master weights.

Start reading at `maker_of`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from featurize.optimizers import make_optimizer

_BY_ITSELF = (
    "optimizers of deepspeed.ops are followed within deepspeed.initialize only; without it, take one of torch.optim"
)


class EngineOptimizer(Optimizer):
    """An optimizer of DeepSpeed's own: it says what its engine is to make, and makes no state.

    our_name        as `featurize.optimizers` spells it
    implementation  likewise; None: its default
    """

    our_name: ClassVar[str] = "adamw"
    implementation: ClassVar[str | None] = None

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *_: Any, weight_decay: float = 0.0, **__: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError(_BY_ITSELF)


def kind_of(name: str, our_name: str, implementation: str | None = None) -> type[EngineOptimizer]:
    """Return a class of optimizers, by the name that a script knows."""
    return type(name, (EngineOptimizer,), {"our_name": our_name, "implementation": implementation})


def adam_of(name: str, implementation: str | None, mode: str) -> Callable[..., EngineOptimizer]:
    """Return the class of an Adam that decays weights as AdamW, unless its keyword `mode` is false."""

    class Adam(kind_of(name, "adamw", implementation)):  # type: ignore[misc]
        def __init__(self, params: Iterable[Any], *args: Any, **options: Any) -> None:
            super().__init__(params, *args, **options)
            self.our_name = "adamw" if options.get(mode, True) else "adam"  # type: ignore[misc]

    Adam.__name__ = Adam.__qualname__ = name
    return Adam


def maker_of(optimizer: Optimizer) -> Callable[[list[torch.nn.Parameter]], Optimizer]:
    """Return what makes an optimizer of the same kind, with the settings of the first group, for other parameters."""
    if isinstance(optimizer, EngineOptimizer):
        return functools.partial(
            make_optimizer, optimizer.our_name, foreach=True, implementation=optimizer.implementation
        )
    taken = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in optimizer.param_groups[0].items() if name in taken and name != "params"}
    return lambda parameters: type(optimizer)(parameters, **options)
