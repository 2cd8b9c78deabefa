"""Published tables of runs on other GPUs (step times, memory, power), of pairs of jobs that shared a GPU, and of times
of operators, all-reduces and layers.

Start reading at `TABLES`, at `KERNEL_TABLES` for rows of `kernels`, or at `read_kernel_times` for NeuSight;
`warehouse.exchange.imported_rows` reads the files by these mappings. Each figure comes from one instrument.
`group_members` turns the pairs of Lucid and Gavel into rows of `collocations`. No row of a run is dropped: a member
without a figure is `invalid`, and one of a pair that did not train at the same time has a doubt.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import EnvironmentProblem, first_line, require_one_of, shown
from conf.files.identity import canonical_json
from warehouse.exchange.imported_rows import (
    TRAINING,
    Cells,
    Columns,
    ImportedFile,
    ImportedRow,
    NotOfThisSource,
    PublishedTable,
    Rule,
    above_zero,
    config_columns,
    doubted,
    imported_kernels,
    invalid,
    is_empty,
    lower,
    read_with_columns,
    run_ids,
    scaled,
    to_number,
    unnamed_instrument,
    whole,
    whole_above_zero,
)
from warehouse.tables.schema import NOT_TOGETHER

# Batch sizes that the benchmark tries, from the largest down; it reports the first that runs.
TIMM_BATCHES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Samples in an epoch: training images, or SQuAD's questions in pieces of at most 384 tokens.
EPOCHS: Mapping[str, int] = {"cifar100": 50_000, "imagenet": 1_281_167, "squad": 88_524}
_MIB = 2**20
_CARDS = {  # name in the files -> name in conf/device, and MiB that CUDA can use or the card has
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
# The same for tables without memory.
_CLUSTERS = dict.fromkeys(("H100", "DGX-H100"), "H100-SXM5-80GB") | dict.fromkeys(
    ("B200", "DGX-B200"), "B200-SXM-180GB"
)
_ZEUS_GPUS = {"V100": "V100-PCIE-32GB", "P100": "P100-PCIE-16GB", "RTX6000": "Quadro-RTX-6000"}
_IMAGE_PRECISIONS = {"amp": "fp16", "tf32": "tf32", "fp32": "fp32"}
_MS = {"ms": 1.0, "s": 1e3}
_POWER, _EPOCH_TIME = ("average power", "W"), ("time per epoch", "s")
_NO_CODE = "its code, input and optimizer are not in the file"
_ACTIVE = json.dumps(
    {"peak_allocated_mib": "the file has torch's peak active: blocks that wait for a stream count, too"}
)
_PARALLEL = "model, gpu, gpus, tp, pp, micro_batch, global_batch, precision, what_was_measured, value, unit"
NO_SPEED = "no speed beside the other, or alone"
_SHARE_OF_THE_SMALLER = 0.25  # least share of the smaller member's memory that a pair needs beyond the larger's
_GAVEL_BATCH = re.compile(r" ?\(batch size (\d{1,9})\)")
LUCID_PAIRS = "model1, dataset1, batchsize1, amp1, speed1, model2, dataset2, batchsize2, amp2, speed2, gmem"
# Each returns the cells that identify a job that ran alone.
_lucid_job = itemgetter("model", "dataset", "batchsize", "amp")
_gavel_job = itemgetter("table", "gpu", "job_a", "gpus_a")
_zeus_kind = itemgetter("what_was_measured", "unit")  # what a figure is of
_Read = Callable[[Cells, Mapping[Any, Mapping[str, Any]]], Iterator[Columns]]


def _card(name: str) -> Columns:
    known, memory_mib = _CARDS.get(name, (name, None))
    return {"device_name": known, "device_memory_mib": memory_mib}


def _card_of_gpu(row: Cells) -> Columns:
    return _card(row["gpu"])


def _gavel_batch(job: str) -> int | None:
    batch = _GAVEL_BATCH.search(job)
    return int(batch[1]) if batch else None


def _torch_version(row: Cells) -> tuple[str, str | None]:
    """Return the releases of torch and CUDA from a text such as 2.13.0+cu130."""
    torch_version, _, build = row["torch"].partition("+cu")
    return torch_version, f"{build[:-1]}.{build[-1]}" if build.isdigit() else None


def _foundry_step_ms(row: Cells) -> float | None:
    tokens, per_second = above_zero(row["GlobalBatchSize (T)"]), above_zero(row["Throughput (T/s)"])
    return tokens / per_second * 1e3 if tokens and per_second else None


def _contradicts_global_batch(row: Cells, _run: Columns) -> bool:
    sizes = [whole_above_zero(row[name]) for name in ("MicroBatchSize", "GradAccum", "# GPUs")]
    return whole_above_zero(row["GlobalBatchSize"]) != math.prod(size or 0 for size in sizes)


def _gavel_step_ms(row: Cells) -> float | None:
    per_second = above_zero(row["iters_per_s_a"])
    return 1e3 / per_second if per_second else None


def _parallel_step_ms(row: Cells) -> float | None:
    """Return the time of a step; NeMo reports tokens per second and GPU."""
    value, kind, unit = above_zero(row["value"]), row["what_was_measured"], row["unit"]
    if unit == "tokens/s/GPU" and value:
        samples, length, gpus = (above_zero(row[name]) for name in ("global_batch", "seq", "gpus"))
        return samples * length / (value * gpus) * 1e3 if samples and length and gpus else None
    return value * _MS[unit] if value and unit in _MS and "time" in kind else None


def _zeus_batch(row: Cells) -> int | None:
    batch = above_zero(row["batch_per_gpu"])
    return int(batch) if batch and batch >= 1 else None


def _zeus_step_ms(row: Cells) -> float | None:
    """Return the time of a step: an epoch's time over its steps, if the size of the data set is known."""
    samples, batch, value = EPOCHS.get(row["dataset"]), _zeus_batch(row), above_zero(row["value"])
    if _zeus_kind(row) != _EPOCH_TIME or None in (samples, batch, value):
        return None
    return (value or 0.0) / math.ceil((samples or 0) / (batch or 1)) * 1e3


