"""The allocator simulator against sequences worked out by hand, one rule of PyTorch's allocator at a time, its
invariants over random requests, and its settings, which PyTorch itself is asked to read.

Start reading at `play`, which runs a sequence that is written as text. Sizes in such texts are MiB."""

import contextlib
import itertools
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from conf.errors import UsageError
from featurize.memory.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from featurize.memory.replay import replay_history

MIB = 2**20

SIGNS = {"segment_alloc": "+", "segment_map": "+", "segment_free": "-", "segment_unmap": "-", "oom": "oom "}

REQUEST = re.compile(r"(?P<mib>\d*)(?P<bytes>[+-]\d+)?(@(?P<stream>\d))?(=(?P<name>\w))?")

GROWS = "expandable_segments:True"


def allocator(conf="", capacity=None, **extra):
    return CachingAllocator(None if capacity is None else int(capacity * MIB), AllocatorSettings.parse(conf), **extra)


def play(simulated, script):
    """Run a sequence: `30` takes 30 MiB, `30-512` 512 bytes less, `30@1` in stream 1, `30=a` calls the block `a`, `free
    a` gives it back, `empty` empties the cache. A request that does not fit is among the allocator's events."""
    blocks, words = {}, iter(script.split())
    for word in words:
        if word == "empty":
            simulated.empty_cache()
        elif word == "free":
            simulated.free(blocks[next(words)])
        else:
            request = REQUEST.fullmatch(word)
            nbytes = int(request["mib"] or 0) * MIB + int(request["bytes"] or 0)
            try:
                blocks[request["name"]] = simulated.allocate(nbytes, int(request["stream"] or 0))
            except OutOfMemory:
                continue


def events(simulated):
    """Segments that were taken (`+`) and given back (`-`), and requests that did not fit."""
    return " ".join(f"{SIGNS[event.action]}{event.size / MIB:g}" for event in simulated.segment_events)


def shape(simulated):
    """Each segment as its blocks: live ones positive, cached ones negative."""
    signs = {"active_allocated": 1, "inactive": -1}
    segments = ([block.size / MIB * signs[block.state] for block in segment.blocks] for segment in simulated.snapshot())
    return " | ".join(" ".join(f"{size:g}" for size in blocks) for blocks in segments)


