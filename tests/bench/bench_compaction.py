"""How long a compaction of many small files takes, and how much memory: runs as the farm lands them, then merged.

Start reading at `run`; `python tests/bench/bench_compaction.py [RUNS SAMPLES_A_RUN [FOLDER]]` prints its figures.
FOLDER was filled with as many by `land`, before: that takes longer than all the rest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import warehouse
from warehouse.files.folder import COMPRESSION, DataFolder
from warehouse.files.snapshots import take_snapshot
from warehouse.reading.checks import check
from warehouse.tables.schema import RUN_SCHEMA, TELEMETRY_SCHEMA

FAMILIES = ("mlp", "cnn", "transformer")
NIGHT_RUNS = 500
BATCH_RUNS = 1_000
LATER_S = 7_200  # when what was replaced may go
MOST_READ_SMALL = 10_000  # runs: of more, readers take minutes until the small files are deleted

# In a process of its own, so that its peak is the compaction's. Prints seconds, peak RSS in MiB, files merged, files
# written, CPU seconds and files deleted.
COMPACT = """
import re, sys, time
from pathlib import Path
from warehouse.files.compaction import compact
from warehouse.files.folder import DataFolder
started = time.perf_counter()
report = compact(DataFolder.resolve(sys.argv[1]), now_s=time.time() + float(sys.argv[2]))
seconds = time.perf_counter() - started
assert not report.problems, report.problems
# Not ru_maxrss, which a process inherits from the one that started it.
peak_kib = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
print(seconds, int(peak_kib) / 1024, sum(report.merged.values()), len(report.merged), time.process_time(),
      report.deleted_files)