def _zeus_why(row: Cells) -> str:
    unknown = _zeus_kind(row) == _EPOCH_TIME and row["dataset"] not in EPOCHS
    more = ", and the steps of an epoch are not known: its time is in origin alone" * unknown
    return f"no family has {row['model']} on {row['dataset']}{more}"


def _image_config(model: str, batch: int, precision: str, layout: str, image_size: int | None) -> Columns:
    network = {"family": "timm", "model": model, "image_size": image_size, "batch_size": batch}
    how = {"precision": precision, "optimizer": "momentum", "channels_last": layout == "nhwc", "cudnn_benchmark": True}
    return {"family": "timm", **config_columns({**TRAINING, **network, **how})}


def _timm_benchmark(row: Cells) -> Iterator[Columns]:
    """Yield the run, and the next larger batch, which the benchmark tried before and could not run.

    Together they bracket the memory: within the card at one batch, beyond it at the next.
    """
    batch, step_ms = whole_above_zero(row["batch"]), above_zero(row["step_ms"])
    side = whole_above_zero(row["img_size"])
    card = {**_card(row["gpu"]), "torch_version": row["torch"], "cuda_version": row["cuda"]}
    million = above_zero(row["param_m"])
    parameters = None if million is None else round(million * 1e6)
    is_amp = row["precision"].lower().startswith("amp")
    if batch is None or step_ms is None or side is None or not row["model"] or not is_amp:
        missing = "no model, batch, image size or step time under AMP"
        yield {"family": "timm", "status": "invalid", "error": missing, **card}
        return
    config = _image_config(row["model"], batch, "fp16", row["layout"], side)
    yield {**card, **config, "parameters": parameters, "status": "ok", "step_time_ms": step_ms}
    larger = next((size for size in TIMM_BATCHES if size > batch), None)
    if larger is not None and batch in TIMM_BATCHES:
        config = _image_config(row["model"], larger, "fp16", row["layout"], side)
        tried = f"inferred: the benchmark tries this batch before {batch}, and {batch} is the largest that ran"
        yield {**card, **config, "parameters": parameters, "status": "oom", "oom_kind": "device", "error": tried}


