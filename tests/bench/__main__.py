"""`make bench`: every figure of docs/benchmarks.md, in one run, as ratios where there is something to compare with.

`FULL=true` (`full=true`) also takes compaction, soak and selection at the size that is wanted, which takes hours.
`python -m tests.bench compaction 1000 100` runs `bench_compaction.py` alone, at the sizes that its `run` names.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def measured(title: str, name: str, *sizes: int) -> dict[str, Any]:
    """Return the figures of the benchmark in a module of this folder, which is imported now, and print them."""
    print(f"\n{title}")
    figures = importlib.import_module(f"bench_{name}").run(*sizes)
    for figure, value in figures.items():
        print(f"{figure:>28}  {value:,.4f}" if isinstance(value, float) else f"{figure:>28}  {value:,}", flush=True)
    return figures


def main() -> None:
    from workers.devices import DeviceChoice
    from workers.devices.cpu import CpuDevice

    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    full = given.get("full") == "true"
    cpu = CpuDevice(DeviceChoice(backend="cpu")).slots()[0].device_name
    machine = f"{os.cpu_count()} x {cpu}, Python {platform.python_version()}"
    many = 100_000 if full else 3_000
    print(f"machine: {machine}")
    overhead = measured("overhead per trial: farm against a fresh process per trial", "overhead")
    queue = measured("queue", "queue")
    first = measured("command to first landed run", "first_run")
    query = measured("grouped query over 1 M runs and 20 M samples: warehouse against CSV in pandas", "query")
    trace = measured(
        "trace and replay of a training step, one thread: ours against MemTracker under FakeTensorMode", "trace"
    )
    sampling = measured(
        "sampling at 10 Hz: recorded NVML and GPM, an exporter's page of eight GPUs, the process; a trial beside it",
        "sampling",
    )
    estimate = measured("estimates, one thread: method=fast of trial configs, and the full path", "estimate")
    compaction = measured("compaction of many small files, under readers' guarantees", "compaction", many, 100)
    soak = measured("the dispatcher's memory over many tasks", "soak", many)
    choosing = measured("the cost of choosing", "selection", 100_000 if full else 5_000)
    growing = measured("a growth cycle beside running and fitting", "grow", many, 10_000 if full else 2_000)

    rows = [
        (
            "overhead per trial beyond warm-up and window, `cpu` device",
            f"{overhead['farm_overhead_s'] * 1e3:.0f} ms",
            f"{overhead['ratio']:.1f} x less than a fresh process ({overhead['fresh_process_overhead_s']:.2f} s)",
            "15 x",
        ),
        (
            "queue: enqueue, lease one at a time, finish; 100,000 tasks",
            f"{queue['overall_per_s']:,.0f} tasks/s",
            "",
            "1,500/s",
        ),
        (
            "command to first landed run, Ray, four simulated GPUs",
            f"{first['first_run_ray_s']:.1f} s",
            f"`cluster=inline`: {first['first_run_inline_s']:.1f} s",
            "20 s",
        ),
        (
            "sampling every source at 10 Hz, without the driver's own time",
            f"{sampling['core_share']:.1%} of a core",
            "",
            "2 %",
        ),
        (
            "a CPU trial's step time with telemetry",
            f"{sampling['slowdown']:+.1%}",
            f"half-width {sampling['slowdown_half_width']:.1%}, of pairs with and without",
            "1 %",
        ),
        (
            "grouped query, 1 M runs and 20 M samples",
            f"{query['warehouse_s']:.2f} s",
            f"{query['ratio']:.0f} x faster than `pandas.read_csv` of the same rows, "
            f"{query['ratio_usecols']:.0f} x with `usecols`",
            "50 x",
        ),
        (
            "resnet50, batch 32, traced (two steps) and replayed, one thread",
            f"{trace['trace_s']:.2f} s",
            f"{trace['ratio']:.1f} x faster than `MemTracker` (one step, {trace['mem_tracker_s']:.2f} s)",
            "5 x, 0.5 s",
        ),
        (
            f"peak RSS, tracing a model of {trace['large_parameters'] / 1e9:.1f} G parameters",
            f"{trace['large_rss_mib']:,.0f} MiB",
            f"{trace['large_s']:.1f} s",
            "2 GB",
        ),
        (
            "method=fast: one trial config, median of the slowest family",
            f"{estimate['median_ms']:.2f} ms",
            f"{estimate['full_s'] / estimate['median_ms'] * 1e3:,.0f} x faster than a traced resnet50",
            "1 ms",
        ),
        ("method=fast: a batch, slowest family", f"{estimate['per_s']:,.0f} configs/s", "", "2,000/s"),
        ("`learn.estimate` of resnet50, batch 64, full path", f"{estimate['full_s']:.2f} s", "", "0.6 s"),
        ("the same module again, answered by the process", f"{estimate['again_ms']:.2f} ms", "", "1 ms"),
        ("the same module again, answered from disk", f"{estimate['from_disk_ms']:.2f} ms", "", "10 ms"),
        (
            f"compaction of {compaction['runs']:,} runs and {compaction['telemetry_rows']:,} samples",
            f"{compaction['compact_s']:.1f} s, {compaction['compact_peak_rss_mib']:,.0f} MiB",
            f"{compaction['compact_cpu_s'] / compaction['files_before'] * 1e3:.2f} ms of CPU a file; "
            f"all rows are counted in {compaction['query_deleted_s']:.2f} s afterwards",
            "100,000 runs, 10,000,000 samples: 120 s, 2 GB",
        ),
        (
            f"the dispatcher's memory, {soak['tasks']:,} tasks",
            f"{soak['grown_mib']:+.1f} MiB",
            f"from {soak['rss_early_mib']:.0f} MiB after a tenth of them",
            "flat over 100,000",
        ),
        (
            f"choosing 500 of {100_000 if full else 5_000:,} candidates, actively",
            f"{choosing['active_s']:.1f} s",
            f"by coverage: {choosing['coverage_s']:.1f} s",
            "100,000: 120 s",
        ),
        (
            f"a growth cycle but for running and fitting, {growing['runs']:,} runs known, "
            f"{growing['candidates']:,} candidates",
            f"{growing['overhead_s']:.0f} s",
            f"canaries {growing['canaries_s']:.0f}, choosing {growing['choose_s']:.0f}, "
            f"landing {growing['land_s']:.0f}, report {growing['report_s']:.0f} s",
            "300 s",
        ),
    ]
    print(f"\nOn {machine}:\n\n| what | figure | compared | wanted |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    if "published" in given:
        _published(given["published"])


def _published(folder: str) -> None:
    """The trace against published measurements of memory, by `learn.benchmark`."""
    print("\npublished measurements: memory")
    command = ["-m", "learn.benchmark", f"published={folder}", "estimators=[trace]"]
    subprocess.run([sys.executable, *command], check=True)


if __name__ == "__main__":
    if sys.argv[1:] and "=" not in sys.argv[1]:
        measured(sys.argv[1], sys.argv[1], *map(int, sys.argv[2:]))
    else:
        main()
