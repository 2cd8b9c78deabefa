"""Which rows of a real warehouse are learnt from, and which mistakes are said how."""

import dataclasses

import numpy as np
import pytest
from learn_rows import labels_of, make_configs, write_batch, write_runs

from conf.errors import UsageError
from learn.judging.evaluate import classes_of
from learn.judging.scores import Scored, described, estimated_classes
from learn.rows.data import LabelledRow, load_rows, memory_bins
from tests.learn.learn_rows import make_rows


@pytest.fixture
def data(tmp_path):
    return tmp_path / "a'; echo foo"


def test_labels_are_those_of_ok_runs_and_out_of_memory_is_a_bound(data):
    configs = make_configs(50)
    statuses = ["ok"] * 40 + ["oom"] * 6 + ["crashed", "timeout", "invalid", "crashed"]
    ids = write_runs(data, configs, statuses=statuses)
    rows = load_rows(data, "memory")
    assert rows.run_ids.tolist() == ids[:46] and rows.configs == tuple(configs[:46])
    assert rows.censored.tolist() == [False] * 40 + [True] * 6
    np.testing.assert_array_equal(rows.label[:40], labels_of(configs)["peak_memory_mib"][:40])
    assert set(rows.label[40:]) == {40_326.0} and rows.ceiling_mib == 40_326.0
    assert dict(rows.counts) == {"ok": 40, "oom": 6, "crashed": 2, "timeout": 1, "invalid": 1}
    assert len(rows.exact) == 40
    assert not load_rows(data, "drama").censored.any(), "out-of-memory says nothing of utilization"


def test_host_memory_running_out_is_no_bound_on_the_devices(data):
    configs = make_configs(40)
    write_batch(data, configs, statuses=["ok"] * 35 + ["oom"] * 5, oom_kind="host")
    assert len(load_rows(data, "memory")) == 35


def test_out_of_memory_without_the_devices_memory_is_judged_by_its_description_or_counted(data):
    configs = make_configs(40)
    statuses = ["ok"] * 35 + ["oom"] * 5
    write_batch(data, configs, statuses=statuses, device_memory_mib=None)
    rows = load_rows(data, "memory")
    assert rows.censored.sum() == 5 and set(rows.label[rows.censored]) == {40_326.0}
    write_batch(data, configs, statuses=statuses, device_memory_mib=None, device_name="XYZ-9", job="other")
    rows = load_rows(data, "memory", device_name="XYZ-9")
    assert len(rows) == 35 and rows.counts["oom on a device of unknown memory"] == 5


def test_mixed_sources_are_refused_with_counts_and_the_way_to_choose(data):
    configs = make_configs(80)
    write_batch(data, configs[:45], statuses=["ok"] * 45)
    write_batch(data, configs[45:], statuses=["ok"] * 35, source="measured", job="real")
    with pytest.raises(UsageError, match=r"several sources \(simulated: 45, measured: 35\).*source=simulated"):
        load_rows(data, "memory")
    assert len(load_rows(data, "memory", source="measured")) == 35
    with pytest.raises(UsageError, match="no usable rows with source=imported; there are simulated: 45"):
        load_rows(data, "memory", source="imported")


def test_sources_are_mixed_only_where_a_list_names_them(data):
    configs = make_configs(80)
    write_batch(data, configs[:40], statuses=["ok"] * 40, source="imported")
    write_batch(data, configs[40:], statuses=["ok"] * 40, source="measured", job="real", device="NVIDIA H100 80GB HBM3")
    rows = load_rows(data, "memory", source=["imported", "measured"])
    assert rows.count("source") == {"imported": 40, "measured": 40}
    assert {case.training_loop for case in rows.cases} == {False, True}, "by which estimators tell them apart"
    assert len(load_rows(data, "memory", source=["imported", "simulated"])) == 40


def test_what_did_not_fit_a_share_of_the_card_needs_at_least_that_share(data):
    configs = make_configs(40)
    write_batch(data, configs, statuses=["ok"] * 35 + ["oom"] * 5, memory_fraction=0.25)
    rows = load_rows(data, "memory")
    assert set(rows.label[rows.censored]) == {0.25 * 40_326.0}


