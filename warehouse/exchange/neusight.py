"""Reads NeuSight's published kernel times (arXiv 2407.13853) as rows of `kernels`.

Start reading at `read_kernel_times`. What their collection script does (`neusight/Dataset/collect.py`): each operator
runs 25 times on the same inputs under `torch.no_grad`, between two CUDA events, and the 5 shortest times are averaged.
So a duration holds the launch (some 25 us at least) and every kernel of the operator, with a warm L2 cache, in fp32
(TF32 off), forward only. The kernel, its grid and its block are of one further call under the profiler; where an
operator takes several kernels, one of them is named. `cudnn.benchmark` is on.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem
from conf.files.identity import canonical_json
from conf.plain_text import first_line
from warehouse.exchange.imported_rows import Columns, ImportedFile, imported_kernels

SOURCE = "neusight"
COLUMNS = (
    "op",
    "device",
    "latency_ms",
    "dims",
    "kernel",
    "warps_per_sm",
    "blocks_per_sm",
    "grid",
    "block",
    "torch",
    "cuda",
    "cudnn",
)
_DEVICES = {  # as CUDA names them -> names in conf/device
    "NVIDIA A100-PCIE-40GB": "A100-PCIE-40GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIE-80GB",
    "Tesla P4": "P4",
    "Tesla P100-PCIE-16GB": "P100-PCIE-16GB",
    "Tesla T4": "T4",
    "Tesla V100-PCIE-32GB": "V100-PCIE-32GB",
}
_EXTENT = re.compile(r"(\d{1,9})x(\d{1,9})x(\d{1,9})")
_CHUNK_ROWS = 20_000

_VECTORS = "B H"
# op -> aten operator, and shapes of its inputs: a tensor behind each comma, its sizes by their names in `dims`; one
# without sizes is a number.
# Their products are (M x N) times (N x K): N is what is summed over.
_OPERATORS: Mapping[str, tuple[str, str]] = {
    "bmm": ("aten::bmm", "B M N, B N K"),
    "linear": ("aten::addmm", "K, B*M N, N K"),
    "conv": (
        "aten::convolution",
        "B Input_Channel Input_Size Input_Size, Output_Channel Input_Channel Kernel_Szie Kernel_Szie, ",
    ),
    "ln": ("aten::native_layer_norm", f"{_VECTORS}, , H, H"),
    "softmax": ("aten::_softmax", _VECTORS),
    **{name: (f"aten::{name}", _VECTORS) for name in ("relu", "gelu", "tanh")},
    **{name: (f"aten::{name}", f"{_VECTORS}, {_VECTORS}") for name in ("add", "mul", "div", "pow")},
    **{f"{name}u": (f"aten::{name}", f"{_VECTORS}, ") for name in ("add", "mul", "div", "pow")},
}


def read_kernel_times(path: Path, device_name: str | None) -> ImportedFile | str:
    """Return the operators of a Parquet file with one row an operator and shape; or why the file is none of NeuSight's.

    Raises:
        EnvironmentProblem: The file cannot be read.
    """
    try:
        with pq.ParquetFile(path) as file:
            if not set(COLUMNS) <= set(file.schema_arrow.names):
                return f"not of this source, whose files have {', '.join(COLUMNS)}"
            batches = (batch.to_pylist() for batch in file.iter_batches(_CHUNK_ROWS, columns=list(COLUMNS)))
            rows = itertools.chain.from_iterable(batches)
            return imported_kernels(
                SOURCE,
                path,
                rows,
                lambda cells: _row(cells, device_name),
                lambda cells: "\n".join([*map(repr, cells.values()), device_name or ""]),
            )
    except (pa.ArrowException, OSError) as error:
        raise EnvironmentProblem(f"path={path} is damaged or no Parquet file: {first_line(error)}") from error


def _row(cells: Mapping[str, Any], device_name: str | None) -> Columns:
    """Return the columns of one row. Raises `ValueError` with the reason for a row that makes no sense."""
    op, device = cells["op"], cells["device"]
    if op not in _OPERATORS:
        raise ValueError(f"unknown op {str(op)[:40]!r}; known: {', '.join(_OPERATORS)}")
    milliseconds = cells["latency_ms"]
    if not isinstance(milliseconds, float) or not (math.isfinite(milliseconds) and milliseconds > 0):
        raise ValueError("latency_ms is no time > 0")
    operator, shapes = _OPERATORS[op]
    sizes = _sizes(cells["dims"])
    try:
        dims: dict[str, Any] = {"shapes": [_shape(tensor, sizes) for tensor in shapes.split(",")]}
        if op == "conv":
            both = {name.lower(): [sizes[name]] * 2 for name in ("Stride", "Padding")}
            dims["arguments"] = {**both, "dilation": [1, 1], "groups": 1}
    except KeyError as error:
        raise ValueError(f"dims of {op} lack {error.args[0]}") from None
    return {
        "device_name": device_name or _DEVICES.get(device, device),
        "torch_version": _text(cells["torch"]).removeprefix("p") or None,
        "cuda_version": _cuda(_text(cells["cuda"])),
        "cudnn_version": _text(cells["cudnn"]) or None,
        "phase": "forward",
        "operator": operator,
        "dims": canonical_json(dims),
        "dtype": "float32",
        "kernel": cells["kernel"],
        **_extent("grid", cells["grid"]),
        **_extent("block", cells["block"]),
        "blocks_per_sm": cells["blocks_per_sm"],
        "warps_per_sm": cells["warps_per_sm"],
        "duration_us": milliseconds * 1e3,
        "timing": "cuda_events",
        "origin": canonical_json({"op": op, "device": device, "dims": sizes}),
    }


def _shape(tensor: str, sizes: Mapping[str, int]) -> list[int]:
    return [math.prod(sizes[name] for name in size.split("*")) for size in tensor.split()]


def _sizes(text: Any) -> dict[str, int]:
    try:
        sizes = {str(name): int(size) for name, size in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError("dims is no JSON object of whole numbers") from None
    if any(not 0 <= size < 2**40 for size in sizes.values()):
        raise ValueError("dims holds a size below 0, or beyond any tensor")
    return sizes


def _extent(name: str, text: Any) -> dict[str, int | None]:
    match = _EXTENT.fullmatch(_text(text))
    if match is None and text:
        raise ValueError(f"{name} is not of the form 1x2x3")
    values: Sequence[int | None] = [None] * 3 if match is None else [int(part) for part in match.groups()]
    return {f"{name}_{axis}": value for axis, value in zip("xyz", values, strict=True)}


def _cuda(text: str) -> str | None:
    digits = text.removeprefix("cu")
    return f"{digits[:-1]}.{digits[-1]}" if len(digits) > 1 and digits.isdigit() else text or None


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()
