"""Readers of published tables of training runs on other GPUs: step times and memory, each of one instrument.

Start reading at `read_table`. A row that no trial config describes is kept as `untraceable`, with its reason. All
cells of the file stay in the column `origin`.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.identity import canonical_json
from warehouse.gpumemnet import TRAINING
from warehouse.imported_rows import (
    DOUBT,
    UNKNOWN_FAMILY,
    ImportedFile,
    above_zero,
    config_columns,
    imported_row,
    run_ids,
    untraceable,
    whole_above_zero,
)
from warehouse.published import wide_cells
from warehouse.published_groups import LUCID_PAIRS
from warehouse.published_parallel import PARALLEL_COLUMNS, read_parallel
from warehouse.published_power import ZEUS_COLUMNS, zeus_run

Cells = Mapping[str, str]
Columns = dict[str, Any]  # of `runs`

# The benchmark tries these from the largest down and reports the first that runs.
TIMM_BATCHES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MIB = 2**20
_SLACK = 0.05  # relative: figures that are rounded agree this closely
_DEVICES = {  # the files' names -> names in conf/device, and MiB that CUDA can use or the card has
    "RTX-3090": ("RTX-3090", 24_260.0),
    "A100-SXM4-40GB": ("A100-SXM4-40GB", 40_960.0),
    "a100_40gb": ("A100-SXM4-40GB", 40_960.0),
    "a100_80gb": ("A100-SXM4-80GB", 81_920.0),
    "h100_80gb": ("H100-SXM5-80GB", 81_559.0),
    "A100-80GB": ("A100-SXM4-80GB", 81_920.0),
    "V100-16GB": ("V100-SXM2-16GB", 16_384.0),
    "V100-32GB": ("V100-SXM2-32GB", 32_768.0),
    "NVIDIA L40S": ("L40S", 46_068.0),
}
_GAVEL_BATCH = re.compile(r"\(batch size (\d{1,9})\)")
_GAVEL_SPREAD = 0.10  # relative: tables of one job on one GPU that agree within this are no contradiction
_IMAGE_PRECISIONS = {"amp": "fp16", "tf32": "tf32", "fp32": "fp32"}


def _device(name: str) -> Columns:
    known, memory_mib = _DEVICES.get(name, (name, None))
    return {"device_name": known, "device_memory_mib": memory_mib}


def _image_config(model: str, batch: int, precision: str, layout: str, image_size: int | None) -> Columns:
    settings = {
        **TRAINING,
        "family": "timm",
        "model": model,
        "image_size": image_size,
        "batch_size": batch,
        "precision": precision,
        "optimizer": "momentum",
        "channels_last": layout == "nhwc",
        "cudnn_benchmark": True,
    }
    return {"family": "timm", **config_columns(settings)}


def _timm_benchmark(row: Cells) -> Iterator[Columns]:
    """Yield the run, and the next larger batch that the benchmark tried before and that did not run.

    Together they bracket the need: at most the card at one batch, more than the card at the next.
    """
    batch, step_ms = whole_above_zero(row["batch"]), above_zero(row["step_ms"])
    side, per_second = whole_above_zero(row["img_size"]), above_zero(row["samples_per_s"])
    card = {**_device(row["gpu"]), "torch_version": row["torch"], "cuda_version": row["cuda"]}
    million = above_zero(row["param_m"])
    parameters = None if million is None else round(million * 1e6)
    if batch is None or step_ms is None or side is None or not row["model"]:
        missing = "no model, batch, image size or step time"
        yield {"family": "timm", "status": "invalid", "error": missing, **card}
        return
    run = {**card, **_image_config(row["model"], batch, "fp16", row["layout"], side), "parameters": parameters,
           "status": "ok", "step_time_ms": step_ms}  # fmt: skip
    if not row["precision"].lower().startswith("amp"):
        run |= {"status": "invalid", "error": f"precision {row['precision']}: this table is of AMP"}
    elif per_second is None or not _agree(batch / per_second * 1e3, step_ms):
        run |= {"error_type": DOUBT, "error": "step_ms and samples_per_s contradict each other"}
    yield run
    larger = next((size for size in TIMM_BATCHES if size > batch), None)
    trusted = run["status"] == "ok" and run.get("error_type") is None
    if trusted and larger is not None and batch in TIMM_BATCHES:
        config = _image_config(row["model"], larger, "fp16", row["layout"], side)
        tried = f"inferred: the benchmark tries this batch before {batch}, and {batch} is the largest that ran"
        yield {**card, **config, "parameters": parameters, "status": "oom", "oom_kind": "device", "error": tried}


def _litgpt(row: Cells) -> Iterator[Columns]:
    gigabytes = above_zero(row["peak_memory_gb"])
    reason = (
        f"no family has LitGPT's {row['method']} with quantization {row['quantization']} on {row['gpus'] or '?'} GPU(s)"
    )
    run = untraceable(
        reason,
        **_device(row["gpu"]),
        batch_size=whole_above_zero(row["micro_batch"]),
        precision=row["precision"],
        optimizer=row["optimizer"].lower(),
        peak_allocated_mib=None if gigabytes is None else gigabytes * 1e9 / _MIB,
    )
    if row["outcome"].lower() == "oom":
        run |= {"status": "oom", "oom_kind": "device"}
    elif gigabytes is None:
        run |= {"status": "invalid", "error_type": None, "error": f"no memory: outcome {row['outcome']}"}
    elif "allocated" not in row["memory_kind"]:
        run |= _unnamed_instrument("peak_allocated_mib", row["memory_kind"])
    yield run


def _torchtune(row: Cells) -> Iterator[Columns]:
    gibibytes = above_zero(row["peak_memory_gib"])
    run = untraceable(
        f"no family has torchtune's recipe of {row['model']}: {row['method']}",
        **_device(row["gpu"]),
        batch_size=whole_above_zero(row["batch"]),
        precision=row["precision"],
        optimizer=row["optimizer"],
        peak_allocated_mib=None if gibibytes is None else gibibytes * 1024,
    )
    if gibibytes is None:
        run |= {"status": "invalid", "error_type": None, "error": "no memory"}
    elif row["memory_kind"] == "torch peak active":
        words = "the file has torch's peak active: blocks that wait for a stream count, too"
        run["quality_reasons"] = json.dumps({"peak_allocated_mib": words})
    else:
        run |= _unnamed_instrument("peak_allocated_mib", row["memory_kind"])
    yield run


def _torchtitan(row: Cells) -> Iterator[Columns]:
    gibibytes = above_zero(row["memory_gib"])
    run = untraceable("one rank of a job on several GPUs, which no trial config describes", **_device(row["gpu"]))
    if row["memory_kind"] == "torch max reserved":
        run["peak_reserved_mib"] = None if gibibytes is None else gibibytes * 1024
    elif gibibytes is not None or row["memory_gb_as_printed"]:
        run |= _unnamed_instrument("peak_reserved_mib", row["memory_kind"])
    if gibibytes is None and above_zero(row["tps_per_gpu"]) is None:
        run |= {"status": "invalid", "error_type": None, "error": "neither memory nor throughput"}
    yield run


def _peft(row: Cells) -> Iterator[Columns]:
    reserved, parameters = above_zero(row["max_reserved_mib"]), whole_above_zero(row["trainable_params"])
    torch_version, _, build = row["torch"].partition("+cu")
    run = untraceable(
        f"no family has {row['model']} with PEFT's {row['method']}; the longest batch is not published",
        **_device(row["gpu"]),
        batch_size=whole_above_zero(row["batch"]),
        precision=row["dtype"],
        optimizer=row["optimizer"].lower(),
        parameters=parameters,
        torch_version=torch_version,
        cuda_version=f"{build[:-1]}.{build[-1]}" if build.isdigit() else None,
        peak_reserved_mib=reserved,
    )
    total = whole_above_zero(row["total_params"])
    if reserved is None:
        run |= {"status": "invalid", "error_type": None, "error": "no memory"}
    elif parameters is not None and total is not None and parameters > total:
        run |= {"error_type": DOUBT, "error": "more trainable parameters than parameters"}
    elif (average := above_zero(row["reserved_avg_mib"])) is not None and average > reserved:
        run |= {"error_type": DOUBT, "error": "the mean of the reserved memory is above its maximum"}
    yield run


def _llm_foundry(row: Cells) -> Iterator[Columns]:
    tokens, per_second = above_zero(row["GlobalBatchSize (T)"]), above_zero(row["Throughput (T/s)"])
    sizes = [whole_above_zero(row[name]) for name in ("MicroBatchSize", "GradAccum", "# GPUs")]
    run = untraceable(
        f"MPT-{row['Model']} sharded over {row['# GPUs']} GPUs, which no trial config describes",
        **_device(row["GPU"]),
        batch_size=sizes[0],
        precision=row["Precision"],
        parameters=whole_above_zero(row["NumParams"]),
        step_time_ms=tokens / per_second * 1e3 if tokens and per_second else None,
    )
    whole = whole_above_zero(row["GlobalBatchSize"])
    micro, steps, gpus = sizes
    if run["step_time_ms"] is None:
        run |= {"status": "invalid", "error_type": None, "error": "no throughput"}
    elif None in (whole, micro, steps, gpus) or whole != (micro or 0) * (steps or 0) * (gpus or 0):
        words = "the global batch is not micro-batch x accumulation x GPUs"
        run |= {"error_type": DOUBT, "error": words}
    yield run


def _deep_learning_examples(row: Cells) -> Iterator[Columns]:
    batch, per_second = whole_above_zero(row["batch"]), above_zero(row["throughput"])
    step_ms = batch / per_second * 1e3 if batch and per_second else None
    run: Columns = {**_device(row["gpu"]), "status": "ok", "step_time_ms": step_ms}
    precision = _IMAGE_PRECISIONS.get(row["precision"].lower())
    if batch is None or step_ms is None:
        run |= {"family": UNKNOWN_FAMILY, "status": "invalid", "error": "no batch size or throughput"}
    elif row["model"] == "resnet50v1.5" and row["gpus"] == "1" and precision is not None:
        run |= _image_config("resnet50", batch, precision, row["layout"], None)
    else:
        reason = f"no family has {row['model']} in {row['precision']} on {row['gpus']} GPU(s)"
        run |= untraceable(reason, batch_size=batch, precision=row["precision"].lower())
    yield run


def _lucid_single(row: Cells) -> Iterator[Columns]:
    gpu_util, memory = above_zero(row["gpu_util"]), above_zero(row["gmem"])
    run = untraceable(
        f"{row['model']} on {row['dataset']}: its code, input and optimizer are not in the file",
        **_device("RTX-3090"),
        batch_size=whole_above_zero(row["batchsize"]),
        precision="fp16" if row["amp"] == "1" else "fp32",
        peak_memory_mib=memory,
        gpu_util=None if gpu_util is None else gpu_util / 100,
    )
    if memory is None:
        run |= {"status": "invalid", "error_type": None, "error": "no memory"}
    elif gpu_util is not None and gpu_util > 100:
        run |= {"status": "invalid", "error_type": None, "error": f"gpu_util: {gpu_util:g} %", "gpu_util": None}
    yield run


def _gavel(row: Cells) -> Iterator[Columns]:
    """Yield the run of a job alone; `warehouse.published_groups` reads pairs."""
    if row["job_b"]:
        return
    per_second = above_zero(row["iters_per_s_a"])
    batch = _GAVEL_BATCH.search(row["job_a"])
    run = untraceable(
        f"{row['job_a']} on {row['gpus_a']} GPU(s): its code, input and optimizer are not in the file",
        **_device(row["gpu"].upper()),
        batch_size=int(batch[1]) if batch else None,
        step_time_ms=1e3 / per_second if per_second else None,
    )
    if per_second is None:
        run |= {"status": "invalid", "error_type": None, "error": "no iterations a second"}
    yield run


def _gavel_ratios(rows: Sequence[Cells]) -> dict[int, float]:
    """Return the factor between the file's tables for each job alone, by the index of its row."""
    speeds: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    for index, row in enumerate(rows):
        per_second = above_zero(row["iters_per_s_a"])
        if not row["job_b"] and per_second is not None:
            speeds[row["gpu"], row["job_a"], row["gpus_a"]][index] = per_second
    return {index: max(group.values()) / min(group.values()) for group in speeds.values() for index in group}


