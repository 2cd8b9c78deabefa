"""Replays that can be worked out by hand, on traces built event by event, and on real ones."""

import dataclasses
import functools
from itertools import pairwise

import pytest
import torch
from torch import nn

from featurize.device.device_spec import load_device
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.memory.replay import MIB, outside_mib, replay
from featurize.operators.library_calls import CUBLAS, LibraryCall, workspace_bytes
from featurize.recording.step_trace import BLOCK_KINDS, Block, Event, StepTrace
from featurize.trace.tracer import trace_step

A100 = load_device("A100-SXM4-40GB")
H100 = load_device("H100-SXM5-80GB")
CONV = LibraryCall("conv_forward", ((1, 2**20, 4, 4), (1, 2**20, 3, 3), (1, 2**20, 2, 2)))  # 64, 36 and 16 MiB
CONV_MIB = workspace_bytes(CONV, A100) // MIB


class Script:
    """A trace written by hand: `take` and `give`, in MiB, and library calls."""

    def __init__(self):
        self.blocks, self.events = [], []
        self.phase, self.step = "forward", 1

    def take(self, mib, kind="temporary", operator="aten::mm", module="layer"):
        nbytes = int(mib * MIB)
        self.blocks.append(Block(nbytes, kind, operator, module))
        self.events.append(Event(len(self.blocks) - 1, nbytes, self.step, self.phase))
        return len(self.blocks) - 1

    def give(self, block):
        self.events.append(Event(block, -self.blocks[block].nbytes, self.step, self.phase))

    def call(self, call, operator="aten::convolution", module="conv"):
        self.blocks.append(Block(0, "workspace", operator, module, call))
        self.events.append(Event(len(self.blocks) - 1, 0, self.step, self.phase))

    def trace(self):
        return StepTrace((), tuple(self.events), tuple(self.blocks), 0, 0, (8, 0))


def card(trace, mib, like=A100):
    """A device on which the trace's allocator may reserve that much."""
    return dataclasses.replace(like, memory_mib=mib + outside_mib(trace, like))


@functools.cache
def mlp(batch=64, widths=(1000, 2000, 10), device="A100-SXM4-40GB", optimizer="adam"):
    def model():
        return nn.Sequential(*(m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())))

    def data(on):
        return (torch.randn(batch, widths[0], device=on),), torch.randint(widths[-1], (batch,), device=on)

    return trace_step(model, data, optimizer=optimizer, device=device)


@functools.cache
def cnn():
    def model():
        return nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )

    return trace_step(model, (torch.empty(16, 3, 64, 64, device="meta"),))


def fragmenting():
    """Ever larger tensors, each given back before the next: no freed segment serves the next one."""
    script = Script()
    for mib in (30, 50, 70, 90):
        script.give(script.take(mib))
    return script.trace()


def test_the_peak_is_taken_apart_by_kind_module_and_operator():
    script = Script()
    script.take(10, "parameter", "", "")
    script.take(2, "batch", "", "")
    kept = script.take(30, "activation", module="a")
    gone = script.take(7, "activation", module="b")
    script.give(gone)
    script.phase = "backward"
    script.take(10, "gradient", module="a")
    peak = script.take(24, "temporary", "aten::bmm", "b")
    script.give(peak)
    script.give(kept)
    memory = replay(script.trace(), A100)
    assert memory.fits and memory.retries == 0 and memory.timeline == ()
    assert memory.peak_allocated == (10 + 2 + 30 + 10 + 24) * MIB
    assert (memory.peak_step, memory.peak_phase) == (1, "backward")
    assert (memory.peak_operator, memory.peak_module) == ("aten::bmm", "b")
    expected = {"parameter": 10, "batch": 2, "activation": 30, "gradient": 10, "temporary": 24}
    assert memory.peak_parts == {kind: expected.get(kind, 0) * MIB for kind in BLOCK_KINDS}
    assert memory.peak_modules == {"a": 30 * MIB}
    # Segments of their own, but for the batch: it shares one of 20 MiB with what is gone, and the gradient.
    assert memory.peak_reserved == (10 + 20 + 30 + 24) * MIB


def test_parts_sum_to_the_peak_but_for_the_rounding_of_blocks():
    for trace in (mlp(), cnn()):
        memory = replay(trace, A100)
        large = sum(1 for block in trace.blocks if block.nbytes > MIB or block.call is not None)
        rounding = 512 * len(trace.blocks) + MIB * large
        assert 0 <= memory.peak_allocated - sum(memory.peak_parts.values()) <= rounding
        assert sum(memory.peak_modules.values()) == memory.peak_parts["activation"]
        assert all(nbytes >= 0 for nbytes in memory.peak_parts.values())


