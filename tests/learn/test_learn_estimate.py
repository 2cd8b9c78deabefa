"""`estimate` on modules, factories, configs and past runs, as a call and as a command."""

import contextlib
import dataclasses
import gc
import json
import shutil
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from conf.errors import EnvironmentProblem, UsageError
from featurize.configs.features import FEATURES_STAMP
from featurize.families import get_family, mlp
from featurize.job.training_settings import Training
from learn import FitSettings, devices_that_fit, estimate, fit
from learn.estimation import answers
from learn.fitting.artifacts import DEFAULT_MODELS, newest
from learn.job.training_job import of_configs
from tests.featurize.small_nets import Computes, linear_then
from tests.learn.learn_rows import make_configs, restamp, write_batch
from warehouse.files.folder import DataFolder

pytestmark = pytest.mark.shares_traces

DEVICE = "A100-SXM4-40GB"
DEFAULT = "hybrid (default)"  # what comes with the project
CONFIG = mlp.Config(batch_size=256, input_size=4096, classes=10, depth=4)

NETS, INPUT = "gpufarm_test_nets", "input=[8,4]"
FACTORIES = """
import torch
from torch import nn

answer = 42

def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

def needs(width):
    return nn.Linear(8, width)

there = nn.Linear(8, 4)

class Config:
    def __init__(self, width=4):
        self.width = width

class Model(nn.Module):
    config_class = Config

    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(8, config.width)

    def forward(self, x):
        return self.layer(x)

def number():
    return 5

class Peeks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x + 1 if x.sum().item() > 0 else x)

def talks():
    print("building")
    return net()

def peeks():
    return nn.Sequential(nn.Linear(4, 4), Peeks())

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(100, 16), nn.Linear(16, 100)

    def forward(self, x):
        return self.out(self.embedding(x))
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / f"{NETS}.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop(NETS, None)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("estimate") / "a'; echo foo"
    write_batch(folder, make_configs(60, families=("mlp",)))
    fit(FitSettings(target="memory", estimator="lightgbm", bin_gb=1, data=str(folder)))
    return folder


def peeking():
    """Its control flow depends on its data."""
    return nn.Sequential(Computes(lambda _, x: x + 1 if x.sum().item() > 0 else x), nn.Linear(64, 10))


def test_a_module_and_its_config_are_the_same_job(tmp_path):
    family = get_family("mlp")
    inputs, _ = family.batch(CONFIG, "meta")
    by_module = estimate(family.build(CONFIG), inputs, estimator="trace")
    by_config = estimate(CONFIG, estimator="trace")
    # The usual loop, which modules are taken to run in, holds a second batch for a moment, the output and the loss.
    more = by_module.peak_memory_mib - by_config.peak_memory_mib
    assert 0 <= more <= 2 * 2**-20 * inputs[0].nbytes + 2
    assert by_module.parameters == sum(p.numel() for p in family.build(CONFIG).parameters())
    assert by_module.drama == by_config.drama and by_module.step_time_ms == by_config.step_time_ms


def test_breakdown_sums_to_the_traced_peak_and_knows_weights_and_optimizer():
    adam = estimate(CONFIG, estimator="trace")
    assert sum(adam.breakdown.values()) == pytest.approx(adam.peak_memory_mib)
    assert all(mib >= 0 for mib in adam.breakdown.values()) and list(adam.breakdown) == [
        "parameters",
        "gradients",
        "optimizer state",
        "activations",
        "temporaries",
        "buffers and batch",
        "workspace",
        "fragmentation",
        "context",
    ]
    weights = 4 * adam.parameters / 2**20
    assert adam.breakdown["parameters"] == pytest.approx(weights)
    assert adam.breakdown["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    sgd = estimate(mlp.Config(**{**vars(CONFIG), "optimizer": "sgd"}), estimator="trace")
    assert sgd.breakdown["optimizer state"] == 0


def test_fitted_models_answer_configs_and_the_trace_answers_the_rest(data):
    done = estimate(CONFIG, data=data)
    artifact = newest(data, "memory")
    prediction = artifact.estimator.predict(of_configs([CONFIG]))
    assert done.peak_memory_mib == prediction.point[0] and done.upper_mib == prediction.upper(0.99)[0]
    assert done.answered_by["memory"] == f"lightgbm {artifact.version}" and done.answered_by["drama"] == "trace"
    assert done.answered_by["smact"] == DEFAULT and done.estimator == "hybrid + lightgbm + trace"
    assert done.fits(done.upper_mib) and not done.fits(done.peak_memory_mib)
    said = " ".join(done.warnings)
    assert "no fitted model for mlp" in said and "for drama, step_time: answered by the trace" in said
    assert "memory: fitted on simulated rows" in said and "smact, smocc: fitted on imported rows" in said
    assert done.trace_memory_mib == estimate(CONFIG, estimator="trace").peak_memory_mib


@pytest.mark.parametrize(
    ("build", "allocator"),
    [(lambda: nn.Linear(64, 10), "expandable_segments:True"), (peeking, None)],
    ids=["answered", "not traced"],
)
def test_a_module_is_let_go_with_its_answer_or_its_error(build, allocator):
    gc.freeze()  # collecting looks at what comes from here on alone
    model = build()
    with contextlib.suppress(UsageError):
        estimate(model, (4, 64), allocator=allocator)
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None


def test_fast_answers_are_of_the_folders_own_model_for_the_gpu_model_of_its_rows(data):
    (config,) = make_configs(1, families=("mlp",))
    own, elsewhere = (estimate(config, method="fast", data=data, device=gpu) for gpu in ("a100", "H200-SXM-141GB"))
    assert own.answered_by["memory"] == f"lightgbm {newest(data, 'memory').version}"
    assert own.answered_by["smact"] == elsewhere.answered_by["memory"] == "lightgbm (default)"


def test_the_callers_random_numbers_and_gradient_mode_stay_and_have_no_part_in_it():
    before = torch.get_rng_state()
    with torch.inference_mode():
        estimate(lambda: nn.Sequential(nn.Linear(torch.randint(8, 9, ()).item(), 8), nn.Dropout()), (4, 8))
        assert torch.is_inference_mode_enabled() and torch.equal(torch.get_rng_state(), before)


def test_a_table_asks_each_model_about_the_gpu_models_that_it_knows(data, monkeypatch):
    monkeypatch.setenv("GPUFARM_CACHE", "off")
    names = ["T4", "A100-SXM4-40GB", "H200-SXM-141GB"]
    answers.clear()
    table = [one.estimate for one in devices_that_fit(CONFIG, devices=names, data=data)]
    own = f"lightgbm {newest(data, 'memory').version}"
    assert [done.answered_by["memory"] for done in table] == [DEFAULT, own, DEFAULT]
    for done in table:
        answers.clear()
        single = estimate(CONFIG, data=data, device=done.device)
        assert dataclasses.replace(done, seconds=single.seconds) == single
    *_, known, unknown = devices_that_fit(CONFIG, devices=names, data=data, estimator="lightgbm")
    assert known.estimate.answered_by["memory"] == own
    assert "no fitted model for target=memory with estimator=lightgbm, family=mlp, device=H200" in unknown.problem


def test_a_model_fitted_on_plain_loops_is_asked_about_the_plain_loop():
    loops = "pipeline", "resident"
    plain, resident = (estimate(nn.Linear(8192, 4), (4096, 8192), loop=loop) for loop in loops)
    assert plain.peak_memory_mib == resident.peak_memory_mib > resident.trace_memory_mib + 100
    rows, of_loop = (next(note.text for note in done.notes if note.code == "fitted-rows") for done in (plain, resident))
    assert "loop" not in rows and of_loop.endswith(", for a plain training loop with its input pipeline")


def test_a_model_of_another_family_or_device_does_not_answer(data):
    (cnn,) = make_configs(1, families=("cnn",))
    assert estimate(cnn, data=data).answered_by["memory"] == DEFAULT
    assert estimate(CONFIG, data=data, device="H200-SXM-141GB").answered_by["memory"] == DEFAULT
    with pytest.raises(UsageError, match="no fitted model for target=memory with estimator=lightgbm, family=cnn"):
        estimate(cnn, data=data, estimator="lightgbm")


def test_a_model_of_other_features_does_not_answer_and_it_is_said(data, tmp_path):
    folder = shutil.copytree(data, tmp_path / "d")
    restamp(newest(folder, "memory").path, feature_version="0ld")
    done = estimate(CONFIG, data=folder)
    assert done.answered_by["memory"] == DEFAULT and any("fitted with features 0ld" in w for w in done.warnings)
    with pytest.raises(EnvironmentProblem, match=r"fitted with features 0ld.*fit it again.*learn\.fit"):
        estimate(CONFIG, data=folder, estimator="lightgbm")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: estimate(CONFIG, estimator="xgb"), "unknown estimator 'xgb'; known: .*trace"),
        (lambda: estimate(CONFIG, device="A1000"), "unknown device 'A1000'; known: A10, A100-PCIE-40GB"),
        (
            lambda: estimate(CONFIG, device="H"),
            "^device 'H' is ambiguous: H100-NVL-94GB, H100-PCIE-80GB, H100-SXM5-80GB, H200-SXM-141GB$",
        ),
        (lambda: estimate(CONFIG, optimizer="sgd"), "the trial config has optimizer=adam"),
        (lambda: estimate(CONFIG, accumulation=2), "accumulation is for modules"),
        (lambda: estimate(CONFIG, loop="endless"), "unknown loop 'endless'; known: pipeline, resident"),
        (lambda: estimate(CONFIG, (3, 4)), "leave inputs out"),
        (lambda: estimate(nn.Linear(3, 4)), "a module needs inputs"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), optimizer="ftrl"), "optimizer must be one of adam, .*, got 'ftrl'"),
        (lambda: estimate(nn.Linear(3, 4), (2, 0)), "sizes must be >= 1"),
        (lambda: estimate(nn.Linear(3, 4), "2,3"), "an input is a tensor or a shape"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), estimator="lightgbm"), "modules are answered by hybrid, gnn, trace"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), cudnn_benchmark="no"), "cudnn_benchmark must be true or false"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), allocator="split:1"), "unknown key 'split'; known: .*max_split"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), allocator=128), "allocator is text"),
        (lambda: estimate(CONFIG, channels_last=True), "the trial config has channels_last=False"),
        (lambda: estimate(lambda: 5, (2, 3)), "the factory gave int, not a torch.nn.Module"),
        (lambda: estimate(lambda: 5, (2, 3), estimator="horus"), "no answer: the factory gave int"),
        (lambda: estimate(nn.LSTM(3, 4), (2, 3), report="/nonexistent/a.html"), "there is no folder /nonexistent"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), input_dtype="fp99"), "input_dtype must be a torch dtype"),
        (lambda: estimate(nn.Linear(3, 4), np.zeros((2, 3, 4))), "got ndarray; torch.from_numpy makes one"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), device=7), "unknown device 7; known: A10"),
        (lambda: estimate(7), "got int"),
        (lambda: estimate({"family": "cmm"}), "unknown family 'cmm'"),
        (lambda: estimate(CONFIG, data="/nonexistent/folder"), "does not exist"),
        (lambda: estimate(wide_net, SHAPE, accumulate=2), "unknown keyword 'accumulate'; known: .*accumulation"),
        (lambda: estimate(wide_net, SHAPE, accumulation=0), "accumulation must be an integer >= 1, got 0"),
        (
            lambda: estimate(wide_net, SHAPE, settings=Training(), accumulation=2),
            "accumulation and settings= exclude each other",
        ),
        (
            lambda: estimate(wide_net, SHAPE, settings={"accumulation": 2}),
            "settings must be a featurize.job.training_settings.Training, got dict",
        ),
        (
            lambda: estimate(wide_net, SHAPE, accumulation=4, estimator="horus"),
            "horus has no answer: it does not know accumulation=4",
        ),
        (
            lambda: estimate(lambda: linear_then(lambda y: {"mean": y}, 8, 8), (4, 8)),
            "has no logits to take cross entropy of",
        ),
        (
            lambda: estimate(wide_net, SHAPE, torch_version="9.0"),
            r"torch_version is a release of PyTorch as text, 2\.0 to 2\.14, got",
        ),
        (lambda: estimate(wide_net, SHAPE, known="runs"), "known=runs is for trial configs"),
        (lambda: devices_that_fit(wide_net, SHAPE, known=[{"batch_size": 8, "memory_mib": 900}]), "without a device"),
        *(
            (
                lambda odd=odd: estimate(wide_net, SHAPE, machine=odd),
                "unknown machine .*; known: current, described, eager",
            )
            for odd in ("dgx", 5, True, ["current"], "x" * 300)
        ),
    ],
)
def test_mistakes_are_named(call, said):
    with pytest.raises(UsageError, match=said):
        call()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model=no_such_module:net", INPUT], "cannot import no_such_module"),
        ([f"model={NETS}:nett", INPUT], "has no attribute 'nett'"),
        ([f"model={NETS}:answer", INPUT], "answer is int, neither a module nor a factory"),
        ([f"model={NETS}", INPUT], "model is MODULE:FACTORY"),
        ([f"model={NETS}:needs", INPUT], "missing 1 required positional argument"),
        ([f"model={NETS}:number", INPUT], "the factory gave int"),
        (
            [f"model={NETS}:peeks", INPUT],
            "fails in operator aten::_local_scalar_dense of module '1': UnknownValue: the model reads",
        ),
        ([f"model={NETS}:Tokens", INPUT], "input_dtype=int64"),
        ([f"model={NETS}:Model", INPUT, "arguments={widht: 10}"], "has no widht; near names: width"),
        ([f"model={NETS}:needs", INPUT, "arguments=[3]"], "arguments must be a JSON object"),
        ([f"model={NETS}:there", INPUT, "arguments={width: 3}"], "takes no arguments"),
        ([f"config='{json.dumps(CONFIG.to_mapping())}'", "arguments={width: 3}"], "arguments are for model="),
        (["run=no-such-run"], "does not exist"),
        (["config={family: mlp}"], "missing"),
        (["format=xml"], "unknown format 'xml'; known: json, table"),
    ],
)
@pytest.mark.usefixtures("factories")
def test_command_says_mistakes_in_one_line_and_exits_with_2(refused, arguments, said):
    assert said in refused("estimate", *arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "parameters"),
    [("needs", ["arguments={width: 10}"], 90), ("Model", ["arguments={width: 10}"], 90), ("Model", [], 36)],
)
@pytest.mark.usefixtures("factories")
def test_a_model_on_the_command_line_takes_arguments(answer, name, arguments, parameters):
    assert answer("estimate", f"model={NETS}:{name}", "input=[2,8]", *arguments)["parameters"] == parameters


@pytest.mark.usefixtures("factories")
def test_what_a_model_prints_does_not_mix_with_the_json(outcome):
    code, out, err = outcome("estimate", f"model={NETS}:talks", "input=[4,3,32,32]", "format=json")
    assert (code, json.loads(out)["parameters"], err) == (0, 314, "building\n")


def test_a_model_that_cannot_be_traced_names_operator_and_module_and_who_may_still_answer():
    def nested():
        return nn.Sequential(nn.Linear(64, 64), peeking())

    refusal = r"aten::_local_scalar_dense of module '1\.0'.*estimator=xmem runs it for real"
    with pytest.raises(UsageError, match=refusal):
        estimate(nested, (32, 64))
    done = estimate(nested, (32, 64), estimator="xmem")
    assert done.peak_memory_mib == pytest.approx(sum(done.breakdown.values())) and done.peak_memory_mib > 0
    assert done.answered_by == {"memory": "xmem"} and done.smact is done.step_time_ms is done.parameters is None
    assert any(text.startswith("smact, smocc, drama, step_time: not known, since") for text in done.warnings)


def test_an_estimator_fitted_to_compare_does_not_displace_the_hybrid(tmp_path):
    rows = {"family": {"mlp": 40}, "device": {DEVICE: 40}, "source": {"measured": 40}}
    meta = {"target": "memory", "feature_version": FEATURES_STAMP, "rows": rows}
    models = ("20260101T000000Z-a", "hybrid", "memory"), ("20260102T000000Z-b", "lightgbm", "fast/memory")
    for version, name, model in models:
        home = tmp_path / "models" / "memory" / version
        shutil.copytree(DEFAULT_MODELS / model / "model", home / "model")
        restamp(home, estimator=name, **meta)
    DataFolder.resolve(tmp_path).create()
    assert newest(tmp_path, "memory").meta["estimator"] == "hybrid"
    assert newest(tmp_path, "memory", estimator="lightgbm").version.startswith("20260102")


# -- training settings


SHAPE = (256, 512)


def wide_net():
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 8))


def test_an_accumulated_step_waits_for_the_input_of_every_micro_step():
    one, four = (estimate(wide_net, SHAPE, accumulation=n, ema=True, loop="pipeline") for n in (1, 4))
    assert four.step_time_ms > 3.5 * one.step_time_ms


def test_settings_are_keys_of_the_command_and_the_trace_answers_those_that_no_model_was_fitted_on(answer, refused):
    settings = "accumulation=2", "clip_norm=1", "optimizer=lion", "set_to_none=false"
    job = "model=tests.learn.test_learn_estimate:wide_net", "input=[8,512]", *settings
    done = answer("estimate", *job)
    assert set(done["answered_by"].values()) == {"trace"}
    (warning,) = (warning for warning in done["warnings"] if "no model was fitted on" in warning)
    assert "accumulation=2, clip_norm=1" in warning
    assert "quantize_skip needs quantize" in refused("estimate", *job, "quantize_skip=[head]")


@pytest.mark.parametrize(
    "wrap, words",
    [
        (lambda module: nn.Sequential(torch.compile(module)), "is compiled"),
        (lambda module: nn.DataParallel(module), "is an nn.DataParallel"),
    ],
    ids=["compiled_member", "data_parallel"],
)
def test_wrappers_around_modules_are_warned_of(wrap, words):
    plain, wrapped = estimate(wide_net(), SHAPE), estimate(wrap(wide_net()), SHAPE)
    assert any(words in warning for warning in wrapped.warnings)
    assert not any(words in warning for warning in plain.warnings)
    if "DataParallel" in words:  # which the trace does not follow
        assert wrapped.trace_memory_mib == plain.trace_memory_mib
    else:
        assert wrapped.trace_memory_mib == pytest.approx(plain.trace_memory_mib, rel=0.05)
