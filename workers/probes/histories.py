"""Records allocator histories of twelve jobs, run like trials of the farm, for the comparison block by block.

Start reading at `measure`; `infra.offline.block_comparison` compares each with our trace of the same job.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from workers.probes.children import (
    Measurement,
    ProbeResult,
    Row,
    first_gpu,
    label_requests,
    measure_all,
    recorded_entries,
    recorded_history,
    start_recording,
    trial_step,
)

STEPS = 3
_MOST_BYTES = 2**20  # largest history, packed; beyond it the job is recorded again with fewer steps
_LEAST_STEPS = 2  # the first step allocates the optimizer's state

_TEXTS = {"vocabulary_size": 16000, "sequence_length": 256, "embedding_size": 512, "heads": 8, "feed_forward": 2048}
_CNN = {
    "family": "cnn",
    "image_size": 112,
    "channels": 3,
    "classes": 1000,
    "base_filters": 64,
    "kernel_size": 3,
    "batch_norm": True,
    "batch_size": 32,
}
# Name -> trial config and allocator settings.
JOBS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "cnn_fp32": ({**_CNN, "base_filters": 32, "depth": 4, "topology": "pyramid"}, ""),
    "cnn_bf16_benchmark": (
        {**_CNN, "depth": 6, "topology": "uniform", "precision": "bf16", "cudnn_benchmark": True},
        "",
    ),
    "resnet_fp16_channels_last": (
        {
            **_CNN,
            "depth": 16,
            "topology": "residual",
            "precision": "fp16",
            "channels_last": True,
            "optimizer": "momentum",
        },
        "",
    ),
    "transformer_fp32": (
        {"family": "transformer", **_TEXTS, "depth": 4, "classes": 1000, "dropout": 0.1, "batch_size": 16},
        "",
    ),
    "gpt_flash_bf16": (
        {"family": "gpt", **_TEXTS, "depth": 4, "batch_size": 8, "precision": "bf16", "optimizer": "adamw"},
        "expandable_segments:True",
    ),
    "vit_fp16_checkpointed": (
        {
            "family": "vit",
            "image_size": 224,
            "patch_size": 16,
            "classes": 1000,
            "embedding_size": 384,
            "heads": 6,
            "depth": 6,
            "feed_forward": 1536,
            "batch_size": 32,
            "precision": "fp16",
            "activation_checkpointing": True,
        },
        "",
    ),
    "rnn_lstm": (
        {
            "family": "rnn",
            "vocabulary_size": 10000,
            "sequence_length": 128,
            "embedding_size": 256,
            "hidden_size": 512,
            "depth": 2,
            "cell": "lstm",
            "task": "language_model",
            "batch_size": 32,
        },
        "max_split_size_mb:64",
    ),
    "unet_bf16": (
        {
            "family": "unet",
            "image_size": 128,
            "channels": 3,
            "classes": 10,
            "base_channels": 32,
            "depth": 3,
            "batch_size": 8,
            "precision": "bf16",
        },
        "",
    ),
    "diffusion_tf32": (
        {
            "family": "diffusion",
            "image_size": 32,
            "channels": 3,
            "base_channels": 64,
            "levels": 3,
            "blocks": 1,
            "batch_size": 16,
            "precision": "tf32",
        },
        "roundup_power2_divisions:4",
    ),
    "dlrm_sgd": (
        {
            "family": "dlrm",
            "dense_features": 64,
            "rows": [200000, 50000, 10000, 1000],
            "embedding_size": 64,
            "bag_size": 4,
            "bottom_width": 512,
            "bottom_depth": 2,
            "top_width": 512,
            "top_depth": 2,
            "batch_size": 2048,
            "optimizer": "sgd",
        },
        "",
    ),
    "gnn_gcn": (
        {
            "family": "gnn",
            "nodes": 10000,
            "degree": 10,
            "features": 128,
            "classes": 32,
            "hidden": 128,
            "depth": 3,
            "batch_size": 2,
        },
        "",
    ),
    "moe_bf16": (
        {
            "family": "moe",
            **_TEXTS,
            "feed_forward": 1024,
            "depth": 2,
            "experts": 8,
            "moe_every": 1,
            "batch_size": 8,
            "precision": "bf16",
        },
        "",
    ),
}


def measure(folder: Path, device: str, seconds_left: Callable[[], float]) -> ProbeResult:
    """Record the missing files in FOLDER/histories, one for each of `JOBS`."""
    measurements = [
        Measurement(
            name=name,
            function="workers.probes.histories:record",
            arguments={"config": dict(config), "conf": conf},
            environment={"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {},  # every release from 2.4 on reads this name
        )
        for name, (config, conf) in JOBS.items()
    ]
    return measure_all(folder / "histories", measurements, device, seconds_left, last_row=True)


def record(device_uuid: str, config: Mapping[str, Any], conf: str) -> Iterator[Row]:
    """Yield the history of two steps of a job, then that of three, unless it is too large to send.

    A killed process leaves the shorter history. This process was started with the allocator settings `conf`.

    Known limitations:
        A label belongs to a thread, and autograd uses its own thread for a GPU. Requests of a step without a label
        belong to the backward pass. Only recomputation labels that thread: a module's name after `backward` is
        approximate.
    """
    start_recording()
    import torch

    from featurize.configs.trial import config_from_mapping

    phase = "setup"

    def on_phase(name: str) -> None:
        nonlocal phase
        phase = name
        label_requests(name)

    label_requests(phase)
    device = first_gpu()
    model, step = trial_step(config_from_mapping(config), device, on_phase)
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_pre_hook(lambda *_, name=name: label_requests(f"{phase} {name}"))
    marks = []
    for number in range(STEPS):
        marks.append(len(recorded_entries()))
        label_requests("batch")
        step()
        if number + 1 < _LEAST_STEPS:
            continue
        history = recorded_history()
        if any("where" in entry for entry in history["trace"]):  # the release can label
            for entry in history["trace"][marks[0] :]:
                if entry["action"] == "alloc":
                    entry.setdefault("where", "backward")
        row = {
            "config": dict(config),
            "conf": conf,
            "torch_version": torch.__version__,
            "device_name": torch.cuda.get_device_name(0),
            **history,
            "marks": [*marks, len(history["trace"])],
        }
        if number + 1 == _LEAST_STEPS or len(lzma.compress(json.dumps(row).encode())) <= _MOST_BYTES:
            yield row