"""


def run(runs: int = 100_000, samples: int = 100, filled: str | None = None) -> dict:
    """Land `runs` runs of `samples` samples each, compact, delete what was replaced, land a night's more, compact; then
    a snapshot and the checks. Between, how long readers take to count everything.

    Raises `AssertionError` if a row is lost or doubled. Takes some 4 GB of temporary disk at full size, for minutes.
    `filled` is a folder that `land` filled with as many, whose files are linked and stay.
    """
    with tempfile.TemporaryDirectory(prefix="bench-compaction-", dir=filled and os.path.dirname(filled)) as temporary:
        started = time.perf_counter()
        if filled is None:
            land(f"{temporary}/data", 0, runs, samples)
        else:
            shutil.copytree(filled, f"{temporary}/data", copy_function=os.link)
        land_s = time.perf_counter() - started
        folder = DataFolder.resolve(f"{temporary}/data").create()
        query_s = {}
        if runs <= MOST_READ_SMALL:
            query_s["before"] = _check(folder, runs, samples)
        first = _compact(folder)
        if runs <= MOST_READ_SMALL:
            query_s["merged"] = _check(folder, runs, samples)
        deletion = _compact(folder, LATER_S)
        query_s["deleted"] = _check(folder, runs, samples)
        land(folder.root, runs, NIGHT_RUNS, samples)
        night = _compact(folder, LATER_S)
        query_s["night"] = _check(folder, runs + NIGHT_RUNS, samples)
        started = time.perf_counter()
        taken = take_snapshot(folder)
        snapshot_s = time.perf_counter() - started
        query_s["snapshot"] = _check(folder, runs + NIGHT_RUNS, samples, taken.name)
        started = time.perf_counter()
        findings = check(folder)
        check_s = time.perf_counter() - started
        assert not findings, findings
    result = {
        "runs": runs,
        "telemetry_rows": runs * samples,
        "land_s": land_s,
        "compact_s": first[0],
        "compact_cpu_s": first[4],
        "compact_peak_rss_mib": first[1],
        "files_before": int(first[2]),
        "files_after": int(first[3]),
        "delete_s": deletion[0],
        "files_deleted": int(deletion[5]),
        "night_compact_s": night[0],
        "night_compact_peak_rss_mib": night[1],
        "snapshot_s": snapshot_s,
        "snapshot_files": len(taken.files),
        "check_s": check_s,
        **{f"query_{when}_s": seconds for when, seconds in query_s.items()},
    }
    for key, value in result.items():
        print(f"{key:>26}  {value:,.3f}" if isinstance(value, float) else f"{key:>26}  {value:,}")
    return result


def land(data: str | os.PathLike, first: int, count: int, samples: int) -> None:
    """The files that `RunWriter` would write, without its checks and fsync, which are no part of a compaction."""
    folder = DataFolder.resolve(data).create()
    for family in FAMILIES:
        for kind in ("runs", "telemetry"):
            folder.partition(kind, family).mkdir(parents=True, exist_ok=True)
    for start in range(first, first + count, BATCH_RUNS):
        number = min(BATCH_RUNS, first + count - start)
        ids = [
            f"{FAMILIES[index % len(FAMILIES)]}-{index % 7:012x}-{index:06d}" for index in range(start, start + number)
        ]
        tables = {"telemetry": (_telemetry(ids, samples, start), samples), "runs": (_runs(ids, samples, start), 1)}
        for place, run_id in enumerate(ids):
            for kind, (table, rows) in tables.items():
                path = folder.partition(kind, run_id.partition("-")[0]) / f"{run_id}.parquet"
                pq.write_table(table.slice(place * rows, rows), path, **COMPRESSION)


def _runs(ids: list[str], samples: int, seed: int) -> pa.Table:
    generator = np.random.default_rng(seed)
    rows = []
    for index, run_id in enumerate(ids, seed):
        memory = float(generator.gamma(2.0, 4000.0))
        family = run_id.partition("-")[0]
        row = {
            "run_id": run_id,
            "job_id": run_id[:-7],
            "task_index": index,
            "attempt": 1,
            "family": family,
            "config": f'{{"batch_size":{index % 512 + 1},"depth":{index % 40},"family":"{family}","seed":{index}}}',
            "config_hash": f"{index * 2654435761 % 2**64:016x}",
            "status": "ok",
            "source": "simulated",
            "device_name": "SYNTHETIC",
            "torch_version": "0",
            "batch_size": index % 512 + 1,
            "precision": "fp32",
            "optimizer": "adam",
            "peak_memory_mib": memory,
            "peak_reserved_mib": memory * 0.9,
            "peak_allocated_mib": memory * 0.8,
            "smact": float(generator.random()),
            "steps": 50,
            "step_time_ms": float(generator.gamma(2.0, 20.0)),
            "telemetry_rows": samples,
            "quality": "trusted",
        }
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=RUN_SCHEMA)


def _telemetry(ids: list[str], samples: int, seed: int) -> pa.Table:
    generator = np.random.default_rng(seed)
    rows = len(ids) * samples
    ratios = ("gpu_util", "memory_util", "smact", "smocc", "drama", "gract", "fp32_active")
    values = {
        "run_id": pa.array(np.repeat(ids, samples)),
        "t_ms": np.tile(np.arange(samples) * 100.0, len(ids)),
        "sensor": pa.array(["simulated"] * rows),
        "phase": pa.array(["window"] * rows),
        "quality": pa.array(["measured"] * rows),
        "process_memory_mib": np.repeat(generator.gamma(2.0, 4000.0, len(ids)), samples),
        "power_w": generator.gamma(20.0, 10.0, rows).round(1),
        **{name: generator.random(rows).round(4) for name in ratios},
    }
    values["smocc"] = (values["smact"] / 2).round(4)
    columns = [pa.array(values[f.name]) if f.name in values else pa.nulls(rows, f.type) for f in TELEMETRY_SCHEMA]
    return pa.Table.from_arrays(columns, schema=TELEMETRY_SCHEMA)


def _compact(folder: DataFolder, later_s: float = 0.0) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", COMPACT, os.fspath(folder.root), repr(later_s)],
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(word) for word in done.stdout.split()]


def _check(folder: DataFolder, runs: int, samples: int, snapshot: str | None = None) -> float:
    """Seconds that counting took; every row has to be there once."""
    started = time.perf_counter()
    with contextlib.closing(warehouse.connect(folder, snapshot=snapshot)) as connection:
        counts = connection.execute(
            "SELECT (SELECT (count(*), count(DISTINCT run_id)) FROM runs), "
            "(SELECT (count(*), count(DISTINCT (run_id, t_ms))) FROM telemetry)"
        ).fetchone()
    assert counts == ((runs, runs), (runs * samples, runs * samples)), counts
    return time.perf_counter() - started


if __name__ == "__main__":
    run(*map(int, sys.argv[1:3]), *sys.argv[3:4])