def _throughput_step_ms(row: Cells) -> float | None:
    batch, per_second = whole_above_zero(row["batch"]), above_zero(row["throughput"])
    return batch / per_second * 1e3 if batch and per_second else None


def _resnet50(row: Cells) -> Columns:
    batch, precision = whole_above_zero(row["batch"]) or 0, _IMAGE_PRECISIONS[row["precision"].lower()]
    return {"error_type": None, "error": None, **_image_config("resnet50", batch, precision, row["layout"], None)}


_PARALLEL_RULES: tuple[Rule, ...] = (
    (
        lambda row, run: bool(row["micro_batch"]) and not (above_zero(row["micro_batch"]) or 0.5).is_integer(),
        invalid("micro_batch is not a whole number > 0", "step_time_ms"),
    ),
    (is_empty("step_time_ms"), invalid(lambda row: f"no time of a step: {row['what_was_measured']}")),
)


def _parallel(names: str) -> PublishedTable:
    """Return a table of steps on several GPUs: vTrain, and NVIDIA's DGX Cloud, NeMo and Megatron tests.

    `batch_size` stays empty: the time covers all micro-batches on all GPUs, whose sizes are in `origin`.
    """
    return PublishedTable(
        names=f"{_PARALLEL}, {names}",
        why=lambda row: f"{row['model']} on {row['gpus']} GPUs, which no trial config describes",
        device=lambda row: {"device_name": _CLUSTERS.get(row["gpu"], row["gpu"]), "device_memory_mib": None},
        columns={"precision": itemgetter("precision"), "step_time_ms": _parallel_step_ms},
        rules=_PARALLEL_RULES,
    )


