"""Tracing and replaying a training step: time beside PyTorch's own MemTracker, memory for a model of 7 billion."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

from timing import seconds_of

ROUNDS = 7


def ours():
    import torch
    from torchvision.models import resnet50

    from featurize.device.device_spec import load_device
    from featurize.memory.replay import replay
    from featurize.trace.tracer import trace_step

    trace = trace_step(resnet50, torch.empty(32, 3, 224, 224, device="meta"))
    return replay(trace, load_device("A100-SXM4-40GB")).peak_reserved


def mem_tracker():
    """As its documentation uses it, one step: it refuses a second."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torchvision.models import resnet50

    with FakeTensorMode():
        model, images = resnet50(), torch.randn(32, 3, 224, 224)
        classes = torch.randint(0, 1000, (32,))
        optimizer, tracker = torch.optim.Adam(model.parameters()), MemTracker()
        tracker.track_external(model, optimizer, images)
        with tracker:
            torch.nn.functional.cross_entropy(model(images), classes).backward()
            optimizer.step()
            optimizer.zero_grad()
        return tracker.get_tracker_snapshot("peak")


def large_model() -> None:
    """A language model of 7 billion parameters in bf16 autocast; prints what the process took."""
    import torch

    from featurize.job.training_settings import Training
    from featurize.nets.vision import import_library
    from featurize.trace.tracer import trace_step

    library = import_library("transformers")
    began = time.perf_counter()
    trace = trace_step(
        lambda: library.LlamaForCausalLM(library.LlamaConfig()),
        torch.zeros(1, 2048, dtype=torch.long, device="meta"),
        settings=Training(optimizer="adamw", precision="bf16"),
    )
    seconds = time.perf_counter() - began
    with open("/proc/self/status") as status:  # not ru_maxrss: a child can have its parent's
        rss_mib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    print(json.dumps({"parameters": trace.parameters, "rss_mib": rss_mib, "seconds": seconds}))


def run() -> dict[str, float]:
    import torch

    from featurize.nets.vision import mend_torchvision

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        mend_torchvision()
        ours(), mem_tracker()  # imports
        # Alternating: what else the machine does meets both.
        pairs = [(seconds_of(ours), seconds_of(mem_tracker)) for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    child = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    large = json.loads(child.stdout.splitlines()[-1])
    return {
        "trace_s": statistics.median(pair[0] for pair in pairs),
        "mem_tracker_s": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(pair[1] / pair[0] for pair in pairs),
        "large_parameters": large["parameters"],
        "large_rss_mib": large["rss_mib"],
        "large_s": large["seconds"],
    }


if __name__ == "__main__":
    large_model()
