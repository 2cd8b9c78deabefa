"""Tools of estimators that are neural networks: quiet, repeatable use of torch, and weights as plain arrays.

Start reading at `quiet_torch`. Torch-only: import it inside functions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

NetT = TypeVar("NetT", bound=nn.Module)


@contextmanager
def quiet_torch(seed: int) -> Iterator[None]:
    """One thread and a random state of `seed` inside; outside, both are as they were."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs' generators too
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def train_best(
    net: NetT,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batches: Callable[[], Iterable[np.ndarray]],
    loss_of: Callable[[np.ndarray], Tensor],
    held_out_loss: Callable[[], float],
    *,
    epochs: int,
    first: int = 0,
    patience: float = math.inf,
) -> NetT:
    """Return the net as it was after the epoch that estimated the held-out rows best.

    Args:
        net: What is trained.
        optimizer, schedule: Update its parameters; the schedule steps with every batch where it has steps for them all.
        batches: Rows of each batch of one epoch.
        loss_of: The loss of a batch's rows.
        held_out_loss: The loss of the held-out rows, now.
        epochs: The most that are trained.
        first: Epoch from which on the best one is looked for.
        patience: Epochs without a better one after which training ends.
    """
    best, best_loss, best_epoch = copy.deepcopy(net.state_dict()), math.inf, 0
    for epoch in range(epochs):
        for rows in batches():
            optimizer.zero_grad(set_to_none=True)
            loss_of(rows).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            if isinstance(schedule, OneCycleLR):
                schedule.step()
        if not isinstance(schedule, OneCycleLR):
            schedule.step()
        loss = held_out_loss() if epoch >= first else math.inf
        if loss < best_loss:
            best, best_loss, best_epoch = copy.deepcopy(net.state_dict()), loss, epoch
        elif epoch - best_epoch >= patience:
            break
    net.load_state_dict(best)
    return net


def arrays_of(net: nn.Module) -> dict[str, np.ndarray]:
    """Its parameters and buffers, copied."""
    return {name: tensor.detach().numpy().copy() for name, tensor in net.state_dict().items()}


def with_arrays(net: NetT, arrays: Mapping[str, np.ndarray]) -> NetT:
    """The net with those weights, in float64 and for predicting: its answer for a case then depends on its neighbours
    in the batch by rounding at 1e-15 only, which `steady` takes away."""
    net.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    return net.double().eval()


def steady(values: np.ndarray) -> np.ndarray:
    """Rounded to 9 decimals."""
    return np.round(np.asarray(values, dtype=float), 9)
