"""Recorded histories beside our trace: each planted difference gets its verdict, and names the blocks."""

import itertools

import pytest
from planted_histories import CNN, planted_history

from conf.errors import UsageError
from infra.offline.block_comparison import compare_blocks

MIB = 2**20


def test_a_history_that_is_as_traced_has_no_difference():
    same = compare_blocks(planted_history())
    assert same.verdict == "none" and same.allocator_difference is None and same.first_reordered is None
    assert same.gap_bytes == {"allocator": 0, "requests": 0, "workspaces": 0, "order": 0}
    assert not same.at_peak.only_measured and not same.at_peak.only_traced
    assert same.measured_reserved_bytes == same.replayed_reserved_bytes == same.traced_reserved_bytes
    (measured, reserved), (traced, traced_reserved) = (
        zip(*curve, strict=True) for curve in (same.measured_curve, same.traced_curve)
    )
    assert max(measured) == max(traced) and set(reserved) == set(traced_reserved)


def test_larger_workspaces_are_found_and_named():
    larger = compare_blocks(planted_history(scale_workspace=3))
    assert larger.verdict == "workspaces"
    (measured,), (traced,) = larger.at_peak.only_measured, larger.at_peak.only_traced
    assert measured.nbytes == 3 * traced.nbytes
    assert traced.where.startswith("workspace conv_backward_")
    assert traced.is_workspace and larger.gap_bytes["workspaces"] == 2 * traced.nbytes
    assert "workspaces or other short-lived blocks that only one side has" in larger.sentence


def test_traced_workspaces_are_those_that_libraries_take_and_are_named_by_their_call():
    def hold_no_memory_of_their_own(requests):
        requests[:] = [request for request in requests if request[0] == "mark"]

    empty = compare_blocks(planted_history(change=hold_no_memory_of_their_own))
    named = {(" ".join(block.where.split()[:2]), block.is_workspace) for block in empty.in_step.only_traced}
    assert {("workspace conv_backward_weight", True), ("workspace conv_backward_data", True)} <= named
    assert {kind.split()[0] for kind, is_workspace in named if is_workspace} == {"workspace"}
    assert any(kind.startswith("temporary") for kind, _ in named)
    kept = [block for block in empty.at_peak.only_traced if block.where.startswith("workspace cublas")]
    assert kept and all(block.is_workspace for block in kept)


def test_a_job_whose_trace_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="its traced step does not fit H100"):
        compare_blocks(planted_history({**CNN, "batch_size": 1_000_000}))


def test_another_setting_of_the_allocator_is_the_allocators_difference():
    other = compare_blocks(planted_history(conf="expandable_segments:True", recorded_conf=""))
    assert other.verdict == "allocator"
    assert other.allocator_difference == (
        "at segment event 0 the simulator takes a segment of 2 MiB, the recorded allocator maps 2 MiB"
    )


def test_blocks_that_the_trace_does_not_have_are_requests():
    def hold_more(requests):
        at = requests.index(("mark", 0, 0))
        requests[at:at] = [("alloc", 10_001, 50 * MIB), ("alloc", 10_002, 50 * MIB)]

    more = compare_blocks(planted_history(change=hold_more))
    assert more.verdict == "requests"
    assert [(block.nbytes, block.count) for block in more.at_peak.only_measured] == [(50 * MIB, 2)]
    assert more.gap_bytes["requests"] == 100 * MIB
    assert not more.in_step.only_measured  # they were requested before it


def cache_more(requests):
    """Take and give back small blocks at the end of the first step: their segments of 2 MiB stay in the cache."""
    at = len(requests) - 1 - requests[::-1].index(("mark", 0, 0), 1)
    blocks = range(10_001, 10_019)
    requests[at:at] = [
        *(("alloc", block, 900_000) for block in blocks),
        *(("free", block, 0) for block in blocks),
    ]


def swap(requests):
    """Swap two requests of the last step that come one after the other."""
    last = len(requests) - 1 - requests[::-1].index(("mark", 0, 0), 1)
    allocs = [i for i in range(last, len(requests)) if requests[i][0] == "alloc"]
    pair = next((a, b) for a, b in itertools.pairwise(allocs) if b == a + 1 and requests[a][2] != requests[b][2])
    requests[pair[0]], requests[pair[1]] = requests[pair[1]], requests[pair[0]]


def test_the_same_requests_in_the_same_order_may_be_released_or_placed_differently():
    other = compare_blocks(planted_history(change=cache_more))
    assert other.verdict == "order" and other.first_reordered is None
    assert other.sentence.endswith("the same blocks in the same order, so their release or placement differs.")


def test_the_same_requests_in_another_order_are_named_by_their_place():
    other = compare_blocks(planted_history(change=lambda requests: (cache_more(requests), swap(requests))))
    assert other.verdict == "order" and other.first_reordered is not None
    place = f"request {other.first_reordered} of the recorded step is the first in another order"
    assert other.sentence.endswith(f"both sides request the same blocks; {place}.")


def test_a_history_with_a_freed_block_without_its_request_is_refused():
    history = planted_history()
    freed = {"action": "free_completed", "size": 512, "addr": 1, "stream": 0}
    history["trace"].append(freed)
    with pytest.raises(UsageError, match="history 'planted' is incomplete: 1 freed block has no recorded request"):
        compare_blocks(history)


@pytest.mark.parametrize("marks", [[], [5], [9, 3], [0, 10**9]])
def test_marks_that_are_no_steps_are_refused(marks):
    with pytest.raises(UsageError, match="marks must rise"):
        compare_blocks({**planted_history(), "marks": marks})


def test_a_gpu_without_a_description_is_asked_for():
    with pytest.raises(UsageError, match="no device description matches the GPU"):
        compare_blocks({**planted_history(), "device_name": "NVIDIA Nothing 9000"})