@pytest.mark.parametrize(
    ("conf", "capacity", "script", "segments", "blocks"),
    [
        # The segment follows from the rounded request.
        ("", None, "+1", "+2", "0.000488281 -1.99951"),
        ("", None, "1 1 1", "+2 +2", "1 1 | 1 -1"),  # the largest small requests share 2 MiB
        ("", None, "1+1", "+20", "1.00049 -18.9995"),
        ("", None, "10-512", "+20", "9.99951 -10.0005"),  # the largest request that shares a segment of 20 MiB
        ("", None, "10-511", "+10", "10"),  # rounds to 10 MiB, which gets its own
        ("", None, "10", "+10", "10"),
        ("", None, "10+1", "+12", "10.0005 -1.99951"),  # and from there on in steps of 2 MiB
        ("", None, "33", "+34", "34"),
        ("large_segment_size_mb:32", None, "2", "+32", "2 -30"),
        ("", None, "5=a free a +1000", "+20 +2", "-20 | 0.000976562 -1.99902"),  # and never take of large segments
        # The smallest block that is large enough serves, among equal ones that of the lowest address.
        ("", None, "60=a 30=b 40 free a free b 25", "+60 +30 +40", "-60 | 25 -5 | 40"),
        ("", None, "30=a 30=b 30=c free c free b free a 30", "+30 +30 +30", "30 | -30 | -30"),
        # A large block is split if more than 1 MiB is left, a small or expandable one down to 512 bytes.
        ("", None, "19", "+20", "20"),
        ("", None, "20=a free a 19-512", "+20", "18.9995 -1.00049"),
        ("", None, "1 1-512", "+2", "1 0.999512 -0.000488281"),
        (GROWS, None, "10 10-512", "+20", "10 9.99951 -0.000488281"),
        # A freed block merges with both neighbours.
        ("", None, "4=a 4 4=c free a free c", "+20", "-4 4 -12"),
        ("", None, "4=a 4=b 4=c free a free c free b", "+20", "-20"),
        # Streams do not share blocks.
        ("", None, "30@1=a free a 30@2", "+30 +30", "-30 | 30"),
        ("", None, "30@1=a free a 30@2 30@1", "+30 +30", "30 | 30"),
        # Emptying the cache gives back whole segments only, large ones first.
        ("", None, "+100=a 12=b 3 3=c free a free b free c empty", "+2 +12 +20 -12 -2", "3 -17"),
        # What does not fit gives the cache back, of which a split segment is no part.
        ("", 100, "60=a free a 70", "+60 -60 +70", "70"),
        ("", 30, "2 19", "+20 oom 19", "2 -18"),
        # Collected above half of 90: blocks that have been free for longer than average.
        (
            "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
            100,
            "20=a 20=b free a 10@1 free b 30",
            "+20 +20 +10 -20 +30",
            "-20 | 10 | 30",
        ),
        ("garbage_collection_threshold:0.1", 100, "20=a free a 30", "+20 +30", "-20 | 30"),  # only beside a fraction
        # Blocks of `max_split_size_mb` are never split, and serve requests up to 20 MiB smaller as a whole.
        ("max_split_size_mb:40", None, "40=a free a 30", "+40 +30", "-40 | 30"),
        ("max_split_size_mb:40", None, "38=a free a 30", "+38", "30 -8"),
        ("max_split_size_mb:40", None, "70=a free a 50 52", "+70 +50", "70 | 50"),
        ("max_split_size_mb:40,max_non_split_rounding_mb:31", None, "70=a free a 40", "+70", "70"),
        # They are given back before a retry: the smallest that suffices, or from the largest on.
        ("max_split_size_mb:20", 100, "50=a 40=b free a free b 15", "+50 +40 -40 +16", "-50 | 16"),
        ("max_split_size_mb:20", 120, "30=a 40=b 50=c free a free b free c 75", "+30 +40 +50 -50 -40 +76", "-30 | 76"),
        # Expandable segments grow by whole pages, whose end is kept for growth.
        (GROWS, 400, "+1 3 18", "+2 +20 +20", "0.000488281 -1.99951 | 3 18 -19"),
        (GROWS, 400, "30=a 30 5 free a 5", "+40 +20 +20", "5 -25 30 5 -15"),
        # Whole free pages are unmapped, and the gap is filled first.
        (GROWS, 400, "25=a 25 free a empty", "+40 +20 -20", "-5 25 -10"),
        (GROWS, 400, "25=a 25 free a empty 20", "+40 +20 -20 +20", "20 -5 25 -10"),
        (GROWS, 50, "15@1=a free a 35 6", "+20 -20 +40 oom 6", "35 -5"),
    ],
)
def test_requests_are_served_as_pytorchs_allocator_serves_them(conf, capacity, script, segments, blocks):
    simulated = allocator(conf, capacity)
    play(simulated, script)
    assert events(simulated) == segments
    assert shape(simulated) == blocks


@pytest.mark.parametrize(
    ("conf", "sizes"),
    [
        # Up to 512 * 4 bytes it is the plain rounding; above, four parts of each interval between powers of two.
        ("4", {1: 512, 1200: 1536, 2048: 2048, 2049: 2560, 4096: 4096, 1200 * 1024: 1280 * 1024, MIB: MIB}),
        # Below 256 MiB the first value, in [256, 512) MiB 1 (off), in [512, 1024) 2, in [1024, 2048) 4, above 8.
        (
            "[256:1,512:2,1024:4,>:8]",
            {300 * MIB + 1: 300 * MIB + 512, 513 * MIB: 768 * MIB, 1025 * MIB: 1280 * MIB, 2049 * MIB: 2304 * MIB},
        ),
    ],
)
def test_power_of_two_divisions_round_within_the_interval(conf, sizes):
    rounded = AllocatorSettings.parse(f"roundup_power2_divisions:{conf}").size_rounding()
    assert {size: rounded(size) for size in sizes} == sizes


