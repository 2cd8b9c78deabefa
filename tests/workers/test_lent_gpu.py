"""An idle H100 that is lent in a container or a virtual machine, where NVML's pids are foreign: runs are trusted."""

import os

import pytest
from recorded_nvml import A100_UUID, FakeGpmNvml

from workers.labels import label_run
from workers.telemetry import nvml as nvml_module
from workers.telemetry.nvml import GpmSensor, NvmlSensor, memory_before
from workers.telemetry.sensors import Sample, WatchTarget
from workers.trial.reports import Observed

MIB = 2**20
S = 1_000_000_000
CARD_MIB, DRIVER_MIB, CONTEXT_MIB, RESERVED_MIB = 81_559, 560, 520, 3_000
NO_PID = 2**32 - 1


class Card:
    """One trial on the card: idle, a context after 0.3 s, its memory from 0.6 s on, gone after `until_s`."""

    def __init__(self, pid=None, used=True):
        """`pid`: under which NVML lists the trial (None: not at all)."""
        self.nvml, self.pid, self.used = FakeGpmNvml(), pid, used
        self.now_ns = S
        self.t0_ns = self.now_ns
        self.answers = self.nvml.answers[0]
        self.answers |= {
            "nvmlDeviceGetClockInfo": {"1": 1980, "2": 2619},
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        }
        self.show()

    def show(self):
        t_s = (self.now_ns - self.t0_ns) / S
        charged = CONTEXT_MIB * (t_s >= 0.3) + RESERVED_MIB * (t_s >= 0.6)
        used = DRIVER_MIB + charged
        self.answers["nvmlDeviceGetMemoryInfo"] = {
            "total": CARD_MIB * MIB,
            "free": (CARD_MIB - used) * MIB,
            "used": used * MIB,
        }
        listed = [{"pid": self.pid, "usedGpuMemory": charged * MIB if self.used else None}]
        self.answers["nvmlDeviceGetComputeRunningProcesses"] = listed if charged and self.pid is not None else []
        busy = min(1.0, max(0.0, t_s - 0.6) / 0.3)  # utilization lags
        self.answers["nvmlDeviceGetUtilizationRates"] = {"gpu": int(98 * busy), "memory": int(40 * busy)}
        self.answers["nvmlDeviceGetTotalEnergyConsumption"] = int(1e9 + 70e3 * t_s + 430e3 * max(0.0, t_s - 0.6))
        self.answers["nvmlDeviceGetPowerUsage"] = int(70e3 + 430e3 * busy)

    def run(self, until_s=3.0, reserved=True):
        """The columns of a run as the worker makes them: warm-up from 0.6 s, the window from 1.5 s."""
        clock = lambda: self.now_ns  # noqa: E731
        samples = [("nvml", sample) for sample in memory_before(self.nvml, A100_UUID, clock_ns=clock)]
        target = WatchTarget(A100_UUID, os.getpid())
        sensors = [NvmlSensor(target, self.nvml, clock_ns=clock), GpmSensor(target, self.nvml, clock_ns=clock)]
        while self.now_ns < self.t0_ns + until_s * S:
            self.now_ns += S // 10
            self.show()
            for sensor in sensors:
                samples += [(sensor.name, sample) for sample in sensor.sample()]
            if reserved and self.now_ns >= self.t0_ns + 0.6 * S:
                samples.append(("torch", Sample(self.now_ns, {"reserved_mib": RESERVED_MIB, "step_time_ms": 20.0})))
        columns, _ = label_run(
            Observed(
                samples=samples,
                values={"peak_reserved_mib": RESERVED_MIB} if reserved else {},
                status="ok" if reserved else "invalid",
                oom_kind=None,
                backend="cuda",
                t0_ns=self.t0_ns,
                warmup_ns=self.t0_ns + 6 * S // 10 if reserved else None,
                window_ns=self.t0_ns + 15 * S // 10 if reserved else None,
                window_end_ns=self.now_ns if reserved else None,
                device_memory_mib=CARD_MIB,
            )
        )
        return columns


@pytest.fixture(params=["of a virtual machine", "of a container"], autouse=True)
def namespace(request, monkeypatch):
    """A virtual machine whose driver is the host's has the initial pid namespace, and yet the pids are foreign."""
    monkeypatch.setattr(nvml_module, "in_initial_pid_namespace", lambda: request.param == "of a virtual machine")


@pytest.mark.parametrize("used", [True, False], ids=["with memory", "without"])
@pytest.mark.parametrize(
    "pid", [None, 0, 1, os.getppid(), 999_999_998, NO_PID], ids=["no", "0", "1", "of_another", "unknown", "none_such"]
)
def test_a_run_is_trusted_and_its_memory_is_the_growth_of_the_devices_where_its_pid_is_not_ours(pid, used):
    columns = Card(pid, used).run()
    assert columns["quality"] == "trusted", columns["quality_reasons"]
    assert columns["peak_memory_mib"] == pytest.approx(CONTEXT_MIB + RESERVED_MIB)
    assert "growth" in columns["quality_summary"]["peak_memory"]
    assert columns["smact"] > 0 and columns["power_w"] == pytest.approx(500.0)


def test_a_run_whose_pid_is_ours_is_trusted_and_its_memory_is_what_nvml_charges():
    columns = Card(os.getpid()).run()
    assert columns["quality"] == "trusted", columns["quality_reasons"]
    assert columns["peak_memory_mib"] == pytest.approx(CONTEXT_MIB + RESERVED_MIB)
    assert "peak_memory" not in columns["quality_summary"]


def test_a_device_whose_memory_does_not_show_the_trial_gives_no_label():
    card = Card(None)
    card.show = lambda: None
    assert card.run()["peak_memory_mib"] is None
    assert Card(None).run(reserved=False)["peak_memory_mib"] is None, "the trial never reached the device"
