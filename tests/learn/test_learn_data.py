"""Which rows of a real warehouse are learnt from, and which mistakes are said how."""

from dataclasses import replace

import numpy as np
import pytest

from conf.errors import UsageError
from conf.units import MIB_PER_GIB
from featurize.families.cnn import Config
from learn.rows.data import load_rows
from learn.rows.step_store import StepStore, with_suspects
from tests.learn.learn_rows import MOSTLY_MLPS, labels_of, make_configs, make_rows, write_batch


def test_labels_are_those_of_ok_runs_and_out_of_memory_is_a_bound(data):
    configs = make_configs(50)
    statuses = ["ok"] * 40 + ["oom"] * 6 + ["crashed", "timeout", "invalid", "crashed"]
    write_batch(data, configs, statuses=statuses)
    rows = load_rows(data, "memory")
    assert rows.run_ids.tolist() == [f"job-{i:06d}" for i in range(46)] and rows.configs == tuple(configs[:46])
    assert rows.censored.tolist() == [False] * 40 + [True] * 6
    np.testing.assert_array_equal(rows.label[:40], labels_of(configs)["peak_memory_mib"][:40])
    assert set(rows.label[40:]) == {40_326.0} and rows.ceiling_mib == 40_326.0
    assert dict(rows.counts) == {"ok": 40, "oom": 6, "crashed": 2, "timeout": 1, "invalid": 1}
    assert not load_rows(data, "drama").censored.any(), "out-of-memory says nothing of utilization"
    write_batch(data, configs[:5], statuses=["oom"] * 5, job="host", oom_kind="host")
    write_batch(data, configs[:3], statuses=["oom"] * 3, job="share", memory_fraction=0.25)
    again = load_rows(data, "memory")
    assert len(again) == 46 + 3, "the host's memory is no bound on the device's"
    assert set(again.label[again.censored]) == {40_326.0, 0.25 * 40_326.0} and again.ceiling_mib == 40_326.0


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A data folder of 45 simulated rows and 35 measured ones."""
    data, configs = tmp_path_factory.mktemp("mixed") / "a'; echo foo", make_configs(80)
    write_batch(data, configs[:45], statuses=["ok"] * 45)
    write_batch(data, configs[45:], statuses=["ok"] * 35, source="measured", job="real")
    return data


def test_mixed_sources_are_refused_with_counts_and_mixed_where_a_list_names_them(mixed):
    with pytest.raises(UsageError, match=r"several sources \(simulated: 45, measured: 35\).*source=simulated"):
        load_rows(mixed, "memory")
    assert len(load_rows(mixed, "memory", source="measured")) == 35
    rows = load_rows(mixed, "memory", source=["simulated", "measured"])
    assert rows.count("source") == {"simulated": 45, "measured": 35}
    with pytest.raises(UsageError, match="no usable rows with source=imported; there are simulated: 45"):
        load_rows(mixed, "memory", source="imported")


def test_rows_of_several_gpus_are_left_out_and_named(data):
    configs = make_configs(33)
    write_batch(data, configs[:30], statuses=["ok"] * 30)
    write_batch(data, [replace(config, parallel="ddp=2") for config in configs[30:]], job="n", statuses=["ok"] * 3)
    rows = load_rows(data, "memory")
    assert len(rows) == 30 and rows.counts["unreadable"] == 3
    assert any("job on several GPUs (ddp=2)" in remark for remark in rows.remarks)


def test_family_is_chosen_and_an_absent_one_is_named(data):
    write_batch(data, make_configs(40, families=MOSTLY_MLPS), statuses=["ok"] * 40)
    assert set(load_rows(data, "memory", family="mlp").family) == {"mlp"}
    assert len(load_rows(data, "memory", family="all")) == 40
    with pytest.raises(UsageError, match="family=gpt; there are mlp: 30, cnn: 10"):
        load_rows(data, "memory", family="gpt")


@pytest.mark.parametrize(
    ("columns", "counted", "remark", "refusal"),
    [
        (
            {"group_id": "pairs-000000"},
            "beside other trials",
            "10 rows are of trials that shared their device with others; they are left out",
            "beside other trials on one device: 35",
        ),
        (
            {"quality": "untrusted"},
            "untrusted",
            "10 rows have untrusted labels (runs.quality_reasons says why); they are left out",
            "with untrusted labels .*: 35",
        ),
    ],
)
def test_untrusted_runs_and_those_beside_others_are_left_out_and_counted_and_suspect_ones_are_not(
    data, columns, counted, remark, refusal
):
    configs = make_configs(50)
    write_batch(data, configs[:35], statuses=["ok"] * 35, quality="suspect")
    write_batch(data, configs[35:45], statuses=["ok"] * 7 + ["oom"] * 3, job="left-out", **columns)
    rows = load_rows(data, "memory")
    assert len(rows) == 35 and rows.counts[counted] == 10 and not rows.censored.any()
    assert rows.left_out == [remark]
    write_batch(data / "few", configs[:35], statuses=["ok"] * 35, **columns)
    with pytest.raises(UsageError, match=f"there are 0; .*{refusal}"):
        load_rows(data / "few", "memory")


def test_fingerprint_is_of_the_data_and_not_of_its_order(mixed):
    rows, again, of_drama = (load_rows(mixed, target, source="measured") for target in ("memory", "memory", "drama"))
    assert rows.fingerprint() == rows.subset(np.arange(35)[::-1]).fingerprint() == again.fingerprint()
    assert rows.fingerprint() != rows.subset(np.arange(34)).fingerprint() != of_drama.fingerprint()


def test_an_imported_activity_of_nothing_is_no_label_and_a_farm_runs_is_and_a_memory_never(data):
    configs = make_configs(33)
    for source in ("imported", "measured"):
        write_batch(data / source, configs[:30], statuses=["ok"] * 30, source=source)
        write_batch(
            data / source, configs[30:], statuses=["ok"] * 3, source=source, job="zero", smact=0.0, peak_memory_mib=0.0
        )
    theirs, ours = load_rows(data / "imported", "smact"), load_rows(data / "measured", "smact")
    assert len(theirs) == 30 and (theirs.label > 0).all() and not any("zero" in run for run in theirs.run_ids)
    assert len(ours) == 33 and ours.label.tolist()[30:] == [0.0] * 3
    assert len(load_rows(data / "imported", "smocc")) == 33
    assert len(load_rows(data / "imported", "memory")) == len(load_rows(data / "measured", "memory")) == 30


def test_out_of_memory_without_the_devices_memory_is_judged_by_its_description(data):
    write_batch(data, make_configs(40), statuses=["ok"] * 35 + ["oom"] * 5, device_memory_mib=None)
    rows = load_rows(data, "memory")
    assert rows.censored.sum() == 5 and set(rows.label[rows.censored]) == {40_326.0}


def test_described_devices_are_learnt_from_together(data):
    configs = make_configs(61)
    write_batch(data, configs[:16], statuses=["ok"] * 16)
    write_batch(data, configs[16:31], statuses=["ok"] * 15, job="h", device="NVIDIA H200-SXM-141GB")
    rows = load_rows(data, "memory")
    assert rows.count("device") == {"A100-SXM4-40GB": 16, "NVIDIA H200-SXM-141GB": 15}
    write_batch(data, configs[31:], statuses=["ok"] * 30, job="odd", device="NVIDIA XYZ-9")
    with pytest.raises(
        UsageError, match=r"several device names \(.*NVIDIA XYZ-9: 30.*which are not mixed.*device_name="
    ):
        load_rows(data, "memory")
    chosen = load_rows(data, "memory", device_name="xyz-9")
    assert len(chosen) == 30 and {case.spec for case in chosen.cases} == {None}


def test_rows_in_doubt_are_told_apart_and_not_trusted(data):
    configs = make_configs(35)
    write_batch(data, configs[:25], statuses=["ok"] * 25, source="imported")
    doubtful = {"statuses": ["ok"] * 3, "source": "imported", "error_type": "doubt"}
    write_batch(data, configs[25:28], job="said", error="less than the next smaller batch took", **doubtful)
    write_batch(data, configs[28:31], job="unsaid", **doubtful)
    write_batch(data, configs[31:], statuses=["ok"] * 4, source="imported", job="other", error_type="late", error="x")
    rows = load_rows(data, "memory")
    doubt = dict(zip(rows.run_ids.tolist(), rows.doubt.tolist(), strict=True))
    assert {doubt[run] for run in doubt if run.startswith("said")} == {"less than the next smaller batch took"}
    assert {doubt[run] for run in doubt if run.startswith("unsaid")} == {"in doubt"}
    assert {doubt[run] for run in doubt if run.startswith(("job", "other"))} == {""}
    assert len(rows) == 35 and len(rows.trusted) == 29 and (rows.trusted.doubt == "").all()
    assert all(case.training_loop for case in rows.cases), "imported runs are of a plain loop"


BATCHES = (4, 8, 16, 32)
CNN = Config(batch_size=1, image_size=64, channels=3, depth=3, base_filters=32, classes=10)


STEPS = StepStore()  # of the cases that the tests share


@pytest.fixture(scope="module")
def traced_mib():
    rows = make_rows("memory", [replace(CNN, batch_size=batch) for batch in BATCHES], [1.0] * len(BATCHES))
    return [STEPS.record(case).values["job_memory_mib"] for case in rows.cases]


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
def test_labels_that_nothing_explains_are_doubted(traced_mib, name):
    label_of, doubted = LABELS[name]
    rows = make_rows("memory", [replace(CNN, batch_size=batch) for batch in BATCHES], label_of(traced_mib))
    assert [bool(doubt) for doubt in with_suspects(rows, STEPS).doubt] == doubted


def test_a_label_below_the_job_s_own_tensors_is_doubted_even_alone():
    config = replace(CNN, batch_size=4096, image_size=128)
    rows = make_rows("memory", [config], [2301.0])
    STEPS.record(rows.cases[0])
    assert with_suspects(rows, STEPS).doubt.tolist() == ["less than the job's tensors alone"]
