"""Estimates: the fast path, one config at a time and in batches, and the full path for a resnet50; one thread."""

from __future__ import annotations

import statistics
import time

import numpy as np

ROUNDS = 5
ONE_BY_ONE, IN_BATCH = 150, 1000  # configs of a family
FAMILIES = ("mlp", "cnn", "transformer")
DEVICE = "A100-SXM4-40GB"


def fast_path():
    """One distilled from the rough model that it starts from: its figures don't matter here, its size is the same."""
    from learn.cases import Case
    from learn.fastpath import fast_nets
    from learn.fastpath.fast import FastPath, Taught
    from learn.fastpath.fast_configs import distillation_configs
    from learn.fastpath.fast_features import step_sketch

    cases = [Case(config, DEVICE) for config in distillation_configs(150, seed=1)]
    sketches = [step_sketch([case.config], case.spec) for case in cases]
    rough = {name: np.array([sketch.base[name][0] for sketch in sketches]) for name in sketches[0].base}
    taught = {name: Taught(figures) for name, figures in rough.items()}
    taught["memory"] = Taught(rough["memory"], 1.1 * rough["memory"])
    steps, fast_nets.STEPS = fast_nets.STEPS, 20
    try:
        return FastPath.distil(cases, taught)
    finally:
        fast_nets.STEPS = steps


def _seconds_each(fast, configs) -> list[float]:
    seconds = []
    for config in configs:
        began = time.perf_counter()
        fast.answer([config], DEVICE)
        seconds.append(time.perf_counter() - began)
    return seconds


def _full() -> float:
    from torchvision.models import resnet50

    import learn

    began = time.perf_counter()
    learn.estimate(resnet50, [64, 3, 224, 224], device=DEVICE)
    return time.perf_counter() - began


def run() -> dict[str, float]:
    """Of several rounds the least median: what else the machine does meets some of them."""
    import torch

    from featurize.vision import mend_torchvision
    from learn.fastpath.fast_configs import distillation_configs

    mend_torchvision()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fast = fast_path()
        figures: dict[str, float] = {}
        for family in FAMILIES:
            configs = distillation_configs(IN_BATCH, seed=2, families=(family,))
            fast.answer(configs[:2], DEVICE)
            rounds = [_seconds_each(fast, configs[:ONE_BY_ONE]) for _ in range(ROUNDS)]
            batches = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                fast.answer(configs, DEVICE)
                batches.append(time.perf_counter() - began)
            figures[f"{family}_median_ms"] = min(map(statistics.median, rounds)) * 1e3
            figures[f"{family}_p99_ms"] = min(float(np.quantile(seconds, 0.99)) for seconds in rounds) * 1e3
            figures[f"{family}_per_s"] = len(configs) / min(batches)
            print(
                f"fast path, {family}: one config {figures[f'{family}_median_ms']:.2f} ms "
                f"(99th percentile {figures[f'{family}_p99_ms']:.2f} ms), "
                f"in a batch {figures[f'{family}_per_s']:,.0f} configs/s"
            )
        _full()  # imports
        figures["full_s"] = min(_full() for _ in range(ROUNDS))
    finally:
        torch.set_num_threads(threads)
    figures["median_ms"] = max(figures[f"{family}_median_ms"] for family in FAMILIES)
    figures["per_s"] = min(figures[f"{family}_per_s"] for family in FAMILIES)
    print(f"full path, resnet50, 64 x 3 x 224 x 224: {figures['full_s']:.2f} s")
    return figures


if __name__ == "__main__":
    run()
