"""Reads published times of all-reduces (`nccl-tests`, as of vTrain's tables) as rows of `kernels`.

Start reading at `read_all_reduces`. nccl-tests divides the time of many all-reduces in a row by their number:
`timing` is `loop`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conf.identity import canonical_json
from warehouse.gpumemnet import to_number
from warehouse.imported_rows import run_ids
from warehouse.neusight import KernelFile

SOURCE = "allreduce"
COLUMNS = ("gpu", "gpus", "precision", "size_bytes", "what_was_measured", "value", "unit")
OPERATOR = "nccl::all_reduce"
_DEVICES = {  # as the file names them -> names in conf/device, whose links do not depend on the memory
    "A100-SXM4": "A100-SXM4-80GB",
    "V100-SXM2": "V100-SXM2-32GB",
}
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def read_all_reduces(
    path: Path, device_name: str | None = None, progress: Callable[[int, int], None] | None = None
) -> KernelFile | None:
    """Read a file of all-reduce times; None if it is no CSV file or lacks a column of `COLUMNS`.

    Args:
        path: CSV file with one row a tensor size and number of GPUs of one node.
        device_name: GPU model that was measured, in place of the file's own.
        progress: is called with the rows read and the rows in all.

    Returns:
        The rows. Rows that make no sense are named in `invalid` and left out.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if not set(COLUMNS) <= set(reader.fieldnames or ()):
                return None
            lines = list(reader)
    except (UnicodeDecodeError, csv.Error):
        return None
    kernels = KernelFile(path)
    contents = []
    for place, cells in enumerate(lines, 1):
        try:
            kernels.rows.append(_row(cells, device_name))
        except ValueError as error:
            kernels.invalid.setdefault(str(error), []).append(place)
            continue
        contents.append("\n".join([*(f"{name}={cells[name]}" for name in COLUMNS), device_name or ""]))
    if progress is not None:
        progress(len(lines), len(lines))
    for row, kernel_row in zip(kernels.rows, run_ids(SOURCE, contents), strict=True):
        row["kernel_row"] = kernel_row
    return kernels


def _row(cells: Mapping[str, str], device_name: str | None) -> dict[str, Any]:
    """Return the columns of one row. Raises `ValueError` with the reason for a row that makes no sense."""
    ranks, nbytes, microseconds = (to_number(cells[name]) for name in ("gpus", "size_bytes", "value"))
    if cells["unit"] != "us" or not microseconds or microseconds < 0:
        raise ValueError("value is no time > 0 in us")
    if ranks is None or ranks < 2 or ranks != int(ranks):
        raise ValueError("gpus is no whole number >= 2")
    if cells["precision"] not in _BYTES:
        raise ValueError(f"unknown precision {cells['precision'][:40]!r}; known: {', '.join(_BYTES)}")
    if nbytes is None or nbytes < 1 or nbytes % _BYTES[cells["precision"]]:
        raise ValueError("size_bytes is no number of bytes of whole elements")
    elements = int(nbytes) // _BYTES[cells["precision"]]
    return {
        "source": "imported",
        "device_name": device_name or _DEVICES.get(cells["gpu"], cells["gpu"]),
        "operator": OPERATOR,
        "dims": canonical_json({"shapes": [[elements]], "arguments": {"ranks": int(ranks)}}),
        "dtype": _DTYPES[cells["precision"]],
        "duration_us": microseconds,
        "count": 1,
        "timing": "loop",
        "origin": canonical_json(dict(cells)),
    }
