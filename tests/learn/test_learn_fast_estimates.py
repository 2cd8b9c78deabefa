"""Estimates of many jobs at once and without tracing: `method="fast"`, `estimate_many`, and `configs=FILE`."""

import dataclasses
import io
import json
import sys

import pytest
from torch import nn

from conf.errors import UsageError
from featurize.device.device_spec import load_device
from featurize.families import cnn, layers_of, mlp, timm, transformer
from learn import estimate, estimate_many
from learn.fitting.config_models import drawn_cases
from tests.learn.learn_rows import make_configs, write_batch

pytestmark = [pytest.mark.shares_traces, pytest.mark.usefixtures("no_models_of_ones_own")]

A100 = load_device("A100-SXM4-40GB")
STATES = {"adamw": 2, "momentum": 1}  # copies of the weights
CONFIG = mlp.Config(batch_size=256, input_size=2048, classes=10, depth=4)
CONFIGS = (
    CONFIG,
    cnn.Config(batch_size=16, image_size=64, channels=3, classes=10, base_filters=32, depth=5),
    transformer.Config(
        batch_size=8,
        vocabulary_size=60_000,
        sequence_length=128,
        embedding_size=256,
        heads=4,
        depth=3,
        feed_forward=512,
        classes=500,
    ),
    mlp.Config(batch_size=32, input_size=64, classes=10, depth=1, optimizer="sgd"),
)
LARGE = (
    mlp.Config(batch_size=1, input_size=60_000, classes=60_000, depth=1),
    transformer.Config(
        batch_size=1,
        vocabulary_size=900_000,
        sequence_length=8,
        embedding_size=8192,
        heads=8,
        depth=2,
        feed_forward=512,
        classes=400,
    ),
    cnn.Config(batch_size=1, image_size=1, channels=3, classes=10, base_filters=2048, depth=40, topology="uniform"),
)
NAME = 'a\'; echo foo, [b] {c}: "d".jsonl'
FIGURES = ("peak_memory_mib", "upper_mib", "smact", "smocc", "drama", "step_time_ms")


def sampled_configs(n, seed):
    """Configs of the spaces that the models are fitted on, each family's own and wider ones."""
    return [case.config for case in drawn_cases(n, seed)]


@pytest.fixture
def jobs(tmp_path):
    """Writes a file of jobs; gives the argument that names it."""

    def written(*lines):
        path = tmp_path / NAME
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return f"configs={path}"

    return written


def test_a_config_is_answered_without_tracing_it(monkeypatch):
    def never(*_args, **_settings):
        raise AssertionError("traced")

    monkeypatch.setattr("featurize.trace.tracer.trace_step", never)
    done = estimate(CONFIG, method="fast")
    assert done.estimator == "fast" and set(done.answered_by.values()) == {"lightgbm (default)"}
    assert set(done.answered_by) == {"memory", "smact", "smocc", "drama", "step_time"}
    assert 450 < done.peak_memory_mib < done.upper_mib and done.step_time_ms > 0
    assert all(0 <= ratio <= 1 for ratio in (done.smact, done.smocc, done.drama))
    assert done.breakdown == {} and done.trace_memory_mib is done.peak_operator is done.parameters is None
    assert done.device == A100.name and done.seconds > 0 and done.coverage == 0.99
    assert done.fits(done.upper_mib) and not done.fits(done.peak_memory_mib)


def test_fast_answers_of_many_are_those_of_one_by_one_in_order():
    device = "NVIDIA H200-SXM-141GB"
    configs = [*CONFIGS, *sampled_configs(12, seed=8), *CONFIGS[::-1]]
    given = [config.to_mapping() if i % 2 else config for i, config in enumerate(configs)]
    together = estimate_many(given, method="fast", device=device)
    assert len(together) == len(configs)
    for config, found in zip(configs, together, strict=True):
        alone = estimate(config, method="fast", device=device)
        for name in FIGURES:
            assert getattr(found, name) == pytest.approx(getattr(alone, name), rel=1e-5, abs=1e-6)
        assert (found.device, found.warnings, found.answered_by) == (alone.device, alone.warnings, alone.answered_by)
    assert estimate_many([], method="fast") == []


