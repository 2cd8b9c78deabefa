"""An optimizer's step on a rank's own parts of parameters, without DTensor's search for how to share each operator.

Start reading at `LocalOptimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from featurize.optimizers import run_step
from featurize.parallel.gradient_buckets import own_part
from featurize.tensor_parts import local_tensor


class LocalOptimizer:
    """Updates parts of parameters; gradients are read, and freed, where the wrapper leaves them.

    Args:
        parameters: Of the wrapped model.
        make: Gives the optimizer of some parameters; an elementwise one.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self._pairs = [(p, nn.Parameter(local_tensor(p.detach()), requires_grad=p.requires_grad)) for p in parameters]
        self._optimizer = make([own for _, own in self._pairs])

    @property
    def state(self) -> Any:
        """The optimizer's own."""
        return self._optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients, or fill them with zeros."""
        for parameter, _ in self._pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                local_tensor(parameter.grad).zero_()

    def step(self) -> None:
        for parameter, own in self._pairs:
            own.grad = None if parameter.grad is None else own_part(parameter.grad, parameter)
        run_step(self._optimizer)
        for _, own in self._pairs:
            own.grad = None
