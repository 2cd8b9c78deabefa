"""Estimates: `method=fast`, one config at a time and in batches; a resnet50, new and asked about again; one thread."""

from __future__ import annotations

import os
import statistics
import tempfile
from functools import partial

import numpy as np
from timing import seconds_of

ROUNDS = 5
ONE_BY_ONE, IN_BATCH = 150, 1000  # configs of a family
REPEATS = 10  # of a question that was asked before, in a round
FAMILIES = ("mlp", "cnn", "transformer")
DEVICE = "A100-SXM4-40GB"


def run() -> dict[str, float]:
    """Return the least median of several rounds, as other load on the machine slows some of them."""
    import torch

    import learn
    from featurize.configs.space import own_space, sample_range

    one = partial(learn.estimate, device=DEVICE, method="fast")
    many = partial(learn.estimate_many, device=DEVICE, method="fast")
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
        figures |= of_resnet50()
    finally:
        torch.set_num_threads(threads)
    figures["median_ms"] = max(figures[f"{family}_median_ms"] for family in FAMILIES)
    figures["per_s"] = min(figures[f"{family}_per_s"] for family in FAMILIES)
    return figures


def of_resnet50() -> dict[str, float]:
    """Return the times of a resnet50 that is traced, of one that this process was asked about before, and of one that
    another process was asked about before."""
    from featurize.nets.vision import mend_torchvision

    mend_torchvision()
    from torchvision.models import resnet50

    import learn
    from featurize.trace import trace_cache
    from learn.estimation import answers

    def anew(module: object) -> float:
        trace_cache.clear()
        answers.clear()
        return seconds_of(ask, module)

    ask = partial(learn.estimate, inputs=[64, 3, 224, 224], device=DEVICE)
    model, before = resnet50(), os.environ.get("GPUFARM_CACHE", "")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUFARM_CACHE"] = "off"
        ask(resnet50)  # imports
        figures = {"full_s": min(anew(resnet50) for _ in range(ROUNDS))}
        os.environ["GPUFARM_CACHE"] = folder
        ask(model)
        for name, seconds_to_answer in {"from_disk_ms": anew, "again_ms": partial(seconds_of, ask)}.items():
            rounds = [[seconds_to_answer(model) for _ in range(REPEATS)] for _ in range(ROUNDS)]
            figures[name] = min(map(statistics.median, rounds)) * 1e3
    os.environ["GPUFARM_CACHE"] = before
    print(
        f"resnet50, 64 x 3 x 224 x 224: {figures['full_s']:.2f} s; the same module again {figures['again_ms']:.2f} ms, "
        f"from disk {figures['from_disk_ms']:.2f} ms"
    )
    return figures


if __name__ == "__main__":
    run()
