"""Reads published times of operators, all-reduces and layers as rows of `kernels`: NeuSight, nccl-tests, Sailor, ...

Start reading at `KERNEL_TABLES`, or at `read_kernel_times` for NeuSight. `operator` is an aten name,
`nccl::all_reduce`, or `layer::NAME`; `dims` has the sizes by name, and `learn.fitting.published_jobs` has the kernels
of such a layer.

nccl-tests divides the time of many all-reduces in a row by their number: `timing` is `loop`.

Sailor (SOSP 2025, eth-easl/sailor): layers of a decoder of Megatron-DeepSpeed in fp32, without flash attention, forward
and backward timed separately. The sizes are those of its profiling script. TF32 is on if the GPU has it, except for
Llama on the A100-40, whose matrix products stay below the rate of fp32 and above none of TF32's.

Liger (linkedin/Liger-Kernel, benchmark/scripts): operators of plain PyTorch and transformers, medians of triton's
`do_bench`. Only gated feed-forward layers are read.

NeuSight (arXiv 2407.13853, `neusight/Dataset/collect.py`): each operator runs 25 times on the same inputs under
`torch.no_grad`, between two CUDA events, and the 5 shortest times are averaged. So a duration holds the launch (some 25
us at least) and every kernel of the operator, with a warm L2 cache, in fp32 (TF32 off), forward only. The kernel, its
grid and its block come from another call under the profiler; if an operator has several kernels, one of them is named.
`cudnn.benchmark` is on.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem, first_line, require_one_of, shown
from conf.files.identity import canonical_json
from warehouse.exchange.imported_rows import (
    Cells,
    Columns,
    ImportedFile,
    NotOfThisSource,
    above_zero,
    imported_kernels,
    read_with_columns,
    to_number,
)

OPERATOR = "nccl::all_reduce"
_TYPES = {"fp32": ("float32", 4), "fp16": ("float16", 2), "bf16": ("bfloat16", 2)}  # dtype, bytes of an element
_US = {"us": 1.0, "ms": 1e3, "s": 1e6}  # microseconds
PREFIX = "layer::"
_SAILOR_SIZES = {  # model -> sizes of a layer in its script; the vocabulary is GPT-2's, padded by Megatron
    "OPT-350": {"width": 1024, "heads": 16, "length": 2048, "vocabulary": 50304},
    "LLAMA-3-8": {"width": 4096, "heads": 32, "length": 8192, "vocabulary": 50304},
    "GPT-Neo-2.7": {"width": 2560, "heads": 20, "length": 2048, "vocabulary": 50304},
    "OPT-30": {"width": 7168, "heads": 56, "length": 2048, "vocabulary": 50304},
}
_WITHOUT_TF32 = (("LLAMA-3-8", "A100-40"),)
_SAILOR_PHASES = {"forward time": "forward", "backward time": "backward"}
SAILOR_LAYERS = ("block", "head")
_GATED = {"swiglu": "silu", "geglu": "gelu", "tiled_geglu": "gelu", "tiled_swiglu": "silu"}
_LIGER_PHASES = {"forward": "forward", "no-grad-forward": "forward", "backward": "backward", "full": None}
_LIGER_PROVIDERS = ("torch", "huggingface")
_LIGER_DTYPES = {"torch.float32": "float32", "torch.bfloat16": "bfloat16"}
_DEVICES = {  # name in the files -> name in conf/device; links do not depend on the memory size
    "A100-SXM4": "A100-SXM4-80GB",
    "V100-SXM2": "V100-SXM2-32GB",
    "A100-40": "A100-SXM4-40GB",
    "A100-80": "A100-SXM4-80GB",
    "GH-96": "GH200-96GB",
    "V100-16": "V100-SXM2-16GB",
    "RTX-2080": "RTX-2080-Ti",  # as fast as a Titan RTX, unlike a 2080
    "RTX-3090": "RTX-3090",
    "Titan-RTX": "TITAN-RTX",
    "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB",
    "NVIDIA H100 PCIe": "H100-PCIE-80GB",
    "NVIDIA GeForce RTX 3090": "RTX-3090",
    "NVIDIA GeForce RTX 4090": "RTX-4090",
    "NVIDIA B200": "B200-SXM-180GB",
}
_TF32_DEVICES = ("A100", "GH", "RTX-3090")
NEUSIGHT = "neusight"
_CHUNK_ROWS = 20_000
_VECTORS = "B H"
Entry = TypeVar("Entry")


def _all_reduce(cells: Cells) -> Columns:
    if "all-reduce" not in cells["what_was_measured"]:
        raise ValueError("what_was_measured is not an all-reduce")
    dtype, element_bytes = _look_up("precision", cells["precision"], _TYPES)
    sizes = _whole({name: cells[name] for name in ("gpus", "size_bytes")}, least=2)
    if sizes["size_bytes"] % element_bytes:
        raise ValueError("size_bytes is not a number of bytes of whole elements")
    dims = {"shapes": [[sizes["size_bytes"] // element_bytes]], "arguments": {"ranks": sizes["gpus"]}}
    return {"operator": OPERATOR, "dims": dims, "dtype": dtype, "duration_us": _duration_us(cells), "timing": "loop"}


def _sailor(cells: Cells) -> Columns:
    model, gpu = cells["model"], cells["gpu"]
    phase = _SAILOR_PHASES.get(cells["what_was_measured"])
    if phase is None or cells["layer"] not in SAILOR_LAYERS:
        raise ValueError("optimizer and embedding: one figure for layers of several sizes")
    sizes = _whole({"samples": cells["batch_per_gpu"], "ranks": cells["tp"]})
    dims = {**_look_up("model", model, _SAILOR_SIZES), **sizes}
    tf32 = gpu.startswith(_TF32_DEVICES) and (model, gpu) not in _WITHOUT_TF32
    return _layer(cells, cells["layer"], phase, dims, "tf32" if tf32 else "float32")


def _liger(cells: Cells) -> Columns:
    if cells["unit"] != "ms" or cells["provider"] not in _LIGER_PROVIDERS:
        raise ValueError("memory, and kernels that are not PyTorch's")
    if cells["model"] not in _GATED or cells["x_name"] != "T":
        raise ValueError("operators other than gated feed-forward layers")
    config = _json_object("config", cells)
    sizes = {
        "width": config.get("hidden_size"),
        "inner": config.get("intermediate_size"),
        "length": cells["x_value"],
        "samples": config.get("bsz", config.get("B", 1)),
    }
    phase = _look_up("mode", cells["mode"], _LIGER_PHASES)
    dtype = _look_up("dtype", config.get("dtype", "torch.float32"), _LIGER_DTYPES)
    return _layer(cells, _GATED[cells["model"]], phase, _whole(sizes), dtype)


def _layer(cells: Cells, layer: str, phase: str | None, dims: Mapping[str, int], dtype: str) -> Columns:
    """Return the columns of a layer's time; `phase` None: forward and backward."""
    named = {"operator": f"{PREFIX}{layer}", "phase": phase, "dims": dims, "dtype": dtype}
    return {**named, "duration_us": _duration_us(cells), "timing": "cuda_events"}


