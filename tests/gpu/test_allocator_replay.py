"""The allocator simulator against PyTorch's own allocator: recorded histories, replayed and compared by segment.

Each history is recorded in a fresh process, since it has to begin before the first allocation. Skipped without a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted_histories import recorded_segments

from featurize.memory.allocator import AllocatorSettings
from featurize.memory.replay import replay_history

pytestmark = pytest.mark.gpu
MIB = 2**20
ROOT = Path(__file__).parents[2]

# Arguments: the file for the result, what to run (`train` or `storm`), a seed, the memory fraction.
RECORDER = """
import json, random, sys
import torch
from workers.probes.children import recorded_history, start_recording

path, what, seed, fraction = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
start_recording()
if fraction < 1:
    torch.cuda.set_per_process_memory_fraction(fraction)
chance = random.Random(seed)


def train():
    nn = torch.nn
    for batch, width, image, tokens in [(8, 32, 64, 64), (32, 48, 56, 100), (3, 96, 96, 17)]:
        model = nn.ModuleDict({
            "cnn": nn.Sequential(
                nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 1000),
            ),
            "encoder": nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8 * width, 8, 16 * width, batch_first=True), 2
            ),
        }).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            images = torch.randn(batch, 3, image, image).cuda()
            sequence = torch.randn(batch, tokens, 8 * width).cuda()
            loss = model["cnn"](images).square().mean() + model["encoder"](sequence).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        del model, optimizer, images, sequence, loss
        torch.cuda.empty_cache()


def storm():
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    common = [chance.randrange(1, 60 << 20) for _ in range(8)]
    live = []
    for _ in range(4000):
        if chance.random() < 0.52:
            size = chance.choice([
                chance.choice(common), chance.randrange(1, 4096), chance.randrange(1, 2 << 20),
                chance.randrange(1, 24 << 20), chance.randrange(1, 150 << 20),
            ])
            try:
                stream = chance.choice([streams[0], streams[0], streams[1]])
                live.append(torch.cuda.caching_allocator_alloc(size, stream=stream))
            except torch.cuda.OutOfMemoryError:
                for _ in range(len(live) // 3):
                    torch.cuda.caching_allocator_delete(live.pop(chance.randrange(len(live))))
        elif live:
            torch.cuda.caching_allocator_delete(live.pop(chance.randrange(len(live))))
        if chance.random() < 0.002:
            torch.cuda.empty_cache()


{"train": train, "storm": storm}[what]()
with open(path, "w") as file:
    json.dump(recorded_history(), file)
"""


@pytest.fixture(scope="module")
def gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no usable GPU: torch.cuda.is_available() is False")


def record(path, workload, conf, seed=0, fraction=1.0):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if conf:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = conf  # every version from 2.4 on reads this name
    subprocess.run(
        [sys.executable, "-c", RECORDER, str(path), workload, str(seed), str(fraction)],
        env=environment,
        cwd=ROOT,
        check=True,
    )
    return json.loads(path.read_text())


def assert_explained(recorded, conf, fraction=1.0):
    limit = f"per_process_memory_fraction:{fraction}"
    settings = AllocatorSettings.parse(f"{conf},{limit}" if fraction < 1 else conf)
    replay = replay_history(recorded["trace"], settings, total_bytes=recorded["total_bytes"])
    assert replay.recorded, "the history holds no segment"
    assert replay.unmatched_frees == 0
    assert replay.first_difference() is None
    simulated = replay.allocator
    assert simulated.snapshot() == recorded_segments(recorded["segments"])
    assert simulated.peak_reserved_bytes == recorded["peak_reserved"]
    assert simulated.peak_allocated_bytes == recorded["peak_allocated"]
    assert sum(event.action == "oom" for event in simulated.segment_events) == recorded["ooms"]


CONFS = [
    "",
    "max_split_size_mb:21",
    "max_split_size_mb:64",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,16:4,>:8]",
    "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.5,max_split_size_mb:32",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:64",
]


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:21,roundup_power2_divisions:8"])
def test_training_steps_of_several_shapes(gpu, tmp_path, conf):
    assert_explained(record(tmp_path / "history", "train", conf), conf)


@pytest.mark.parametrize("conf", CONFS)
def test_a_storm_of_allocations_that_fits(gpu, tmp_path, conf):
    assert_explained(record(tmp_path / "history", "storm", conf, seed=1), conf)


@pytest.mark.parametrize("conf", CONFS)
def test_a_storm_that_runs_out_of_its_memory_fraction(gpu, tmp_path, conf):
    import torch

    # 2 GiB, as a fraction that both sides turn into bytes in the same way.
    fraction = round(2048 * MIB / torch.cuda.get_device_properties(0).total_memory, 4)
    assert_explained(record(tmp_path / "history", "storm", conf, seed=2, fraction=fraction), conf, fraction)
