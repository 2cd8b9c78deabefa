"""How the fits of `learn.kernels` find their values: gradient descent on an error, held to where it began.

Start reading at `descended`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

Values = Mapping[str, torch.Tensor]
_LAST_PART = 0.7  # of the iterations, from which on the rate is the last one
_AS_FIRM: Mapping[str, float] = MappingProxyType({})


def descended(
    begin: Values,
    error: Callable[[Values], torch.Tensor],
    *,
    iterations: int,
    rate: float,
    last_rate: float,
    limits: Mapping[str, tuple[float, float]],
) -> dict[str, torch.Tensor]:
    """Return the values that make an error small, found by Adam.

    Args:
        begin: Name -> where the value begins; left as it is.
        error: Gives a scalar for values with the names and shapes of `begin`.
        iterations: Number of steps; 0 gives `begin`.
        rate, last_rate: Learning rate, and the one of the last 30 % of the steps.
        limits: Name -> the least and the most that the value may be.
    """
    values = {name: value.clone().requires_grad_(True) for name, value in begin.items()}
    optimizer = torch.optim.Adam(values.values(), lr=rate)
    for iteration in range(iterations):
        if iteration == int(_LAST_PART * iterations):
            for parameters in optimizer.param_groups:
                parameters["lr"] = last_rate
        optimizer.zero_grad()
        error(values).backward()
        optimizer.step()
        with torch.no_grad():
            for name, (least, most) in limits.items():
                values[name].clamp_(least, most)
    return {name: value.detach() for name, value in values.items()}


def robust(off: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return the Huber loss over the tolerance: what is further off than it counts in proportion, not squared."""
    zero = torch.zeros_like(off)
    return torch.nn.functional.huber_loss(off, zero, delta=tolerance, reduction="none") / tolerance


def distance(values: Values, begin: Values, firmness: Mapping[str, float] = _AS_FIRM) -> torch.Tensor:
    """Return the squared distance of all values from where they began, each times its firmness; 1 if not named."""
    parts = [firmness.get(name, 1.0) * ((value - begin[name]) ** 2).sum() for name, value in values.items()]
    return torch.stack(parts).sum()
