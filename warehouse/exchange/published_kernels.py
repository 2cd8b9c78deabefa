"""Published times of all-reduces and layers, as rows of `kernels`: nccl-tests', vTrain's, Sailor's and Liger's.

Start reading at `KERNEL_TABLES`. `operator` is `nccl::all_reduce`, or no aten name but `layer::NAME`; `dims` has the
sizes by name, and `learn.fitting.published_jobs` knows which kernels such a layer runs.

nccl-tests divides the time of many all-reduces in a row by their number: `timing` is `loop`.

Sailor (SOSP 2025, eth-easl/sailor): layers of a decoder of Megatron-DeepSpeed in fp32, without flash attention, forward
and backward each timed by itself. The sizes are those of its profiling script. TF32 is on where the GPU has it, but for
Llama on the A100-40: there the products stay below the rate of fp32 and above none of TF32's.

Liger (linkedin/Liger-Kernel, benchmark/scripts): operators of plain PyTorch and transformers, the median of triton's
`do_bench`. Of these, gated feed-forward layers in bf16 are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conf.files.identity import canonical_json
from warehouse.exchange.gpumemnet import to_number
from warehouse.exchange.imported_rows import Cells, Columns, ImportedFile, imported_kernels, read_with_columns

OPERATOR = "nccl::all_reduce"
_TYPES = {"fp32": ("float32", 4), "fp16": ("float16", 2), "bf16": ("bfloat16", 2)}  # and bytes of an element
_MOST_RANKS = 72  # of a node: NVIDIA's NVL72
_MOST_BYTES = 2**40
PREFIX = "layer::"
_SAILOR_SIZES = {  # model -> sizes of a layer, of its script; the vocabulary is GPT-2's, padded by Megatron
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
_LIGER_DTYPES = ("float32", "bfloat16")
_DEVICES = {  # the files' names -> names in conf/device; links do not depend on the memory
    "A100-SXM4": "A100-SXM4-80GB",
    "V100-SXM2": "V100-SXM2-32GB",
    "A100-40": "A100-SXM4-40GB",
    "A100-80": "A100-SXM4-80GB",
    "GH-96": "GH200-96GB",
    "V100-16": "V100-SXM2-16GB",
    "RTX-2080": "RTX-2080-Ti",  # it is as fast as a Titan RTX, which a 2080 is not
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


def _all_reduce(cells: Cells) -> Columns:
    ranks, nbytes, microseconds = (to_number(cells[name]) for name in ("gpus", "size_bytes", "value"))
    if "all-reduce" not in cells["what_was_measured"]:
        raise ValueError("what_was_measured is no all-reduce")
    if cells["unit"] != "us" or not microseconds or microseconds < 0:
        raise ValueError("value is no time > 0 in us")
    if ranks is None or not 2 <= ranks <= _MOST_RANKS or ranks != int(ranks):
        raise ValueError(f"gpus is no whole number from 2 to {_MOST_RANKS}")
    if cells["precision"] not in _TYPES:
        raise ValueError(f"unknown precision {cells['precision'][:40]!r}; known: {', '.join(_TYPES)}")
    dtype, element_bytes = _TYPES[cells["precision"]]
    if nbytes is None or not 1 <= nbytes <= _MOST_BYTES or nbytes % element_bytes:
        raise ValueError("size_bytes is no number of bytes of whole elements")
    dims = {"shapes": [[int(nbytes) // element_bytes]], "arguments": {"ranks": int(ranks)}}
    return {"operator": OPERATOR, "dims": dims, "dtype": dtype, "duration_us": microseconds, "timing": "loop"}


def _sailor(cells: Cells) -> Columns:
    model, gpu = cells["model"], cells["gpu"]
    if model not in _SAILOR_SIZES:
        raise ValueError(f"model {model}; known: {', '.join(_SAILOR_SIZES)}")
    if cells["unit"] != "s":
        raise ValueError(f"unit {cells['unit'][:40]!r}; known: s")
    phase = _SAILOR_PHASES.get(cells["what_was_measured"])
    if phase is None or cells["layer"] not in SAILOR_LAYERS:
        raise ValueError("optimizer and embedding: one figure for layers of several sizes")
    dims = {**_SAILOR_SIZES[model], **_whole({"samples": cells["batch_per_gpu"], "ranks": cells["tp"]})}
    tf32 = gpu.startswith(_TF32_DEVICES) and (model, gpu) not in _WITHOUT_TF32
    return _layer(cells, cells["layer"], phase, dims, "tf32" if tf32 else "float32", 1e6)


def _liger(cells: Cells) -> Columns:
    model = cells["model"]
    if cells["unit"] != "ms" or cells["provider"] not in _LIGER_PROVIDERS:
        raise ValueError("memory, and kernels that are not PyTorch's")
    if cells["mode"] not in _LIGER_PHASES:
        raise ValueError(f"mode {cells['mode'][:40]}; known: {', '.join(_LIGER_PHASES)}")
    config = _config(cells["config"])
    if model not in _GATED or cells["x_name"] != "T":
        raise ValueError("operators other than gated feed-forward layers")
    sizes = {
        "width": config.get("hidden_size"),
        "inner": config.get("intermediate_size"),
        "length": cells["x_value"],
        "samples": config.get("bsz", config.get("B", 1)),
    }
    dims, dtype = _whole(sizes), _dtype(config)
    return _layer(cells, _GATED[model], _LIGER_PHASES[cells["mode"]], dims, dtype, 1e3)


def _layer(
    cells: Cells, layer: str, phase: str | None, dims: Mapping[str, int], dtype: str, us_per_unit: float
) -> Columns:
    """Return the columns of a layer's time; `phase` None: forward and backward."""
    value = to_number(cells["value"])
    if value is None or value <= 0:
        raise ValueError("value is no time > 0")
    named = {"operator": f"{PREFIX}{layer}", "phase": phase, "dims": dims, "dtype": dtype}
    return {**named, "duration_us": value * us_per_unit, "timing": "cuda_events"}