TABLES: Mapping[str, PublishedTable] = {
    "timm_benchmark": PublishedTable(
        names="model, gpu, precision, layout, torch, cuda, batch, img_size, step_ms, samples_per_s, param_m",
        read=_timm_benchmark,
    ),
    "litgpt": PublishedTable(
        names="model, method, quantization, precision, optimizer, micro_batch, gpus, gpu, peak_memory_gb, outcome, "
        "memory_kind",
        why=lambda row: (
            f"no family has LitGPT's {row['method']} with quantization {row['quantization']} on "
            f"{row['gpus'] or '?'} GPU(s)"
        ),
        device=_card_of_gpu,
        columns={
            "batch_size": whole("micro_batch"),
            "precision": itemgetter("precision"),
            "optimizer": lower("optimizer"),
            "peak_allocated_mib": scaled("peak_memory_gb", 1e9, _MIB),
        },
        rules=(
            (lambda row, run: row["outcome"].lower() == "oom", lambda row: {"status": "oom", "oom_kind": "device"}),
            (is_empty("peak_allocated_mib"), invalid(lambda row: f"no memory: outcome {row['outcome']}")),
            (lambda row, run: "allocated" not in row["memory_kind"], unnamed_instrument("peak_allocated_mib")),
        ),
    ),
    "torchtune": PublishedTable(
        names="model, method, precision, batch, optimizer, gpu, peak_memory_gib, memory_kind, packed",
        why=lambda row: f"no family has torchtune's recipe of {row['model']}: {row['method']}",
        device=_card_of_gpu,
        columns={
            "batch_size": whole("batch"),
            "precision": itemgetter("precision"),
            "optimizer": itemgetter("optimizer"),
            "peak_allocated_mib": scaled("peak_memory_gib", 1024),
        },
        rules=(
            (is_empty("peak_allocated_mib"), invalid("no memory")),
            (lambda row, run: row["memory_kind"] == "torch peak active", lambda row: {"quality_reasons": _ACTIVE}),
            (lambda row, run: True, unnamed_instrument("peak_allocated_mib")),
        ),
    ),
    "torchtitan": PublishedTable(
        names="setting, technique, gpu, seq, tps_per_gpu, memory_gib, memory_kind, memory_gb_as_printed",
        why=lambda row: "one rank of a job on several GPUs, which no trial config describes",
        device=_card_of_gpu,
        columns={"peak_reserved_mib": scaled("memory_gib", 1024)},
        rules=(
            (
                lambda row, run: run["peak_reserved_mib"] is None and above_zero(row["tps_per_gpu"]) is None,
                invalid("neither memory nor throughput"),
            ),
            (lambda row, run: row["memory_kind"] == "torch max reserved", lambda row: {}),
            (
                lambda row, run: bool(run["peak_reserved_mib"] or row["memory_gb_as_printed"]),
                unnamed_instrument("peak_reserved_mib"),
            ),
        ),
    ),
    "peft": PublishedTable(
        names="model, method, batch, dtype, optimizer, gpu, torch, max_reserved_mib, reserved_avg_mib, "
        "trainable_params, total_params",
        why=lambda row: f"no family has {row['model']} with PEFT's {row['method']}; the longest batch is not published",
        device=_card_of_gpu,
        columns={
            "batch_size": whole("batch"),
            "precision": itemgetter("dtype"),
            "optimizer": lower("optimizer"),
            "parameters": whole("trainable_params"),
            "torch_version": lambda row: _torch_version(row)[0],
            "cuda_version": lambda row: _torch_version(row)[1],
            "peak_reserved_mib": scaled("max_reserved_mib"),
        },
        rules=(
            (is_empty("peak_reserved_mib"), invalid("no memory")),
            (
                lambda row, run: (run["parameters"] or 0) > (whole_above_zero(row["total_params"]) or math.inf),
                doubted("more trainable parameters than parameters"),
            ),
            (
                lambda row, run: (above_zero(row["reserved_avg_mib"]) or 0) > run["peak_reserved_mib"],
                doubted("the mean of the reserved memory is above its maximum"),
            ),
        ),
    ),
    "llm_foundry": PublishedTable(
        names="Model, # GPUs, GPU, MicroBatchSize, GradAccum, GlobalBatchSize, GlobalBatchSize (T), Throughput (T/s), "
        "Precision, NumParams",
        why=lambda row: f"MPT-{row['Model']} sharded over {row['# GPUs']} GPUs, which no trial config describes",
        device=lambda row: _card(row["GPU"]),
        columns={
            "batch_size": whole("MicroBatchSize"),
            "precision": itemgetter("Precision"),
            "parameters": whole("NumParams"),
            "step_time_ms": _foundry_step_ms,
        },
        rules=(
            (is_empty("step_time_ms"), invalid("no throughput")),
            (_contradicts_global_batch, doubted("the global batch is not micro-batch x accumulation x GPUs")),
        ),
    ),
    "deeplearningexamples": PublishedTable(
        names="model, gpu, gpus, precision, batch, seq, layout, throughput",
        why=lambda row: f"no family has {row['model']} in {row['precision']} on {row['gpus']} GPU(s)",
        device=_card_of_gpu,
        columns={
            "batch_size": whole("batch"),
            "precision": lower("precision"),
            "step_time_ms": _throughput_step_ms,
        },
        rules=(
            (is_empty("step_time_ms"), invalid("no batch size or throughput")),
            (
                lambda row, run: (
                    (row["model"], row["gpus"]) == ("resnet50v1.5", "1") and run["precision"] in _IMAGE_PRECISIONS
                ),
                _resnet50,
            ),
        ),
    ),
    "gavel": PublishedTable(
        names="table, gpu, job_a, gpus_a, job_b, gpus_b, iters_per_s_a, iters_per_s_b",
        why=lambda row: f"{row['job_a']} on {row['gpus_a']} GPU(s): {_NO_CODE}",
        device=lambda row: _card(row["gpu"].upper()),
        columns={"batch_size": lambda row: _gavel_batch(row["job_a"]), "step_time_ms": _gavel_step_ms},
        rules=((is_empty("step_time_ms"), invalid("no iterations a second")),),
        is_pair=lambda row: bool(row["job_b"]),
    ),
    "lucid": PublishedTable(
        names="model, dataset, batchsize, amp, speed, gpu_util, gmem_util, gmem",
        why=lambda row: f"{row['model']} on {row['dataset']}: {_NO_CODE}",
        device=lambda row: _card("RTX-3090"),
        columns={
            "batch_size": whole("batchsize"),
            "precision": lambda row: "fp16" if row["amp"] == "1" else "fp32",
            "peak_memory_mib": scaled("gmem"),
            "gpu_util": scaled("gpu_util", over=100),
        },
        rules=(
            (is_empty("peak_memory_mib"), invalid("no memory")),
            (
                lambda row, run: (above_zero(row["gpu_util"]) or 0) > 100,
                invalid(lambda row: f"gpu_util: {above_zero(row['gpu_util']):g} %", "gpu_util"),
            ),
        ),
        pairs=LUCID_PAIRS,
    ),
    "vtrain": _parallel("num_layers, hidden, heads, dp, pipeline_schedule, micro_batches"),
    "dgxc": _parallel("cp, ep, framework, section, release"),
    "nemo": _parallel("seq, cp, ep, container, task, ga"),
    "megatron": _parallel("num_layers, hidden, test_case, environment"),
    "zeus": PublishedTable(  # Zeus (NSDI 2023): a job's power in one row, the time of its epoch in another
        names="model, dataset, gpu, gpus, batch_per_gpu, precision, optimizer, power_limit_w, what_was_measured, "
        "value, unit",
        why=_zeus_why,
        device=lambda row: {"device_name": _ZEUS_GPUS.get(row["gpu"], row["gpu"])},
        columns={
            "batch_size": _zeus_batch,
            "precision": lambda row: row["precision"].split()[0] if row["precision"] else None,
            "optimizer": lower("optimizer"),
            "power_w": lambda row: to_number(row["value"]) if _zeus_kind(row) == _POWER else None,
            "step_time_ms": _zeus_step_ms,
        },
        rules=(
            (
                lambda row, run: (
                    _zeus_kind(row) not in (_POWER, _EPOCH_TIME)
                    or row["gpus"] != "1"
                    or above_zero(row["value"]) is None
                ),
                invalid(
                    lambda row: f"no power or time of one GPU: {row['what_was_measured']}", "power_w", "step_time_ms"
                ),
            ),
        ),
    ),
}


