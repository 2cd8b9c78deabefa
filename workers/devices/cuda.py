"""A real NVIDIA GPU: trials train on it, NVML and DCGM watch it. Start reading at `CudaDevice`."""

from __future__ import annotations

from workers.devices.base import DeviceChoice, DeviceUnavailable, Report, Slot


class CudaDevice:
    """GPUs by UUID, without the display's; one trial at a time on each."""

    backend = "cuda"
    source = "measured"
    sampled = True

    def __init__(self, choice: DeviceChoice):
        self.choice = choice

    def slots(self) -> tuple[Slot, ...]:
        """Every usable GPU, at most `count`. Raises `DeviceUnavailable`: no driver, no GPU, no torch with CUDA."""
        from workers.devices.discovery import discover_gpus, torch_cuda_build

        found = discover_gpus()
        usable = [gpu for gpu in found.gpus if gpu.excluded_reason is None][: self.choice.count]
        if not usable:
            excluded = "; ".join(f"{gpu.name}: {gpu.excluded_reason}" for gpu in found.gpus)
            raise DeviceUnavailable(found.reason or excluded or "NVML sees no GPU")
        if torch_cuda_build() is None:
            raise DeviceUnavailable("the installed torch is a CPU build; the README says how to get the CUDA build")
        return tuple(
            Slot(
                index=index,
                device_name=gpu.name,
                device_uuid=gpu.uuid,
                device_memory_mib=gpu.memory_mib,
                driver_version=found.driver_version,
            )
            for index, gpu in enumerate(usable)
        )

    def environment(self, slot: Slot) -> dict[str, str]:
        """By UUID: indices differ between NVML (PCI bus order) and CUDA (fastest first)."""
        return {"CUDA_VISIBLE_DEVICES": slot.device_uuid or "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def measure(self, config, slot: Slot, settings, seed: int, report: Report) -> None:
        import torch

        from workers.devices.training import measure_training

        device = torch.device("cuda", 0)
        torch.cuda.init()
        cudnn = torch.backends.cudnn.version()
        report("environment", cudnn_version=None if cudnn is None else str(cudnn))
        torch.cuda.reset_peak_memory_stats()
        measure_training(config, CudaMeter(device), settings, seed, report)


class CudaMeter:
    """Reads the caching allocator and waits for the stream (torch.cuda.memory_stats)."""

    def __init__(self, device):
        import torch

        self.device = device
        self._cuda = torch.cuda

    def synchronize(self) -> None:
        self._cuda.synchronize(self.device)

    def memory(self) -> dict[str, float]:
        """allocated_mib, reserved_mib now, and their peaks since the process started."""
        stats = self._cuda.memory_stats(self.device)
        return {
            "allocated_mib": stats["allocated_bytes.all.current"] / 2**20,
            "reserved_mib": stats["reserved_bytes.all.current"] / 2**20,
            "peak_allocated_mib": stats["allocated_bytes.all.peak"] / 2**20,
            "peak_reserved_mib": stats["reserved_bytes.all.peak"] / 2**20,
        }
