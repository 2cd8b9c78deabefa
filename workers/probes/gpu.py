"""Parts that the probes' processes share: readings of its memory, and training as a trial of the farm does it.

Start reading at `trial_step`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workers.telemetry.base import WatchTarget
from workers.telemetry.nvml import NvmlSensor

if TYPE_CHECKING:
    import torch

    from featurize.job.trial_config import TrialConfig


def memory_reading(device_uuid: str) -> dict[str, Any]:
    """Return NVML's `card_mib` and this process's `process_mib` in MiB, with the `reason` where the latter is missing.

    Raises:
        SensorUnavailable: NVML or the GPU cannot be reached.
    """
    sensor = NvmlSensor()
    try:
        sensor.watch(WatchTarget(device_uuid=device_uuid, pid=os.getpid()))
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
        device: On which it trains.
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
