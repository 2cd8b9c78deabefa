"""A replay as a memory snapshot: PyTorch's own tools read it, and it tells what the replay found."""

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz

from featurize.device.device_spec import DeviceSpec, load_device
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.memory.replay import MemoryProfile, replay, replay_history
from featurize.recording.step_trace import StepTrace
from featurize.trace.tracer import trace_step


def network() -> nn.Module:
    convolutions = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3))
    return nn.Sequential(convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    return trace_step(network, torch.zeros(16, 3, 128, 128, device="meta"))


@pytest.fixture(scope="module")
def a100() -> DeviceSpec:
    return load_device("A100-SXM4-40GB")


@pytest.fixture(scope="module")
def profile(trace: StepTrace, a100: DeviceSpec) -> MemoryProfile:
    return replay(trace, a100, timeline=True)


def test_pytorchs_viewer_reads_the_snapshot(profile: MemoryProfile) -> None:
    snapshot = profile.snapshot
    assert "total_reserved" in _memory_viz.segsum(snapshot)  # which adds the segments up itself
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "Allocator State History" in _memory_viz.segment_plot(snapshot)


def test_pytorchs_page_finds_the_category_that_it_needs(profile: MemoryProfile) -> None:
    """Its script fails where entries have categories, and none has this one."""
    entries = profile.snapshot["device_traces"][0]
    assert {entry["category"] for entry in entries if entry["action"].startswith("segment")} == {"unknown"}
    assert all(entry["category"] for entry in entries)


def test_requested_bytes_of_the_history_peak_as_the_trace_says(profile: MemoryProfile, trace: StepTrace) -> None:
    live = peak = 0
    for entry in profile.snapshot["device_traces"][0]:
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        peak = max(peak, live)
    assert trace.peak_live_bytes <= peak <= profile.peak_allocated  # workspaces count, rounding does not


@pytest.mark.parametrize("settings", [None, AllocatorSettings(expandable_segments=True)])
def test_the_history_replays_to_the_same_segments(
    trace: StepTrace, a100: DeviceSpec, settings: AllocatorSettings | None
) -> None:
    profile = replay(trace, a100, timeline=True, allocator=settings)
    again = replay_history(profile.snapshot["device_traces"][0], settings)
    assert again.first_difference() is None
    assert again.unmatched_frees == 0
    assert again.allocator.peak_reserved_bytes == profile.peak_reserved
    assert [block["state"] for segment in profile.snapshot["segments"] for block in segment["blocks"]] == [
        block.state for segment in again.allocator.snapshot() for block in segment.blocks
    ]


def test_workspaces_are_taken_and_given_back(profile: MemoryProfile) -> None:
    actions = [
        entry["action"]
        for entry in profile.snapshot["device_traces"][0]
        if entry["category"] == "workspace" and not entry["action"].startswith("segment")
    ]
    assert actions[:3] == ["alloc", "free_requested", "free_completed"]


def test_frames_lead_from_the_operator_through_its_modules_to_the_step(profile: MemoryProfile) -> None:
    convolutions = [
        [(frame["filename"], frame["name"]) for frame in entry["frames"]]
        for entry in profile.snapshot["device_traces"][0]
        if entry["action"] == "alloc" and entry["category"] == "activation"
    ]
    assert convolutions[0] == [("0.0", "aten::convolution"), ("module", "0.0"), ("module", "0"), ("step 1", "forward")]


def test_a_job_that_does_not_fit_ends_with_its_out_of_memory(trace: StepTrace, a100: DeviceSpec) -> None:
    profile = replay(trace, a100, timeline=True, taken_mib=a100.memory_mib - 200)
    assert not profile.fits
    last = profile.snapshot["device_traces"][0][-1]
    assert last["action"] == "oom"
    assert 0 <= last["device_free"] < last["size"]
    assert "OutOfMemoryError" in _memory_viz.trace(profile.snapshot)


def test_no_snapshot_is_kept_unasked(trace: StepTrace, a100: DeviceSpec) -> None:
    assert replay(trace, a100).snapshot is None
