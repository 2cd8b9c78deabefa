"""Operators of our own, with what each gives on meta tensors: kernels of libraries that need a GPU.

Start reading at `_META`: an entry adds one, which `OPS` then runs. `featurize.operators.table` prices them as any
other.
"""

from __future__ import annotations

import torch

_META = {
    # bitsandbytes
    "dequantize_4bit(Tensor packed, Tensor scales, SymInt[] shape, ScalarType dtype) -> Tensor": (
        lambda packed, scales, shape, dtype: torch.empty(shape, dtype=dtype, device=packed.device)
    ),
    "dequantize_scales(Tensor scales, Tensor outer) -> Tensor": (
        lambda scales, outer: torch.empty_like(scales, dtype=torch.float32)
    ),
    "quantize_rows(Tensor x) -> (Tensor, Tensor)": lambda x: (
        torch.empty_like(x, dtype=torch.int8),
        torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device),
    ),
    "int8_product(Tensor x, Tensor weight) -> Tensor": (
        lambda x, weight: torch.empty((*x.shape[:-1], weight.shape[0]), dtype=torch.int32, device=x.device)
    ),
    "dequantize_product(Tensor product, Tensor row_scales, Tensor scales, ScalarType dtype) -> Tensor": (
        lambda product, row_scales, scales, dtype: torch.empty_like(product, dtype=dtype)
    ),
    # Liger
    "liger_norm(Tensor x, Tensor? weight, ScalarType statistics) -> (Tensor, Tensor)": lambda x, weight, statistics: (
        torch.empty_like(x),
        torch.empty(x.shape[:-1], dtype=statistics, device=x.device),
    ),
    "liger_gated(Tensor a, Tensor b) -> Tensor": lambda a, b: torch.empty_like(a),
    "liger_write_(Tensor(a!) written, Tensor[] read) -> ()": lambda written, read: None,
    "liger_write_both_(Tensor(a!) first, Tensor(b!) second, Tensor[] read) -> ()": lambda first, second, read: None,
    "liger_add_product_(Tensor(a!) sums, Tensor a, Tensor b) -> ()": lambda sums, a, b: None,
}
# None of their results is saved for the backward pass where a graph is compiled.
DEQUANTIZATIONS = frozenset({"gpufarm::dequantize_4bit", "gpufarm::dequantize_scales"})

_library = torch.library.Library("gpufarm", "DEF")
for _schema, _kernel in _META.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _kernel, "Meta")
OPS = torch.ops.gpufarm
