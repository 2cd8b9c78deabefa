"""Bounds of memory: their coverage and distribution, what makes them wide, and what a measured run does to them."""

import dataclasses
import json

import pytest
from torch import nn

from conf.errors import EnvironmentProblem, UsageError
from featurize.device.device_spec import load_device
from featurize.families import cnn, mlp
from learn import devices_that_fit, estimate
from learn.estimation.bounds import KINDS
from tests.learn.learn_rows import write_batch

pytestmark = pytest.mark.shares_traces

MLP = mlp.Config(batch_size=64, input_size=4096, classes=10, depth=4)
CNN = cnn.Config(batch_size=64, image_size=64, channels=3, classes=10, base_filters=64, depth=3)
MAPPING = "config={family: mlp, batch_size: 64, input_size: 4096, classes: 10, depth: 4}"
RUN = {"batch_size": 64, "memory_mib": 2000}


def measured(folder, config, job="a", mib=None, /, **about):
    """Write a run of the config that was measured on a GPU: 250 MiB above the trace, unless `mib` says what it took."""
    labels = {"peak_memory_mib": [estimate(config, known="none").process_mib + 250 if mib is None else mib]}
    write_batch(folder, [config], job=job, labels=labels, **{"source": "measured", "device_uuid": "GPU-1", **about})


def net():
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 28**2, 10))


def images(batch):
    return [batch, 3, 32, 32]


@pytest.mark.parametrize("job", [MLP, dataclasses.replace(CNN, precision="fp16")], ids=["fitted", "by causes"])
def test_a_lower_coverage_has_a_lower_bound_and_the_distribution_holds_it(job):
    bounds = {coverage: estimate(job, coverage=coverage) for coverage in (0.9, 0.93, 0.99)}
    assert bounds[0.9].peak_memory_mib <= bounds[0.9].upper_mib < bounds[0.93].upper_mib < bounds[0.99].upper_mib
    for coverage, done in bounds.items():
        assert done.coverage == coverage and done.quantile_mib(coverage) == pytest.approx(done.upper_mib)
        levels, mib = zip(*done.distribution, strict=True)
        assert list(levels) == sorted(levels) and list(mib) == sorted(mib)
        assert done.quantile_mib(0.01) <= done.peak_memory_mib
    assert json.loads(json.dumps(bounds[0.9].to_mapping()))["coverage"] == 0.9


def test_the_bound_of_what_no_fit_knows_is_taken_apart_into_causes():
    done = estimate(dataclasses.replace(CNN, precision="fp16"))
    assert done.peak_memory_mib == pytest.approx(done.card_mib, abs=200)  # a plain loop holds a batch more
    assert done.upper_mib - done.peak_memory_mib == pytest.approx(sum(done.uncertain.values()))
    assert set(done.uncertain) == {
        "convolution workspaces",
        "memory of kernels that the trace does not see",
        "context and libraries",
    }
    (note,) = [text for text in done.warnings if "the bound exceeds the estimate by" in text]
    widest = max(done.uncertain, key=done.uncertain.get)
    assert note.index(widest) == note.index("for ") + 4 and "narrows it" in note


def test_a_job_that_runs_without_its_workspaces_has_the_card_as_its_bound():
    wide = estimate(net, images(512), precision="fp16")
    card = dataclasses.replace(load_device("A100-SXM4-40GB"), memory_mib=wide.upper_mib - 10)
    done = estimate(net, images(512), precision="fp16", device=card)
    assert done.upper_mib == card.memory_mib and done.fits_device
    little = dataclasses.replace(card, memory_mib=done.peak_memory_mib + 1)
    assert not estimate(net, images(512), precision="fp16", device=little).fits_device


@pytest.mark.parametrize("kind", KINDS)
def test_a_measured_run_of_the_same_job_moves_the_estimate_and_narrows_its_bound(kind):
    before = estimate(net, images(64))
    measured_mib = getattr(before, f"{kind}_mib") + 300
    done = estimate(net, images(64), known=[{"batch_size": 64, "memory_mib": measured_mib, "kind": kind}])
    assert done.peak_memory_mib == pytest.approx(before.card_mib + 300)
    assert done.upper_mib / done.peak_memory_mib == pytest.approx(1.01)
    assert done.answered_by["memory"] == "trace with 1 measured run" and done.estimator.startswith("hybrid")
    assert list(done.uncertain) == ["distance to the measured run"]


def test_a_neighbour_says_less_than_the_job_itself_and_two_say_more_than_one():
    at = {batch: estimate(net, images(batch)) for batch in (64, 128, 256)}
    beyond = {64: 100, 256: 400}
    known = [{"batch_size": n, "memory_mib": at[n].card_mib + mib, "kind": "card"} for n, mib in beyond.items()]
    near = estimate(net, images(128), known=known[:1])
    between = estimate(net, images(128), known=known)
    assert at[128].card_mib + 100 < near.peak_memory_mib < at[128].card_mib + 200
    assert at[128].card_mib + 100 < between.peak_memory_mib < at[128].card_mib + 400
    assert 1.01 < near.upper_mib / near.peak_memory_mib <= 1.07 + 1e-9


