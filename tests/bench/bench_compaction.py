"""How long a compaction of many small files takes, and how much memory: runs as the farm lands them, then merged.

Start reading at `run`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time

import pyarrow.parquet as pq
from bench_query import synthetic_runs, synthetic_telemetry

import warehouse
from warehouse.files.folder import COMPRESSION, DataFolder

NIGHT_RUNS = 500
LATER_S = 7_200  # when what was replaced may go

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


def run(runs: int = 100_000, samples: int = 100) -> dict:
    """Land `runs` runs of `samples` samples each, compact, delete what was replaced, and count everything; then land a
    night's more, and compact.

    Raises `AssertionError` if a row is lost or doubled. Takes some 4 GB of temporary disk at full size, for minutes.
    """
    with tempfile.TemporaryDirectory(prefix="bench-compaction-") as temporary:
        land(f"{temporary}/data", 0, runs, samples)
        folder = DataFolder.resolve(f"{temporary}/data").create()
        first = _compact(folder)
        deletion = _compact(folder, LATER_S)
        query_s = _check(folder, runs, samples)
        land(folder.root, runs, NIGHT_RUNS, samples)
        night = _compact(folder, LATER_S)
        _check(folder, runs + NIGHT_RUNS, samples)
    return {
        "runs": runs,
        "telemetry_rows": runs * samples,
        "compact_s": first[0],
        "compact_cpu_s": first[4],
        "compact_peak_rss_mib": first[1],
        "files_before": int(first[2]),
        "files_after": int(first[3]),
        "delete_s": deletion[0],
        "files_deleted": int(deletion[5]),
        "night_compact_s": night[0],
        "night_compact_peak_rss_mib": night[1],
        "query_deleted_s": query_s,
    }


def land(data: str | os.PathLike, first: int, count: int, samples: int) -> None:
    """The files that `RunWriter` would write, without its checks and fsync, which are no part of a compaction."""
    folder = DataFolder.resolve(data).create()
    tables = {
        "telemetry": (synthetic_telemetry(count, count * samples, first), samples),
        "runs": (synthetic_runs(count, first), 1),
    }
    for kind, (pieces, rows) in tables.items():
        for family, table in pieces:
            folder.partition(kind, family).mkdir(parents=True, exist_ok=True)
            for number, run_id in enumerate(table["run_id"].to_pylist()[::rows]):
                path = folder.partition(kind, family) / f"{run_id}.parquet"
                pq.write_table(table.slice(number * rows, rows), path, **COMPRESSION)


def _compact(folder: DataFolder, later_s: float = 0.0) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", COMPACT, os.fspath(folder.root), repr(later_s)],
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(word) for word in done.stdout.split()]


def _check(folder: DataFolder, runs: int, samples: int) -> float:
    """Seconds that counting took; every row has to be there once."""
    started = time.perf_counter()
    with contextlib.closing(warehouse.connect(folder)) as connection:
        counts = connection.execute(
            "SELECT (SELECT (count(*), count(DISTINCT run_id)) FROM runs), "
            "(SELECT (count(*), count(DISTINCT (run_id, t_ms))) FROM telemetry)"
        ).fetchone()
    assert counts == ((runs, runs), (runs * samples, runs * samples)), counts
    return time.perf_counter() - started
