"""The three ways of measuring that `bench_gpu` compares, each resumable: two of the farm, one as published.

Start reading at `Plan`; `queue_trials` has the farm's own, `run_published` a fresh process for every trial.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.cli.overrides import load_settings
from conf.files.identity import mapping_hash
from conf.files.outputs import json_lines
from farm.queue.jobs import Queue
from farm.queue.queue_values import Job, device_key
from farm.submission.settings import SubmitSettings
from featurize.configs.draws import NO_LIMITS, Limits, sample
from featurize.configs.trial import TrialConfig, canonical_json
from workers.devices import DeviceChoice, make_device
from workers.settings import TrialSettings
from workers.telemetry.base import WatchTarget
from workers.telemetry.sampler import TelemetrySampler, TelemetrySettings, make_sensors

ADAPTIVE, FIXED, PUBLISHED = "adaptive", "fixed", "published"
PROTOCOLS = (ADAPTIVE, FIXED, PUBLISHED)
PUBLISHED_FILE = "bench-published.jsonl"  # in the data folder; a line a trial
_SMALL = Limits(max_parameters=5_000_000, max_memory_mib=400.0)  # of a benchmark on the CPU, which proves only itself
_PUBLISHED_PERIOD_S = 1.0  # of nvidia-smi and dcgmi in the published collection
_LIMIT_S = 75.0  # beyond its window, for any trial: a call that is lent for ten minutes has to see its end
_ROOT = Path(__file__).resolve().parents[2]  # a fresh process must find the project also where it is not installed
# Means are of one sensor, the preferred one first, as the farm's.
_MEANS = {
    **dict.fromkeys(("smact", "smocc", "drama"), ("gpm", "dcgm")),
    **dict.fromkeys(("gpu_util", "power_w"), ("nvml", "dcgm")),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a comparison: round k is the k-th stratified configuration of every family, under every protocol."""

    choice: DeviceChoice
    families: tuple[str, ...]
    n: int
    repeats: int
    seconds: float
    seed: int
    protocols: tuple[str, ...]

    @property
    def key(self) -> str:
        """A key of everything that decides the runs but n and repeats: a larger number adds the difference."""
        of = [device_key(self.choice), sorted(self.families), self.seconds, self.seed]
        return mapping_hash({"plan": of})[:8]

    def settings(self, protocol: str) -> TrialSettings:
        """How a trial is run; the published minute is a fixed window, too."""
        kind = ADAPTIVE if protocol == ADAPTIVE else FIXED
        lengths = [f"window.seconds={self.seconds}"]
        if kind == ADAPTIVE:
            lengths = [f"window.max_seconds={self.seconds}", f"window.min_seconds={min(1.0, self.seconds)}"]
        limit = f"trial.timeout_s={self.seconds + _LIMIT_S}"
        return _submission(self.families[0], f"window={kind}", limit, *lengths).trial_settings

    def config(self, family: str, k: int) -> TrialConfig:
        """The k-th configuration, over the family's whole space; small ones on the CPU."""
        limits = _SMALL if self.choice.backend == "cpu" else NO_LIMITS
        return sample(_submission(family).spaces[0], self.seed, k, "stratified", limits)

    def job_id(self, protocol: str, repeat: int, k: int) -> str:
        return f"bench-{self.key}-{protocol}-{repeat}-{k:03d}"


def _submission(family: str, *overrides: str) -> SubmitSettings:
    return load_settings(SubmitSettings, [f"+arch={family}", "n=1", *overrides])


def queue_trials(plan: Plan, queue: Queue, k: int, protocol: str, families: Sequence[str]) -> None:
    """Queue round k of one of the farm's protocols for some families: every repeat of the adaptive window."""
    every = sorted(plan.families)
    configs = [(every.index(name), canonical_json(plan.config(name, k).to_mapping())) for name in families]
    for repeat in range(plan.repeats if protocol == ADAPTIVE else 1):
        job = Job(
            job_id=plan.job_id(protocol, repeat, k),
            family="all",
            space_json="{}",
            n=len(every),
            seed=plan.seed,
            policy="stratified",
            settings_json=canonical_json(plan.settings(protocol).to_mapping()),
            device=device_key(plan.choice),
            submitted_at=time.time(),
        )
        queue.submit(job, configs, time.time())


def published_trials(folder: Path) -> list[dict]:
    """Return the trials that were measured the published way, of every plan."""
    return json_lines(folder / PUBLISHED_FILE)


def run_published(plan: Plan, folder: Path, k: int, family: str) -> None:
    """Round k of one family in a fresh process, unless that is done."""
    own = (plan.key, family, k)
    if any((trial["key"], trial["family"], trial["k"]) == own for trial in published_trials(folder)):
        return
    trial = {"key": plan.key, "family": family, "k": k, **_published_trial(plan, plan.config(family, k))}
    path = folder / PUBLISHED_FILE
    torn = path.exists() and not path.read_bytes().endswith(b"\n")  # by a kill: the next line begins anew
    with open(path, "a") as file:
        file.write(("\n" if torn else "") + json.dumps(trial, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _published_trial(plan: Plan, config: TrialConfig) -> dict:
    """One configuration in a process of its own for one window, sampled once a second from its start to its end.

    Labels as the published pipeline makes them: the largest memory in use on the device, and means over the process's
    whole life without the samples that are 0.
    """
    (slot, *_) = make_device(plan.choice).slots()
    environment = {**os.environ, **make_device(plan.choice).environment(slot)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable,
        str(Path(__file__).with_name("fresh_process.py")),
        canonical_json(config.to_mapping()),
        canonical_json(plan.settings(PUBLISHED).to_mapping()),
        plan.choice.backend,
    ]
    began = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        try:
            settings = TelemetrySettings(period_s=_PUBLISHED_PERIOD_S)
            sensors, _ = make_sensors(settings, WatchTarget(slot.device_uuid, child.pid))
            sampler = TelemetrySampler(sensors, _PUBLISHED_PERIOD_S)
            sampler.start()
            child_output, _ = child.communicate(timeout=plan.seconds + _LIMIT_S)
            status = "ok" if child.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            child_output, status = b"", "timeout"
        finally:
            child.kill()  # which one that has ended does not notice
            child.communicate()
        samples = sampler.stop()
        wall_s = time.monotonic() - began
        errors.seek(0)
        error_text = errors.read().decode(errors="replace").strip()
        # Everything that does not say so counts as a success or a crash there; so it does here.
        if status == "failed":
            status = "oom" if "out of memory" in error_text else "crashed"
    return {
        "status": status,
        "error": error_text.rpartition("\n")[2] if status == "crashed" else None,
        "wall_s": wall_s,
        "window_s": float(child_output.split()[0]) if status == "ok" else None,
        "labels": _published_labels(samples),
    }


def _published_labels(samples: Sequence[tuple]) -> dict[str, float | None]:
    def readings(metric: str, sensor: str) -> list[float]:
        return [sample.values[metric] for name, sample in samples if name == sensor and metric in sample.values]

    labels = {"peak_memory_mib": max(readings("memory_used_mib", "nvml"), default=None)}
    for metric, sensors in _MEANS.items():
        preferred = next(filter(None, (readings(metric, sensor) for sensor in sensors)), [])
        kept = [value for value in preferred if value]
        labels[metric] = sum(kept) / len(kept) if kept else None
    return labels


def usable_device(backend: str) -> DeviceChoice:
    """The device to measure on: the first GPU, or the CPU. Raises `DeviceUnavailable` where there is none."""
    choice = DeviceChoice(backend=backend, count=1)
    make_device(choice).slots()
    return choice
