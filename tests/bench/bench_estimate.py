"""Estimates: `method=fast`, one config at a time and in batches, and the full path for a resnet50; one thread."""

from __future__ import annotations

import statistics
import time

import numpy as np

ROUNDS = 5
ONE_BY_ONE, IN_BATCH = 150, 1000  # configs of a family
FAMILIES = ("mlp", "cnn", "transformer")
DEVICE = "A100-SXM4-40GB"


def _seconds_each(configs) -> list[float]:
    import learn

    seconds = []
    for config in configs:
        began = time.perf_counter()
        learn.estimate(config, device=DEVICE, method="fast")
        seconds.append(time.perf_counter() - began)
    return seconds


def _full() -> float:
    from torchvision.models import resnet50

    import learn

    began = time.perf_counter()
    learn.estimate(resnet50, [64, 3, 224, 224], device=DEVICE)
    return time.perf_counter() - began


def run() -> dict[str, float]:
    """Return the least median of several rounds, as other load on the machine slows some of them."""
    import torch

    import learn
    from featurize.configs.dimensions import own_space
    from featurize.configs.draws import sample_range
    from featurize.nets.vision import mend_torchvision

    mend_torchvision()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures: dict[str, float] = {}
        for family in FAMILIES:
            configs = list(sample_range(own_space(family), 2, 0, IN_BATCH))
            learn.estimate_many(configs[:2], device=DEVICE, method="fast")
            rounds = []
            for _ in range(ROUNDS):
                rounds.append(_seconds_each(configs[:ONE_BY_ONE]))
            batches = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                learn.estimate_many(configs, device=DEVICE, method="fast")
                batches.append(time.perf_counter() - began)
            figures[f"{family}_median_ms"] = min(map(statistics.median, rounds)) * 1e3
            figures[f"{family}_p99_ms"] = min(float(np.quantile(seconds, 0.99)) for seconds in rounds) * 1e3
            figures[f"{family}_per_s"] = len(configs) / min(batches)
            print(
                f"method=fast, {family}: one config {figures[f'{family}_median_ms']:.2f} ms "
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
