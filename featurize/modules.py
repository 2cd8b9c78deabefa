"""The torch modules that families are built from. Imported only inside a family's `build`, so families stay torch-free.

Start reading at `Stack`, the body of every model: blocks in a row, each recomputed in the backward pass if asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class NoActivation(nn.Identity):
    """The activation `identity`, which counts as a layer of the plan."""

    plan_kind: ClassVar[str] = "identity"


_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "prelu": nn.PReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "mish": nn.Mish,
    "identity": NoActivation,
}
# Who hears of `counted` layers while a plan is read.
reading: ContextVar[Callable[[str, torch.Tensor, tuple], None] | None] = ContextVar("reading", default=None)


def counted(kind: str, output: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """Return `output` as it is, as one layer of the plan (`featurize.plan_of_module`) that owns `parameters`: for what
    a forward pass computes outside of modules."""
    if (count := reading.get()) is not None:
        count(kind, output, parameters)
    return output


def activation(name: str) -> nn.Module:
    """A new module (`prelu` has a parameter) for a name of `featurize.trial.ACTIVATIONS`."""
    return _ACTIVATIONS[name]()


def dropout(rate: float) -> list[nn.Module]:
    """No module at rate 0."""
    return [nn.Dropout(rate)] if rate > 0 else []


class Stack(nn.Module):
    """Blocks in a row. With `recompute`, training keeps each block's input only and runs the block again in backward
    (`torch.utils.checkpoint`, non-reentrant). Further arguments go to every block as they are."""

    def __init__(self, blocks: Iterable[nn.Module], *, recompute: bool):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        recompute = self.recompute and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            if not recompute:
                x = block(x, *args, **kwargs)
                continue
            x = checkpoint(block, x, *args, use_reentrant=False, **kwargs)
        return x