def test_memory_that_another_stream_uses_is_given_to_nobody_before_that_ends():
    simulated = allocator(capacity=60)
    first = simulated.allocate(30 * MIB)
    simulated.retire(first)
    simulated.allocate(30 * MIB)
    assert simulated.reserved_bytes == 60 * MIB
    simulated.settle(first)
    second = simulated.allocate(30 * MIB)
    assert (simulated.allocated_bytes, simulated.peak_reserved_bytes, simulated.retries) == (60 * MIB, 60 * MIB, 0)
    simulated.retire(second)
    simulated.allocate(30 * MIB)  # an out of memory waits for other streams
    simulated.settle(second)  # already given back
    assert (simulated.allocated_bytes, simulated.peak_reserved_bytes, simulated.retries) == (60 * MIB, 60 * MIB, 1)


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
        blocks, end = segment.blocks, segment.address + segment.size
        ends = [block.address + block.size for block in blocks]
        assert [*(block.address for block in blocks), end] == [segment.address, *ends]  # back to back, all inside
        states = [block.state for block in blocks]
        assert ("inactive", "inactive") not in list(itertools.pairwise(states))  # neighbours are merged
    used = [block for segment in segments for block in segment.blocks if block.state == "active_allocated"]
    assert all(block.requested <= block.size and block.size % 512 == 0 for block in used)
    assert sum(segment.size for segment in segments) == simulated.reserved_bytes <= simulated.peak_reserved_bytes
    assert sum(block.size for block in used) == simulated.allocated_bytes
    assert {block.address: block.requested for block in used} == {
        simulated.address_of(handle): nbytes for handle, nbytes in live.items()
    }
    if capacity is not None and not simulated.settings.expandable_segments:  # whose last page may pass the fraction
        fraction = simulated.settings.per_process_memory_fraction or 1
        assert simulated.peak_reserved_bytes <= int(capacity * fraction)


def best_fit(simulated, nbytes, stream):
    """Return where the request must go, looked up the slow way; None where new memory is needed or pages are mapped."""
    conf = simulated.settings
    if conf.expandable_segments or nbytes == 0:
        return None
    size = conf.size_rounding()(nbytes)
    fitting = [
        (block.size, block.address)
        for segment in simulated.snapshot()
        if (segment.stream, segment.pool) == (stream, "small" if size <= MIB else "large")
        for block in segment.blocks
        if block.state == "inactive" and block.size >= size
    ]
    found, address = min(fitting, default=(0, None))
    oversize = (conf.max_split_size_mb or 1 << 40) * MIB
    rounding = (conf.max_non_split_rounding_mb or conf.large_segment_size_mb) * MIB
    refused = found >= oversize if size < oversize else found >= size + rounding
    return None if refused else address


def run_steps(steps, simulated):
    """Run the steps. After each, yield what is live: handle -> requested bytes."""
    live = {}
    for step in steps:
        if step is None:
            simulated.empty_cache()
        elif isinstance(step, tuple):
            nbytes, stream = step
            expected = best_fit(simulated, nbytes, stream)
            with contextlib.suppress(OutOfMemory):
                if (handle := simulated.allocate(nbytes, stream)) is not None:
                    live[handle] = nbytes
                    assert expected in (None, simulated.address_of(handle))
        elif live:
            handle = list(live)[int(step * (len(live) - 1))]
            simulated.free(handle)
            del live[handle]
        yield live


@settings(max_examples=40, deadline=None)
@given(STEPS, st.sampled_from(CONFS), CAPACITIES)
@example(  # the last request frees pages and maps some, although the rest of the first block has room for it
    [(50 * MIB, 0), (30 * MIB, 0), 0.0, (9 * MIB, 0)], "expandable_segments:True,max_split_size_mb:20", 80 * MIB
)
def test_blocks_never_overlap_accounts_add_up_and_everything_comes_back(steps, conf, capacity):
    simulated, live = CachingAllocator(capacity, AllocatorSettings.parse(conf)), {}
    for live in run_steps(steps, simulated):
        check(simulated, capacity, live)
    for handle in live:
        simulated.free(handle)
    check(simulated, capacity, {})
    simulated.empty_cache()
    assert (simulated.allocated_bytes, simulated.reserved_bytes, simulated.snapshot()) == (0, 0, ())


