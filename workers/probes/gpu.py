"""Parts that the probes' processes share: readings of memory, training as a trial of the farm does it, histories.

Start reading at `trial_step`. `start_recording` records every request of the allocator from its first on, and
`featurize.memory.replay` replays the result of `recorded_history`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from workers.telemetry.base import WatchTarget
from workers.telemetry.nvml import NvmlSensor

if TYPE_CHECKING:
    import torch

    from featurize.job.training_settings import TrialConfig

_MOST_ENTRIES = 10_000_000


def memory_reading(device_uuid: str) -> dict[str, Any]:
    """Return NVML's `card_mib` and this process's `process_mib` in MiB, with the `reason` where the latter is missing.

    Raises:
        SensorUnavailable: NVML or the GPU cannot be reached.
    """
    sensor = NvmlSensor(WatchTarget(device_uuid=device_uuid, pid=os.getpid()))
    try:
        sensor.sample()  # the first one shows whether MPS runs; from the next on, its clients' list is read
        values = sensor.sample()[0].values
        process_mib = values.get("process_memory_mib")
        reason = None
        if process_mib is None:
            reason = sensor.dropped.get("process_memory_mib", "NVML does not list the process")
        return {"card_mib": values.get("memory_used_mib"), "process_mib": process_mib, "reason": reason}
    finally:
        sensor.close()


def first_gpu() -> torch.device:
    """Return the GPU that the probes measure: the one that this process was started with."""
    import torch

    return torch.device("cuda", 0)


def trial_step(
    config: TrialConfig, device: torch.device, on_phase: Callable[[str], None] | None = None
) -> tuple[torch.nn.Module, Callable[[], None]]:
    """Return a trial's model and its step, built and run as `workers.devices.training.measure_training` does.

    Args:
        config: The trial's.
        device: Device on which it trains.
        on_phase: Is called as `forward`, `backward` and `optimizer` begin.
    """
    import torch

    from featurize.families import get_family, loss_of
    from featurize.training.training_step import TrainingStep

    family = get_family(config.family)
    torch.manual_seed(0)
    with device:
        model = family.build(config)
    torch.manual_seed(0)
    inputs, targets = family.batch(config, torch.device("cpu"))
    step = TrainingStep(model, config, device, loss=loss_of(config), on_phase=on_phase)

    def run() -> None:
        step(tuple(tensor.to(device, non_blocking=True) for tensor in inputs), targets.to(device, non_blocking=True))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return model, run


def start_recording() -> None:
    """Record every request of the GPU's allocator from now on. Call it before the first allocation."""
    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=_MOST_ENTRIES, context=None)


def label_requests(where: str) -> None:
    """Mark this thread's requests from now on with a text, where the release can (2.11 can, 2.8 cannot)."""
    import torch

    if hasattr(torch.cuda.memory, "_set_memory_metadata"):
        torch.cuda.memory._set_memory_metadata(where)


def recorded_entries() -> list[dict[str, Any]]:
    """Return the first GPU's history so far: `action`, `size`, `addr`, `stream`, and `where` of `label_requests`."""
    import torch

    return _plain(torch.cuda.memory._snapshot())


def _plain(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    plain = []
    for entry in snapshot["device_traces"][0]:
        plain_entry = {"action": entry["action"], "size": entry["size"], "stream": entry["stream"]}
        if "addr" in entry:  # an out-of-memory has none
            plain_entry["addr"] = entry["addr"]
        if entry["action"] == "alloc" and entry.get("user_metadata"):
            plain_entry["where"] = entry["user_metadata"]
        plain.append(plain_entry)
    return plain


def recorded_history() -> dict[str, Any]:
    """Return the history with what it must explain: segments, peaks and out-of-memory errors of the first GPU."""
    import torch

    torch.cuda.synchronize()
    snapshot, stats = torch.cuda.memory._snapshot(), torch.cuda.memory_stats()
    segments = [segment for segment in snapshot["segments"] if segment["device"] == 0]
    for segment in segments:
        for block in segment["blocks"]:
            block.pop("frames", None)
            block.pop("history", None)
        segment.pop("frames", None)
    return {
        "trace": _plain(snapshot),
        "segments": segments,
        "total_bytes": torch.cuda.get_device_properties(0).total_memory,
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "ooms": stats["num_ooms"],
    }
