"""The allocator simulator against sequences worked out by hand, one rule of PyTorch's allocator at a time.

MiB sizes stand in the tests as plain numbers; `events` shows segments as (`+` taken or `-` given back, MiB).
"""

import pytest

from featurize.memory.allocator import AddressSpace, CachingAllocator, OutOfMemory
from featurize.memory.allocator_settings import AllocatorSettings

MIB = 2**20
SIGNS = {"segment_alloc": "+", "segment_map": "+", "segment_free": "-", "segment_unmap": "-", "oom": "oom"}


def allocator(conf="", capacity=None, **extra):
    return CachingAllocator(None if capacity is None else int(capacity * MIB), AllocatorSettings.parse(conf), **extra)


def events(simulated):
    return [(SIGNS[event.action], event.size / MIB) for event in simulated.segment_events]


def shape(simulated):
    """Each segment as its blocks, in MiB: live ones positive, cached ones negative."""
    return [
        [block.size / MIB * (1 if block.state == "active_allocated" else -1) for block in segment.blocks]
        for segment in simulated.snapshot()
    ]


def mib(simulated, size, stream=0):
    return simulated.allocate(int(size * MIB), stream)


# ---- sizes and segments


def test_sizes_are_rounded_up_to_512_bytes():
    simulated = allocator()
    for nbytes, block in [(1, 512), (512, 512), (513, 1024), (1025, 1536)]:
        before = simulated.allocated_bytes
        simulated.allocate(nbytes)
        assert simulated.allocated_bytes - before == block
    assert simulated.requested_bytes == 1 + 512 + 513 + 1025


def test_zero_bytes_allocate_nothing_and_free_as_nothing():
    simulated = allocator()
    assert simulated.allocate(0) is None
    simulated.free(None)
    assert (simulated.allocated_bytes, simulated.reserved_bytes, simulated.snapshot()) == (0, 0, ())


@pytest.mark.parametrize(
    "request_bytes, segment_mib",
    [
        (1, 2),
        (MIB, 2),  # the largest small request
        (MIB + 1, 20),
        (10 * MIB - 512, 20),  # the largest request that shares a segment of 20 MiB
        (10 * MIB - 511, 10),  # rounds to 10 MiB, which gets its own
        (10 * MIB, 10),
        (10 * MIB + 1, 12),  # and from there on in steps of 2 MiB
        (33 * MIB, 34),
    ],
)
def test_the_segment_follows_from_the_rounded_request(request_bytes, segment_mib):
    simulated = allocator()
    simulated.allocate(request_bytes)
    assert events(simulated) == [("+", segment_mib)]


def test_large_segment_size_replaces_the_20_mib():
    simulated = allocator("large_segment_size_mb:32")
    mib(simulated, 2)
    assert events(simulated) == [("+", 32)]


def test_power_of_two_divisions_round_within_the_interval():
    # 1200 KiB lies in [1024, 2048): four parts of 256 KiB, so 1280 KiB.
    simulated = allocator("roundup_power2_divisions:4")
    simulated.allocate(1200 * 1024)
    assert simulated.allocated_bytes == 1280 * 1024
    # Up to 512 * 4 = 2048 bytes it is the plain rounding: 1200 becomes 1536; a power of two stays.
    rounded = AllocatorSettings.parse("roundup_power2_divisions:4").size_rounding()
    assert [rounded(n) for n in (1, 1200, 2048, 2049, 4096, 1 << 20)] == [512, 1536, 2048, 2560, 4096, 1 << 20]


def test_divisions_may_differ_by_size():
    # Below 256 MiB the first value, in [256, 512) MiB 1 (off), in [512, 1024) 2, in [1024, 2048) 4, above 8.
    rounded = AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]").size_rounding()
    assert rounded(300 * MIB + 1) == 300 * MIB + 512
    assert rounded(513 * MIB) == 768 * MIB
    assert rounded(1025 * MIB) == 1280 * MIB
    assert rounded(2049 * MIB) == (2048 + 256) * MIB


# ---- best fit, splitting, merging


def test_small_requests_share_segments_of_2_mib():
    simulated = allocator()
    for _ in range(3):
        mib(simulated, 1)
    assert shape(simulated) == [[1, 1], [1, -1]]