@pytest.mark.parametrize(
    ("conf", "cached", "touched", "allocated", "reserved"),
    [("", 22, 20, 20, 22), ("", 22, 21, 22, 22), ("max_split_size_mb:20", 40, 10, 10, 50), (GROWS, 40, 30, 30, 40)],
)
def test_a_touched_block_counts_as_one_that_is_allocated_and_freed(conf, cached, touched, allocated, reserved):
    simulated = allocator(conf)
    play(simulated, f"{cached}=a free a")
    assert simulated.touch(touched * MIB) == allocated * MIB
    assert (simulated.allocated_bytes, simulated.reserved_bytes) == (0, reserved * MIB)


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


def test_settings_are_read_in_pytorchs_spelling():
    settings = AllocatorSettings.parse(
        " max_split_size_mb:128 , roundup_power2_divisions:[64:8,256:4,1024:2,>:1],garbage_collection_threshold:0.8,"
        "expandable_segments:True,backend:native,pinned_use_background_threads:True,"
    )
    assert settings.max_split_size_mb == 128
    # Entry i is for sizes from 2**i MiB; what lies between named ones is off.
    assert settings.roundup_power2_divisions == (8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 2, 1, 1, 1, 1, 1)
    assert settings.expandable_segments and settings.garbage_collection_threshold == 0.8


VALID = [
    "max_split_size_mb:20",
    "max_non_split_rounding_mb:20",
    "large_segment_size_mb:11",
    "large_segment_size_mb:40,max_split_size_mb:40",
    "garbage_collection_threshold:0.99",
    "roundup_power2_divisions:1",
    "roundup_power2_divisions:[64:4,>:0]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[131072:4]",
    "roundup_power2_divisions:[]",
    "expandable_segments:False",
    "max_split_size_mb:64,max_split_size_mb:128",
    "",
]
INVALID = [
    "max_split_size_mb:19",
    "max_split_size_mb:x",
    "max_split_size_mb",
    "max_split_size_mb:",
    "max_non_split_rounding_mb:10",
    "large_segment_size_mb:10",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[64:3]",
    "roundup_power2_divisions:[63:4]",
    "roundup_power2_divisions:[64:4",
    "expandable_segments:true",
    "max_split_size_mb:128;expandable_segments:True",
]


@pytest.mark.parametrize("text", VALID)
def test_valid_settings_are_taken(text):
    AllocatorSettings.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, text.split(":")[0]) for text in INVALID),
        ("backend:cudaMallocAsync", "backend"),
        ("max_split_size_mb:-1", "max_split_size_mb"),
        ("max_split_size_mb:64.5", "max_split_size_mb"),
        ("max_split_size_mb:3,garbage_collection_threshold:7", r"max_split_size_mb.*garbage_collection_threshold"),
        ("," * 100_000, "100,000 characters"),
        ("max_split:128", r"unknown key 'max_split'; known: .*expandable_segments.*roundup_power2"),
    ],
)
def test_invalid_settings_are_all_named_and_unknown_ones_list_the_known(text, message):
    with pytest.raises(UsageError, match=message):
        AllocatorSettings.parse(text)


def taken_by_pytorch(texts):
    """Return whether PyTorch takes each of the settings, in a process of which nothing else is asked."""
    taken = []
    for text in texts:
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")  # the one that stays from call to call
        try:
            torch._C._accelerator_setAllocatorSettings(text)
            taken.append(True)
        except Exception:
            taken.append(False)
    return taken


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"), reason="this PyTorch parses them on a GPU only"
)
def test_pytorch_itself_takes_and_refuses_the_same_settings():
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        taken = pool.submit(taken_by_pytorch, [*VALID, *INVALID]).result()
    assert taken == [True] * len(VALID) + [False] * len(INVALID)
