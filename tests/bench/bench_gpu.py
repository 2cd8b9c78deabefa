"""`make bench-gpu`: the same trials under the adaptive window, the fixed one, and as published; figures of each.

Start reading at `run`. `python -m tests.bench.bench_gpu families=[cnn,gpt] n=40 seconds=60 repeats=3 minutes=9`: the
same command goes on where it was, in the same data folder, so that it may be done in several short calls.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.cli.command_line import EXIT_USAGE, run as run_command
from conf.cli.settings import Checked, key
from conf.reports.blocks import print_blocks
from farm.dispatch.dispatcher import work
from farm.dispatch.ray_cluster import ClusterSettings
from farm.queue.jobs import Queue
from featurize.families import family_names
from warehouse.files.folder import DataFolder
from workers.devices import DeviceUnavailable

sys.path.insert(0, str(Path(__file__).parent))

import gpu_figures
from gpu_protocols import (
    ADAPTIVE,
    FIXED,
    PROTOCOLS,
    PUBLISHED,
    Plan,
    published_trials,
    queue_trials,
    run_published,
    usable_device,
)


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Checked):
    """The keys."""

    families: tuple[str, ...] = key((), kind="text | list of text", choices=family_names())
    n: int = key(40, kind="int >= 1")
    seconds: float = key(60, kind="number >= 0.1")
    repeats: int = key(3, kind="int >= 1")
    protocols: tuple[str, ...] = key(PROTOCOLS, kind="text | list of text", choices=PROTOCOLS)
    device: str = key("cuda", choices=("cuda", "cpu"))
    minutes: float | None = key(None, "default: until it is done", "number >= 0")
    seed: int = key(0, kind="int >= 0")
    data: str = key("data/bench-gpu", kind="new path")
    out: str | None = key(None, kind="new path")


def run(settings: BenchSettings, say: Callable[[str], None] = print) -> dict:
    """Go on with the benchmark until it is done or the time is up; the figures so far. Raises `DeviceUnavailable`."""
    began = time.monotonic()
    plan = Plan(
        choice=usable_device(settings.device),
        families=tuple(settings.families) or family_names(),
        n=settings.n,
        repeats=settings.repeats,
        seconds=settings.seconds,
        seed=settings.seed,
        protocols=tuple(settings.protocols),
    )
    if settings.device == "cpu":
        say("on the CPU: small configurations, no GPU figures; this shows that the benchmark works, and no more")

    def seconds_left() -> float:
        return float("inf") if settings.minutes is None else 60 * settings.minutes - (time.monotonic() - began)

    folder = DataFolder.resolve(settings.data).create()
    with Queue.open(folder.queue) as queue:
        done = all(_round(plan, folder, queue, k, seconds_left) for k in range(plan.n))
    rows = [row for row in gpu_figures.measured(folder.root) if row["key"] == plan.key]
    published = [trial for trial in published_trials(folder.root) if trial["key"] == plan.key]
    if not rows:
        say("nothing has been measured yet; the same command goes on")
        return {}
    figures = gpu_figures.figures(rows, published, settings.seconds)
    figures["plan"] = {
        "device": plan.choice.backend,
        "families": sorted(plan.families),
        "n": plan.n,
        "repeats": plan.repeats,
        "seed": plan.seed,
        "complete": done,
    }
    print_blocks(*gpu_figures.blocks(figures))
    say("all rounds are done" if done else "the time is up; run the same command again to continue")
    if settings.out is not None:
        Path(settings.out).write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    return figures


def _round(plan: Plan, folder: DataFolder, queue: Queue, k: int, seconds_left: Callable[[], float]) -> bool:
    """One configuration of every family under every protocol; False when the time is up.

    The adaptive runs follow one another, as on a farm; then each family is done with before the next one begins, so
    that an early end leaves whole comparisons.
    """
    longest_s = plan.seconds + 30  # what is begun is finished

    def worked_off() -> bool:
        if queue.pending():
            left_s = seconds_left() - longest_s
            work(folder, queue, ClusterSettings(kind="inline"), seconds=None if left_s == float("inf") else left_s)
        return not queue.pending()

    families = sorted(plan.families)
    parts = [(ADAPTIVE, families), *((protocol, [family]) for family in families for protocol in (FIXED, PUBLISHED))]
    for protocol, own in parts:
        if protocol not in plan.protocols:
            continue
        if seconds_left() < longest_s:
            return False
        if protocol == PUBLISHED:
            run_published(plan, folder.root, k, *own)
        else:
            queue_trials(plan, queue, k, protocol, own)
            if not worked_off():
                return False
    return True


def main(argv: Sequence[str]) -> int:
    def benchmarked(settings: BenchSettings) -> None:
        run(settings)

    try:
        return run_command("tests.bench.bench_gpu:BenchSettings", benchmarked, argv)
    except DeviceUnavailable as reason:
        print(f"bench-gpu needs an NVIDIA GPU: {reason}")
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
