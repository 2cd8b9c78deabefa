"""The cost of a trial beyond its warm-up and measured window: in the farm, and in a fresh process per trial.

Start reading at `run`. Both train the same model on the CPU with the same loop.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from featurize.configs.trial import canonical_json
from workers.devices import TrialSettings, WindowSettings

WINDOW_S = 0.2
_OVERRIDES = (
    "+arch=mlp",
    "arch.space={input_size:256,classes:10,linear_layers:4,topology:uniform,activation:relu,"
    "batch_norm:false,use_dropout:false,dropout:0.1,softmax:false,batch_size:64}",
    "device=cpu",
    "window=fixed",
    f"window.seconds={WINDOW_S}",
    "policy=uniform",
)


def run(trials: int = 40, fresh: int = 7) -> dict[str, float]:
    """Seconds of overhead per trial, and their ratio.

    Farm: from the landing of the first run to that of the last, less their warm-ups and windows, over their number: it
    holds the lease, the fork, building the model, telemetry, and the durable landing. Fresh: a process's wall time less
    the same, median. Warm-up lasts until steps have no trend, some 0.2 s here: it is measuring, and the same in both.
    """
    farm_s, config, settings = _farm_overhead_s(trials)
    fresh_s = statistics.median(_fresh_overhead_s(config, settings) for _ in range(fresh))
    return {"farm_overhead_s": farm_s, "fresh_process_overhead_s": fresh_s, "ratio": fresh_s / farm_s}


def _farm_overhead_s(trials: int) -> tuple[float, str, str]:
    from warehouse import connect

    with tempfile.TemporaryDirectory() as data:
        subprocess.run(
            [sys.executable, "-m", "farm.submit", *_OVERRIDES, f"n={trials}", f"data={data}"],
            check=True,
            capture_output=True,
        )
        with contextlib.closing(connect(data)) as connection:
            rows = connection.execute(
                "SELECT epoch(finished_at), warmup_s + window_s, config FROM runs WHERE status = 'ok' "
                "ORDER BY finished_at"
            ).fetchall()
    assert len(rows) == trials, f"{len(rows)} of {trials} trials are ok"
    elapsed_s = rows[-1][0] - rows[0][0]
    overhead_s = (elapsed_s - sum(measuring_s for _, measuring_s, _ in rows[1:])) / (trials - 1)
    settings = TrialSettings(window=WindowSettings(kind="fixed", seconds=WINDOW_S, min_steps=1))
    return overhead_s, rows[0][2], canonical_json(settings.to_mapping())


def _fresh_overhead_s(config: str, settings: str) -> float:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fresh_process.py")), config, settings],
        check=True,
        capture_output=True,
        text=True,
    )
    return time.perf_counter() - start - sum(map(float, done.stdout.split()))
