"""Tools of estimators that are neural networks: quiet, repeatable use of torch, and weights as plain arrays.

Start reading at `quiet_torch`. Torch-only: import it inside functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import nn

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


def arrays_of(net: nn.Module) -> dict[str, np.ndarray]:
    """Its parameters and buffers, copied."""
    return {name: tensor.detach().numpy().copy() for name, tensor in net.state_dict().items()}


def with_arrays(net: NetT, arrays: Mapping[str, np.ndarray]) -> NetT:
    """The net with those weights, in float64 and for predicting: what it says of a case then depends on its neighbours
    in the batch by rounding at 1e-15 only, which `steady` takes away."""
    net.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
    return net.double().eval()


def steady(values: np.ndarray) -> np.ndarray:
    """Rounded to 9 decimals."""
    return np.round(np.asarray(values, dtype=float), 9)