# Source -> columns of its files, and what reads a row: `ValueError` is the reason why it is left out.
KERNEL_TABLES: Mapping[str, tuple[str, Callable[[Cells], Columns]]] = {
    "allreduce": ("gpu, gpus, precision, size_bytes, what_was_measured, value, unit", _all_reduce),
    "sailor": ("model, layer, gpu, tp, batch_per_gpu, what_was_measured, value, unit", _sailor),
    "liger": ("model, provider, mode, x_name, x_value, config, gpu, value, unit", _liger),
}


def read_kernel_table(path: Path, device_name: str | None, *, source: str) -> ImportedFile | str:
    """Return the times of a CSV file; or why the file is none of `source`."""
    names, read = KERNEL_TABLES[source]
    lines = read_with_columns(path, names)
    if isinstance(lines, str):
        return lines

    def columns(line: Mapping[Any, Any]) -> Columns:
        if None in line:
            raise ValueError("more cells than the header has columns")
        cells = _cells(line)
        if not (device_name or cells["gpu"]):
            raise ValueError("no gpu")
        row = read(cells)
        named = device_name or _DEVICES.get(cells["gpu"], cells["gpu"])
        return {**row, "dims": canonical_json(row["dims"]), "device_name": named, "origin": canonical_json(cells)}

    def content(line: Mapping[Any, Any]) -> str:
        return canonical_json({"cells": _cells(line), "device_name": device_name})

    return imported_kernels(source, path, lines, columns, content)


def _cells(line: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value or "" for name, value in line.items()}


def _config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError:
        raise ValueError("config is no JSON object") from None
    if not isinstance(config, dict):
        raise ValueError("config is no JSON object")
    return config


def _dtype(config: Mapping[str, Any]) -> str:
    dtype = str(config.get("dtype", "torch.float32")).removeprefix("torch.")
    if dtype not in _LIGER_DTYPES:
        raise ValueError(f"dtype {dtype[:40]!r}; known: {', '.join(_LIGER_DTYPES)}")
    return dtype


def _whole(sizes: Mapping[str, object]) -> dict[str, int]:
    numbers = {name: to_number(str(size)) for name, size in sizes.items()}
    for name, number in numbers.items():
        if number is None or not 1 <= number < 2**31 or number != int(number):
            raise ValueError(f"{name} is no whole number > 0: {str(sizes[name])[:40]!r}")
    return {name: int(number) for name, number in numbers.items() if number is not None}
