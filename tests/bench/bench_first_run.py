"""How long from typing the command until the first run is durable in the warehouse: Ray and torch start in between.

Start reading at `run`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(repeats: int = 3) -> dict[str, float]:
    """Median seconds until the first run has landed, with four simulated GPUs under Ray and with one worker inline."""
    return {
        "first_run_ray_s": statistics.median(_first_run_s("local") for _ in range(repeats)),
        "first_run_inline_s": statistics.median(_first_run_s("inline") for _ in range(repeats)),
    }


def _first_run_s(cluster: str) -> float:
    with tempfile.TemporaryDirectory() as data:
        start = time.perf_counter()
        farm = subprocess.Popen(
            [sys.executable, "-m", "farm.submit", "+arch=cnn", "n=4", f"cluster={cluster}", f"data={data}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not any(Path(data, "runs", "family=cnn").glob("cnn-*.parquet")):
            assert farm.poll() in (None, 0), "the farm failed"
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        assert farm.wait() == 0
        return seconds
