"""A worker: pinned to one slot of a device, it runs one trial after another and turns each into a run.

Start reading at `Worker.run`. Never imports torch. Under Ray it lives in an actor; inline it lives in the dispatcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import platform
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from featurize.trial import mapping_hash
from warehouse.schema import SCHEMA_VERSION
from workers.devices import DeviceChoice, make_device
from workers.environment import host_memory_share_mib
from workers.server_client import ServerLost, TrialExit, TrialServer
from workers.settings import TrialSettings
from workers.telemetry.base import Sample, SensorUnavailable, Target
from workers.telemetry.nvml import open_nvml
from workers.telemetry.sampler import TelemetrySampler, make_sensors, time_weighted_mean, to_table

if TYPE_CHECKING:
    import pyarrow as pa

_TICK_S = 0.2  # how often the deadline and the host memory are looked at while a trial runs
# metric -> sensors that give it, the preferred one first: a window's mean is of one sensor, figures are never mixed.
_MEANS = {
    **dict.fromkeys(("smact", "smocc", "drama"), ("gpm", "dcgm", "simulated")),
    **dict.fromkeys(("gpu_util", "power_w"), ("nvml", "dcgm", "simulated")),
}


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What a worker needs to run a task. `config` and `settings` are JSON, as the queue holds them."""

    job_id: str
    task_index: int
    attempt: int
    config: str
    settings: str
    seed: int

    @property
    def run_id(self) -> str:
        """The same for every attempt: a task that is run twice lands once."""
        return f"{self.job_id}-{self.task_index:06d}"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One row of `runs`, its rows of `telemetry`, and whether the failure was not the trial's own (try again)."""

    run: dict[str, Any]
    telemetry: pa.Table
    retryable: bool = False


@dataclass
class _Observed:
    """What a trial said and what was sampled of it, while it runs."""

    samples: list[tuple[str, Sample]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, Any] | None = None
    finished: bool = False
    warmup_ns: int | None = None
    window_ns: int | None = None
    window_end_ns: int | None = None
    exit: TrialExit = field(default_factory=TrialExit)


