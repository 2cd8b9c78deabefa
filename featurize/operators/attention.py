"""Fused attention on meta tensors as a GPU runs it: PyTorch's own, the flash-attn package's and xFormers'.

Start reading at `scaled_dot_product`; neither a package nor a GPU is needed. The packages' functions become PyTorch's
operators of the same kernels, which keep the same tensors: query, key, value, output, the fp32 row sums and the random
state. `featurize.operators.table.ATTENTION` prices the kernels.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.errors import UsageError
from featurize.device.device_spec import AttentionKernels
from featurize.operators.autocast import Autocast
from featurize.operators.replacing import Change, all_replaced, if_imported
from featurize.operators.tensor_parts import is_shared

_IMPLEMENTATION = "flash_attention_2"
_ROWS = 32  # rows for which memory-efficient attention keeps sums (aten/src/ATen/native/transformers: kAlignLSE)
_HALF = (torch.float16, torch.bfloat16)
_XFORMERS_RUN = "_memory_efficient_attention"  # called by each of xFormers' public functions
_LIBRARY, _MODELS = "transformers.modeling_flash_attention_utils", "transformers.modeling_utils"
# Attributes in which transformers caches the imported package.
_STATE = (
    "_loaded_implementation",
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
    "_process_with_kvcache_kwargs_fn",
)
T = TypeVar("T")


def building(build: Callable[[], T]) -> T:
    """Call `build()` as if flash-attn were installed, even if that call is the first to import transformers."""
    known = _transformers() is not None
    try:
        with all_replaced(as_installed()):
            return build()
    except ImportError:
        if known or _transformers() is None:
            raise
    with all_replaced(as_installed()):
        return build()


def packages_on_gpu() -> Iterator[Change]:
    """Yield the changes that make attention of imported packages call the kernels that a GPU would run."""
    yield from as_installed()
    xformers = functools.partial(functools.partial, _attend_xformers)
    yield from if_imported("xformers.ops.fmha", _XFORMERS_RUN, xformers)


def as_installed() -> Iterator[Change]:
    """Yield the changes that make transformers find flash-attn, if transformers is imported and has the names known
    here."""
    library = _transformers()
    matrix = getattr(library, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    imports = getattr(library, "_lazy_imports", None)
    if library is None or imports is None or not isinstance(matrix, dict) or 2 not in matrix:
        return

    def lazy_imports(implementation: str | None, *args: object, **kwargs: object) -> Any:
        if implementation != _IMPLEMENTATION:
            return imports(implementation, *args, **kwargs)
        return flash_attn_func, flash_attn_varlen_func, None, vars(library)["_pad_input"], vars(library)["_unpad_input"]

    described = {**matrix, 2: {**matrix[2], "general_availability_check": lambda *_, **__: True}}
    instead: list[tuple[str, str, object]] = [
        *((module, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", described) for module in (_LIBRARY, _MODELS)),
        (_LIBRARY, "_lazy_imports", lazy_imports),
        *((_LIBRARY, name, None) for name in _STATE),
    ]
    for module, name, value in instead:
        yield from if_imported(module, name, functools.partial(lambda given, _: given, value))


# transformers reads from these two signatures which options the package supports.
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Attend [N, L, heads, E] as `flash_attn.flash_attn_func` does."""
    longest = q.shape[1], k.shape[1]
    return flash_attn_varlen_func(q, k, v, None, None, *longest, dropout_p, softmax_scale, causal, window_size)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attend packed texts of any lengths, [all tokens, heads, E]; without their starts, as `flash_attn_func`."""
    if q.dtype not in _HALF:
        raise RuntimeError("FlashAttention only supports fp16 and bf16")
    sides = {}
    if window_size != (-1, -1):
        sides = {"window_size_left": window_size[0], "window_size_right": window_size[1]}
    more = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), dropout_p, causal, False
    return _flash(torch.ops.aten._flash_attention_forward, (q, k, v), *more, scale=softmax_scale, **sides)


def _flash(
    kernel: Callable[..., tuple[Tensor, ...]],
    heads: tuple[Tensor, Tensor, Tensor],
    *more: Any,
    scale: float | None,
    **sides: int,
) -> Tensor:
    """Run flash attention, which pads the head of query, key and value to a multiple of 8."""
    width = heads[0].shape[-1]
    scale = scale if scale is not None else width**-0.5
    out = kernel(*(F.pad(t, (0, -width % 8)) if width % 8 else t for t in heads), *more, scale=scale, **sides)[0]
    return out[..., :width] if width % 8 else out


def _transformers() -> ModuleType | None:
    library = sys.modules.get(_LIBRARY)
    return library if library is not None and inspect.isfunction(getattr(library, "_lazy_imports", None)) else None


def _attend_xformers(run: Callable[..., Tensor], inp: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Attend [N, L, E], [N, L, heads, E] or [N, L, groups, heads of each, E] on meta, as `run` does on a GPU.

    In half precision xFormers runs FlashAttention, else its CUTLASS kernel.
    """
    if not inp.query.is_meta:
        return run(inp, *args, **kwargs)
    query, key, value, bias = inp.query, inp.key, inp.value, inp.attn_bias
    shape = (*query.shape[:-1], value.shape[-1])
    query, key, value = (_four_dimensions(x) for x in (query, key, value))
    causal = type(bias).__name__.startswith("LowerTriangular")
    if query.dtype in _HALF and not isinstance(bias, Tensor):
        return flash_attn_func(query, key, value, inp.p, inp.scale, causal).reshape(shape)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mask = bias.expand(*query.shape[:3], key.shape[2]) if isinstance(bias, Tensor) else None
    out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, query.requires_grad, inp.p, causal, scale=inp.scale
    )[0]
    return out.transpose(1, 2).reshape(shape)