def test_the_smallest_block_that_is_large_enough_serves():
    simulated = allocator()
    big, middle, _ = mib(simulated, 60), mib(simulated, 30), mib(simulated, 40)
    address = simulated.address_of(middle)
    simulated.free(big)
    simulated.free(middle)
    assert simulated.address_of(mib(simulated, 25)) == address
    assert shape(simulated) == [[-60], [25, -5], [40]]


def test_among_equal_sizes_the_lowest_address_serves():
    simulated = allocator()
    blocks = [mib(simulated, 30) for _ in range(3)]
    lowest = simulated.address_of(blocks[0])
    for block in reversed(blocks):
        simulated.free(block)
    assert simulated.address_of(mib(simulated, 30)) == lowest


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left():
    simulated = allocator()
    simulated.allocate(19 * MIB)  # of a segment of 20: 1 MiB is left, which stays inside the block
    assert simulated.allocated_bytes == 20 * MIB
    simulated = allocator()
    simulated.free(mib(simulated, 20))
    simulated.allocate(19 * MIB - 512)
    assert simulated.allocated_bytes == 19 * MIB - 512
    assert shape(simulated) == [[19 - 512 / MIB, -(1 + 512 / MIB)]]


@pytest.mark.parametrize("conf, segment_mib", [("", 2), ("expandable_segments:True", 20)])
def test_a_small_or_expandable_block_is_split_down_to_512_bytes(conf, segment_mib):
    simulated = allocator(conf)
    mib(simulated, segment_mib // 2)
    simulated.allocate(segment_mib // 2 * MIB - 512)
    assert [block.size for block in simulated.snapshot()[0].blocks][1:] == [segment_mib // 2 * MIB - 512, 512]


def test_small_requests_never_use_large_blocks():
    simulated = allocator()
    simulated.free(mib(simulated, 5))
    simulated.allocate(1000)
    assert events(simulated) == [("+", 20), ("+", 2)]


def test_a_freed_block_merges_with_both_neighbours():
    simulated = allocator()
    first, second, third = (mib(simulated, 4) for _ in range(3))
    simulated.free(first)
    simulated.free(third)
    assert shape(simulated) == [[-4, 4, -12]]
    simulated.free(second)
    assert shape(simulated) == [[-20]]


def test_streams_do_not_share_blocks():
    simulated = allocator()
    simulated.free(mib(simulated, 30, stream=1))
    mib(simulated, 30, stream=2)
    assert events(simulated) == [("+", 30), ("+", 30)]
    mib(simulated, 30, stream=1)
    assert len(simulated.segment_events) == 2
    assert [segment.stream for segment in simulated.snapshot()] == [1, 2]


# ---- giving back


def test_empty_cache_gives_back_whole_segments_only_large_ones_first():
    simulated = allocator()
    small, large, kept = simulated.allocate(100), mib(simulated, 12), mib(simulated, 3)
    split = mib(simulated, 3)
    for block in (small, large, split):
        simulated.free(block)
    simulated.empty_cache()
    assert events(simulated)[3:] == [("-", 12), ("-", 2)]
    assert simulated.reserved_bytes == 20 * MIB
    simulated.free(kept)
    simulated.empty_cache()
    assert simulated.reserved_bytes == 0


def test_a_request_that_does_not_fit_gives_the_cache_back_and_retries():
    simulated = allocator(capacity=100)
    simulated.free(mib(simulated, 60))
    mib(simulated, 70)  # 60 + 70 > 100
    assert events(simulated) == [("+", 60), ("-", 60), ("+", 70)]
    assert (simulated.retries, simulated.ooms, simulated.peak_reserved_bytes) == (1, 0, 70 * MIB)


def test_out_of_memory_states_its_figures_and_leaves_the_allocator_usable():
    simulated = allocator(capacity=100)
    held, cached = mib(simulated, 50), mib(simulated, 21)  # 21 takes a segment of 22
    simulated.free(cached)
    with pytest.raises(OutOfMemory) as raised:
        simulated.allocate(50 * MIB + 1)  # needs 52; 50 are left once the 22 are given back
    error = raised.value
    assert (error.requested_bytes, error.reserved_bytes) == (52 * MIB, 50 * MIB)
    assert (error.allocated_bytes, error.capacity_bytes) == (50 * MIB, 100 * MIB)
    assert (simulated.retries, simulated.ooms) == (1, 1)
    assert events(simulated)[2:] == [("-", 22), ("oom", 50 + 512 / MIB)]
    mib(simulated, 50)
    simulated.free(held)
    assert simulated.allocated_bytes == 50 * MIB


def test_a_split_segment_cannot_help_a_large_request():
    simulated = allocator(capacity=30)
    mib(simulated, 2)  # holds a segment of 20, of which 18 are cached
    with pytest.raises(OutOfMemory):
        mib(simulated, 19)
    assert simulated.reserved_bytes == 20 * MIB


def test_the_memory_fraction_is_a_limit_below_the_capacity():
    simulated = allocator("per_process_memory_fraction:0.5", capacity=80, total_bytes=100 * MIB)
    mib(simulated, 50)
    with pytest.raises(OutOfMemory) as raised:
        simulated.allocate(1)
    assert raised.value.capacity_bytes == 50 * MIB


def test_garbage_collection_gives_back_what_was_free_for_longer_than_average():
    # Allowed 90 % of 100, collected above half of that: 45.
    simulated = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:0.9", capacity=100)
    old, young = mib(simulated, 20), mib(simulated, 20)
    simulated.free(old)
    mib(simulated, 10, stream=1)  # the third large request: `old` ages by one; 40 + 10 reserved
    simulated.free(young)
    mib(simulated, 30)  # the fourth: ages 2 and 1, average 1.5; 50 > 45, so `old` goes, and 30 is below 45
    assert events(simulated) == [("+", 20), ("+", 20), ("+", 10), ("-", 20), ("+", 30)]
    assert simulated.retries == 0


def test_garbage_is_collected_only_beside_a_memory_fraction():
    simulated = allocator("garbage_collection_threshold:0.1", capacity=100)
    simulated.free(mib(simulated, 20))
    mib(simulated, 30)
    assert events(simulated) == [("+", 20), ("+", 30)]


# ---- max_split_size


@pytest.mark.parametrize(
    "more, cached, requests, blocks",
    [
        ("", 40, [30], [[-40], [30]]),  # a block of that size serves no smaller request
        ("", 38, [30], [[30, -8]]),  # a smaller block is still split
        ("", 70, [50], [[-70], [50]]),  # 70 >= 50 + 20: too large a block
        ("", 70, [50, 52], [[70], [50]]),  # it serves requests up to 20 MiB smaller, as a whole
        (",max_non_split_rounding_mb:31", 70, [40], [[70]]),  # 70 < 40 + 31
    ],
)
def test_blocks_of_max_split_size_are_never_split(more, cached, requests, blocks):
    simulated = allocator("max_split_size_mb:40" + more)
    simulated.free(mib(simulated, cached))
    for size in requests:
        mib(simulated, size)
    assert shape(simulated) == blocks


@pytest.mark.parametrize(
    "capacity, cached, request_mib, given_back, segment",
    [
        (100, [50, 40], 15, [40], 16),  # 90 + 16 > 100; both are at least 20: the smallest that suffices goes
        (120, [30, 40, 50], 75, [50, 40], 76),  # no single one has 75: from the largest on
    ],
)
def test_oversize_segments_are_given_back_before_a_retry(capacity, cached, request_mib, given_back, segment):
    simulated = allocator("max_split_size_mb:20", capacity=capacity)
    for block in [mib(simulated, size) for size in cached]:
        simulated.free(block)
    mib(simulated, request_mib)
    assert events(simulated)[len(cached) :] == [*(("-", size) for size in given_back), ("+", segment)]
    assert simulated.retries == 0


# ---- expandable segments


def test_an_expandable_segment_grows_by_whole_pages():
    simulated = allocator("expandable_segments:True", capacity=400)
    simulated.allocate(1)
    mib(simulated, 3)
    mib(simulated, 18)  # 17 of the page are left: the missing MiB takes another page of 20
    assert events(simulated) == [("+", 2), ("+", 20), ("+", 20)]
    assert {event.action for event in simulated.segment_events} == {"segment_map"}
    assert [segment.size // MIB for segment in simulated.snapshot()] == [2, 40]
    assert shape(simulated)[1] == [3, 18, -19]


def test_whole_free_pages_are_unmapped_and_the_gap_is_filled_first():
    simulated = allocator("expandable_segments:True", capacity=400)
    first = mib(simulated, 25)  # 40 mapped
    mib(simulated, 25)  # 60 mapped, 50 used
    base = simulated.address_of(first)
    simulated.free(first)
    simulated.empty_cache()  # [0, 20) is a whole page, [20, 25) is not, [50, 60) neither
    assert events(simulated) == [("+", 40), ("+", 20), ("-", 20)]
    assert shape(simulated) == [[-5, 25, -10]]
    again = mib(simulated, 20)  # mapped at the lowest address, merged with the 5 that stayed
    assert simulated.address_of(again) == base
    assert shape(simulated) == [[20, -5, 25, -10]]


def test_the_end_of_an_expandable_segment_is_kept_for_growth():
    simulated = allocator("expandable_segments:True", capacity=400)
    hole, _, _ = mib(simulated, 30), mib(simulated, 30), mib(simulated, 5)
    base = simulated.address_of(hole)
    simulated.free(hole)
    assert shape(simulated) == [[-30, 30, 5, -15]]
    assert simulated.address_of(mib(simulated, 5)) == base  # though 15 fits better than 30


def test_pages_that_do_not_fit_are_an_out_of_memory_after_unmapping():
    simulated = allocator("expandable_segments:True", capacity=50)
    simulated.free(mib(simulated, 15, stream=1))
    mib(simulated, 35)  # 20 + 40 > 50: the other stream's page is unmapped
    assert events(simulated) == [("+", 20), ("-", 20), ("+", 40)]
    assert (simulated.retries, simulated.ooms) == (1, 0)
    with pytest.raises(OutOfMemory):
        mib(simulated, 6)  # 5 are left of the 40, and another 20 don't fit in 50
    assert simulated.reserved_bytes == 40 * MIB


def test_an_emptied_expandable_segment_gives_its_addresses_back():
    simulated = allocator("expandable_segments:True", capacity=100)
    block = mib(simulated, 30)
    address = simulated.address_of(block)
    simulated.free(block)
    simulated.empty_cache()
    assert (simulated.reserved_bytes, simulated.snapshot()) == (0, ())
    assert simulated.address_of(mib(simulated, 30, stream=7)) == address


# ---- use and misuse


def test_peaks_are_kept_where_memory_is_given_back():
    simulated = allocator()
    simulated.free(mib(simulated, 30))
    simulated.empty_cache()
    assert (simulated.peak_allocated_bytes, simulated.peak_reserved_bytes) == (30 * MIB, 30 * MIB)


def test_a_stale_or_foreign_handle_is_refused():
    simulated, other = allocator(), allocator()
    block, foreign = mib(simulated, 3), mib(other, 3)
    simulated.free(block)
    mib(simulated, 3)  # the same place again
    for handle in (block, foreign, -1, "x"):
        with pytest.raises(ValueError, match="not a live block"):
            simulated.free(handle)
    with pytest.raises(ValueError, match="nbytes"):
        simulated.allocate(-1)


def test_freed_address_ranges_are_reused_from_the_lowest_on():
    space = AddressSpace()
    a, b, c = (space.take(size * MIB, "segment_alloc") for size in (2, 4, 2))
    space.give(a, 2 * MIB)
    space.give(b, 4 * MIB)
    assert space.take(6 * MIB, "segment_alloc") == a
    space.give(c, 2 * MIB)
    assert space.take(8 * MIB, "segment_alloc") == c


def test_memory_that_another_stream_uses_is_given_to_nobody_before_that_ends():
    allocator = CachingAllocator()
    first = allocator.allocate(30 * MIB)
    allocator.retire(first)
    assert allocator.allocated_bytes == 0 and allocator.peak_reserved_bytes == 30 * MIB
    second = allocator.allocate(30 * MIB)
    assert allocator.peak_reserved_bytes == 60 * MIB
    allocator.settle(first)
    allocator.free(second)
    allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    assert allocator.peak_reserved_bytes == 60 * MIB == allocator.allocated_bytes


def test_out_of_memory_waits_for_other_streams():
    allocator = CachingAllocator(40 * MIB)
    first = allocator.allocate(30 * MIB)
    allocator.retire(first)
    allocator.allocate(30 * MIB)
    assert allocator.retries == 1
    allocator.settle(first)  # already given back
    assert allocator.allocated_bytes == 30 * MIB == allocator.reserved_bytes
