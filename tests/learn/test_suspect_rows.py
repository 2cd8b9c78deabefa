"""Labels that nothing explains are doubted, and only these."""

from dataclasses import replace

import pytest

from conf.units import MIB_PER_GIB
from featurize.families.cnn import Config
from learn.data import make_rows
from learn.step_store import StepStore
from learn.suspect_rows import with_suspects

BATCHES = (4, 8, 16, 32)
CNN = Config(batch_size=1, image_size=64, channels=3, depth=3, base_filters=32, classes=10)


@pytest.fixture(scope="module")
def steps():
    return StepStore()


@pytest.fixture(scope="module")
def traced_mib(steps):
    rows = make_rows("memory", [replace(CNN, batch_size=batch) for batch in BATCHES], [1.0] * len(BATCHES))
    return [steps.record(case).values["job_memory_mib"] for case in rows.cases]


def doubts_of(steps, label, *, censored=None, target="memory"):
    configs = [replace(CNN, batch_size=batch) for batch in BATCHES]
    rows = make_rows(target, configs, label, censored=censored)
    return with_suspects(rows, steps).doubt.tolist()


def test_labels_that_follow_the_trace_are_trusted_however_far_off_all_of_them_are(steps, traced_mib):
    assert doubts_of(steps, [1.3 * mib + 700 for mib in traced_mib]) == [""] * 4


@pytest.mark.parametrize("place", range(4))
def test_one_label_that_is_gigabytes_off_the_same_network_at_other_batches_is_doubted(steps, traced_mib, place):
    label = [mib + 200 for mib in traced_mib]
    label[place] += 6 * MIB_PER_GIB
    doubts = doubts_of(steps, label)
    assert "other batches" in doubts.pop(place) and doubts == [""] * 3


def test_a_single_label_below_those_of_larger_batches_is_doubted_and_not_these(steps, traced_mib):
    """All larger batches take 6 GiB more than traced and agree; the smallest takes what the trace says."""
    label = [traced_mib[0]] + [mib + 6 * MIB_PER_GIB for mib in traced_mib[1:]]
    assert [bool(doubt) for doubt in doubts_of(steps, label)] == [True, False, False, False]


def test_a_larger_batch_bounds_what_smaller_ones_take(steps, traced_mib):
    """The figures are of the whole card: another job can only add to them."""
    label = [mib + 6 * MIB_PER_GIB for mib in traced_mib[:3]] + [traced_mib[3] + 100]
    assert [bool(doubt) for doubt in doubts_of(steps, label)] == [True, True, True, False]


def test_a_label_below_the_job_s_own_tensors_is_doubted_even_alone(steps):
    config = replace(CNN, batch_size=4096, image_size=128)
    rows = make_rows("memory", [config], [2301.0])
    steps.record(rows.cases[0])
    assert with_suspects(rows, steps).doubt.tolist() == ["less than the job's tensors alone"]


def test_rows_that_ran_out_of_memory_and_doubted_ones_are_left_as_they_are(steps, traced_mib):
    label = [mib + 200 for mib in traced_mib[:3]] + [40_960.0]
    assert doubts_of(steps, label, censored=[False, False, False, True]) == [""] * 4


def test_other_targets_have_no_suspects(steps):
    assert doubts_of(steps, [0.1, 0.9, 0.1, 0.9], target="smact") == [""] * 4


def test_rows_that_were_not_traced_are_left_as_they_are(traced_mib):
    assert doubts_of(StepStore(), [90_000.0, 1.0, 2.0, 3.0]) == [""] * 4


def test_where_as_many_rows_are_in_doubt_every_label_gigabytes_off_its_trace_is_doubted(steps, traced_mib):
    """Another job on the card adds as much to two batches as to one."""
    label = [mib + 16 * MIB_PER_GIB for mib in traced_mib[:2]] + [traced_mib[2] + 100, traced_mib[3] + 100]
    assert [bool(doubt) for doubt in doubts_of(steps, label)] == [True, True, False, False]
