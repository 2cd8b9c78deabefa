"""GPU memory of a process outside the allocator: its context, cuBLAS, cuDNN, a training step; lazy and eager.

Start reading at `measure`. `python -m learn.calibrate measured=` reads its `numbers.csv`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from conf.files.outputs import write_file
from conf.units import MIB
from workers.probes.children import (
    Measurement,
    ProbeResult,
    Row,
    first_gpu,
    measure_all,
    measured_in,
    memory_reading,
    trial_step,
)

LOADINGS = ("lazy", "eager")
# Stage -> whether it loads cuDNN. Each runs in its own process.
STAGES = {"context": False, "cublas": False, "cudnn": True, "training": False, "training_cudnn": True}
_TRAINED = {
    False: {
        "family": "transformer",
        "vocabulary_size": 1000,
        "sequence_length": 64,
        "embedding_size": 128,
        "heads": 4,
        "depth": 2,
        "feed_forward": 256,
        "classes": 10,
        "batch_size": 8,
    },
    True: {
        "family": "cnn",
        "image_size": 32,
        "channels": 3,
        "classes": 10,
        "base_filters": 32,
        "depth": 3,
        "batch_norm": True,
        "batch_size": 16,
    },
}
_CSV_COLUMNS = ("kind", "mib", "reserved_mib", "cudnn", "config")  # learn.calibrate.COLUMNS


def measure(folder: Path, device: str, seconds_left: Callable[[], float]) -> ProbeResult:
    """Measure the missing files in FOLDER/contexts, and write FOLDER/numbers.csv and numbers_eager.csv from them."""
    measurements = [Measurement(name="idle", function="workers.probes.contexts:idle")]
    for loading in LOADINGS:
        for stage in STAGES:
            measurements.append(
                Measurement(
                    name=f"{stage} {loading}",
                    function="workers.probes.contexts:stage",
                    arguments={"stage": stage, "module_loading": loading},
                    environment={"CUDA_MODULE_LOADING": loading.upper()},
                )
            )
    result = measure_all(folder / "contexts", measurements, device, seconds_left)
    rows = [row for measured in measured_in(folder / "contexts") for row in measured.rows]
    for loading, name in zip(LOADINGS, ("numbers.csv", "numbers_eager.csv"), strict=True):
        if numbers := _numbers(rows, loading):
            lines = (",".join(map(str, line)) for line in (_CSV_COLUMNS, *numbers))
            write_file(folder / name, ("\n".join(lines) + "\n").encode())
    return result


def idle(device_uuid: str) -> Iterator[Row]:
    """Yield the card's memory in MiB before this process touches it."""
    reading = memory_reading(device_uuid)
    yield {"stage": "idle", "card_before_mib": reading["card_mib"], "card_mib": reading["card_mib"], "cudnn": False}


def stage(device_uuid: str, stage: str, module_loading: str) -> Iterator[Row]:
    """Run one of `STAGES` and yield the memory in MiB. CUDA_MODULE_LOADING must be set before."""
    before_mib = memory_reading(device_uuid)["card_mib"]
    import torch

    device = first_gpu()
    alive = [torch.ones(1, device=device)]
    if stage == "cublas":
        matrix = torch.ones(256, 256, device=device)
        alive.append(matrix @ matrix)
    elif stage == "cudnn":
        alive.append(torch.nn.Conv2d(8, 8, 3, device=device)(torch.ones(8, 8, 32, 32, device=device)))
    elif stage.startswith("training"):
        from featurize.configs.trial import config_from_mapping

        _, step = trial_step(config_from_mapping(_TRAINED[STAGES[stage]]), device)
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    reserved_mib = torch.cuda.memory_reserved() / MIB  # only cuDNN's benchmark may have freed memory
    yield {
        "stage": "training" if stage.startswith("training") else stage,
        "module_loading": os.environ.get("CUDA_MODULE_LOADING", module_loading).lower(),
        "card_before_mib": before_mib,
        "reserved_mib": reserved_mib,
        "allocated_mib": torch.cuda.memory_allocated() / MIB,
        "cudnn": STAGES[stage],
        **memory_reading(device_uuid),
    }


def _numbers(rows: list[Row], loading: str) -> list[tuple[Any, ...]]:
    """Return the CSV lines for one way of loading; empty before it was measured.

    If NVML does not list the process, the card's growth takes its place.
    """
    lines: list[tuple[Any, ...]] = []
    for row in rows:
        is_asked = row.get("module_loading") == loading and row["stage"] in ("context", "training")
        if not is_asked or row["card_mib"] is None:
            continue
        process_mib = row["process_mib"]
        if process_mib is None:
            process_mib = row["card_mib"] - row["card_before_mib"]
        if row["stage"] == "context":  # subtract the allocator's segment for the one tensor
            lines.append(("context", round(process_mib - row["reserved_mib"], 1), "", "", ""))
        else:
            job = (round(row["reserved_mib"], 1), str(row["cudnn"]).lower(), "")
            lines += [("process", round(process_mib, 1), *job), ("card", round(row["card_mib"], 1), *job)]
    idle_mib = [row["card_mib"] for row in rows if row["stage"] == "idle" and row["card_mib"] is not None]
    return [("idle", round(mib, 1), "", "", "") for mib in idle_mib] + lines if lines else []