def _duration_us(cells: Cells) -> float:
    return _time("value", cells) * _look_up("unit", cells["unit"], _US)


# Source -> columns of its files, and the reader of a row, whose error is the reason to leave it out.
KERNEL_TABLES: Mapping[str, tuple[str, Callable[[Cells], Columns]]] = {
    "allreduce": ("gpu, gpus, precision, size_bytes, what_was_measured, value, unit", _all_reduce),
    "sailor": ("model, layer, gpu, tp, batch_per_gpu, what_was_measured, value, unit", _sailor),
    "liger": ("model, provider, mode, x_name, x_value, config, gpu, value, unit", _liger),
}


def read_kernel_table(path: Path, device_name: str | None, *, source: str) -> ImportedFile:
    """Return the times of a CSV file. Raises `NotOfThisSource`."""
    names, read = KERNEL_TABLES[source]
    lines = read_with_columns(path, names)

    def columns(line: Mapping[Any, Any]) -> Columns:
        if None in line:
            raise ValueError("more cells than the header has columns")
        cells = _cells(line)
        row = read(cells)
        named = device_name or _DEVICES.get(cells["gpu"], cells["gpu"])
        if not named:
            raise ValueError("no gpu")
        return {**row, "dims": canonical_json(row["dims"]), "device_name": named, "origin": canonical_json(cells)}

    def content(line: Mapping[Any, Any]) -> str:
        return canonical_json({"cells": _cells(line), "device_name": device_name})

    return imported_kernels(source, path, lines, columns, content)


def _cells(line: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value or "" for name, value in line.items()}