def test_a_share_of_the_card_says_nothing_of_where_the_largest_class_begins(data):
    configs = make_configs(60)
    write_batch(data, configs[:50], statuses=["ok"] * 46 + ["oom"] * 4)
    write_batch(data, configs[50:], statuses=["oom"] * 10, job="share", memory_fraction=0.25)
    rows = load_rows(data, "memory")
    assert rows.ceiling_mib == 40_326.0 == rows.subset(rows.label < 12_000).ceiling_mib
    bins = memory_bins(rows.exact.label, 8, rows.ceiling_mib)
    share = rows.censored & (rows.label < 12_000)
    assert bins.labels[-1] == "32+ GB" and set(classes_of(rows, bins)[rows.censored & ~share]) == {4}
    said = np.zeros(len(rows), dtype=int)
    said[np.flatnonzero(share)[:7]] = 3
    answers = zip(said.tolist(), rows.records, strict=True)
    scored = [Scored(estimate=1.0, classes={"ours": k}, **described(row, rows.target)) for k, row in answers]
    classes, _ = estimated_classes(scored, "ours", bins)
    assert classes[share].tolist() == [3] * 7 + [1] * 3, "10 GB or more: 24 GB may be right, below 8 GB is wrong"


def test_mixed_devices_are_refused_unless_they_are_spellings_of_one(data):
    configs = make_configs(80)
    write_batch(data, configs[:35], statuses=["ok"] * 35)
    write_batch(data, configs[35:40], statuses=["ok"] * 5, job="b", device="NVIDIA A100-SXM4-40GB")
    assert len(load_rows(data, "memory")) == 40
    write_batch(data, configs[40:], statuses=["ok"] * 40, job="c", device="NVIDIA XYZ-9")
    with pytest.raises(UsageError, match=r"several device names .*NVIDIA XYZ-9: 40.*device_name="):
        load_rows(data, "memory")
    assert len(load_rows(data, "memory", device_name="xyz-9")) == 40
    assert len(load_rows(data, "memory", device_name="A100-SXM4-40GB")) == 35


def test_family_is_chosen_and_an_absent_one_is_named(data):
    write_batch(data, make_configs(70), statuses=["ok"] * 70)
    assert set(load_rows(data, "memory", family="mlp").family) == {"mlp"}
    assert len(load_rows(data, "memory", family="all")) == 70
    with pytest.raises(UsageError, match="family=gpt; there are cnn: 35, mlp: 35"):
        load_rows(data, "memory", family="gpt")


def test_too_few_rows_are_refused_with_counts_by_status(data):
    write_batch(data, make_configs(20), statuses=["ok"] * 12 + ["crashed"] * 8)
    with pytest.raises(UsageError, match=r"at least 30 usable rows, and there are 12; .*ok: 12, crashed: 8; run more"):
        load_rows(data, "memory")
    with pytest.raises(UsageError, match="ok without power_w: 12"):
        load_rows(data, "power")


def test_unreadable_configs_are_counted(data):
    write_batch(data, make_configs(40), statuses=["ok"] * 40)
    write_batch(data, make_configs(3, seed=9), statuses=["ok"] * 3, job="old", config='{"family": "cnn", "depht": 3}')
    rows = load_rows(data, "memory")
    assert len(rows) == 40 and rows.counts["unreadable"] == 3


def test_runs_beside_others_on_one_device_are_left_out_and_counted(data):
    configs = make_configs(45)
    write_batch(data, configs[:35], statuses=["ok"] * 35)
    write_batch(data, configs[35:], statuses=["ok"] * 6 + ["oom"] * 4, job="pairs", group_id="pairs-000000")
    rows = load_rows(data, "memory")
    assert len(rows) == 35 and rows.counts["beside other trials"] == 10 and not rows.censored.any()
    assert rows.left_out == ["10 rows are of trials that shared their device with others; they are left out"]
    write_batch(data / "few", configs[:35], statuses=["ok"] * 35, group_id="pairs-000000")
    with pytest.raises(UsageError, match=r"there are 0; .*beside other trials on one device: 35"):
        load_rows(data / "few", "memory")


