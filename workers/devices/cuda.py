"""A real NVIDIA GPU: trials train on it, NVML and DCGM measure it. Start reading at `CudaDevice`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conf.errors import UsageError
from workers.devices import DeviceChoice, DeviceUnavailable, Link, Place, Slot

if TYPE_CHECKING:
    import torch

    from featurize.configs.trial import TrialConfig
    from workers.settings import TrialSettings


class CudaDevice:
    """GPUs by UUID, without display adapters; one trial at a time on each."""

    backend = "cuda"
    source = "measured"
    sampled = True
    prepares = True

    def __init__(self, choice: DeviceChoice):
        self.choice = choice

    def slots(self) -> tuple[Slot, ...]:
        """Return the usable GPUs, at most `count`. Raises `DeviceUnavailable` without driver, GPU or CUDA build."""
        from workers.devices.discovery import discover_gpus, torch_cuda_build

        discovery = discover_gpus()
        usable = [gpu for gpu in discovery.gpus if gpu.excluded_reason is None][: self.choice.count]
        if not usable:
            excluded = "; ".join(f"{gpu.name}: {gpu.excluded_reason}" for gpu in discovery.gpus)
            raise DeviceUnavailable(discovery.reason or excluded or "NVML sees no GPU")
        if torch_cuda_build() is None:
            raise DeviceUnavailable("the installed torch is a CPU build; the README says how to get the CUDA build")
        return tuple(
            Slot(
                index=index,
                device_name=gpu.name,
                device_uuid=gpu.uuid,
                device_memory_mib=gpu.memory_mib,
                driver_version=discovery.driver_version,
                memory_fraction=self.choice.memory_fraction,
                mig_profile=gpu.mig_profile,
                mps=gpu.mps,
            )
            for index, gpu in enumerate(usable)
        )

    def environment(self, *slots: Slot) -> dict[str, str]:
        """Return the variables that select GPUs by UUID; NVML (PCI bus order) and CUDA (fastest first) differ."""
        uuids = ",".join(slot.device_uuid or "" for slot in slots)
        return {"CUDA_VISIBLE_DEVICES": uuids, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def measure(
        self,
        config: TrialConfig,
        slot: Slot,
        settings: TrialSettings,
        seed: int,
        link: Link,
        place: Place | None = None,
    ) -> None:
        import torch

        from workers.devices.training import measure_training

        if place is not None and slot.mig_profile is not None:
            raise UsageError(f"ranks cannot talk between MIG slices ({slot.mig_profile}); run the trial on whole GPUs")
        number = 0 if place is None else place.rank  # index among the GPUs that the trial's server was pinned to

        def open_meter() -> CudaMeter:
            torch.cuda.init()
            if place is not None:
                torch.cuda.set_device(number)
            if slot.memory_fraction is not None:
                # Of the whole card, for the caching allocator alone: context and libraries lie outside it.
                torch.cuda.set_per_process_memory_fraction(slot.memory_fraction, number)
            cudnn = torch.backends.cudnn.version()
            link.report("environment", cudnn_version=None if cudnn is None else str(cudnn))
            torch.cuda.reset_peak_memory_stats()
            torch.set_num_threads(threads)
            return CudaMeter(torch.device("cuda", number))

        threads = torch.get_num_threads()
        if link.ahead:  # one core at most: another trial is being measured
            torch.set_num_threads(1)
        measure_training(config, open_meter, settings, seed, link, place)


class CudaMeter:
    """Reads the caching allocator and waits for the stream (torch.cuda.memory_stats)."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self._cuda = torch.cuda

    def synchronize(self) -> None:
        self._cuda.synchronize(self.device)

    def memory(self) -> dict[str, float]:
        """Return allocated_mib and reserved_mib now, and their peaks since the process started."""
        stats = self._cuda.memory_stats_as_nested_dict(self.device)  # `memory_stats` would flatten and sort all of it
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return {
            "allocated_mib": allocated["current"] / 2**20,
            "reserved_mib": reserved["current"] / 2**20,
            "peak_allocated_mib": allocated["peak"] / 2**20,
            "peak_reserved_mib": reserved["peak"] / 2**20,
        }
