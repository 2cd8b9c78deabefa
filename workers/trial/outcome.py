"""Collects a trial's reports and samples while it runs, and derives its status from how it ended.

Start reading at `outcome_of`.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from conf.plain_text import OUTPUT_STARTS
from workers.settings import TrialSettings
from workers.telemetry.base import Sample
from workers.trial.failure import is_device_fault
from workers.trial.reports import (
    BrokenReport,
    Built,
    DeviceOpened,
    Failure,
    KernelsSeen,
    Profiled,
    RankEnded,
    RankResult,
    Reading,
    Report,
    TrialResult,
    Warm,
    WarmupBegun,
    WindowBegun,
)
from workers.trial.safe_text import safe_text
from workers.trial.server_client import TrialExit


@dataclass
class Observed:
    """Reports and samples of one trial. Times are of `time.monotonic_ns`, or virtual ones that begin at 0.

    backend     cuda, cpu or simulated
    t0_ns       when the trial began
    period_s    of the sampling
    samples     as the sensors gave them
    values      what the trial itself reported: column -> figure
    shared      other trials of its group were on the device: what that shows is not this trial's alone
    oom_kills   by the kernel since boot, before the trial was started
    status, oom_kind, clock_drift_s: known once it has ended; the last is by how much the wall clock ran ahead of the
                monotonic one
    """

    backend: str = "cuda"
    t0_ns: int = 0
    period_s: float = 0.1
    device_memory_mib: float | None = None
    status: str = "ok"
    oom_kind: str | None = None
    clock_drift_s: float = 0.0
    samples: list[tuple[str, Sample]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    half_widths: dict[str, float] = field(default_factory=dict)  # label -> of its 95 % confidence interval
    kernels: list[dict[str, Any]] = field(default_factory=list)  # rows of `kernels`
    profiled: Profiled | None = None
    rank_values: dict[int, dict[str, Any]] = field(default_factory=dict)  # labels that each rank reported
    rank_ended: RankEnded | None = None
    failure: Failure | None = None
    broken: BrokenReport | None = None
    finished: bool = False
    prepared: bool = False
    shared: bool = False
    oom_kills: int = 0
    warm: bool = False  # it waits until its window may open
    warmup_ns: int | None = None
    window_ns: int | None = None
    window_end_ns: int | None = None
    exit: TrialExit = field(default_factory=TrialExit)


def startup_s(observed: Observed, t0_ns: int | None) -> float | None:
    """Return the seconds from the task's start to its first step; None in virtual time, or without a step."""
    if t0_ns is None or observed.warmup_ns is None:
        return None
    return (observed.warmup_ns - t0_ns) / 1e9


def take(report: Report, observed: Observed) -> None:
    """Record one report of the trial."""
    match report:
        case Built(parameters):
            observed.values["parameters"] = parameters
        case DeviceOpened(cudnn_version):
            observed.values["cudnn_version"] = cudnn_version
        case WarmupBegun(t_ns):
            observed.warmup_ns = t_ns
        case Warm():
            observed.warm = True
        case WindowBegun(t_ns):
            observed.window_ns = t_ns
        case Reading(sensor, t_ns, values, rank):
            observed.samples.append((sensor, Sample(t_ns, values, rank=rank)))
        case RankResult(rank, values):
            observed.rank_values[rank] = values
        case RankEnded():
            observed.rank_ended = report
        case TrialResult():
            observed.finished = True
            observed.window_end_ns = report.window_end_ns
            observed.half_widths |= report.half_widths
            observed.values |= {"window_ended": report.window_ended, **report.values}
        case KernelsSeen(rows):
            observed.kernels += rows
        case Profiled():
            observed.profiled = report
        case Failure():
            observed.failure = report
            observed.values |= report.values
            if report.rank is not None:
                observed.rank_values[report.rank] = report.values
        case BrokenReport():
            observed.broken = report


def kernels_missing(observed: Observed) -> str | None:
    """Return why a finished trial that was to report its kernels has none; None if it has."""
    if observed.profiled is not None:
        return observed.profiled.problem
    if observed.broken is not None:
        return f"the trial reported {observed.broken.reason}"
    ended = observed.exit
    if ended.signal is None and ended.code is None:
        return f"the trial was killed before it had reported them: {ended.killed_for or 'it was not done in time'}"
    how = signal_name(ended.signal) if ended.signal is not None else f"code {ended.code}"
    return f"the trial's process ended with {how} before it had reported them"


def failed_rank(observed: Observed) -> int | None:
    """Return the rank that ended the trial; None if none did, and of a trial that runs alone."""
    if observed.rank_ended is not None:
        return observed.rank_ended.rank
    return None if observed.failure is None else observed.failure.rank


def lost_rank_to_kill(observed: Observed) -> bool:
    """Return whether the trial ended because one of its ranks was sent SIGKILL."""
    return observed.rank_ended is not None and observed.rank_ended.signal == signal.SIGKILL


def kernel_oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has killed since boot (0 if not reported)."""
    try:
        with open("/proc/vmstat") as lines:
            for line in lines:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0


def outcome_of(
    observed: Observed, settings: TrialSettings, lost: str | None, backend: str, ranks: int = 1
) -> tuple[dict[str, Any], bool]:
    """Return (status, oom_kind, error_type, error) of a run, and whether another attempt may end differently.

    `backend` is the device's; a trial's claims about a device that it did not have are ignored. Of `ranks` processes
    the error names the one that ended the trial.
    """
    rank = failed_rank(observed)
    who, prefix = ("the trial", "") if rank is None else (f"rank {rank} of {ranks}", f"rank {rank} of {ranks}: ")

    def outcome(
        status: str,
        oom_kind: str | None = None,
        error_type: str | None = None,
        error: str | None = None,
        retryable: bool = False,
    ) -> tuple[dict[str, Any], bool]:
        text, output = None if error is None else safe_text(error), observed.exit.output
        if text is not None and output and output not in text:
            text = f"{text}{OUTPUT_STARTS}\n{output}"
        return {"status": status, "oom_kind": oom_kind, "error_type": error_type, "error": text}, retryable

    ended = observed.exit
    if observed.finished:
        return outcome("ok")
    if observed.failure is not None:
        failure = observed.failure
        faulty = failure.device_fault and is_device_fault(backend, failure.error_type, failure.error)
        return outcome(failure.status, failure.oom_kind, failure.error_type, prefix + failure.error, faulty)
    if observed.broken is not None:
        return outcome("crashed", error_type="BrokenReport", error=f"the trial reported {observed.broken.reason}")
    if lost is not None:
        return outcome("crashed", error_type="ServerLost", error=lost, retryable=True)
    if ended.killed_for is not None:
        kind = "device" if backend == "cpu" else "host"
        return outcome("oom", kind, "HostOutOfMemory", f"{prefix}killed: {ended.killed_for}")
    if ended.timed_out:
        return outcome(
            "timeout", error_type="Timeout", error=f"not done after trial.timeout_s={settings.timeout_s:g} s"
        )
    code, number = ended.code, ended.signal
    if observed.rank_ended is not None:
        code, number = observed.rank_ended.code, observed.rank_ended.signal
    if number == signal.SIGKILL:
        return outcome("crashed", error_type="SIGKILL", error=f"{who} was killed from outside", retryable=True)
    if number is not None:
        name = signal_name(number)
        return outcome("crashed", error_type=name, error=f"{who} died of {name}")
    return outcome("crashed", error_type="Exit", error=f"{who} exited with code {code} and no result")


def signal_name(number: int) -> str:
    """Return a signal's name, as `SIGSEGV`; `SIG40` for one without a name, as real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"