def test_full_answers_of_many_are_those_of_one_by_one_in_order():
    given = [CONFIGS[0], CONFIGS[3].to_mapping(), CONFIGS[1]]
    together, alone = estimate_many(given), [estimate(config) for config in given]
    assert [dataclasses.replace(one, seconds=0) for one in together] == [
        dataclasses.replace(one, seconds=0) for one in alone
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_fast_memory_holds_at_least_the_parameters_and_what_the_optimizer_keeps(optimizer):
    configs = [dataclasses.replace(config, optimizer=optimizer) for config in (*LARGE, *sampled_configs(45, seed=9))]
    for config, found in zip(configs, estimate_many(configs, method="fast"), strict=True):
        parameters = sum(layer.parameters for layer in layers_of(config))
        least = 4 * parameters * (1 + STATES[optimizer]) / 2**20
        assert least < found.peak_memory_mib <= found.upper_mib


def test_fast_says_how_a_job_is_unlike_what_it_was_fitted_on():
    odd = dataclasses.replace(CONFIG, batch_size=5000, depth=60)
    said = estimate(odd, method="fast").warnings
    for text in ("batch_size 5000: fitted on ", "depth 60: fitted on 1 to "):
        assert any(one.startswith(f"unlike what method=fast was fitted on: {text}") for one in said)
    unknown = dataclasses.replace(A100, name="A100-OF-MINE", memory_mib=1000.0)
    memory, device = estimate(CONFIG, method="fast", device=unknown).warnings[:2]
    assert memory == "out of memory: A100-OF-MINE has 1,000 MiB"
    assert device.startswith("unlike what method=fast was fitted on: device A100-OF-MINE: fitted on A100")
    tight = dataclasses.replace(A100, memory_mib=estimate(CONFIG, method="fast").peak_memory_mib + 1)
    assert "it may run out of memory: the bound is above" in estimate(CONFIG, method="fast", device=tight).warnings[0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: estimate(nn.Linear(3, 4), method="fast"), "modules take method=full"),
        (lambda: estimate(lambda: nn.Linear(3, 4), (2, 3), method="fast"), "leave inputs out"),
        (lambda: estimate(CONFIG, (2, 3), method="fast"), "leave inputs out"),
        (lambda: estimate(CONFIG, method="fast", estimator="hybrid"), "leave estimator out"),
        (
            lambda: estimate(CONFIG, method="fast", allocator="expandable_segments:True", report="r.html"),
            "leave allocator, report out",
        ),
        (
            lambda: estimate(CONFIG, method="fast", optimizer="sgd"),
            "the trial config has optimizer=adam; change it there",
        ),
        (
            lambda: estimate(CONFIG.to_mapping(), method="fast", precision="bf16"),
            "has precision=fp32; .* not by precision=",
        ),
        (lambda: estimate(CONFIG, method="fast", cudnn_benchmark=True), "the trial config has cudnn_benchmark=False"),
        (lambda: estimate(CONFIG, method="fast", channels_last=True), "the trial config has channels_last=False"),
        (lambda: estimate(CONFIG, method="fast", target=(3,), loss=print), "leave target, loss out"),
        (lambda: estimate(CONFIG, target=(3,), loss=print), "its own inputs, target and loss; leave target, loss out"),
        (lambda: estimate(CONFIG, input_dtype="int64"), "leave input_dtype out"),
        (lambda: estimate_many([CONFIG], method="fast", estimator="hybrid"), "leave estimator out"),
        (
            lambda: estimate(timm.Config(model="resnet18", batch_size=8), method="fast"),
            "has no model of the family timm: python -m learn.fit estimator=lightgbm fits one; use method=full",
        ),
        (
            lambda: estimate_many([CONFIG, {"family": "timm", "model": "resnet18", "batch_size": 8}], method="fast"),
            "method=fast has no model of the family timm",
        ),
        *(
            (call, "method=fast was fitted on NVIDIA GPUs, and MI300X is an AMD GPU; use method=full")
            for call in (
                lambda: estimate(CONFIGS[1], device="MI300X", method="fast"),
                lambda: estimate_many(CONFIGS[:2], device="MI300X", method="fast"),
            )
        ),
        (lambda: estimate(CONFIG, method="quick"), "unknown method 'quick'; known: fast, full"),
        (lambda: estimate_many([CONFIG], method="quick"), "unknown method 'quick'; known: fast, full"),
        (lambda: estimate(CONFIG, method="fast", device="A1000"), "unknown device 'A1000'; known: A10"),
        (lambda: estimate_many([CONFIG], device="A1000"), "unknown device 'A1000'; known: A10"),
        (lambda: estimate({"family": "mlp"}, method="fast"), "mlp: missing batch_size, input_size, classes, depth"),
        (lambda: estimate_many([CONFIG, {"family": "cmm"}]), r"configs\[1\]: unknown family 'cmm'; known: cnn"),
        (lambda: estimate_many([CONFIG, 5], method="fast"), r"configs\[1\]: a trial config or its mapping .* got int"),
        (lambda: estimate_many([nn.Linear(3, 4)]), r"configs\[0\]: a trial config or its mapping .* got Linear"),
        (lambda: estimate_many(CONFIG.to_mapping(), method="fast"), "got dict; estimate.config. answers one"),
        (lambda: estimate_many(CONFIG), "a sequence of trial configs or their mappings, got Config; estimate"),
        (lambda: estimate_many("jobs.jsonl"), "a sequence of trial configs or their mappings, got str"),
        (lambda: estimate_many(None, method="fast"), "a sequence of trial configs or their mappings, got NoneType"),
        (lambda: estimate_many([CONFIG], device=7), "unknown device 7; known: A10"),
        (lambda: estimate(CONFIG, method="fast", loop="resident"), "method=fast .*leave loop out"),
        (lambda: estimate_many([CONFIG], known=[{"batch_size": 8, "memory_mib": 900}]), "a list is of one job"),
        (
            lambda: estimate_many([CONFIG], method="fast", workspaces="cudnn", known="runs"),
            "leave workspaces, known out",
        ),
        (lambda: estimate_many([CONFIG], method="fast", coverage=0.9), "coverage"),
        (
            lambda: estimate(CONFIG, method="fast", parallel="ddp=8"),
            "method=fast answers from a trial config alone; leave parallel out",
        ),
        (
            lambda: estimate(dataclasses.replace(CONFIG, parallel="ddp=8"), method="fast"),
            "method=fast knows one GPU, and the config has parallel=ddp=8; use method=full",
        ),
        (lambda: estimate_many([CONFIG], snapshot="a.pickle"), "snapshot: of one estimate only"),
        (lambda: estimate_many([], estimator="xgb"), "unknown estimator 'xgb'; known: .*trace"),
        (lambda: estimate_many([CONFIG], estimator=["trace"]), "unknown estimator .*; known: .*trace"),
    ],
)
def test_mistakes_are_named_by_the_call(call, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        call()
    assert not list(tmp_path.iterdir())


def test_the_command_answers_a_file_of_jobs_line_by_line(jobs, shown):
    named = jobs(
        f"\ufeff{json.dumps(CONFIGS[0].to_mapping())}\r", "", CONFIGS[2].to_mapping(), "   ", CONFIGS[1].to_mapping()
    )
    lines = shown("estimate", named, "method=fast", "format=json", "device=H200-SXM-141GB").splitlines()
    assert len(lines) == 3
    for line, config in zip(lines, (CONFIGS[0], CONFIGS[2], CONFIGS[1]), strict=True):
        found, wanted = json.loads(line), estimate(config, method="fast", device="H200-SXM-141GB").to_mapping()
        assert found.keys() == wanted.keys() and found["device"] == "H200-SXM-141GB"
        for name in FIGURES:
            assert found[name] == pytest.approx(wanted[name], rel=1e-5)
    assert shown("estimate", jobs(), "format=json") == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"family": "mlp", "depht": 2}', "mlp: unknown depht; known: activation"),
        ('{"family": "cmm"}', "unknown family 'cmm'"),
        ('{"family": "mlp"', "config is neither a mapping nor JSON"),
        ("[1, 2]", "config is a mapping"),
        pytest.param("1" * 5000, "config is neither a mapping nor JSON", id="a number of 5000 digits"),
        ('{"family": "c\u2028nn"}', "unknown family 'c\\u2028nn'"),
    ],
)
def test_a_line_that_is_no_job_is_named_by_its_number_before_anything_is_printed(jobs, refused, line, said):
    named = jobs("", CONFIG.to_mapping(), "  ", line, CONFIG.to_mapping())
    error = refused("estimate", named, "method=fast", "format=json")
    assert f"{named}, line 4: " in error and said in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give format=json with it"),
        (["format=json", "optimizer=sgd", "precision=bf16"], "leave optimizer, precision out"),
        (["format=json", "report=r.html"], "leave report out"),
        (["format=json", "allocator=expandable_segments:True"], "leave allocator out"),
        (["format=json", "input=[2,3]"], "input is for model="),
        (["format=json", "method=fast", "estimator=hybrid"], "leave estimator out"),
        (["format=json", "method=quick"], "unknown method 'quick'; known: fast, full"),
        (["format=json", "model=torchvision.models:resnet18"], "; got model and configs"),
        (["format=xml"], "unknown format 'xml'; known: json, table"),
    ],
)
def test_mistakes_beside_a_file_of_jobs_are_one_line(jobs, refused, arguments, said):
    assert said in refused("estimate", jobs(CONFIG.to_mapping()), *arguments)


