"""CUDA's autocast on meta tensors, where PyTorch's own has no effect: that of the training, and a model's own.

Start reading at `casting`. Inside it, functions that Python code calls cast their arguments as CUDA would, and
`torch.autocast("cuda")` in a forward pass (also for `x.device.type`, which is meta here) switches that on or off.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from featurize.operators.replacing import Change, all_replaced

# The lists of ATen/autocast_mode.h (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE) under
# the names that Python code calls. Operators outside both lists run in their inputs' type, as with real autocast.
_LOWER = {
    F: "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d linear prelu",
    torch: "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm addmv addr "
    "matmul einsum mm mv addbmm baddbmm bmm chain_matmul",
    Tensor: "matmul __matmul__ __rmatmul__ mm mv bmm addmm addmv addr addbmm baddbmm",
}
_FP32 = {
    F: "layer_norm rms_norm group_norm softplus cross_entropy nll_loss kl_div l1_loss smooth_l1_loss huber_loss "
    "mse_loss poisson_nll_loss binary_cross_entropy_with_logits cosine_similarity interpolate",
    torch: "layer_norm rms_norm group_norm softmax log_softmax exp expm1 log log2 log10 log1p pow reciprocal rsqrt "
    "norm logsumexp cdist",
    Tensor: "softmax log_softmax exp expm1 log log2 log10 log1p pow __pow__ __rpow__ reciprocal rsqrt norm logsumexp",
}
# These get `dtype=float32` instead: CUDA's kernels convert as they read, without a copy.
_AS_FP32 = "sum prod cumsum cumprod"
# Likewise in fp16 only (ATen/native/cuda/SoftMax.cpp, half_to_float).
_HALF_TO_FLOAT = {"softmax": torch._softmax, "log_softmax": torch._log_softmax}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_lock = threading.RLock()  # the replacements are per process: one trace at a time


class Autocast:
    """The casts in effect: lower-precision operators cast to `dtype`; None: no casts. The forward pass's context caches
    the casts of weights; the contexts that a checkpointed backward opens for its recomputations are shorter, and are
    treated as having no cache."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._installed = False
        self._cache: dict[int, tuple[Tensor, Tensor]] | None = None

    def enter(self, phase: str) -> None:
        """Begin a phase of the step."""
        self._cache = {} if phase == "forward" else None

    def cast(self, value: Any, dtype: torch.dtype | None) -> Any:
        """Return floating-point tensors, also those in lists, in that type; unchanged without autocast."""
        if self.dtype is None:
            return value
        if isinstance(value, Tensor):
            if value.dtype is dtype or value.dtype not in _FLOATS or value.device.type != "meta":
                return value
            if self._cache is None or not (value.is_leaf and value.requires_grad and dtype is self.dtype):
                return value.to(dtype)
            key = id(value)
            if key not in self._cache:
                self._cache[key] = (value, value.to(dtype))  # holds the weight, so that its id is not reused
            return self._cache[key][1]
        if isinstance(value, list | tuple):
            return type(value)(self.cast(v, dtype) for v in value)
        return value

    @contextlib.contextmanager
    def switched(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Behave as inside a `torch.autocast` of that type; None is a disabled one."""
        before, cache = self.dtype, self._cache
        self.dtype = dtype
        if dtype is not before and dtype is not None:
            self._cache = {}
        try:
            with self.installed() if dtype is not None else contextlib.nullcontext():
                yield
        finally:
            self.dtype, self._cache = before, cache

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the functions that autocast covers by ones that cast as this object requires."""
        if self._installed:
            yield
            return
        with all_replaced(self._changes()):
            self._installed = True
            try:
                yield
            finally:
                self._installed = False

    def _changes(self) -> Iterator[Change]:
        for names, wide in ((_LOWER, None), (_FP32, torch.float32)):
            for owner, listed in names.items():
                for name in listed.split():
                    if function := getattr(owner, name, None):
                        halves = _HALF_TO_FLOAT.get(name)
                        instead = self._wrap_softmax(function, halves) if halves else self._wrap(function, wide)
                        yield owner, name, instead
        for owner in (torch, Tensor):
            for name in _AS_FP32.split():
                yield owner, name, self._wrap_dtype(getattr(owner, name))

    def _wrap(self, function: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
        """Return the function with arguments cast to a type; None: to autocast's."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            into = dtype or self.dtype
            return function(*(self.cast(a, into) for a in args), **{k: self.cast(v, into) for k, v in kwargs.items()})

        return call

    def _wrap_dtype(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a result in fp32, unless the caller passes a type."""

        @functools.wraps(function)
        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            narrow = isinstance(x, Tensor) and x.is_meta and x.dtype in _FLOATS[1:]
            if self.dtype is not None and narrow and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            return function(x, *args, **kwargs)

        return call

    def _wrap_softmax(self, function: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
        """Return softmax that, in fp16, calls the kernel that reads halves and returns floats; else it copies to fp32
        first."""
        otherwise = self._wrap(function, torch.float32)

        @functools.wraps(function)
        def call(x: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
            plain = self.dtype is not None and isinstance(dim, int) and not args and not kwargs
            if plain and isinstance(x, Tensor) and x.is_meta and x.dtype is torch.float16:
                return kernel(x, dim, True)
            return otherwise(x, *(() if dim is None else (dim,)), *args, **kwargs)

        return call


@contextlib.contextmanager
def casting(dtype: torch.dtype | None) -> Iterator[Autocast]:
    """Cast meta tensors inside as CUDA's autocast of that type would (None: not at all), and as the model's own calls
    of `torch.autocast` or `torch.cuda.amp.autocast` in its forward pass require."""
    autocast = Autocast(dtype)

    class ModelAutocast(torch.autocast):
        """The context that the model enters. It accepts meta for CUDA, which PyTorch's own refuses."""

        def __init__(
            self,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            self._of_gpu = device_type in ("cuda", "meta")
            self._asked = (dtype or torch.get_autocast_dtype("cuda")) if enabled else None
            arguments = {"enabled": False} if self._of_gpu else {"enabled": enabled}
            super().__init__("cuda" if self._of_gpu else device_type, dtype, cache_enabled=cache_enabled, **arguments)

        def __enter__(self) -> Any:
            self._inside = contextlib.ExitStack()
            if self._of_gpu:
                self._inside.enter_context(autocast.switched(self._asked))
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            self._inside.close()
            return super().__exit__(*error)

    def of_cuda(enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> ModelAutocast:
        return ModelAutocast("cuda", dtype, enabled, cache_enabled)

    with _lock:
        # Called for the type of a tensor's device; PyTorch has no autocast for meta.
        enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

        def is_enabled(device_type: str | None = None) -> bool:
            if device_type in (None, "meta"):  # without a type, it means CUDA
                return autocast.dtype is not None
            return enabled(device_type)

        def autocast_dtype(device_type: str) -> torch.dtype:
            return autocast.dtype or torch.float16 if device_type == "meta" else dtype_of(device_type)

        changes = (
            *((owner, "autocast", ModelAutocast) for owner in (torch, torch.amp, torch.amp.autocast_mode)),
            (torch, "is_autocast_enabled", is_enabled),
            (torch, "get_autocast_dtype", autocast_dtype),
            (torch, "get_autocast_gpu_dtype", lambda: autocast_dtype("meta")),
            *((owner, "autocast", of_cuda) for owner in (torch.cuda.amp, torch.cuda.amp.autocast_mode)),
        )
        with all_replaced(changes), autocast.switched(dtype):
            yield autocast
