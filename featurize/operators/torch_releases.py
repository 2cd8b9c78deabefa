"""Gaps of torch's releases that a traced step meets: filled before a trace, or refused by name.

Start reading at `complete`, which adds; `require_torch` refuses.
"""

from __future__ import annotations

import functools

from conf.errors import EnvironmentProblem


def is_older_than(release: str) -> bool:
    """Return whether the installed torch is older than a release of two numbers, such as "2.11"."""
    # Of two numbers: a vendor's build of 2.11.0a0 has what 2.11 has, and would sort before it.
    return [int(part) for part in installed_release().split(".")[:2]] < [int(part) for part in release.split(".")]


def installed_release() -> str:
    """Return the installed torch's release without its build, such as `2.13.0`."""
    import torch

    return torch.__version__.partition("+")[0]


def require_torch(oldest: str, feature: str) -> None:
    """Refuse a feature that the installed torch is too old for.

    Args:
        oldest: The first release that has what the feature needs, as two numbers: "2.11".
        feature: What needs it, as it begins the message: "context parallelism".

    Raises:
        EnvironmentProblem: "context parallelism needs torch 2.11 or newer; 2.8.0 is installed".
    """
    if is_older_than(oldest):
        raise EnvironmentProblem(f"{feature} needs torch {oldest} or newer; {installed_release()} is installed")


@functools.cache
def complete() -> None:
    """Give this process's torch the meta kernels that later releases have; harmless on a release that has them.

    `featurize.trace.tracer` and scripts call it before a step is traced. The one that is missed: `aten::_convolution`
    has a meta kernel from 2.13 on (`torch/_meta_registrations.py`). Before, it chooses a backend by the device and
    finds none for meta tensors: "convolution_overrideable not implemented".
    """
    import torch

    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_convolution", "Meta"):
        return
    from torch._meta_registrations import meta_conv

    def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *_flags):
        return meta_conv(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)

    library = torch.library.Library("aten", "IMPL", "Meta")
    # Not `library.impl`, which wants composite operators left composite.
    implementations = library.m
    assert implementations is not None, "a new library has them"
    implementations.impl("_convolution", "Meta", convolution, False)
    _kept.append(library)


@functools.cache
def complete_collectives() -> None:
    """Give this process's torch meta kernels of collectives; harmless on a release that has them.

    From 2.11 on they come with torch (`torch/distributed/_meta_registrations.py`). Before, those of the CPU stand in:
    they ask the process group for the work, and the group of a trace does none.
    """
    import torch
    import torch.distributed

    if torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        return
    library = torch.library.Library("c10d", "IMPL", "Meta")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        if name.startswith("c10d::"):
            operator = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default
            library.impl(name, functools.partial(operator._op_dk, torch._C.DispatchKey.CPU))
    _kept.append(library)


_kept: list[object] = []  # a library that is collected takes its kernels along
