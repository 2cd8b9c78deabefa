"""Reads published CSV files of times as rows of `kernels`, and those of all-reduces (`nccl-tests`, vTrain's tables).

Start reading at `read_times`, or at `read_all_reduces`. nccl-tests divides the time of many all-reduces in a row by
their number: `timing` is `loop`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from conf.identity import canonical_json
from warehouse.gpumemnet import to_number
from warehouse.imported_rows import run_ids
from warehouse.neusight import KernelFile
from warehouse.published import wide_cells

SOURCE = "allreduce"
COLUMNS = ("gpu", "gpus", "precision", "size_bytes", "what_was_measured", "value", "unit")
OPERATOR = "nccl::all_reduce"
_DEVICES = {  # as the file names them -> names in conf/device, whose links do not depend on the memory
    "A100-SXM4": "A100-SXM4-80GB",
    "V100-SXM2": "V100-SXM2-32GB",
}
_TYPES = {"fp32": ("float32", 4), "fp16": ("float16", 2), "bf16": ("bfloat16", 2)}  # and bytes of an element
_MOST_RANKS = 72  # of a node: NVIDIA's NVL72
_MOST_BYTES = 2**40

Cells = Mapping[str, str]


def read_times(
    path: Path,
    source: str,
    columns: Collection[str],
    row_of: Callable[[Cells], dict[str, Any]],
    device_name: str | None = None,
) -> KernelFile | None:
    """Read a CSV file of times; None if it is none, or lacks a column.

    Args:
        path: The file.
        source: Name of the source.
        columns: That the file must have.
        row_of: Takes a row's cells and returns its columns of `kernels`; `ValueError` is the reason why it is not read.
        device_name: GPU model that was measured, in place of the file's own.

    Returns:
        The rows. Rows that are not read are named in `invalid` with the reason.
    """
    try:
        with wide_cells(), open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="")
            if not set(columns) <= set(reader.fieldnames or ()):
                return None
            lines = list(reader)
    except (UnicodeDecodeError, csv.Error):
        return None
    kernels = KernelFile(path)
    contents = []
    for place, line in enumerate(lines, 1):
        try:
            if "" in line:
                raise ValueError("more cells than the header has columns")
            cells = {name: value or "" for name, value in line.items()}
            if not (device_name or cells["gpu"]):
                raise ValueError("no gpu")
            row = row_of(cells)
        except ValueError as error:
            kernels.invalid.setdefault(str(error), []).append(place)
            continue
        named = device_name or row["device_name"]
        of_import = {"source": "imported", "count": 1, "device_name": named, "origin": canonical_json(cells)}
        kernels.rows.append({**row, **of_import})
        contents.append(canonical_json({"cells": cells, "device_name": device_name}))
    for row, kernel_row in zip(kernels.rows, run_ids(source, contents), strict=True):
        row["kernel_row"] = kernel_row
    return kernels


def read_all_reduces(
    path: Path, device_name: str | None = None, progress: Callable[[int, int], None] | None = None
) -> KernelFile | None:
    """Read a file of all-reduce times; None if it is no CSV file or lacks a column of `COLUMNS`.

    Args:
        path: CSV file with one row a tensor size and number of GPUs of one node.
        device_name: GPU model that was measured, in place of the file's own.
        progress: Unused; these files are small.
    """
    return read_times(path, SOURCE, COLUMNS, _row, device_name)


def _row(cells: Cells) -> dict[str, Any]:
    """Return the columns of one row. Raises `ValueError` with the reason for a row that makes no sense."""
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
    elements = int(nbytes) // element_bytes
    return {
        "device_name": _DEVICES.get(cells["gpu"], cells["gpu"]),
        "operator": OPERATOR,
        "dims": canonical_json({"shapes": [[elements]], "arguments": {"ranks": int(ranks)}}),
        "dtype": dtype,
        "duration_us": microseconds,
        "timing": "loop",
    }
