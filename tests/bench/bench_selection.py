"""The cost of choosing what a night measures, out of many candidates with many known rows.

Start reading at `run`.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from farm.sampling.forecast import Forecaster
from farm.sampling.selection import Known, candidates, choose
from featurize.configs.space import default_space, parse_space
from featurize.configs.trial import config_hash
from featurize.device.device_spec import load_device

DEVICE = load_device("A100-SXM4-40GB")
UTILIZATION = ("smact", "smocc", "drama")


def run(n: int = 100_000) -> dict[str, float]:
    """Seconds of choosing 500 of `n` CNNs with 2,000 known rows of four labels, all of it: also sampling, forecasts."""
    space = parse_space("cnn", default_space("cnn"))
    known_configs = candidates(space, "stratified", 1, 0, min(2000, n // 2)).configs
    forecaster = Forecaster(device=DEVICE)
    figures = replace(forecaster, workers=0).look(known_configs).figures
    random = np.random.default_rng(0)
    out = figures["memory"] >= DEVICE.memory_mib
    noise = random.normal(0, 0.1, len(out))
    known = Known(
        frozenset(map(config_hash, known_configs)),
        known_configs,
        {"memory": figures["memory"] * np.exp(noise)}
        | {name: np.clip(figures[name] + noise / 3, 0, 1) for name in UTILIZATION},
        out,
        np.full(len(out), np.nan),
    )
    costs = {}
    for policy in ("coverage", "active"):
        began = time.perf_counter()
        choose(policy, candidates(space, policy, 0, 0, n), known, min(500, n // 10), forecaster)
        costs[f"{policy}_s"] = time.perf_counter() - began
    return costs