@pytest.mark.parametrize(
    "name, kib",
    [
        ("A100-SXM4-40GB", 8 * 1024 + 128),
        ("V100-SXM2-32GB", 8 * 1024 + 128),
        ("H100-SXM5-80GB", 32 * 1024),
        ("H200-SXM-141GB", 32 * 1024),
    ],
)
def test_cublas_keeps_a_workspace_of_its_generation_from_each_thread(name, kib):
    spec = load_device(name)
    assert spec.architecture.blas_workspace_bytes == kib * 1024
    script = Script()
    script.call(LibraryCall(CUBLAS))
    script.take(1)
    script.phase = "backward"
    script.call(LibraryCall(CUBLAS))
    script.take(1)
    memory = replay(script.trace(), spec)
    assert memory.peak_parts["workspace"] == 2 * kib * 1024
    assert memory.peak_allocated == 2 * kib * 1024 + 2 * MIB


def test_the_same_step_takes_two_larger_workspaces_on_hopper():
    a100, hopper = replay(mlp(), A100), replay(mlp(device="H100-SXM5-80GB"), H100)
    assert hopper.peak_allocated - a100.peak_allocated == 2 * (32 * MIB - 8 * MIB - 128 * 1024)


def test_a_convolutions_workspace_is_there_while_it_runs_and_can_be_the_peak():
    assert CONV_MIB >= 40 and CONV_MIB % 2 == 0
    script = Script()
    script.take(10, "activation")
    script.call(CONV)
    script.take(20, "activation")
    memory = replay(script.trace(), A100, timeline=True)
    assert memory.peak_allocated == (10 + CONV_MIB) * MIB
    assert memory.peak_parts["workspace"] == CONV_MIB * MIB and memory.peak_parts["activation"] == 10 * MIB
    assert (memory.peak_operator, memory.peak_module) == ("aten::convolution", "conv")
    assert [moment.allocated // MIB for moment in memory.timeline] == [10, 10 + CONV_MIB, 30]
    # The 20 MiB lie in what the workspace has left.
    assert memory.peak_reserved == (10 + CONV_MIB) * MIB


def test_a_workspace_that_does_not_fit_is_done_without():
    script = Script()
    script.take(10, "activation")
    script.call(CONV)
    script.take(20, "activation")
    trace = script.trace()
    tight = card(trace, 32)
    memory = replay(trace, tight)
    assert memory.fits and memory.peak_parts["workspace"] == 0
    assert memory.peak_allocated == memory.peak_reserved == 30 * MIB
    # Nothing was cached: giving back was tried for the workspace, and did not help.
    assert memory.retries == 1


def test_a_workspace_without_which_a_kernel_cannot_run_does_not_fit():
    script = Script()
    script.take(10)
    script.call(LibraryCall("flash_backward", nbytes=40 * MIB))
    trace = script.trace()
    assert replay(trace, card(trace, 50)).fits
    memory = replay(trace, card(trace, 48))
    assert not memory.fits and memory.peak_reserved == 50 * MIB


def test_more_than_the_card_has_does_not_fit_and_tells_the_whole_need():
    script = Script()
    for _ in range(3):
        script.take(20)
    trace = script.trace()
    unlimited = replay(trace, A100)
    assert unlimited.fits and unlimited.peak_reserved == 60 * MIB
    memory = replay(trace, card(trace, 58))
    assert not memory.fits
    assert memory == dataclasses.replace(unlimited, fits=False)
    assert replay(trace, card(trace, 60)).fits


def test_cached_segments_are_given_back_for_what_does_not_fit_beside_them():
    trace = fragmenting()  # 30 + 50 + 70 + 90 MiB reserved, 90 needed
    roomy = replay(trace, A100)
    assert (roomy.peak_allocated, roomy.peak_reserved, roomy.retries) == (90 * MIB, 240 * MIB, 0)
    tight = replay(trace, card(trace, 100))
    # 70 makes 30 and 50 go; 90 makes 70 go.
    assert (tight.fits, tight.peak_allocated, tight.retries) == (True, 90 * MIB, 2)
    assert tight.peak_reserved == 90 * MIB
    some = replay(trace, card(trace, 170))
    assert (some.fits, some.retries, some.peak_reserved) == (True, 1, 150 * MIB)  # 30 + 50 + 70, then 90
    assert not replay(trace, card(trace, 88)).fits


def test_trying_a_convolutions_algorithms_empties_the_cache_once_for_each_of_them():
    last = CONV._replace(channels_last=True)  # takes nothing, but is tried
    assert workspace_bytes(last, A100) == 0
    script = Script()
    script.give(script.take(30))
    script.call(CONV)
    script.give(script.take(CONV_MIB + 20))
    script.call(CONV)  # known by now: what is cached stays
    script.call(last)
    script.take(10)
    plain = replay(script.trace(), A100, timeline=True)
    tried = replay(script.trace(), A100, cudnn_benchmark=True, timeline=True)
    # Moments: take 30, give, call, take more, give, call, call, take 10.
    w, more = CONV_MIB, CONV_MIB + 20
    cached = 30 + w + more
    assert [m.reserved // MIB for m in plain.timeline] == [30, 30, 30 + w, cached, cached, cached, cached, cached]
    assert [m.reserved // MIB for m in tried.timeline] == [30, 30, 30 + w, more, more, more, more, 10]
    assert replay(script.trace(), A100, cudnn_benchmark=True).retries == 0


def test_allocator_settings_are_those_of_the_process():
    trace = fragmenting()
    plain = replay(trace, A100)
    growing = replay(trace, A100, allocator=AllocatorSettings(expandable_segments=True))
    assert growing.peak_allocated == plain.peak_allocated
    # One segment that grows by pages of 20 MiB to 100.
    assert growing.peak_reserved == 100 * MIB < plain.peak_reserved
    rounded = replay(trace, A100, allocator=AllocatorSettings.parse("roundup_power2_divisions:2"))
    assert rounded.peak_allocated == 96 * MIB
    small = card(trace, 200)  # PyTorch takes the fraction of the device's total, context included
    for mib, fits in ((100, True), (80, False)):
        part = AllocatorSettings(per_process_memory_fraction=mib / small.memory_mib)
        found = replay(trace, small, allocator=part)
        assert found.fits == fits and (not fits or found.retries > 0)


@pytest.mark.parametrize("make", [mlp, cnn, fragmenting])
@pytest.mark.parametrize("benchmark", [False, True])
def test_a_timeline_holds_every_moment_and_its_peaks(make, benchmark):
    trace = make()
    memory = replay(trace, A100, timeline=True, cudnn_benchmark=benchmark)
    assert len(memory.timeline) == len(trace.events)
    assert [m.block for m in memory.timeline] == [e.block for e in trace.events]
    assert max(m.allocated for m in memory.timeline) == memory.peak_allocated
    assert max(m.reserved for m in memory.timeline) == memory.peak_reserved
    assert all(0 <= m.allocated <= m.reserved for m in memory.timeline)
    at = next(m for m in memory.timeline if m.allocated == memory.peak_allocated)
    assert (at.step, at.phase) == (memory.peak_step, memory.peak_phase)
    assert dataclasses.replace(memory, timeline=()) == replay(trace, A100, cudnn_benchmark=benchmark)


def test_a_timeline_of_a_card_that_is_too_small_is_the_whole_need():
    trace = fragmenting()
    memory = replay(trace, card(trace, 60), timeline=True)
    assert not memory.fits and len(memory.timeline) == len(trace.events)


@pytest.mark.parametrize("mib", [None, 100, 60])
def test_a_replay_gives_the_same_every_time(mib):
    trace = mlp(4096, (64, 3000, 5000, 700))
    spec = A100 if mib is None else card(trace, mib)
    assert replay(trace, spec, timeline=True) == replay(trace, spec, timeline=True)


def test_a_larger_batch_takes_no_less():
    profiles = [replay(mlp(batch), A100) for batch in (1, 7, 64, 500, 4096, 20000)]
    allocated = [p.peak_allocated for p in profiles]
    assert allocated == sorted(allocated)
    # Whole segments are less exact: what a small block was cut from may fit two others better.
    assert all(b.peak_reserved >= a.peak_reserved - 20 * MIB for a, b in pairwise(profiles))


def test_a_smaller_card_never_reserves_more_and_ends_at_one_that_does_not_fit():
    trace = mlp(4096, (64, 3000, 5000, 700, 6000, 900, 10), optimizer="sgd")
    need = replay(trace, A100)
    found = [replay(trace, card(trace, need.peak_reserved / MIB - less)) for less in range(0, 400, 10)]
    fits = [p.fits for p in found]
    assert fits[0] and not fits[-1] and fits == sorted(fits, reverse=True)
    for profile, less in zip(found, range(0, 400, 10), strict=True):
        if profile.fits:
            assert profile.peak_reserved <= need.peak_reserved - less * MIB
        else:
            assert profile.peak_reserved == need.peak_reserved


def test_an_empty_trace_needs_nothing():
    memory = replay(Script().trace(), A100)
    assert memory.fits and memory.peak_allocated == memory.peak_reserved == 0
    assert (memory.peak_step, memory.peak_phase, memory.peak_operator) == (0, "setup", "")
    assert set(memory.peak_parts.values()) == {0}


def test_convolutions_copies_are_for_tensor_cores():
    assert workspace_bytes(CONV, load_device("V100-SXM2-32GB")) == 0
    assert workspace_bytes(CONV._replace(element_bytes=8), A100) == 0
