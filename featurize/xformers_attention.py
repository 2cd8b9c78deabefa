"""xFormers' memory-efficient attention on meta tensors: neither its kernels nor a GPU is needed.

Start reading at `as_on_gpu`. In half precision xFormers runs FlashAttention, else its CUTLASS kernel. PyTorch has
operators of both, which keep the same tensors: query, key, value, output and the fp32 row sums.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from featurize.flash_attention import flash_attn_func
from featurize.replacing import replaced

_HALF = (torch.float16, torch.bfloat16)
_RUN = "_memory_efficient_attention"  # which each of the public functions calls


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Within, `xformers.ops.memory_efficient_attention` takes meta tensors, if xFormers is imported."""
    library = sys.modules.get("xformers.ops.fmha")
    run = getattr(library, _RUN, None)
    if library is None or run is None:
        yield
        return

    def attend(inp: Any, *args: Any, **kwargs: Any) -> Tensor:
        return _attend(inp) if inp.query.is_meta else run(inp, *args, **kwargs)

    with replaced(library, _RUN, attend):
        yield


def _attend(inp: Any) -> Tensor:
    """Attend [N, L, E], [N, L, heads, E] or [N, L, groups, heads of each, E]."""
    query, key, value, bias = inp.query, inp.key, inp.value, inp.attn_bias
    shape = (*query.shape[:-1], value.shape[-1])
    query, key, value = (_four_dimensions(x) for x in (query, key, value))
    causal = type(bias).__name__.startswith("LowerTriangular")
    if query.dtype in _HALF and not isinstance(bias, Tensor):
        return flash_attn_func(query, key, value, inp.p, inp.scale, causal).reshape(shape)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mask = bias.expand(*query.shape[:3], key.shape[2]) if isinstance(bias, Tensor) else None
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out = kernel(query, key, value, mask, query.requires_grad, inp.p, causal, scale=inp.scale)[0]
    return out.transpose(1, 2).reshape(shape)


def _four_dimensions(x: Tensor) -> Tensor:
    return x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, 3) if x.dim() == 5 else x