def group_members(
    source: str, pairs: Sequence[tuple[int, Cells]], alone: Sequence[Mapping[str, Any]], device_name: str | None = None
) -> list[ImportedRow]:
    """Return both members of each pair as rows of `collocations` without `run_id`.

    Args:
        source: lucid or gavel.
        pairs: Places and cells of the file's pairs.
        alone: Rows of `runs` of the same source: `run_id`, `origin`, and the figures of solo jobs.
        device_name: GPU model that was measured; replaces the file's.
    """
    read, key_of = _PAIR_SOURCES[source]
    by_job = {key_of(json.loads(run["origin"])): run for run in reversed(alone) if run["status"] != "invalid"}
    other = {} if device_name is None else {"device_name": device_name}
    contents = [canonical_json({"pair": dict(cells), **other}) for _, cells in pairs]
    members = []
    for (_, cells), group_id in zip(pairs, run_ids(source, contents), strict=True):
        origin = canonical_json(dict(cells))
        for number, columns in enumerate(read(cells, by_job)):
            status = "ok" if columns.get("slowdown") else "invalid"
            ids = {"group_id": group_id, "member_row": f"{group_id}-c{number}", "member": number, "group_size": 2}
            common = {"source": "imported", "sharing": "time_slicing", "status": status, "origin": origin}
            members.append({**ids, **common, **columns, **other})
    places = [place for place, _ in pairs for _ in range(2)]
    return list(zip(places, members, strict=True))