def _four_dimensions(x: Tensor) -> Tensor:
    return x.unsqueeze(2) if x.dim() == 3 else x.flatten(2, 3) if x.dim() == 5 else x


def scaled_dot_product(
    original: Callable[..., Tensor],
    autocast: Autocast,
    kernels: AttentionKernels,
    attends: Callable[[int], None],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run the kernel that ATen/native/transformers/cuda/sdp_utils.cpp would choose: flash for half types without a mask
    (compute capability 8.0 and later), memory-efficient otherwise, the math path where neither applies. cuDNN's kernel,
    which newer releases may prefer on Hopper, keeps the same tensors as flash; so do AOTriton's on ROCm."""
    width = query.shape[-1]
    attends(width)
    query, key, value, attn_mask = autocast.cast((query, key, value, attn_mask), autocast.dtype)
    half = query.dtype in _HALF
    aligned = query.shape[-1] % (8 if half else 4) == 0 and value.shape[-1] % (8 if half else 4) == 0
    fused = query.device.type == "meta" and query.dim() == key.dim() == value.dim() == 4
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    square = not is_causal or query.shape[-2] == key.shape[-2]  # flash aligns the causal mask differently
    if fused and half and attn_mask is None and same_width and square and width <= kernels.flash:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return _flash(kernel, (query, key, value), dropout_p, is_causal, scale=scale)
    grouped = fused and query.shape[1] != key.shape[1]
    if fused and aligned and not grouped and width <= kernels.efficient:
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                bias = torch.zeros_like(attn_mask, dtype=query.dtype)
                attn_mask = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
            attn_mask = _align(attn_mask)
            batch, heads, length = query.shape[:3]
            attn_mask = attn_mask.expand(batch, heads, length, key.shape[-2])
        if is_shared(query):
            _require_whole_rows(query)
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        keep = query.requires_grad or key.requires_grad or value.requires_grad
        return kernel(query, key, value, attn_mask, keep, dropout_p, is_causal, scale=scale)[0]
    if is_shared(query):
        raise UsageError(
            "parallel: cp: PyTorch runs fused attention over several ranks, and this call has no fused kernel (heads "
            f"of {width} elements in {str(query.dtype).removeprefix('torch.')}, {query.shape[1]} of queries and "
            f"{key.shape[1]} of keys); bf16 has more of them"
        )
    more = {"enable_gqa": True} if enable_gqa else {}
    return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)


def _require_whole_rows(query: Tensor) -> None:
    """Raise `UsageError` where memory-efficient attention over several ranks has more row sums than queries, which the
    ring does not merge.

    Args:
        query: [N, heads, L, E], spread over ranks, within `featurize.training.sharded_rank`.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    assert isinstance(query, DTensor)
    parts = 2 if ring._cp_options.enable_load_balance else 1
    if (rows := query.to_local().shape[2] // parts) % _ROWS:
        multiple = _ROWS * parts * query.device_mesh.size()
        raise UsageError(
            f"parallel: cp: memory-efficient attention keeps row sums of {_ROWS} queries or a multiple, and a part of "
            f"the sequence has {rows}; give a sequence of a multiple of {multiple} tokens, or bf16 on a GPU with flash "
            "attention"
        )


def _align(mask: Tensor) -> Tensor:
    """Return the bias as the memory-efficient kernel reads it, with rows that begin at multiples of 8 elements; else a
    view of a padded copy (ATen/native/transformers/attention.cpp: preprocess_mask)."""
    if mask.stride(-1) == 1 and not any(step % 8 for step in mask.stride()[:-1]):
        return mask
    columns = mask.shape[-1]
    return F.pad(mask, (0, 8 - columns % 8))[..., :columns]
