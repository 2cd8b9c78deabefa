"""Labels that nothing explains are doubted, and only these."""

from dataclasses import replace

import pytest

from conf.units import MIB_PER_GIB
from featurize.families.cnn import Config
from learn.rows.step_store import StepStore, with_suspects
from tests.learn.learn_rows import make_rows

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


GIB = MIB_PER_GIB
LABELS = {  # what is measured of each batch by what is traced, and which of the labels are doubted
    "however far off all are, alike": (lambda mib: [1.3 * one + 700 for one in mib], [False] * 4),
    "a larger batch bounds what smaller ones take": (
        lambda mib: [*(one + 6 * GIB for one in mib[:3]), mib[3] + 100],
        [True, True, True, False],
    ),
    "a single one below those of larger batches": (
        lambda mib: [mib[0], *(one + 6 * GIB for one in mib[1:])],
        [True, False, False, False],
    ),
    "in a network of which as many are in doubt": (
        lambda mib: [*(one + 16 * GIB for one in mib[:2]), mib[2] + 100, mib[3] + 100],
        [True, True, False, False],
    ),
    **{
        f"one gigabytes off, at place {place}": (
            lambda mib, place=place: [one + 200 + 6 * GIB * (at == place) for at, one in enumerate(mib)],
            [at == place for at in range(4)],
        )
        for place in range(4)
    },
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_that_nothing_explains_are_doubted(steps, traced_mib, name):
    label_of, doubted = LABELS[name]
    assert [bool(doubt) for doubt in doubts_of(steps, label_of(traced_mib))] == doubted


def test_a_label_below_the_job_s_own_tensors_is_doubted_even_alone(steps):
    config = replace(CNN, batch_size=4096, image_size=128)
    rows = make_rows("memory", [config], [2301.0])
    steps.record(rows.cases[0])
    assert with_suspects(rows, steps).doubt.tolist() == ["less than the job's tensors alone"]


def test_rows_that_ran_out_of_memory_of_other_targets_or_without_a_trace_are_left_as_they_are(steps, traced_mib):
    label = [mib + 200 for mib in traced_mib[:3]] + [40_960.0]
    assert doubts_of(steps, label, censored=[False, False, False, True]) == [""] * 4
    assert doubts_of(steps, [0.1, 0.9, 0.1, 0.9], target="smact") == [""] * 4
    assert doubts_of(StepStore(), [90_000.0, 1.0, 2.0, 3.0]) == [""] * 4
