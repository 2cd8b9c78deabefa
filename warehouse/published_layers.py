"""Reads published times of layers and of operators in half precision as rows of `kernels`: Sailor's and Liger's.

Start reading at `read_layer_times`. `operator` is then no aten name but `layer::NAME`, and `dims` has the layer's
sizes by name; `learn.kernels.layers` knows which kernels such a layer runs.

Sailor (SOSP 2025, eth-easl/sailor): layers of a decoder of Megatron-DeepSpeed in fp32, without flash attention, forward
and backward each timed by itself. The sizes are those of its profiling script. TF32 is on where the GPU has it, but for
Llama on the A100-40: there the products stay below the rate of fp32 and above none of TF32's.

Liger (linkedin/Liger-Kernel, benchmark/scripts): operators of plain PyTorch and transformers, the median of triton's
`do_bench`. Of these, gated feed-forward layers in bf16 are read.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conf.identity import canonical_json
from warehouse.gpumemnet import to_number
from warehouse.imported_rows import run_ids
from warehouse.neusight import KernelFile
from warehouse.published import wide_cells

PREFIX = "layer::"
_SAILOR_SIZES = {  # model -> sizes of a layer, of its script; the vocabulary is GPT-2's, padded by Megatron
    "OPT-350": {"width": 1024, "heads": 16, "length": 2048, "vocabulary": 50304},
    "LLAMA-3-8": {"width": 4096, "heads": 32, "length": 8192, "vocabulary": 50304},
    "GPT-Neo-2.7": {"width": 2560, "heads": 20, "length": 2048, "vocabulary": 50304},
    "OPT-30": {"width": 7168, "heads": 56, "length": 2048, "vocabulary": 50304},
}
_WITHOUT_TF32 = (("LLAMA-3-8", "A100-40"),)
_SAILOR_PHASES = {"forward time": "forward", "backward time": "backward"}
_SAILOR_LAYERS = ("block", "head")
_GATED = {"swiglu": "silu", "geglu": "gelu", "tiled_geglu": "gelu", "tiled_swiglu": "silu"}
_LIGER_PHASES = {"forward": "forward", "no-grad-forward": "forward", "backward": "backward", "full": None}
_LIGER_PROVIDERS = ("torch", "huggingface")
_DEVICES = {  # the files' names -> names in conf/device
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

Cells = Mapping[str, str]
_Timed = tuple[str, str | None, dict[str, int], str, float]  # layer, phase (None: both), sizes, type, us in a unit


class _Unread(ValueError):
    """Why a row is not read."""


def _sailor(cells: Cells) -> _Timed:
    model, gpu = cells["model"], cells["gpu"]
    if model not in _SAILOR_SIZES:
        raise _Unread(f"model {model}; known: {', '.join(_SAILOR_SIZES)}")
    phase = _SAILOR_PHASES.get(cells["what_was_measured"])
    if phase is None or cells["layer"] not in _SAILOR_LAYERS:
        raise _Unread("optimizer and embedding: one figure for layers of several sizes")
    dims = {**_SAILOR_SIZES[model], "samples": _whole(cells["batch_per_gpu"]), "ranks": _whole(cells["tp"])}
    tf32 = gpu.startswith(_TF32_DEVICES) and (model, gpu) not in _WITHOUT_TF32
    return cells["layer"], phase, dims, "tf32" if tf32 else "float32", 1e6


def _liger(cells: Cells) -> _Timed:
    model = cells["model"]
    if cells["unit"] != "ms" or cells["provider"] not in _LIGER_PROVIDERS:
        raise _Unread("memory, and kernels that are not PyTorch's")
    if cells["mode"] not in _LIGER_PHASES:
        raise _Unread(f"mode {cells['mode'][:40]}; known: {', '.join(_LIGER_PHASES)}")
    phase = _LIGER_PHASES[cells["mode"]]
    config = _config(cells["config"])
    samples = config.get("bsz", config.get("B", 1))
    if model in _GATED and cells["x_name"] == "T":
        sizes = {"width": config["hidden_size"], "inner": config["intermediate_size"]}
        dims = {**sizes, "length": _whole(cells["x_value"]), "samples": samples}
        return _GATED[model], phase, dims, _dtype(config), 1e3
    raise _Unread("operators other than gated feed-forward layers")


_SOURCES: Mapping[str, tuple[str, Callable[[Cells], _Timed]]] = {
    "sailor": ("model, layer, gpu, tp, batch_per_gpu, what_was_measured, value, unit", _sailor),
    "liger": ("model, provider, mode, x_name, x_value, config, gpu, value, unit", _liger),
}
SOURCES = tuple(_SOURCES)


def layer_columns(source: str) -> str:
    """Return the columns that a file of this source must have, for messages."""
    return _SOURCES[source][0]


def read_layer_times(path: Path, source: str, device_name: str | None = None) -> KernelFile | None:
    """Read a file of layer times; None if it is no CSV file or lacks a column of `source`.

    Args:
        path: CSV file with one row a layer, phase and batch.
        source: One of `SOURCES`.
        device_name: GPU model that was measured, in place of the file's own.

    Returns:
        The rows. Rows that are not read are named in `invalid` with the reason.
    """
    names, read = _SOURCES[source]
    try:
        with wide_cells(), open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if not set(names.split(", ")) <= set(reader.fieldnames or ()):
                return None
            lines = [{str(name): str(value or "") for name, value in row.items()} for row in reader]
    except (UnicodeDecodeError, csv.Error):
        return None
    kernels = KernelFile(path)
    contents = []
    for place, cells in enumerate(lines, 1):
        try:
            kernels.rows.append(_row(cells, read, device_name))
        except (_Unread, KeyError) as error:
            reason = f"config lacks {error.args[0]}" if isinstance(error, KeyError) else str(error)
            kernels.invalid.setdefault(reason, []).append(place)
            continue
        contents.append(canonical_json({"cells": cells, "device_name": device_name}))
    for row, kernel_row in zip(kernels.rows, run_ids(source, contents), strict=True):
        row["kernel_row"] = kernel_row
    return kernels


def _row(cells: Cells, read: Callable[[Cells], Any], device_name: str | None) -> dict[str, Any]:
    layer, phase, dims, dtype, us_per_unit = read(cells)
    value = to_number(cells["value"])
    if value is None or not (math.isfinite(value) and value > 0):
        raise _Unread("value is no time > 0")
    return {
        "source": "imported",
        "device_name": device_name or _DEVICES.get(cells["gpu"], cells["gpu"]),
        "phase": phase,
        "operator": f"{PREFIX}{layer}",
        "dims": canonical_json(dims),
        "dtype": dtype,
        "duration_us": value * us_per_unit,
        "count": 1,
        "timing": "cuda_events",
        "origin": canonical_json(dict(cells)),
    }


def _config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError:
        raise _Unread("config is no JSON object") from None
    if not isinstance(config, dict):
        raise _Unread("config is no JSON object")
    return config


def _dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype", "torch.float32")).removeprefix("torch.")


def _whole(text: str) -> int:
    number = to_number(text)
    if number is None or number < 1 or number != int(number):
        raise _Unread(f"{text[:40]!r} is no whole number > 0")
    return int(number)