def test_of_runs_of_one_batch_that_differ_the_median_counts_and_none_lies_above_the_bound():
    runs = [{"batch_size": 64, "memory_mib": mib} for mib in (2600, 2000)]
    done = estimate(net, images(64), known=runs)
    assert done.peak_memory_mib == pytest.approx(2300, abs=1) and done.upper_mib > 2600


@pytest.fixture
def measured_folder(tmp_path):
    """A data folder that measured MLP at half its batch, 250 MiB above the trace, on an A100."""
    measured(tmp_path / "d", dataclasses.replace(MLP, batch_size=32))
    return tmp_path / "d"


def test_measured_runs_of_the_data_folder_move_the_estimate_without_being_named(measured_folder, monkeypatch):
    named, without = (estimate(MLP, data=measured_folder, known=known) for known in ("runs", "none"))
    done = estimate(MLP, data=measured_folder)
    assert done.answered_by["memory"] == named.answered_by["memory"] == "trace with 1 measured run"
    assert (done.peak_memory_mib, done.upper_mib) == (named.peak_memory_mib, named.upper_mib)
    assert without.card_mib + 245 < done.peak_memory_mib < without.card_mib + 400
    assert "measured of this job, at a batch of 32; known=none leaves them out" in done.warnings[0]
    monkeypatch.setenv("GPUFARM_DATA", str(measured_folder))
    assert estimate(MLP).peak_memory_mib == done.peak_memory_mib
    by = {one.device: one.estimate.answered_by["memory"] for one in devices_that_fit(MLP, devices=["A100", "H100"])}
    assert by == {"A100-SXM4-40GB": "trace with 1 measured run", "H100-SXM5-80GB": "hybrid (default)"}
    unknown = estimate(dataclasses.replace(MLP, depth=6), known="runs")
    assert unknown.answered_by["memory"] == "hybrid (default)"
    assert "the data folder has no run of this job" in unknown.warnings[-1]


def test_measured_runs_of_the_data_folder_leave_other_questions_alone(measured_folder):
    elsewhere = measured_folder.parent / "empty"
    write_batch(elsewhere, [dataclasses.replace(MLP, depth=5)], source="measured", job="a", device_uuid="GPU-1")
    for options in (
        {"known": "none"},
        {"known": []},
        {"estimator": "trace"},
        {"estimator": "hybrid"},
        {"method": "fast"},
        {"allocator": "expandable_segments:True"},
        {"torch_version": "2.4"},
        {"device": "H100"},
    ):
        done, alone = (estimate(MLP, data=at, **options) for at in (measured_folder, elsewhere))
        assert "measured" not in done.answered_by["memory"], options
        assert done.peak_memory_mib == alone.peak_memory_mib and done.upper_mib == alone.upper_mib, options


def test_a_run_beside_its_own_estimate_does_not_answer_for_itself(measured_folder, answer, refused):
    assert "known=runs cannot be combined with run=" in refused("estimate", "run=a-000000", "known=runs")
    beside = answer("estimate", "run=a-000000", f"data={measured_folder}")
    assert "measured" not in beside["answered_by"]["memory"]
    alone = answer("estimate", MAPPING.replace("64", "32"), f"data={measured_folder}")
    assert "1 measured run" in alone["answered_by"]["memory"]


def test_a_run_that_lands_after_an_estimate_moves_the_next_one(tmp_path):
    write_batch(tmp_path / "d", [MLP], job="simulated")
    assert "measured" not in estimate(MLP, data=tmp_path / "d").answered_by["memory"]
    measured(tmp_path / "d", MLP)
    assert estimate(MLP, data=tmp_path / "d").answered_by["memory"] == "trace with 1 measured run"


def test_a_data_folder_that_nobody_named_and_that_cannot_be_read_is_a_note(tmp_path, monkeypatch):
    write_batch(tmp_path / "d", [MLP], source="measured", job="a", device_uuid="GPU-1")
    (tmp_path / "d" / "format.json").write_text(json.dumps({"format": "gpufarm-data", "schema_version": 10**6}))
    monkeypatch.setenv("GPUFARM_DATA", str(tmp_path / "d"))
    assert any(
        "measured runs are left out: data=" in note and "schema version" in note for note in estimate(MLP).warnings
    )
    with pytest.raises(EnvironmentProblem, match="schema version"):
        estimate(MLP, known="runs")


def test_runs_of_other_jobs_and_gpus_simulated_ones_and_odd_ones_are_passed_over(measured_folder):
    alone = estimate(MLP, data=measured_folder)
    half = dataclasses.replace(MLP, batch_size=32)
    for job, config, mib, about in (
        ("simulated", half, 9000, {"source": "simulated"}),
        ("of-no-gpu", half, 9000, {"device_uuid": None}),
        ("of-no-config", MLP, 9000, {"config": "{no JSON"}),
        ("other", dataclasses.replace(MLP, depth=5), 9000, {}),
        ("optimizer", dataclasses.replace(MLP, optimizer="sgd"), 9000, {}),
        ("too-much", MLP, 79_000, {"status": "ok"}),
    ):
        measured(measured_folder, config, job, mib, **about)
    done = estimate(MLP, data=measured_folder, machine="current")
    assert done.answered_by["memory"] == "trace with 1 measured run" and "at a batch of 32;" in done.warnings[0]
    assert (done.peak_memory_mib, done.upper_mib) == (alone.peak_memory_mib, alone.upper_mib)


