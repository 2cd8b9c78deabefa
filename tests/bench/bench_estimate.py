"""Estimates: `method=fast`, one config at a time and in batches, and the full path for a resnet50; one thread."""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np
from timing import seconds_of

ROUNDS = 5
ONE_BY_ONE, IN_BATCH = 150, 1000  # configs of a family
FAMILIES = ("mlp", "cnn", "transformer")
DEVICE = "A100-SXM4-40GB"


def run() -> dict[str, float]:
    """Return the least median of several rounds, as other load on the machine slows some of them."""
    import torch
    from torchvision.models import resnet50

    import learn
    from featurize.configs.dimensions import own_space
    from featurize.configs.draws import sample_range
    from featurize.nets.vision import mend_torchvision

    one = partial(learn.estimate, device=DEVICE, method="fast")
    many = partial(learn.estimate_many, device=DEVICE, method="fast")
    full = partial(learn.estimate, resnet50, [64, 3, 224, 224], device=DEVICE)
    mend_torchvision()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures: dict[str, float] = {}
        for family in FAMILIES:
            configs = list(sample_range(own_space(family), 2, 0, IN_BATCH))
            many(configs[:2])
            rounds = [[seconds_of(one, config) for config in configs[:ONE_BY_ONE]] for _ in range(ROUNDS)]
            batches = [seconds_of(many, configs) for _ in range(ROUNDS)]
            figures[f"{family}_median_ms"] = min(map(statistics.median, rounds)) * 1e3
            figures[f"{family}_p99_ms"] = min(float(np.quantile(seconds, 0.99)) for seconds in rounds) * 1e3
            figures[f"{family}_per_s"] = len(configs) / min(batches)
            print(
                f"method=fast, {family}: one config {figures[f'{family}_median_ms']:.2f} ms "
                f"(99th percentile {figures[f'{family}_p99_ms']:.2f} ms), "
                f"in a batch {figures[f'{family}_per_s']:,.0f} configs/s"
            )
        full()  # imports
        figures["full_s"] = min(seconds_of(full) for _ in range(ROUNDS))
    finally:
        torch.set_num_threads(threads)
    figures["median_ms"] = max(figures[f"{family}_median_ms"] for family in FAMILIES)
    figures["per_s"] = min(figures[f"{family}_per_s"] for family in FAMILIES)
    print(f"full path, resnet50, 64 x 3 x 224 x 224: {figures['full_s']:.2f} s")
    return figures


if __name__ == "__main__":
    run()
