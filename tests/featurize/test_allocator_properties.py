"""The allocator simulator's invariants over random requests, a naive best fit, and histories replayed.

Start reading at `check`.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featurize.memory.allocator import CachingAllocator, OutOfMemory
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.memory.replay import replay_history

MIB = 2**20

CONFS = [
    "",
    "max_split_size_mb:20",
    "max_split_size_mb:64,max_non_split_rounding_mb:30",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,8:4,>:8]",
    "garbage_collection_threshold:0.4,per_process_memory_fraction:0.8",
    "garbage_collection_threshold:0.4,per_process_memory_fraction:0.8,max_split_size_mb:24",
    "per_process_memory_fraction:0.5",
    "large_segment_size_mb:32",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:64",
    "expandable_segments:True,per_process_memory_fraction:0.7,garbage_collection_threshold:0.5",
]
SIZES = st.one_of(
    st.integers(0, 4096),
    st.sampled_from([MIB - 1, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB, 21 * MIB]),
    st.integers(1, 2 * MIB),
    st.integers(1, 90 * MIB),
)
# (size, stream) allocates; a float in [0, 1] frees the live block at that share; None empties the cache.
STEPS = st.lists(
    st.one_of(
        st.tuples(SIZES, st.integers(0, 2)), st.tuples(SIZES, st.just(0)), st.floats(0, 1), st.floats(0, 1), st.none()
    ),
    max_size=60,
)
CAPACITIES = st.one_of(st.none(), st.integers(2, 400).map(lambda n: n * MIB))


def check(simulated, capacity, live):
    """Everything that must hold at any time. `live` is handle -> requested bytes."""
    segments = simulated.snapshot()
    for before, behind in itertools.pairwise(segments):
        assert before.address + before.size <= behind.address
    for segment in segments:
        end = segment.address
        for block in segment.blocks:  # back to back, so that none overlaps and all lie inside
            assert block.address == end and block.size > 0 and block.size % 512 == 0
            end += block.size
        assert end == segment.address + segment.size
        states = [block.state for block in segment.blocks]
        assert ("inactive", "inactive") not in list(itertools.pairwise(states))  # neighbours are merged
    blocks = [block for segment in segments for block in segment.blocks]
    used = [block for block in blocks if block.state == "active_allocated"]
    assert sum(segment.size for segment in segments) == simulated.reserved_bytes
    assert sum(block.size for block in used) == simulated.allocated_bytes
    assert sum(block.requested for block in used) == simulated.requested_bytes == sum(live.values())
    assert {block.address: block.requested for block in used} == {
        simulated.address_of(handle): nbytes for handle, nbytes in live.items()
    }
    assert all(block.requested <= block.size for block in used)
    assert simulated.allocated_bytes <= simulated.reserved_bytes <= simulated.peak_reserved_bytes
    if capacity is not None:
        fraction = simulated.settings.per_process_memory_fraction or 1
        # An expandable segment's last page may pass the fraction, which PyTorch checks for the request alone.
        allowed = capacity if simulated.settings.expandable_segments else int(capacity * fraction)
        assert simulated.peak_reserved_bytes <= allowed


def play(steps, conf, capacity, checked=True):
    """Run the steps; the simulator, the handle -> requested bytes that stay live, and PyTorch's history of it."""
    simulated = CachingAllocator(capacity, AllocatorSettings.parse(conf))
    live, history = {}, []

    def note(action, **values):
        history.extend(
            {"action": e.action, "size": e.size, "stream": e.stream, "addr": e.address}
            for e in simulated.segment_events[len(history) - others[0] :]
        )
        history.append({"action": action, **values})
        others[0] += 1

    others = [0]
    for step in steps:
        if step is None:
            simulated.empty_cache()
        elif isinstance(step, float):
            if live:
                handle = list(live)[int(step * (len(live) - 1))]
                address = simulated.address_of(handle)
                simulated.free(handle)
                note("free_requested", addr=address, size=live[handle])
                note("free_completed", addr=address, size=live.pop(handle))
        else:
            nbytes, stream = step
            expected = best_fit(simulated, nbytes, stream) if checked else None
            try:
                handle = simulated.allocate(nbytes, stream)
            except OutOfMemory:
                assert capacity is not None
                note("snapshot")  # the out-of-memory stands among the segment events
                continue
            if handle is not None:
                live[handle] = nbytes
                assert expected in (None, simulated.address_of(handle))
                note("alloc", addr=simulated.address_of(handle), size=nbytes, stream=stream)
        if checked:
            check(simulated, capacity, live)
    note("snapshot")
    return simulated, live, history


