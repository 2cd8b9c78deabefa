"""What a worker learns of a trial while it runs, and the status that follows from how it ended.

Start reading at `outcome_of`.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from workers.server_client import TrialExit
from workers.settings import TrialSettings
from workers.telemetry.base import Sample


@dataclass
class Observed:
    """What a trial said and what was sampled of it, while it runs."""

    samples: list[tuple[str, Sample]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    half_widths: dict[str, float] = field(default_factory=dict)  # label -> of its 95 % confidence interval
    failure: dict[str, Any] | None = None
    finished: bool = False
    prepared: bool = False
    warmup_ns: int | None = None
    window_ns: int | None = None
    window_end_ns: int | None = None
    exit: TrialExit = field(default_factory=TrialExit)


def startup_s(observed: Observed, t0_ns: int | None) -> float | None:
    """From the task's start to its first step; None in virtual time, and where there never was one."""
    if t0_ns is None or observed.warmup_ns is None:
        return None
    return (observed.warmup_ns - t0_ns) / 1e9


def take(event: dict[str, Any], observed: Observed) -> None:
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
            values = dict(event["values"])
            observed.half_widths |= values.pop("half_widths", {})
            observed.values |= {"window_ended": event["window_ended"], **values}
        case "failed":
            observed.failure = event
            observed.values |= event["values"]


def outcome_of(
    observed: Observed, settings: TrialSettings, lost: str | None, host_is_device: bool
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