def _gavel_doubts(rows: Sequence[Cells]) -> dict[int, Columns]:
    """Return the columns that mark the jobs alone whose figures differ between the file's tables."""
    doubt = f"the file's tables differ by more than {_GAVEL_SPREAD:.0%} for this job on this GPU"
    return {
        index: {
            "error_type": DOUBT,
            "error": doubt,
            "quality_reasons": json.dumps({"step_time_ms": f"the file's tables differ by a factor of {ratio:.2f}"}),
        }
        for index, ratio in _gavel_ratios(rows).items()
        if ratio > 1 + _GAVEL_SPREAD
    }


def _unnamed_instrument(column: str, kind: str) -> Columns:
    words = f"the file's instrument is {kind or 'not named'}: the figure is in origin alone"
    return {column: None, "quality_reasons": json.dumps({column: words})}


@dataclass(frozen=True)
class _Table:
    """One kind of file: the columns that tell it, separated by commas, and the reader of one row."""

    names: str
    read: Callable[[Cells], Iterator[Columns]]
    doubts: Callable[[Sequence[Cells]], Mapping[int, Columns]] | None = None  # of rows that others contradict
    is_pair: Callable[[Cells], bool] | None = None  # whether a row is of two jobs that shared a GPU
    pair_names: str | None = None  # columns of the source's files that hold nothing but pairs

    @property
    def columns(self) -> frozenset[str]:
        return frozenset(self.names.split(", "))

    @property
    def pair_columns(self) -> frozenset[str] | None:
        return None if self.pair_names is None else frozenset(self.pair_names.split(", "))


