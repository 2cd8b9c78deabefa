"""Recorded histories beside our trace: each planted difference gets its verdict, and names the blocks."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from conf.errors import UsageError
from infra.offline.block_comparison import compare_blocks
from infra.offline.sections import histories
from tests.infra.lent_results import plant
from tests.planted_histories import CNN, planted_history

MIB = 2**20


def test_a_history_that_is_as_traced_has_no_difference():
    same = compare_blocks(planted_history())
    assert (same.verdict, same.allocator_difference, set(same.gap_bytes.values())) == ("none", None, {0})
    assert not same.at_peak.only_measured and not same.at_peak.only_traced
    assert same.measured.reserved_bytes == same.replayed_reserved_bytes == same.traced.reserved_bytes
    measured, traced = (np.array(side.curve) for side in (same.measured, same.traced))
    assert measured[:, 0].max() == traced[:, 0].max() and set(measured[:, 1]) == set(traced[:, 1])


def test_larger_workspaces_are_found_and_named():
    larger = compare_blocks(planted_history(scale_workspace=3))
    ((measured, _),), ((traced, _),) = larger.at_peak.only_measured.items(), larger.at_peak.only_traced.items()
    assert traced.is_workspace and traced.where.startswith("workspace conv_backward_")
    assert (larger.verdict, measured.nbytes) == ("workspaces", 3 * traced.nbytes)
    assert larger.gap_bytes["workspaces"] == 2 * traced.nbytes


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
    assert (more.verdict, more.gap_bytes["requests"]) == ("requests", 100 * MIB)
    assert [(kind.nbytes, count) for kind, count in more.at_peak.only_measured.items()] == [(50 * MIB, 2)]
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


@pytest.mark.parametrize("change", [cache_more, lambda requests: (cache_more(requests), swap(requests))])
def test_the_same_requests_with_another_peak_differ_in_order_or_placement(change):
    assert compare_blocks(planted_history(change=change)).verdict == "order"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {**CNN, "batch_size": 1_000_000}}, "its traced step does not fit H100"),
        ({"marks": []}, "marks must rise"),
        ({"marks": [9, 3]}, "marks must rise"),
        ({"marks": [0, 10**9]}, "marks must rise"),
        ({"device_name": "NVIDIA Nothing 9000"}, "no device description matches the GPU"),
    ],
)
def test_a_history_that_cannot_be_compared_is_refused(change, message):
    with pytest.raises(UsageError, match=message):
        compare_blocks({**planted_history(), **change})


# ---- the page's section


def shown(work):
    """The text of the page's section on the histories in a work folder."""
    return str([*histories(SimpleNamespace(work=work))])


def test_a_history_that_cannot_be_compared_has_its_reason_and_costs_itself_alone(tmp_path):
    folder, history = tmp_path / "probes" / "histories", planted_history()
    plant(folder, "good", [history])
    plant(folder, "odd", [{**history, "config": [1]}])
    plant(folder, "cut", [{**history, "trace": history["trace"][-1:]}])
    plant(folder, "out", [], "CUDA out of memory")
    plant(folder, "former", [{"trace": []}])
    (folder / "torn.json.xz").write_bytes(b"no xz")
    text = shown(tmp_path)
    reasons = (
        "Not compared: odd: ",
        "Not compared: cut: history 'cut'",
        "Not compared: out: CUDA out of memory",
        "Not compared: former: history former is incomplete: missing config, conf",
        "Not compared: torn: torn.json.xz cannot be read",
    )
    assert "1 job recorded; verdicts: none 1." in text and [words for words in reasons if words not in text] == []


def test_a_recording_that_was_cut_off_is_compared_and_says_why(tmp_path):
    plant(tmp_path / "probes" / "histories", "short", [planted_history()], cut_off="it took more than 60 s")
    text = shown(tmp_path)
    assert "verdicts: none 1." in text and "Recorded in part: it took more than 60 s." in text