class Worker:
    """Runs trials in one slot. Use from one thread. `close` ends its trial server and whatever runs under it."""

    def __init__(
        self,
        choice: DeviceChoice,
        slot_key: str | None,
        name: str,
        environment: dict[str, str] | None = None,
        workers: int = 1,
    ):
        """`slot_key`: the slot's UUID, its index as text, or None for the only one. `environment` is added to the trial
        server's.

        `workers` share this machine: each trial may take its part of the host's memory.
        """
        self.name = name
        self._choice = choice
        self._device = make_device(choice)
        slots = self._device.slots()
        if slot_key is not None:
            slots = [slot for slot in slots if slot_key in (slot.device_uuid, str(slot.index))]
        assert len(slots) == 1, f"slot {slot_key} of {slots}"
        (self._slot,) = slots
        self._workers = workers
        self._nvml = None
        if self._device.sampled and self._slot.device_uuid is not None:
            with contextlib.suppress(SensorUnavailable):
                # Held for the worker's life: NVML counts, and the sensors of each trial then start at once.
                self._nvml = open_nvml()
        self._environment = {**(environment or {}), **self._device.environment(self._slot)}
        self._server: TrialServer | None = None

    def start(self) -> None:
        """Execute the trial server; does not wait for it."""
        if self._server is None:
            self._server = TrialServer(self._environment)

    def ready(self) -> dict[str, Any]:
        """Wait until trials can be forked; the software environment. Raises `ServerLost`."""
        self.start()
        return self._server.hello()

    def run(self, task: TaskSpec) -> RunResult:
        """Run one trial to its end, whatever that is: always a result, never an exception for what the trial did."""
        settings = TrialSettings.from_mapping(json.loads(task.settings))
        observed = _Observed()
        lost: str | None = None
        started_at, t0_ns = datetime.datetime.now(datetime.UTC), time.monotonic_ns()
        try:
            self.ready()
            # Again: a server's start is not on the trial's clock.
            started_at, t0_ns = datetime.datetime.now(datetime.UTC), time.monotonic_ns()
            self._observe(task, settings, t0_ns, observed)
        except ServerLost as error:
            lost = str(error)
            self._discard_server()
        except BaseException:
            self._discard_server()  # a trial may still run on it
            raise
        outcome, retryable = _outcome(observed, settings, lost, host_is_device=self._choice.backend == "cpu")
        run = {
            **self._identity(task),
            **outcome,
            **_labels(observed, t0_ns if self._device.sampled else 0),
            "window_kind": settings.window.kind,
            "telemetry_rows": len(observed.samples),
            "telemetry_missing": json.dumps(observed.missing, sort_keys=True) if observed.missing else None,
            "started_at": started_at,
            "finished_at": datetime.datetime.now(datetime.UTC),
            "wall_s": (time.monotonic_ns() - t0_ns) / 1e9,
        }
        table = to_table(
            task.run_id,
            observed.samples,
            t0_ns if self._device.sampled else 0,
            observed.warmup_ns,
            observed.window_ns,
            observed.window_end_ns,
        )
        return RunResult(run=run, telemetry=table, retryable=retryable)

    def close(self) -> None:
        self._discard_server()
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _discard_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _observe(self, task: TaskSpec, settings: TrialSettings, t0_ns: int, observed: _Observed) -> None:
        oom_kills = _kernel_oom_kills()
        trial = self._server.start(
            {
                "config": json.loads(task.config),
                "settings": settings.to_mapping(),
                "seed": task.seed,
                "device": self._choice.to_mapping(),
                "slot": dataclasses.asdict(self._slot),
            }
        )
        sampler = self._sampler(settings, trial.pid, observed)
        guard = _HostMemoryGuard(trial.pid, settings.host_memory_limit_mib or host_memory_share_mib(self._workers))
        deadline_ns = t0_ns + int(settings.timeout_s * 1e9)
        try:
            for event in self._server.events(trial, deadline_ns, _TICK_S):
                if event is None:
                    trial.kill_reason = trial.kill_reason or guard.exceeded()
                elif isinstance(event, TrialExit):
                    observed.exit = event
                    if event.signal == signal.SIGKILL and _kernel_oom_kills() > oom_kills:
                        observed.exit.killed_for = observed.exit.killed_for or "the kernel's out-of-memory killer"
                else:
                    _take(event, observed)
                    if event["event"] in ("result", "failed"):
                        self._stop(sampler, observed)  # its last sample still sees the trial's memory
                        self._server.acknowledge(trial)
        finally:
            self._stop(sampler, observed)
            trial.channel.close()

    def _sampler(self, settings: TrialSettings, pid: int, observed: _Observed) -> TelemetrySampler:
        sensors, observed.missing = [], {}
        if self._device.sampled:
            sensors, observed.missing = make_sensors(settings.telemetry, self._slot.device_uuid)
        sampler = TelemetrySampler(sensors, settings.telemetry.period_s)
        sampler.start(Target(self._slot.device_uuid, pid))
        return sampler

    def _stop(self, sampler: TelemetrySampler, observed: _Observed) -> None:
        observed.samples += sampler.stop()
        observed.missing |= sampler.missing
        with_memory = any("process_memory_mib" in sample.values for _, sample in observed.samples)
        if self._slot.device_uuid is not None and self._device.sampled and not with_memory:
            observed.missing.setdefault(
                "nvml.process_memory_mib",
                "NVML never listed the trial's process; in a container the host's pids are needed (--pid=host)",
            )

    def _identity(self, task: TaskSpec) -> dict[str, Any]:
        config = json.loads(task.config)
        software = dict(self._server.hello()) if self._server is not None else {}
        software.pop("threads", None)
        return {
            **software,
            "run_id": task.run_id,
            "job_id": task.job_id,
            "task_index": task.task_index,
            "attempt": task.attempt,
            "family": config["family"],
            "config": task.config,
            "config_hash": mapping_hash(config),
            "source": self._device.source,
            "device_name": self._slot.device_name,
            "device_uuid": self._slot.device_uuid,
            "device_memory_mib": self._slot.device_memory_mib,
            "driver_version": self._slot.driver_version,
            "node": platform.node(),
            "worker": self.name,
            "schema_version": SCHEMA_VERSION,
            "batch_size": config["batch_size"],
            "precision": config["precision"],
            "optimizer": config["optimizer"],
        }


def _take(event: dict[str, Any], observed: _Observed) -> None:
    """Fold one event of the trial into what is known of it."""
    match event["event"]:
        case "built":
            observed.values["parameters"] = event["parameters"]
        case "environment":
            observed.values["cudnn_version"] = event["cudnn_version"]
        case "warmup":
            observed.warmup_ns = event["t_ns"]
        case "window":
            observed.window_ns = event["t_ns"]
        case "step":
            observed.samples.append(("torch", Sample(event["t_ns"], event["values"])))
        case "sample":
            observed.samples.append((event["sensor"], Sample(event["t_ns"], event["values"])))
        case "result":
            observed.finished = True
            observed.window_end_ns = event["window_end_ns"]
            observed.values |= {"window_ended": event["window_ended"], **event["values"]}
        case "failed":
            observed.failure = event
            observed.values |= event["values"]