def test_untrusted_runs_are_left_out_and_counted_and_suspect_ones_are_not(data):
    configs = make_configs(50)
    write_batch(data, configs[:35], statuses=["ok"] * 35, quality="suspect")
    write_batch(data, configs[35:45], statuses=["ok"] * 7 + ["oom"] * 3, job="bad", quality="untrusted")
    rows = load_rows(data, "memory")
    assert len(rows) == 35 and rows.counts["untrusted"] == 10 and not rows.censored.any()
    assert rows.left_out == ["10 rows have untrusted labels (runs.quality_reasons says why); they are left out"]
    write_batch(data / "few", configs[:35], statuses=["ok"] * 35, quality="untrusted")
    with pytest.raises(UsageError, match=r"there are 0; .*with untrusted labels .*: 35"):
        load_rows(data / "few", "memory")


def test_unknown_target_lists_the_known(data):
    with pytest.raises(UsageError, match=r"unknown target 'mem'; known: drama, .*memory"):
        load_rows(data, "mem")


def test_fingerprint_is_of_the_data_and_not_of_its_order(data):
    write_batch(data, make_configs(40), statuses=["ok"] * 40)
    rows = load_rows(data, "memory")
    assert (
        rows.fingerprint() == rows.subset(np.arange(40)[::-1]).fingerprint() == load_rows(data, "memory").fingerprint()
    )
    assert rows.fingerprint() != rows.subset(np.arange(39)).fingerprint() != load_rows(data, "drama").fingerprint()


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


def test_described_devices_are_learnt_from_together(data):
    configs = make_configs(61)
    write_batch(data, configs[:16], statuses=["ok"] * 16)
    write_batch(data, configs[16:31], statuses=["ok"] * 15, job="h", device="NVIDIA H200-SXM-141GB")
    rows = load_rows(data, "memory")
    assert rows.count("device") == {"A100-SXM4-40GB": 16, "NVIDIA H200-SXM-141GB": 15}
    assert [case.device for case in rows.cases] == rows.device.tolist()
    assert len({case.spec.name for case in rows.cases}) == 2

    write_batch(data, configs[31:], statuses=["ok"] * 30, job="odd", device="GTX 9000")
    with pytest.raises(UsageError, match=r"several device names \(.*GTX 9000: 30.*which are not mixed.*device_name="):
        load_rows(data, "memory")
    with pytest.raises(UsageError, match="at least 30 usable rows, and there are 16"):
        load_rows(data, "memory", device_name="A100-SXM4-40GB")
    chosen = load_rows(data, "memory", device_name="GTX 9000")
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
    assert rows.trusted.run_ids.tolist() == [run for run in rows.run_ids if not doubt[run]]
    assert rows.subset(rows.doubt != "").fingerprint() != rows.fingerprint() != rows.trusted.fingerprint()


def test_rows_are_records_whose_fields_are_columns_as_well():
    configs = make_configs(12)
    label = np.arange(12.0)
    rows = make_rows("memory", configs, label, censored=[i % 5 == 0 for i in range(12)], device="A100-SXM4-40GB")
    for field in dataclasses.fields(LabelledRow):
        column = (
            rows.cases if field.name == "case" else getattr(rows, {"run_id": "run_ids"}.get(field.name, field.name))
        )
        assert list(column) == [getattr(row, field.name) for row in rows.records]
    some = rows.subset([7, 2])
    assert some.records == (rows.records[7], rows.records[2]) and some.label.tolist() == [7.0, 2.0]
    assert rows.subset(label > 9).records == rows.records[10:]
    assert rows.exact.records == tuple(row for row in rows.records if not row.censored)
    with pytest.raises(ValueError, match="read-only"):
        rows.label[0] = 1.0
