"""Small models, made in the place that needs them. Start reading at `Computes`."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn


class Computes(nn.Module):
    """Members by name, and a forward pass that is a function of the module and its inputs."""

    def __init__(self, compute: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.compute(self, *inputs, **named)


def linear_then(function: Callable[[Tensor], Any], width: int, wanted: int) -> Computes:
    """A linear layer from `width` to `wanted` elements, and a function of what it gives."""
    return Computes(lambda net, x: function(net.line(x)), line=nn.Linear(width, wanted))


def dense(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers from each of these widths to the next one, with a ReLU after each."""
    layers = (nn.Linear(*pair) for pair in pairwise(widths))
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))


class Block(nn.Module):
    """Feed-forward part of a transformer block: x + narrow(activation(wide(norm(x)))); the norm may be left out."""

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        *,
        norm: bool = True,
        bias: bool = True,
        activation: Callable[[Tensor], Tensor] = nn.functional.gelu,
    ) -> None:
        super().__init__()
        hidden, self.activation = hidden or 4 * width, activation
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.wide, self.narrow = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.activation(self.wide(self.norm(x))))


class Stack(nn.Module):
    """Blocks one after the other, between a first layer and a head."""

    def __init__(self, blocks: Iterable[nn.Module], head: nn.Module, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.blocks, self.head = first or nn.Identity(), nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