def _look_up(column: str, name: str, known: Mapping[str, Entry]) -> Entry:
    require_one_of(column, name, known)
    return known[name]


def _time(column: str, cells: Mapping[str, Any]) -> float:
    time = above_zero(str(cells[column]))
    if time is None:
        raise ValueError(f"{column} is not a time > 0")
    return time


def _json_object(column: str, cells: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = json.loads(cells[column])
    except (ValueError, TypeError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{column} is not a JSON object")
    return content


def _whole(sizes: Mapping[str, object], least: int = 1) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for name, size in sizes.items():
        number = to_number(str(size))
        if number is None or not least <= number < 2**40 or not number.is_integer():
            raise ValueError(f"{name} is not a whole number >= {least} and < 2^40: {shown(size)}")
        numbers[name] = int(number)
    return numbers


NEUSIGHT_COLUMNS = (
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
_CUDA_DEVICES = {  # CUDA's name -> name in conf/device
    "NVIDIA A100-PCIE-40GB": "A100-PCIE-40GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIE-80GB",
    "Tesla P4": "P4",
    "Tesla P100-PCIE-16GB": "P100-PCIE-16GB",
    "Tesla T4": "T4",
    "Tesla V100-PCIE-32GB": "V100-PCIE-32GB",
}

# op -> aten operator, and shapes of its inputs: tensors separated by commas, sizes by their names in `dims`; an input
# without sizes is a number. Matrix products are (M x N) times (N x K), summed over N.
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


def read_kernel_times(path: Path, device_name: str | None) -> ImportedFile:
    """Return the operators of a Parquet file with a row per operator and shape.

    Raises:
        NotOfThisSource: It is not NeuSight's.
        EnvironmentProblem: The file cannot be read.
    """
    try:
        with pq.ParquetFile(path) as file:
            if not set(NEUSIGHT_COLUMNS) <= set(file.schema_arrow.names):
                raise NotOfThisSource(f"not of this source, whose files have {', '.join(NEUSIGHT_COLUMNS)}")
            batches = (batch.to_pylist() for batch in file.iter_batches(_CHUNK_ROWS, columns=list(NEUSIGHT_COLUMNS)))
            rows = itertools.chain.from_iterable(batches)
            return imported_kernels(
                NEUSIGHT,
                path,
                rows,
                lambda cells: _row(cells, device_name),
                lambda cells: "\n".join([*map(repr, cells.values()), device_name or ""]),
            )
    except (pa.ArrowException, OSError) as error:
        raise EnvironmentProblem(f"path={path} is damaged or no Parquet file: {first_line(error)}") from error


def _row(cells: Mapping[str, Any], device_name: str | None) -> Columns:
    """Return the columns of one row. Raises an error in `MALFORMED` for an invalid row."""
    op, device = cells["op"], cells["device"]
    operator, shapes = _look_up("op", op, _OPERATORS)
    duration_us = _time("latency_ms", cells) * 1e3
    sizes = _whole(_json_object("dims", cells), least=0)
    dims: dict[str, Any] = {"shapes": [_shape(tensor, sizes) for tensor in shapes.split(",")]}
    if op == "conv":
        both = {name.lower(): [sizes[name]] * 2 for name in ("Stride", "Padding")}
        dims["arguments"] = {**both, "dilation": [1, 1], "groups": 1}
    return {
        "device_name": device_name or _CUDA_DEVICES.get(device, device),
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
        "duration_us": duration_us,
        "timing": "cuda_events",
        "origin": canonical_json({"op": op, "device": device, "dims": sizes}),
    }


def _shape(tensor: str, sizes: Mapping[str, int]) -> list[int]:
    return [math.prod(sizes[name] for name in size.split("*")) for size in tensor.split()]


def _extent(name: str, text: str | None) -> Mapping[str, int | None]:
    axes = tuple(f"{name}_{axis}" for axis in "xyz")
    if not text:
        return dict.fromkeys(axes)
    extents = text.split("x")
    if len(extents) != len(axes):
        raise ValueError(f"{name} is not of the form 1x2x3")
    return _whole(dict(zip(axes, extents, strict=True)))


def _cuda(text: str) -> str | None:
    digits = text.removeprefix("cu")
    return f"{digits[:-1]}.{digits[-1]}" if len(digits) > 1 and digits.isdigit() else text or None


def _text(value: Any) -> str:
    return "" if value is None else str(value).strip()
