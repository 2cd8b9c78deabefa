"""The CPU as a device: trials train on it, and their process is measured. Start reading at `CpuDevice`."""

from __future__ import annotations

import platform
import resource
from typing import TYPE_CHECKING

from conf.children.containment import line_of
from workers.devices import DeviceChoice, Link, Place, Slot, TrialSettings, core_count, host_memory_share_mib

if TYPE_CHECKING:
    from featurize.configs.trial import TrialConfig


class CpuDevice:
    """`count` workers (default 1) that share the cores and the memory evenly.

    `peak_memory_mib` is the process's peak resident set, which includes the runtime, like a GPU process's memory. If a
    trial starts processes and their sampled memory together (`workers.telemetry.process`) peaks higher, that peak
    counts. A CPU has no SMs: `smact`, `smocc` and `drama` stay NULL.
    """

    backend = "cpu"
    source = "measured"
    sampled = True
    prepares = False  # preparing would disturb the measured cores

    def __init__(self, choice: DeviceChoice):
        self.choice = choice
        self.count = choice.count or 1

    def slots(self) -> tuple[Slot, ...]:
        name = line_of("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
        return tuple(
            Slot(index=i, device_name=name, device_uuid=None, device_memory_mib=self._limit_mib())
            for i in range(self.count)
        )

    def environment(self, *slots: Slot) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""}

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

        ranks = 1 if place is None else place.ranks  # they share the worker's part of cores and memory
        torch.set_num_threads(max(1, core_count() // (self.count * ranks)))
        # Trials of a group compete for the cores, as for a GPU; each has an equal part of the memory.
        sharers = ranks if link.together is None else link.together.size
        limit_bytes = int(self._limit_mib() / sharers * 2**20)
        # Of private memory (Linux): an excess raises before the OOM killer acts.
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        measure_training(config, CpuMeter, settings, seed, link, place)

    def _limit_mib(self) -> float:
        if self.choice.memory_limit_mib is not None:
            return self.choice.memory_limit_mib
        return host_memory_share_mib(self.count)


class CpuMeter:
    """Reads the process's resident set. Operators on the CPU are synchronous, so it never waits."""

    def __init__(self) -> None:
        import psutil
        import torch

        self.device = torch.device("cpu")
        self._process = psutil.Process()
        self._peak_mib = 0.0

    def synchronize(self) -> None:
        pass

    def memory(self) -> dict[str, float]:
        """Return the resident set in MiB as `reserved_mib`, and its peak by the kernel."""
        rss_mib = self._process.memory_info().rss / 2**20
        # The kernel's high-water mark includes peaks between two readings.
        peak_kib = int((line_of("/proc/self/status", "VmHWM") or "0").split()[0])
        self._peak_mib = max(self._peak_mib, rss_mib, peak_kib / 1024)
        return {"reserved_mib": rss_mib, "peak_memory_mib": self._peak_mib}