def _outcome(
    observed: _Observed, settings: TrialSettings, lost: str | None, host_is_device: bool
) -> tuple[dict[str, Any], bool]:
    """(status, oom_kind, error_type, error) of a run, and whether another attempt may end otherwise."""

    def outcome(status, oom_kind=None, error_type=None, error=None, retryable=False):
        tail = observed.exit.log_tail
        text = f"{error}\n--- the trial's output ends:\n{tail}" if error and tail and tail not in error else error
        return {"status": status, "oom_kind": oom_kind, "error_type": error_type, "error": text}, retryable

    ended = observed.exit
    if observed.finished:
        return outcome("ok")
    if observed.failure is not None:
        failure = observed.failure
        return outcome(
            failure["status"], failure["oom_kind"], failure["error_type"], failure["error"], failure["device_fault"]
        )
    if lost is not None:
        return outcome("crashed", error_type="ServerLost", error=lost, retryable=True)
    if ended.killed_for is not None:
        kind = "device" if host_is_device else "host"
        return outcome("oom", kind, "HostOutOfMemory", f"killed: {ended.killed_for}")
    if ended.timed_out:
        return outcome(
            "timeout", error_type="Timeout", error=f"not done after trial.timeout_s={settings.timeout_s:g} s"
        )
    if ended.signal == signal.SIGKILL:
        return outcome("crashed", error_type="SIGKILL", error="the trial was killed from outside", retryable=True)
    if ended.signal is not None:
        name = signal.Signals(ended.signal).name
        return outcome("crashed", error_type=name, error=f"the trial died of {name}")
    return outcome("crashed", error_type="Exit", error=f"the trial exited with code {ended.code} and no result")


def _labels(observed: _Observed, t0_ns: int) -> dict[str, Any]:
    """Labels and times of a run: sampled figures over the window, then what the trial itself reported."""
    labels: dict[str, Any] = {}
    if observed.warmup_ns is not None and observed.window_ns is not None:
        labels["warmup_s"] = (observed.window_ns - observed.warmup_ns) / 1e9
    if observed.window_ns is not None and observed.window_end_ns is not None:
        start_ns, end_ns = observed.window_ns, observed.window_end_ns
        labels["window_s"] = (end_ns - start_ns) / 1e9
        labels["window_start_ms"] = (start_ns - t0_ns) / 1e6
        labels["window_end_ms"] = (end_ns - t0_ns) / 1e6
        for metric, sensors in _MEANS.items():
            labels[metric] = _first_mean(observed.samples, metric, sensors, start_ns, end_ns)
        labels["energy_j"] = _counter_difference(observed.samples, "energy_j", start_ns, end_ns)
    labels["peak_memory_mib"] = _peak_memory_mib(observed)
    labels["peak_rss_mib"] = _peak(observed.samples, "rss_mib")
    reported = {name: value for name, value in observed.values.items() if value is not None}
    return {**labels, **reported}


def _first_mean(
    samples: list[tuple[str, Sample]], metric: str, sensors: tuple[str, ...], start_ns: int, end_ns: int
) -> float | None:
    """The window's mean from the first of `sensors` that measured it."""
    for sensor in sensors:
        of_sensor = [sample for name, sample in samples if name == sensor]
        mean = time_weighted_mean(of_sensor, metric, start_ns, end_ns)
        if mean is not None:
            return mean
    return None


def _counter_difference(samples: list[tuple[str, Sample]], metric: str, start_ns: int, end_ns: int) -> float | None:
    """How much a monotonic counter grew over the window, scaled from its first to its last reading inside it."""
    readings = [
        (sample.t_ns, sample.values[metric])
        for name, sample in samples
        if name in ("nvml", "simulated") and metric in sample.values and start_ns <= sample.t_ns <= end_ns
    ]
    if len(readings) < 2 or readings[-1][0] == readings[0][0]:
        return None
    (first_ns, first), (last_ns, last) = readings[0], readings[-1]
    return (last - first) * (end_ns - start_ns) / (last_ns - first_ns)


def _peak_memory_mib(observed: _Observed) -> float | None:
    """NVML's highest charge to the trial's processes, or what it must have been between two samples: the allocator's
    own peak plus what lies outside the allocator (context, libraries), as last seen."""
    sampled = _peak(observed.samples, "process_memory_mib")
    reserved_peak = observed.values.get("peak_reserved_mib")
    charged = [s.values["process_memory_mib"] for _, s in observed.samples if "process_memory_mib" in s.values]
    reserved = [s.values["reserved_mib"] for _, s in observed.samples if "reserved_mib" in s.values]
    if sampled is None or reserved_peak is None or not reserved:
        return sampled
    return max(sampled, reserved_peak + max(0.0, charged[-1] - reserved[-1]))


def _peak(samples: list[tuple[str, Sample]], metric: str) -> float | None:
    return max((sample.values[metric] for _, sample in samples if metric in sample.values), default=None)


class _HostMemoryGuard:
    """Kills a trial that takes more host memory than its share, before the kernel kills something else."""

    def __init__(self, pid: int, limit_mib: float):
        import psutil

        self._limit_mib = limit_mib
        self._process = None
        with contextlib.suppress(psutil.Error):
            self._process = psutil.Process(pid)

    def exceeded(self) -> str | None:
        """Why the trial must go, or None."""
        import psutil

        if self._process is None:
            return None
        try:
            tree = [self._process, *self._process.children(recursive=True)]
            resident_mib = sum(process.memory_info().rss for process in tree) / 2**20
        except psutil.Error:
            return None
        if resident_mib <= self._limit_mib:
            return None
        return f"its {resident_mib:.0f} MiB of host memory exceed trial.host_memory_limit_mib={self._limit_mib:.0f}"


def _kernel_oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has taken since boot (0 where it does not say)."""
    try:
        with open("/proc/vmstat") as lines:
            for line in lines:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0
