"""How the fits of `learn.kernels` find their values: gradient descent on an error, held to where it began.

Start reading at `descended`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

Values = Mapping[str, torch.Tensor]
_LAST_PART = 0.7  # of the iterations, from which on the rate is the last one
_AS_FIRM: Mapping[str, float] = MappingProxyType({})
_FREE = (-math.inf, math.inf)


def descended(
    begin: Values,
    error: Callable[[Values], torch.Tensor],
    *,
    of_priors: float,
    firmness: Mapping[str, float] = _AS_FIRM,
    iterations: int,
    rate: float,
    last_rate: float,
    limits: Mapping[str, tuple[float, float]],
) -> dict[str, torch.Tensor]:
    """Return the values that make an error small and stay near to where they began, found by Adam.

    All values are one vector that the optimizer steps over: with one of its own each, starting the many small operators
    takes longer than their arithmetic.

    Args:
        begin: Name -> where the value begins; left as it is.
        error: Gives a scalar for values with the names and shapes of `begin`.
        of_priors: What a squared distance of 1 from where a value began adds to the error.
        firmness: Name -> by how many times more it adds for this value.
        iterations: Number of steps; 0 gives `begin`.
        rate, last_rate: Learning rate, and the one of the last 30 % of the steps.
        limits: Name -> the least and the most that the value may be.
    """
    sizes = [value.numel() for value in begin.values()]

    def of_each(by_name: Callable[[str], float]) -> torch.Tensor:
        numbers = torch.tensor([by_name(name) for name in begin], dtype=torch.float64)
        return numbers.repeat_interleave(torch.tensor(sizes))

    def named(vector: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = zip(begin.items(), vector.split(sizes), strict=True)
        return {name: part.view(value.shape) for (name, value), part in parts}

    start = torch.cat([value.flatten() for value in begin.values()])
    cost = of_priors * of_each(lambda name: firmness.get(name, 1.0))
    least, most = of_each(lambda name: limits.get(name, _FREE)[0]), of_each(lambda name: limits.get(name, _FREE)[1])
    vector = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([vector], lr=rate)
    for iteration in range(iterations):
        if iteration == int(_LAST_PART * iterations):
            for parameters in optimizer.param_groups:
                parameters["lr"] = last_rate
        optimizer.zero_grad()
        (error(named(vector)) + (cost * (vector - start) ** 2).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            vector.clamp_(least, most)
    return named(vector.detach())


def robust(off: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return the Huber loss over the tolerance: what is further off than it counts in proportion, not squared."""
    zero = torch.zeros_like(off)
    return torch.nn.functional.huber_loss(off, zero, delta=tolerance, reduction="none") / tolerance
