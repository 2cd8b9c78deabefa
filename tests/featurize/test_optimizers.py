"""Optimizers as they step: what of PyTorch is replaced for meta tensors, and what for none."""

import sys

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from featurize.training.optimizers import make_optimizer, run_step


@pytest.mark.parametrize("device, replaces", [("cpu", False), ("meta", True)])
def test_real_training_runs_pytorch_as_it_is(device, replaces):
    """Another thread may train at the same time."""
    of_adam, of_all = sys.modules["torch.optim.adam"], torch_optimizer
    names = ((of_adam, "_get_value"), (of_all, "_get_fused_kernels_supported_devices"))
    before = [getattr(module, name) for module, name in names]
    parameter, seen = nn.Parameter(torch.ones(3, device=device)), []

    class Watched(torch.optim.Adam):
        def step(self, closure=None):
            seen.extend(getattr(module, name) for module, name in names)

    Watched.__module__ = "torch.optim.adam"
    run_step(Watched([parameter], foreach=True))
    assert [one is not other for one, other in zip(seen, before, strict=True)] == [replaces, replaces]
    assert [getattr(module, name) for module, name in names] == before


def test_an_optimizer_whose_module_is_gone_steps():
    class Own(torch.optim.SGD):
        pass

    Own.__module__ = "no.such.module"
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    parameter.grad = torch.ones(3, device="meta")
    run_step(Own([parameter]))


def test_an_optimizer_of_real_parameters_updates_them():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    run_step(make_optimizer("adam", [parameter]))
    assert (parameter < 1).all()
