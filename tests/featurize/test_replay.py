"""Replays that can be worked out by hand, of real traces, and as memory snapshots that PyTorch's own tools read."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from featurize.device.device_spec import load_device
from featurize.memory.allocator import AllocatorSettings, CachingAllocator
from featurize.memory.cudnn_workspaces import _Pool, reserved_by_scenario
from featurize.memory.replay import MIB, outside_mib, replay, replay_history
from featurize.operators.library_calls import CUBLAS, LibraryCall, workspace_bytes
from featurize.recording.step_trace import BLOCK_KINDS, Block, Event, StepTrace
from featurize.trace.tracer import trace_step

A100 = load_device("A100-SXM4-40GB")

CONV = LibraryCall("conv_forward", ((1, 2**20, 4, 4), (1, 2**20, 3, 3), (1, 2**20, 2, 2)))  # 64, 36 and 16 MiB

CONV_MIB = workspace_bytes(CONV, A100) // MIB


def scripted(*steps):
    """Return a trace written by hand: a number takes so many MiB, its negative gives them back, a block is taken as it
    is, a library call runs, and `backward` begins that phase."""
    blocks, events, phase = [], [], "forward"
    for step in steps:
        if step == "backward":
            phase = step
        elif isinstance(step, int) and step < 0:
            block = max(place for place, block in enumerate(blocks) if block.nbytes == -step * MIB)
            events.append(Event(block, step * MIB, 1, phase))
        else:
            if isinstance(step, int):
                step = Block(step * MIB, "temporary", "aten::mm", "layer")
            elif isinstance(step, LibraryCall):
                step = Block(0, "workspace", "aten::convolution", "conv", step)
            blocks.append(step)
            events.append(Event(len(blocks) - 1, step.nbytes, 1, phase))
    return StepTrace((), tuple(events), tuple(blocks), 0, 0, (8, 0))


def card(trace, mib, like=A100):
    """A device on which the trace's allocator may reserve that much."""
    return dataclasses.replace(like, memory_mib=mib + outside_mib(trace, like))


def fragmenting():
    """Ever larger tensors, each given back before the next: no freed segment serves the next one."""
    return scripted(30, -30, 50, -50, 70, -70, 90, -90)


def test_the_peak_is_taken_apart_by_kind_module_and_operator():
    trace = scripted(
        Block(10 * MIB, "parameter", "", ""),
        Block(2 * MIB, "batch", "", ""),
        Block(30 * MIB, "activation", "aten::mm", "a"),
        Block(7 * MIB, "activation", "aten::mm", "b"),
        -7,
        "backward",
        Block(10 * MIB, "gradient", "aten::mm", "a"),
        Block(24 * MIB, "temporary", "aten::bmm", "b"),
        -24,
        -30,
    )
    memory = replay(trace, A100)
    assert memory.fits and memory.retries == 0 and memory.timeline == ()
    assert memory.peak_allocated == (10 + 2 + 30 + 10 + 24) * MIB
    assert (memory.peak_step, memory.peak_phase) == (1, "backward")
    assert (memory.peak_operator, memory.peak_module) == ("aten::bmm", "b")
    expected = {"parameter": 10, "batch": 2, "activation": 30, "gradient": 10, "temporary": 24}
    assert memory.peak_parts == {kind: expected.get(kind, 0) * MIB for kind in BLOCK_KINDS}
    assert memory.peak_modules == {"a": 30 * MIB}
    # Segments of their own, but for the batch: it shares one of 20 MiB with what is gone, and the gradient.
    assert memory.peak_reserved == (10 + 20 + 30 + 24) * MIB


@pytest.mark.parametrize(
    "name, kib",
    [
        ("A100-SXM4-40GB", 8 * 1024 + 128),
        ("V100-SXM2-32GB", 8 * 1024 + 128),
        ("H100-SXM5-80GB", 32 * 1024),
        ("H200-SXM-141GB", 32 * 1024),
        ("MI100", 32 * 1024),
        ("MI210", 76 * 1024),
        ("MI300X", 76 * 1024),
    ],
)
def test_the_library_of_products_keeps_a_workspace_of_its_generation_from_each_thread(name, kib):
    memory = replay(scripted(LibraryCall(CUBLAS), 1, "backward", LibraryCall(CUBLAS), 1), load_device(name))
    assert memory.peak_parts["workspace"] == 2 * kib * 1024
    assert memory.peak_allocated == 2 * kib * 1024 + 2 * MIB


def test_a_workspace_that_does_not_fit_is_done_without():
    trace = scripted(10, CONV, 20)
    memory = replay(trace, card(trace, 32))
    assert memory.fits and memory.peak_parts["workspace"] == 0
    assert memory.peak_allocated == memory.peak_reserved == 30 * MIB
    # Nothing was cached: giving back was tried for the workspace, and did not help.
    assert memory.retries == 1


def test_a_workspace_without_which_a_kernel_cannot_run_does_not_fit():
    trace = scripted(10, LibraryCall("flash_backward", nbytes=40 * MIB))
    assert replay(trace, card(trace, 50)).fits
    memory = replay(trace, card(trace, 48))
    assert not memory.fits and memory.peak_reserved == 50 * MIB