_TABLES = {
    "timm_benchmark": _Table(
        "model, gpu, precision, layout, torch, cuda, batch, img_size, step_ms, samples_per_s, param_m",
        _timm_benchmark,
    ),
    "litgpt": _Table(
        "model, method, quantization, precision, optimizer, micro_batch, gpus, gpu, "
        "peak_memory_gb, outcome, memory_kind",
        _litgpt,
    ),
    "torchtune": _Table(
        "model, method, precision, batch, optimizer, gpu, peak_memory_gib, memory_kind, packed",
        _torchtune,
    ),
    "torchtitan": _Table(
        "setting, technique, gpu, seq, tps_per_gpu, memory_gib, memory_kind, memory_gb_as_printed",
        _torchtitan,
    ),
    "peft": _Table(
        "model, method, batch, dtype, optimizer, gpu, "
        "torch, max_reserved_mib, reserved_avg_mib, trainable_params, total_params",
        _peft,
    ),
    "llm_foundry": _Table(
        "Model, # GPUs, GPU, MicroBatchSize, GradAccum, GlobalBatchSize, "
        "GlobalBatchSize (T), Throughput (T/s), Precision, NumParams",
        _llm_foundry,
    ),
    "deeplearningexamples": _Table(
        "model, gpu, gpus, precision, batch, seq, layout, throughput",
        _deep_learning_examples,
    ),
    "gavel": _Table(
        "table, gpu, job_a, gpus_a, job_b, gpus_b, iters_per_s_a, iters_per_s_b",
        _gavel,
        _gavel_doubts,
        is_pair=lambda row: bool(row["job_b"]),
    ),
    "lucid": _Table(
        "model, dataset, batchsize, amp, speed, gpu_util, gmem_util, gmem", _lucid_single, pair_names=LUCID_PAIRS
    ),
    **{source: _Table(names, read_parallel) for source, names in PARALLEL_COLUMNS.items()},
    "zeus": _Table(ZEUS_COLUMNS, zeus_run),
}
TABLES = tuple(_TABLES)


