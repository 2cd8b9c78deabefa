"""Tell whether this process lets float32 products use TF32, by whichever of PyTorch's two APIs that was set.

Start reading at `matmul_allows_tf32`.
"""

from __future__ import annotations

from typing import Any

import torch

# Since PyTorch 2.9 `fp32_precision` says so. Reading `allow_tf32` raises once a part of it was set to TF32.
_TF32, _EXACT = "tf32", "ieee"


def matmul_allows_tf32() -> bool:
    """Return whether matrix products of float32 tensors on a GPU may use TF32."""
    return _allows(torch.backends.cuda.matmul, torch.backends.cuda.matmul)


def cudnn_allows_tf32() -> bool:
    """Return whether convolutions of float32 tensors on a GPU may use TF32."""
    return _allows(getattr(torch.backends.cudnn, "conv", None), torch.backends.cudnn)


def _allows(part: object, older: Any) -> bool:
    precision = getattr(part, "fp32_precision", None)
    return bool(older.allow_tf32) if precision is None else precision == _TF32


def allow_tf32(*, matmul: bool, cudnn: bool) -> None:
    """Set whether matrix products, and whether convolutions and recurrent layers, may use TF32."""
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = cudnn
    if matmul_allows_tf32() != matmul:
        products = getattr(torch.backends.cuda, "matmul")  # noqa: B009 -- its type has the older API only
        products.fp32_precision = _TF32 if matmul else _EXACT
    if cudnn_allows_tf32() != cudnn:  # the older API leaves it to `torch.backends.fp32_precision`
        for name in ("conv", "rnn"):
            part = getattr(torch.backends.cudnn, name)
            part.fp32_precision = _TF32 if cudnn else _EXACT