def _lucid(cells: Cells, alone: Mapping[Any, Mapping[str, Any]]) -> Iterator[Columns]:
    joint = {
        "joint_memory_mib": above_zero(cells["gmem"]),
        "joint_gpu_util": _share(cells.get("gpu_util")),
        "joint_memory_util": _share(cells.get("gmem_util")),
    }
    jobs = [{name: cells[f"{name}{number}"] for name in ("model", "dataset", "batchsize", "amp")} for number in "12"]
    runs = [alone.get(_lucid_job(job)) for job in jobs]
    sizes = [run["peak_memory_mib"] for run in runs if run is not None]
    joint_mib = joint["joint_memory_mib"]
    # Each member has a separate context.
    known = joint_mib is not None and len(sizes) == 2
    is_apart = known and joint_mib < max(sizes) + _SHARE_OF_THE_SMALLER * min(sizes)
    for number, job, run in zip("12", jobs, runs, strict=True):
        speed, mixed = above_zero(cells[f"speed{number}"]), job["amp"] == "1"
        yield {
            "device_name": "RTX-3090",
            "model": job["model"],
            "name": f"{job['model']} on {job['dataset']}, batch {job['batchsize']}{', AMP' if mixed else ''}",
            "batch_size": whole_above_zero(job["batchsize"]),
            "precision": "fp16" if mixed else "fp32",
            "slowdown": 1 / speed if speed else None,
            **_figures_alone(run),
            **joint,
            "doubt": NOT_TOGETHER if is_apart else None,
        }


def _figures_alone(run: Mapping[str, Any] | None) -> Columns:
    if run is None:
        return {}
    cells = json.loads(run["origin"])
    return {
        "solo_run_id": run["run_id"],
        "solo_memory_mib": run.get("peak_memory_mib"),
        "solo_gpu_util": run.get("gpu_util"),
        "solo_memory_util": _share(cells.get("gmem_util")),
        "solo_step_ms": run.get("step_time_ms"),
    }


def _gavel(cells: Cells, alone: Mapping[Any, Mapping[str, Any]]) -> Iterator[Columns]:
    for letter in ("a", "b"):
        job, devices = cells[f"job_{letter}"], cells[f"gpus_{letter}"]
        per_second = above_zero(cells[f"iters_per_s_{letter}"])  # 0 means no figure
        run = alone.get((cells["table"], cells["gpu"], job, devices))
        shared = 1e3 / per_second if per_second else None
        figures = _figures_alone(run)
        solo = figures.get("solo_step_ms")
        yield {
            "device_name": cells["gpu"].upper(),
            "series": cells["table"].removesuffix(".json"),
            "model": _GAVEL_BATCH.sub("", job),
            "name": job,
            "devices": None if devices == "1" else whole_above_zero(devices),
            "batch_size": _gavel_batch(job),
            **figures,
            "shared_step_ms": shared,
            "slowdown": shared / solo if shared and solo else None,
        }


def _share(text: str | None) -> float | None:
    """Return a percentage as a share; None if it is not between 0 and 100."""
    number = to_number(text)
    return number / 100 if number is not None and 0 <= number <= 100 else None


_PAIR_SOURCES: Mapping[str, tuple[_Read, Callable[[Cells], Any]]] = {
    "lucid": (_lucid, _lucid_job),
    "gavel": (_gavel, _gavel_job),
}


# ---- times of operators, all-reduces and layers: rows of `kernels`
#
# `operator` is an aten name, `nccl::all_reduce`, or `layer::NAME`; `dims` has the sizes by name, and
# `learn.fitting.published_jobs` has the kernels of such a layer.
#
# nccl-tests divides the time of many all-reduces in a row by their number: `timing` is `loop`.
#
# Sailor (SOSP 2025, eth-easl/sailor): layers of a decoder of Megatron-DeepSpeed in fp32, without flash attention,
# forward and backward timed separately. The sizes are those of its profiling script. TF32 is on if the GPU has it,
# except for Llama on the A100-40, whose matrix products stay below the rate of fp32 and above none of TF32's.
#
# Liger (linkedin/Liger-Kernel, benchmark/scripts): operators of plain PyTorch and transformers, medians of triton's
# `do_bench`. Only gated feed-forward layers are read.

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


# NeuSight (arXiv 2407.13853, `neusight/Dataset/collect.py`): each operator runs 25 times on the same inputs under
# `torch.no_grad`, between two CUDA events, and the 5 shortest times are averaged. So a duration holds the launch (some
# 25 us at least) and every kernel of the operator, with a warm L2 cache, in fp32 (TF32 off), forward only. The kernel,
# its grid and its block come from another call under the profiler; if an operator has several kernels, one of them is
# named. `cudnn.benchmark` is on.
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
