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

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from conf.identity import canonical_json
from warehouse.gpumemnet import to_number
from warehouse.neusight import KernelFile
from warehouse.published_links import Cells, read_times

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

_Timed = tuple[str, str | None, dict[str, int], str, float]  # layer, phase (None: both), sizes, type, us in a unit


def _sailor(cells: Cells) -> _Timed:
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
    return cells["layer"], phase, dims, "tf32" if tf32 else "float32", 1e6


def _liger(cells: Cells) -> _Timed:
    model = cells["model"]
    if cells["unit"] != "ms" or cells["provider"] not in _LIGER_PROVIDERS:
        raise ValueError("memory, and kernels that are not PyTorch's")
    if cells["mode"] not in _LIGER_PHASES:
        raise ValueError(f"mode {cells['mode'][:40]}; known: {', '.join(_LIGER_PHASES)}")
    phase = _LIGER_PHASES[cells["mode"]]
    config = _config(cells["config"])
    if model in _GATED and cells["x_name"] == "T":
        sizes = {
            "width": config.get("hidden_size"),
            "inner": config.get("intermediate_size"),
            "length": cells["x_value"],
            "samples": config.get("bsz", config.get("B", 1)),
        }
        return _GATED[model], phase, _whole(sizes), _dtype(config), 1e3
    raise ValueError("operators other than gated feed-forward layers")


_SOURCES: Mapping[str, tuple[str, Callable[[Cells], _Timed]]] = {
    "sailor": ("model, layer, gpu, tp, batch_per_gpu, what_was_measured, value, unit", _sailor),
    "liger": ("model, provider, mode, x_name, x_value, config, gpu, value, unit", _liger),
}
SOURCES = tuple(_SOURCES)


def layer_columns(source: str) -> str:
    """Return the columns that a file of this source must have, for messages."""
    return _SOURCES[source][0]


def read_layer_times(
    path: Path, device_name: str | None = None, progress: Callable[[int, int], None] | None = None, *, source: str
) -> KernelFile | None:
    """Read a file of layer times; None if it is no CSV file or lacks a column of `source`.

    Args:
        path: CSV file with one row a layer, phase and batch.
        device_name: GPU model that was measured, in place of the file's own.
        progress: Unused; these files are small.
        source: One of `SOURCES`.

    Returns:
        The rows. Rows that are not read are named in `invalid` with the reason.
    """
    names, read = _SOURCES[source]
    return read_times(path, source, names.split(", "), partial(_row, read=read), device_name)


def _row(cells: Cells, read: Callable[[Cells], _Timed]) -> dict[str, Any]:
    layer, phase, dims, dtype, us_per_unit = read(cells)
    value = to_number(cells["value"])
    if value is None or value <= 0:
        raise ValueError("value is no time > 0")
    return {
        "device_name": _DEVICES.get(cells["gpu"], cells["gpu"]),
        "phase": phase,
        "operator": f"{PREFIX}{layer}",
        "dims": canonical_json(dims),
        "dtype": dtype,
        "duration_us": value * us_per_unit,
        "timing": "cuda_events",
    }


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