def test_more_than_the_card_has_does_not_fit_and_tells_the_whole_need():
    trace = scripted(20, 20, 20)
    unlimited = replay(trace, A100)
    assert unlimited.fits and unlimited.peak_reserved == 60 * MIB
    memory = replay(trace, card(trace, 58))
    assert memory == dataclasses.replace(unlimited, fits=False)
    assert replay(trace, card(trace, 60)).fits


@pytest.mark.parametrize(
    ("mib", "fits", "reserved_mib", "retries"),
    [
        (1000, True, 240, 0),  # 30 + 50 + 70 + 90
        (170, True, 150, 1),  # 30 + 50 + 70, then 90
        (100, True, 90, 2),  # 70 makes 30 and 50 go; 90 makes 70 go
        (88, False, 240, 0),  # the whole need
    ],
)
def test_cached_segments_are_given_back_for_what_does_not_fit_beside_them(mib, fits, reserved_mib, retries):
    trace = fragmenting()
    memory = replay(trace, card(trace, mib))
    assert (memory.fits, memory.peak_allocated, memory.peak_reserved) == (fits, 90 * MIB, reserved_mib * MIB)
    assert memory.retries == retries


def test_trying_a_convolutions_algorithms_empties_the_cache_once_for_each_of_them():
    last = CONV._replace(channels_last=True)  # takes nothing, but is tried
    assert workspace_bytes(last, A100) == 0
    w, more = CONV_MIB, CONV_MIB + 20
    trace = scripted(30, -30, CONV, more, -more, CONV, last, 10)  # known at the second call: what is cached stays
    plain = replay(trace, A100, timeline=True)
    tried = replay(trace, A100, cudnn_benchmark=True, timeline=True)
    cached = 30 + w + more
    assert [m.reserved // MIB for m in plain.timeline] == [30, 30, 30 + w, cached, cached, cached, cached, cached]
    assert [m.reserved // MIB for m in tried.timeline] == [30, 30, 30 + w, more, more, more, more, 10]
    assert tried.retries == 0


def test_allocator_settings_are_those_of_the_process():
    trace = fragmenting()
    plain = replay(trace, A100)
    growing = replay(trace, A100, allocator=AllocatorSettings(expandable_segments=True))
    assert growing.peak_allocated == plain.peak_allocated
    # One segment that grows by pages of 20 MiB to 100.
    assert growing.peak_reserved == 100 * MIB < plain.peak_reserved
    small = card(trace, 200)  # PyTorch takes the fraction of the device's total, context included
    fractions = (AllocatorSettings(per_process_memory_fraction=mib / small.memory_mib) for mib in (100, 80))
    assert [replay(trace, small, allocator=part).fits for part in fractions] == [True, False]


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    convolutions = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3))
    network = nn.Sequential(convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return trace_step(network, torch.zeros(16, 3, 128, 128, device="meta"))


def test_pytorchs_viewer_reads_the_snapshot(trace: StepTrace) -> None:
    snapshot = replay(trace, A100, timeline=True).snapshot
    assert "total_reserved" in _memory_viz.segsum(snapshot)  # which adds the segments up itself
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    # The page's script fails where entries have categories, and none has this one.
    entries = snapshot["device_traces"][0]
    assert {entry["category"] for entry in entries if entry["action"].startswith("segment")} == {"unknown"}
    first = next(entry for entry in entries if (entry["action"], entry["category"]) == ("alloc", "activation"))
    frames = [(frame["filename"], frame["name"]) for frame in first["frames"]]
    assert frames == [("0.0", "aten::convolution"), ("module", "0.0"), ("module", "0"), ("step 1", "forward")]


@pytest.mark.parametrize("settings", [None, AllocatorSettings(expandable_segments=True)])
def test_the_history_replays_to_the_same_segments(trace: StepTrace, settings: AllocatorSettings | None) -> None:
    profile = replay(trace, A100, timeline=True, allocator=settings)
    again = replay_history(profile.snapshot["device_traces"][0], settings)
    assert again.first_difference() is None
    assert again.unmatched_frees == 0 and again.allocator.peak_reserved_bytes == profile.peak_reserved


@pytest.mark.parametrize("after", [1, 200])
def test_scenarios_that_were_interrupted_are_answered_as_if_they_were_not(trace, after, monkeypatch):
    expected, trace = reserved_by_scenario(trace, A100), dataclasses.replace(trace)  # which remembers no answers
    memory = replay(trace, A100)
    left, take = itertools.count(after, -1), CachingAllocator.allocate

    def interrupted(self, *args, **kwargs):
        if not next(left):
            raise KeyboardInterrupt
        return take(self, *args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(CachingAllocator, "allocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reserved_by_scenario(trace, A100)
    assert reserved_by_scenario(trace, A100) == expected
    assert replay(trace, A100) == memory


def test_steps_that_two_threads_play_at_once_are_kept_once(monkeypatch):
    monkeypatch.setattr(_Pool, "_play", lambda self, sizes: iter((2, 3, 4)))
    pool = _Pool([], small=True)
    assert [*zip(pool.reserved([]), pool.reserved([]), strict=True)] == [(2, 2), (3, 3), (4, 4)]
    assert [*pool.reserved([])] == [2, 3, 4]