def best_fit(simulated, nbytes, stream):
    """Where the request must go, looked up the slow way; None where new memory is needed or pages may be mapped."""
    conf = simulated.settings
    if conf.expandable_segments or nbytes == 0:
        return None
    size = conf.size_rounding()(nbytes)
    pool = "small" if size <= MIB else "large"
    fitting = [
        (block.size, block.address)
        for segment in simulated.snapshot()
        if (segment.stream, segment.pool) == (stream, pool)
        for block in segment.blocks
        if block.state == "inactive" and block.size >= size
    ]
    if not fitting:
        return None
    found, address = min(fitting)
    oversize = (conf.max_split_size_mb or 1 << 40) * MIB
    rounding = (conf.max_non_split_rounding_mb or conf.large_segment_size_mb) * MIB
    refused = found >= oversize if size < oversize else found >= size + rounding
    return None if refused else address


@settings(max_examples=300, deadline=None)
@given(STEPS, st.sampled_from(CONFS), CAPACITIES)
def test_blocks_never_overlap_accounts_add_up_and_everything_comes_back(steps, conf, capacity):
    simulated, live, _ = play(steps, conf, capacity)
    for handle in live:
        simulated.free(handle)
    check(simulated, capacity, {})
    simulated.empty_cache()
    assert (simulated.allocated_bytes, simulated.requested_bytes, simulated.reserved_bytes) == (0, 0, 0)
    assert simulated.snapshot() == ()


@settings(max_examples=100, deadline=None)
@given(STEPS, st.sampled_from(CONFS), CAPACITIES)
def test_equal_requests_give_equal_segments(steps, conf, capacity):
    first, _, _ = play(steps, conf, capacity, checked=False)
    second, _, _ = play(steps, conf, capacity, checked=False)
    assert first.snapshot() == second.snapshot()
    assert [vars_of(e) for e in first.segment_events] == [vars_of(e) for e in second.segment_events]


def vars_of(event):
    return event.action, event.size, event.stream, event.address


# ---- histories


@settings(max_examples=200, deadline=None)
@given(STEPS, st.sampled_from(CONFS), CAPACITIES)
def test_a_replayed_history_gives_the_recorded_segments(steps, conf, capacity):
    simulated, _, history = play(steps, conf, capacity, checked=False)
    replay = replay_history(history, AllocatorSettings.parse(conf), capacity_bytes=capacity)
    assert replay.first_difference() is None
    assert replay.unmatched_frees == 0
    assert replay.allocator.snapshot() == simulated.snapshot()


def test_a_history_that_the_rules_do_not_explain_shows_the_first_difference():
    history = [
        {"action": "segment_alloc", "addr": 0x7F0000000000, "size": 20 * MIB, "stream": 0},
        {"action": "alloc", "addr": 0x7F0000000000, "size": 3 * MIB, "stream": 0},
        {"action": "segment_alloc", "addr": 0x7F0002000000, "size": 20 * MIB, "stream": 0},
        {"action": "alloc", "addr": 0x7F0002000000, "size": 3 * MIB, "stream": 0},
        {"action": "free_completed", "addr": 0x7F0009000000, "size": 1, "stream": 0},
    ]
    replay = replay_history(history)
    assert [event.size for event in replay.simulated] == [20 * MIB]
    assert replay.first_difference() == (
        "at segment event 1 the simulator does nothing more, the recorded allocator takes a segment of 20 MiB"
    )
    assert replay.unmatched_frees == 1
    assert replay.allocator.snapshot()[0].address == 0x7F0000000000
    with pytest.raises(ValueError, match="unknown action 'teleport'"):
        replay_history([{"action": "teleport"}])