def table_columns(source: str) -> str:
    """Return the columns that a file of this source must have, for messages."""
    table = _TABLES[source]
    of_pairs = "" if table.pair_columns is None else f", or of pairs: {', '.join(sorted(table.pair_columns))}"
    return ", ".join(sorted(table.columns)) + of_pairs


def read_table(path: Path, source: str, device_name: str | None = None) -> ImportedFile | None:
    """Read one published table; None if the file is no CSV file or lacks a column of `source`.

    Args:
        path: The CSV file.
        source: One of `TABLES`.
        device_name: GPU model that was measured, in place of the file's own.

    Returns:
        The runs with the places of their rows, and the rows of pairs; a row of `timm_benchmark` may give two runs.
    """
    table = _TABLES[source]
    try:
        with wide_cells(), open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = set(reader.fieldnames or ())
            holds_pairs = table.pair_columns is not None and table.pair_columns <= header
            if not holds_pairs and not table.columns <= header:
                return None
            lines = [{str(name): _text(value) for name, value in row.items()} for row in reader]
    except (UnicodeDecodeError, csv.Error):
        return None
    if holds_pairs:
        return ImportedFile(path, (), pairs=tuple(enumerate(lines, 1)))
    other = {} if device_name is None else {"device_name": device_name, "device_memory_mib": None}
    doubts = {} if table.doubts is None else table.doubts(lines)
    runs = [
        (at, part, {**run, **other, **doubts.get(at - 1, {}), "origin": canonical_json(row)})
        for at, row in enumerate(lines, 1)
        for part, run in enumerate(table.read(row))
    ]
    contents = [canonical_json({"part": part, "cells": run["origin"], **other}) for _, part, run in runs]
    rows = [
        imported_row(at, source, run_id, run)
        for (at, _, run), run_id in zip(runs, run_ids(source, contents), strict=True)
    ]
    is_pair = table.is_pair or (lambda row: False)
    return ImportedFile(path, tuple(rows), pairs=tuple(place for place in enumerate(lines, 1) if is_pair(place[1])))


def _text(value: str | list[str] | None) -> str:
    """Return a cell's text; those beyond the header's columns come as a list, those that lack as None."""
    return (",".join(value) if isinstance(value, list) else value or "").strip()


def _agree(one: float, other: float) -> bool:
    return abs(one - other) <= _SLACK * max(one, other)