def test_a_file_of_jobs_that_is_no_text_is_named(tmp_path, refused):
    (tmp_path / NAME).write_bytes(b"{}\n\xff\xfe{}\n")
    assert "'utf-8' codec can't decode byte 0xff" in refused("estimate", f"configs={tmp_path / NAME}", "format=json")


def test_jobs_are_read_from_standard_input(monkeypatch, shown, refused):
    def given(text):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    given(f"{json.dumps(CONFIG.to_mapping())}\n\n{json.dumps(CONFIGS[3].to_mapping())}")
    lines = shown("estimate", "configs=-", "method=fast", "format=json").splitlines()
    assert [json.loads(line)["estimator"] for line in lines] == ["fast"] * 2
    given("\n{}")
    assert "configs=-, line 2: a trial config needs" in refused("estimate", "configs=-", "method=fast", "format=json")


def test_the_command_answers_a_config_and_a_past_run_fast(tmp_path, answer, shown):
    mapping = "config='" + json.dumps(CONFIG.to_mapping()) + "'"
    fast = estimate(CONFIG, method="fast")
    assert answer("estimate", mapping, "method=fast")["peak_memory_mib"] == fast.peak_memory_mib
    said = shown("estimate", mapping, "method=fast")
    assert "lightgbm (default)" in said and "consists of" not in said
    errors = fast.held_out_errors["memory"]
    assert f"memory {errors['median']:.1%} ({errors['p90']:.1%}), smact " in said
    assert "error on held-out configurations" in said

    (config,) = make_configs(1, families=("mlp",))
    write_batch(tmp_path / "d", [config], statuses=["ok"], device="NVIDIA H200-SXM-141GB")
    found = answer("estimate", "run=job-000000", "method=fast", f"data={tmp_path / 'd'}")
    assert found["device"] == "H200-SXM-141GB" and found["run"]["status"] == "ok"
    wanted = estimate(config, method="fast", device="H200-SXM-141GB").peak_memory_mib
    assert found["peak_memory_mib"] == wanted
