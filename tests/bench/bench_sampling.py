"""The cost of telemetry: the share of a CPU core that sampling takes, and how it slows training beside it.

Start reading at `run`. There need be no GPU: the sensors read recorded answers,
so the time that a real driver takes for its answers is not in the figures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from featurize.families import get_family
from workers.telemetry.dcgm import DcgmSensor
from workers.telemetry.nvml import GpmSensor, NvmlSensor
from workers.telemetry.process import ProcessSensor
from workers.telemetry.sensors import TelemetrySampler, WatchTarget

_RECORDINGS = Path(__file__).parent.parent / "workers"
_GPUS = 8
_PERIOD_S = 0.1
_SAMPLE_S = 10.0
_TURN_S = 0.5
sys.path.insert(0, str(_RECORDINGS))


def run(pairs: int = 60) -> dict[str, float]:
    """`core_share` of sampling at 10 Hz, the same by sensor; `slowdown`: the median over `pairs` of turns of (median
    step time with telemetry) / (without) - 1, with the half-width of its 95 % confidence interval."""
    with exporter() as url:
        result = {"core_share": core_share(_sensors(url, os.getpid()))}
        for sensor in _sensors(url, os.getpid()):
            result[f"core_share_{sensor.name}"] = core_share([sensor])
        return result | slowdown(url, pairs)


def core_share(sensors: list) -> float:
    """CPU seconds a second that this process, otherwise idle, spends on sampling."""
    sampler = TelemetrySampler(sensors, _PERIOD_S)
    sampler.start()
    time.sleep(1.0)  # what only the first readings do
    before_s, began_s = time.process_time(), time.perf_counter()
    time.sleep(_SAMPLE_S)
    used_s, elapsed_s = time.process_time() - before_s, time.perf_counter() - began_s
    samples = sampler.stop()
    assert {name for name, _ in samples} == {sensor.name for sensor in sensors}, sampler.missing
    return used_s / elapsed_s


def slowdown(url: str, pairs: int) -> dict[str, float]:
    """A loop that trains on the CPU in one thread, as a GPU's trial has one, with every sensor and with none in turns.

    Turns are short, and medians are compared within a pair of them, so that a machine that drifts does not matter.
    """
    turns: list[tuple[bool, int, int]] = []  # (watched, from, to)
    with subprocess.Popen(
        [sys.executable, __file__, "train"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trial:
        assert trial.stdout.readline().strip() == "trains"
        for pair in range(pairs):
            for watched in (pair % 2 == 0, pair % 2 == 1):
                with contextlib.ExitStack() as held:
                    if watched:
                        sampler = TelemetrySampler(_sensors(url, trial.pid), _PERIOD_S)
                        sampler.start()
                        held.callback(sampler.stop)
                        time.sleep(_PERIOD_S)
                    began_ns = time.monotonic_ns()
                    time.sleep(_TURN_S)
                    turns.append((watched, began_ns, time.monotonic_ns()))
        steps = json.loads(trial.communicate("enough\n")[0])
    ratios = []
    for pair in range(pairs):
        medians = {}
        for watched, began_ns, ended_ns in turns[2 * pair : 2 * pair + 2]:
            medians[watched] = statistics.median(ms for t_ns, ms in steps if began_ns < t_ns <= ended_ns)
        ratios.append(medians[True] / medians[False] - 1)
    ratios.sort()
    reach = max(1, round(0.98 * pairs**0.5))  # a median's 95 % interval, by order statistics: of any distribution
    low, high = ratios[max(0, pairs // 2 - reach)], ratios[min(pairs - 1, pairs // 2 + reach)]
    return {"slowdown": statistics.median(ratios), "slowdown_half_width": (high - low) / 2}


def train() -> None:
    """Train until a line comes; prints every step as (its end, ms)."""
    import torch

    from featurize.training.training_step import TrainingStep

    torch.set_num_threads(1)
    family = get_family("mlp")
    config = family.Config(batch_size=64, input_size=512, classes=10, depth=4)
    step = TrainingStep(family.build(config), config, torch.device("cpu"))
    inputs, targets = family.batch(config, torch.device("cpu"))
    steps, before_ns = [], time.monotonic_ns()
    for index in itertools.count():
        step(inputs, targets)
        now_ns = time.monotonic_ns()
        steps.append((now_ns, (now_ns - before_ns) / 1e6))
        before_ns = now_ns
        if index == 100:
            print("trains", flush=True)
        if select.select([sys.stdin], [], [], 0)[0]:
            break
    print(json.dumps(steps))


def _sensors(url: str, pid: int) -> list:
    from recorded_nvml import FakeGpmNvml, RecordedNvml

    recorded = RecordedNvml(pids={"trial": os.getpid()})
    for _ in range(2):
        recorded.advance()  # to where the trial runs
    target = WatchTarget(_uuid(0), pid)
    sensors = [NvmlSensor(target, recorded), GpmSensor(target, FakeGpmNvml())]
    return [*sensors, DcgmSensor(target, url), ProcessSensor(target)]


def _uuid(gpu: int) -> str:
    from recorded_nvml import A100_UUID

    return A100_UUID if gpu == 0 else f"GPU-{gpu:08d}{A100_UUID[12:]}"


@contextlib.contextmanager
def exporter() -> Iterator[str]:
    """A page of eight GPUs, renewed twice a period, in a process of its own; its URL."""
    process = subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def serve() -> None:
    """Until killed. Prints the URL."""
    from dcgm_server import PAGE, DcgmServer
    from recorded_nvml import A100_UUID

    lines = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            lines.append(line)
        elif A100_UUID in line:
            lines += [line.replace(A100_UUID, _uuid(gpu)).replace('gpu="0"', f'gpu="{gpu}"') for gpu in range(_GPUS)]
    page = "\n".join(lines) + "\n"
    with DcgmServer() as server:
        print(server.url, flush=True)
        for number in itertools.count():
            server.page = page.replace(" 312.480000", f" {300 + number % 50}.480000")
            time.sleep(_PERIOD_S / 2)


if __name__ == "__main__":
    {"serve": serve, "train": train}.get("".join(sys.argv[1:]), run)()
