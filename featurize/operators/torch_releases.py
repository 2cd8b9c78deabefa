"""Differences between torch's releases that affect a job: gaps filled before a trace, refused modes, TF32's two APIs.

Start reading at `complete`, which adds; `require_torch` and `refused_modes` refuse. Traces of refused modes replace
private parts of PyTorch's wrappers, which older releases do not have; DistributedDataParallel and ZeRO are traced under
every release. Torch is imported on use.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from conf.errors import EnvironmentProblem
from featurize.job.layout import EXPERTS, OWN, Parallel


def is_older_than(release: str) -> bool:
    """Return whether the installed torch is older than a release of two numbers, such as "2.11"."""
    # Compared by two numbers: a vendor's build of 2.11.0a0 has the features of 2.11, and would sort before it.
    return [int(part) for part in installed_release().split(".")[:2]] < [int(part) for part in release.split(".")]


def installed_release() -> str:
    """Return the installed torch's release without its build, such as `2.13.0`."""
    import torch

    return torch.__version__.partition("+")[0]


def require_torch(oldest: str, feature: str) -> None:
    """Raise an error for a feature that the installed torch is too old for.

    Args:
        oldest: The first release that supports the feature, as two numbers: "2.11".
        feature: The feature, at the beginning of the message: "context parallelism".

    Raises:
        EnvironmentProblem: "context parallelism needs torch 2.11 or newer; 2.8.0 is installed".
    """
    if is_older_than(oldest):
        raise EnvironmentProblem(f"{feature} needs torch {oldest} or newer; {installed_release()} is installed")


@functools.cache
def complete() -> None:
    """Add the meta kernels of later releases to this process's torch; harmless on a release that has them.

    `featurize.trace.tracer` and scripts call it before a step is traced. One kernel is missing: `aten::_convolution`
    has a meta kernel from 2.13 on (`torch/_meta_registrations.py`). Before, it chooses a backend by the device and
    finds none for meta tensors: "convolution_overrideable not implemented".
    """
    import torch

    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_convolution", "Meta"):
        return
    from torch._meta_registrations import meta_conv

    def convolution(*args: Any) -> Any:
        return meta_conv(*args[:9])  # without the flags of backends

    library = torch.library.Library("aten", "IMPL", "Meta")
    # Not `library.impl`, which wants composite operators left composite.
    implementations = library.m
    assert implementations is not None, "a new library has them"
    implementations.impl("_convolution", "Meta", convolution, False)
    _kept.append(library)


@functools.cache
def complete_collectives() -> None:
    """Add meta kernels of collectives to this process's torch; harmless on a release that has them.

    torch has them from 2.11 on (`torch/distributed/_meta_registrations.py`). Before, the CPU's kernels are used: they
    delegate the work to the process group, and the group of a trace does nothing.
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


_kept: list[object] = []  # a library that is collected loses its kernels


SHARDS = "2.11"  # FSDP2's all-gather is an object, DTensor's cache can be cleared, attention over ranks is a package
_OTHER_STAGES = "2.15"  # from here on, stages make and free buffers as they run: traces fall short of real ranks
_OLDEST = {"pp": "2.13", "fsdp": SHARDS, "cp": SHARDS, "tp": SHARDS, EXPERTS: SHARDS, OWN: SHARDS}


@functools.cache
def refused_modes() -> Mapping[str, str]:
    """Return each mode that is not traced under the installed release, with the reason."""
    refused = {}
    for mode, oldest in _OLDEST.items():
        try:
            require_torch(oldest, f"parallel: {mode}")
        except EnvironmentProblem as error:
            refused[mode] = str(error)
    if not is_older_than(_OTHER_STAGES):
        refused["pp"] = f"parallel: pp is not traced under torch {_OTHER_STAGES} or newer yet; use 2.13"
    return refused


def refused_note(modes: Iterable[str]) -> str | None:
    """Return one line on the modes among these that the installed release does not trace; None if it traces all."""
    of_release: dict[str, list[str]] = {}
    for mode in modes:
        if mode in refused_modes():
            of_release.setdefault(_OLDEST["pp"] if mode == "pp" else f"{SHARDS} or newer", []).append(mode)
    if not of_release:
        return None
    texts = [f"{', '.join(names)} ({release})" for release, names in of_release.items()]
    return f"torch {installed_release()} does not trace {' and '.join(texts)}"


def require_traceable(layout: Parallel) -> None:
    """Raise `EnvironmentProblem` for a layout with a mode that is not traced under the installed release."""
    for mode, why in refused_modes().items():
        if mode in layout.modes:
            raise EnvironmentProblem(why)


# Since PyTorch 2.9, `fp32_precision` holds the setting. Reading `allow_tf32` raises once a part of it was set to TF32.
_TF32, _EXACT = "tf32", "ieee"


def matmul_allows_tf32() -> bool:
    """Return whether matrix products of float32 tensors on a GPU may use TF32."""
    import torch

    return _allows(torch.backends.cuda.matmul, torch.backends.cuda.matmul)


def cudnn_allows_tf32() -> bool:
    """Return whether convolutions of float32 tensors on a GPU may use TF32."""
    import torch

    return _allows(getattr(torch.backends.cudnn, "conv", None), torch.backends.cudnn)


def _allows(part: object, older: Any) -> bool:
    precision = getattr(part, "fp32_precision", None)
    return bool(older.allow_tf32) if precision is None else precision == _TF32


def allow_tf32(*, matmul: bool, cudnn: bool) -> None:
    """Set whether matrix products, and whether convolutions and recurrent layers, may use TF32."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = cudnn
    if matmul_allows_tf32() != matmul:
        products = getattr(torch.backends.cuda, "matmul")  # noqa: B009 -- its type has the older API only
        products.fp32_precision = _TF32 if matmul else _EXACT
    if cudnn_allows_tf32() != cudnn:  # the older API leaves it to `torch.backends.fp32_precision`
        for name in ("conv", "rnn"):
            part = getattr(torch.backends.cudnn, name)
            part.fp32_precision = _TF32 if cudnn else _EXACT