def test_the_command_takes_a_coverage_a_report_and_measured_runs_also_as_json(answer, shown, tmp_path):
    said = shown(
        "estimate",
        MAPPING,
        "coverage=0.95",
        "known=[{batch_size: 32, memory_mib: 1900}]",
        f"report={tmp_path / 'out.html'}",
    )
    assert "95 % bound" in said and "report: " in said and (tmp_path / "out.html").exists()
    as_json = answer("estimate", MAPPING, """known='[{"batch_size": 32, "memory_mib": 1900}]'""")
    assert "1 measured run" in as_json["answered_by"]["memory"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("coverage=0.999", "at most 0.99"),
        ("""known='[{"batch_size": 32 "memory_mib": 1900}]'""", "not JSON (Expecting ',' delimiter"),
        ("""known='[{"batch_size": 32 "memory_mib": 1900}]'""", "[{batch_size: 32, memory_mib: 10240"),
        (
            """known=[{"batch_size": 32, "memory_mib": 1900}]""",
            "write KEY=VALUE (a mapping's keys have no quotes: {key: value})",
        ),
    ],
)
def test_the_command_refuses_a_coverage_and_measured_runs_that_cannot_be(refused, argument, message):
    assert message in refused("estimate", MAPPING, argument)


# Measured runs that cannot be, and what is said of them.
IMPOSSIBLE_RUNS = [
    ({"batch_size": 8}, "known is a list"),
    ([{"batch_size": 8}], r"known\[0\]: missing memory_mib"),
    ([{"batch_size": 0, "memory_mib": 5}], "at least 1"),
    ([{"batch_size": 8, "memory_mib": float("nan")}], "above 0"),
    ([{"batch_size": 8, "memory_mib": 5, "kind": "peak"}], "allocated, card, process, reserved"),
    ([{"batch_size": 8, "memory_mib": 5, "mib": 5}], "unknown mib"),
    ([8], "a mapping is wanted"),
    ({}, "put it in brackets"),
    ('[{"batch_size": 8 "memory_mib": 5}]', r"not JSON \(Expecting ',' delimiter.*as in|as in .*not JSON"),
    ("folder", "runs or none; got text that is not JSON"),
    ('{"batch_size": 8, "memory_mib": 5}', "put it in brackets"),
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"known": known}, message) for known, message in IMPOSSIBLE_RUNS),
        *(
            ({"coverage": coverage}, r"coverage is a number above 0.5 and at most 0.99")
            for coverage in (0.5, 1, 0.995, -1, True, "0.9", None, float("nan"))
        ),
        ({"known": [RUN], "estimator": "hybrid"}, "estimator=hybrid"),
        ({"known": [RUN], "method": "fast"}, "known"),
        ({"known": [RUN | {"memory_mib": 90_000}]}, "A100-SXM4-40GB has"),
        ({"known": [RUN | {"device": "abacus"}]}, "RTX-4090"),
        ({"knwon": []}, "unknown keyword 'knwon'"),
        ({"allocator": "per_process_memory_fraction:abc"}, "expected a number"),
        ({"allocator": "per_process_memory_fraction:"}, "expected a number"),
        ({"allocator": "per_process_memory_fraction:0"}, r"in \(0, 1\]"),
    ],
)
def test_options_that_cannot_be_are_one_message(options, message):
    with pytest.raises(UsageError, match=message):
        estimate(MLP, **options)


@pytest.mark.parametrize("share", [0.3, 0.5, 6.0])
def test_a_run_that_contradicts_its_trace_is_left_out_either_way(share):
    without = estimate(net, images(256), precision="fp16")
    known = [{"batch_size": 256, "memory_mib": share * without.card_mib, "kind": "card"}]
    done = estimate(net, images(256), precision="fp16", known=known)
    assert "is left out: the trace says" in done.warnings[0] and "another job" in done.warnings[0]
    assert (done.peak_memory_mib, done.upper_mib) == (without.peak_memory_mib, without.upper_mib)


def test_a_run_of_another_gpu_moves_that_one_alone():
    known = [{"batch_size": 8, "memory_mib": 900, "device": "RTX-4090"}]
    assert "no run was measured on A100" in estimate(net, images(8), known=known).warnings[-1]
    devices = ["A100-SXM4-40GB", "RTX-4090"]
    by = {
        one.device: one.estimate.answered_by["memory"]
        for one in devices_that_fit(net, images(8), devices=devices, known=known)
    }
    assert by["RTX-4090"] == "trace with 1 measured run" and "measured" not in by["A100-SXM4-40GB"]
