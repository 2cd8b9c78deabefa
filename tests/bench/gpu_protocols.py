"""The three ways of measuring that `bench_gpu` compares, each resumable: two of the farm, one as published.

Start reading at `Plan`; `queue_trials` has the farm's own, `run_published` a fresh process for every trial.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.cli.command_line import load_settings
from conf.files.identity import mapping_hash
from conf.files.outputs import json_lines
from farm.queue.jobs import Job, Queue, device_key
from farm.submission.submitting import SubmitSettings
from featurize.configs.space import NO_LIMITS, Limits, sample
from featurize.configs.trial import TrialConfig, canonical_json
from workers.devices import DeviceChoice, TrialSettings, make_device

ADAPTIVE, FIXED, PUBLISHED = "adaptive", "fixed", "published"
PROTOCOLS = (ADAPTIVE, FIXED, PUBLISHED)
PUBLISHED_FILE = "bench-published.jsonl"  # in the data folder; a line a trial
_SMALL = Limits(max_parameters=5_000_000, max_memory_mib=400.0)  # of a benchmark on the CPU, which proves only itself
_LIMIT_S = 75.0  # beyond its window, for any trial: a call that is lent for ten minutes has to see its end
_ROOT = Path(__file__).resolve().parents[2]  # a fresh process must find the project also where it is not installed


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
        queue.submit(job, configs)


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
    """One configuration in a process of its own for one window. What fails without saying so counts as a crash."""
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
    trial = {"status": "timeout", "error": None, "window_s": None}
    began = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        limit_s = plan.seconds + _LIMIT_S
        child = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=limit_s
        )
        if child.returncode == 0:
            trial |= {"status": "ok", "window_s": float(child.stdout.split()[0])}
        elif "out of memory" in child.stderr:
            trial["status"] = "oom"
        else:
            trial |= {"status": "crashed", "error": child.stderr.strip().rpartition("\n")[2]}
    return {**trial, "wall_s": time.monotonic() - began}


def usable_device(backend: str) -> DeviceChoice:
    """The device to measure on: the first GPU, or the CPU. Raises `DeviceUnavailable` where there is none."""
    choice = DeviceChoice(backend=backend, count=1)
    make_device(choice).slots()
    return choice
