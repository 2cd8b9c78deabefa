"""The flash-attn package as transformers calls it, on meta tensors: neither the package nor a GPU is needed.

Start reading at `as_installed`. Its functions become PyTorch's own flash attention operators, which keep the same
tensors: query, key, value, output, the fp32 row sums and the random state.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from featurize.replacing import replaced

_IMPLEMENTATION = "flash_attention_2"
_HALF = (torch.float16, torch.bfloat16)
# What transformers remembers of the package that it has imported.
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
    """`build()` as if the package were installed, also where it is the call that imports transformers."""
    known = _transformers() is not None
    try:
        with as_installed():
            return build()
    except ImportError:
        if known or _transformers() is None:
            raise
    with as_installed():
        return build()


@contextlib.contextmanager
def as_installed() -> Iterator[None]:
    """Within, transformers finds the package, if transformers is imported and keeps to the names known here."""
    library = _transformers()
    matrix = getattr(library, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    imports = getattr(library, "_lazy_imports", None)
    if library is None or imports is None or not isinstance(matrix, dict) or 2 not in matrix:
        yield
        return

    def lazy_imports(implementation: str | None, *args: object, **kwargs: object) -> tuple:
        if implementation != _IMPLEMENTATION:
            return imports(implementation, *args, **kwargs)
        return flash_attn_func, flash_attn_varlen_func, None, vars(library)["_pad_input"], vars(library)["_unpad_input"]

    described: Mapping[str, object] = {**matrix[2], "general_availability_check": lambda *_, **__: True}
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(library, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {**matrix, 2: described}))
        models = sys.modules.get("transformers.modeling_utils")
        if models is not None and hasattr(models, "FLASH_ATTENTION_COMPATIBILITY_MATRIX"):
            table = vars(library)["FLASH_ATTENTION_COMPATIBILITY_MATRIX"]
            stack.enter_context(replaced(models, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", table))
        stack.enter_context(replaced(library, "_lazy_imports", lazy_imports))
        for name in _STATE:
            if hasattr(library, name):
                stack.enter_context(replaced(library, name, None))
        yield


# transformers reads from these two signatures which options the package has.
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
    return _attend(q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
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
    """Attend texts of any length one behind the other, [all tokens, heads, E]."""
    longest = int(max_seqlen_q), int(max_seqlen_k)
    return _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, dropout_p, softmax_scale, causal, window_size)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    longest_q: int,
    longest_k: int,
    dropout: float,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
) -> Tensor:
    if q.dtype not in _HALF:
        raise RuntimeError("FlashAttention only supports fp16 and bf16")
    width = q.shape[-1]
    scale = scale if scale is not None else width**-0.5
    if width % 8:
        q, k, v = (F.pad(t, (0, 8 - width % 8)) for t in (q, k, v))
    sides = {"window_size_left": window[0], "window_size_right": window[1]} if window != (-1, -1) else {}
    kernel = torch.ops.aten._flash_attention_forward
    out = kernel(q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, causal, False, scale=scale, **sides)[0]
    return out[..., :width] if width % 8 else out


def _transformers() -> ModuleType | None:
    library = sys.modules.get("transformers.modeling_flash_attention_utils")
    return library if library is not None and inspect.isfunction(getattr(library, "_lazy_imports", None)) else None
