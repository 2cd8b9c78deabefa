"""The cost of a growth cycle beside running and fitting, on a data folder that has grown for long.

Start reading at `run`.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile

import numpy as np

from farm.nights.journal import Journal
from farm.nights.plan import NEED_LIBRARIES
from featurize.configs.space import default_space, parse_space, sample_range
from featurize.configs.trial import canonical_json, config_hash
from featurize.families import family_names, layers_of
from featurize.job.layers import rough_memory_mib, totals
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter

DEVICE = "A100-SXM4-40GB"
NIGHT = 8  # runs of the cycle that is measured: what is measured is everything but them
NOT_OVERHEAD = ("run", "learn")


def run(runs: int = 100_000, candidates: int = 10_000) -> dict:
    """Fill a folder with `runs` runs of all families, then take one cycle on simulated GPUs; seconds by step."""
    with tempfile.TemporaryDirectory(prefix="bench-grow-") as temporary:
        folder = DataFolder.resolve(f"{temporary}/data").create()
        families = [name for name in family_names() if name not in NEED_LIBRARIES]
        for family in families:
            _fill(folder, family, runs // len(families))
        arguments = (f"n={NIGHT}", f"pool={candidates}", f"device={DEVICE}", "cluster=inline", "learn.targets=[]")
        subprocess.run(
            [sys.executable, "-m", "farm.grow", *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GPUFARM_DATA": str(folder.root)},
        )
        ended_at = datetime.datetime.now(datetime.UTC)
        (cycle,) = Journal(folder).cycles()
        assert cycle.outcome == "done", cycle.said
        seconds = {name: step.seconds for name, step in cycle.steps.items()}
        return {
            "runs": runs,
            "candidates": candidates,
            **{f"{name}_s": value for name, value in seconds.items()},
            "overhead_s": (ended_at - cycle.started_at).total_seconds() - sum(seconds[name] for name in NOT_OVERHEAD),
        }


def _fill(folder: DataFolder, family: str, count: int) -> None:
    """One merged file of runs of the family's own space, with labels of their rough size."""
    random = np.random.default_rng(0)
    configs = list(sample_range(parse_space(family, default_space(family)), 1, 0, count))
    plans = [layers_of(config) for config in configs]
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    rough = [rough_memory_mib(p, c.batch_size, c.optimizer) for p, c in zip(plans, configs, strict=True)]
    memory = 500 + np.minimum(np.array(rough), 60_000) * random.lognormal(sigma=0.1, size=count)
    ratios = {name: random.beta(2, 3, count) for name in ("smact", "smocc", "drama", "gpu_util")}
    rows = [
        {
            "run_id": f"{family}-0000000a-{i:06d}",
            "job_id": f"{family}-0000000a",
            "task_index": i,
            "attempt": 1,
            "family": family,
            "config": canonical_json(config.to_mapping()),
            "config_hash": config_hash(config),
            "status": "ok" if memory[i] < 40_000 else "oom",
            "oom_kind": None if memory[i] < 40_000 else "device",
            "source": "simulated",
            "device_name": DEVICE,
            "device_memory_mib": 40_326.0,
            "torch_version": "2.12.0",
            "batch_size": config.batch_size,
            "precision": config.precision,
            "optimizer": config.optimizer,
            "parameters": totals(plans[i]).parameters,
            "wall_s": 3.0,
            "final": True,
            "started_at": at,
            "finished_at": at + datetime.timedelta(seconds=3),
            **(
                {"peak_memory_mib": memory[i], "step_time_ms": 5.0, **{n: v[i] for n, v in ratios.items()}}
                if memory[i] < 40_000
                else {}
            ),
        }
        for i, config in enumerate(configs)
    ]
    RunWriter(folder).write_batch(rows)
