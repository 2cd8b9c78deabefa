"""Saved activations in host memory: what autograd keeps for the backward pass leaves the device meanwhile.

Start reading at `saved_on_host`.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks


def saved_on_host(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context for a forward pass whose saved tensors wait in host memory (`save_on_cpu`).

    Everything that autograd saves is moved, weights included, and comes back as a new tensor of the device when its
    backward operator reads it. Meta tensors stand for the device's: nothing but their shape is kept.
    """
    if device.type != "meta":
        return save_on_cpu(pin_memory=device.type == "cuda")
    return saved_tensors_hooks(_to_host, _from_host)


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.Size, torch.dtype]:
    return (tensor.shape, tensor.dtype) if tensor.is_meta else tensor


def _from_host(saved: Tensor | tuple[torch.Size, torch.dtype]) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    shape, dtype = saved
    return torch.empty(shape, dtype=dtype, device="meta")
