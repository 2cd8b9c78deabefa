"""`estimate` on modules, factories, configs and past runs, as a call and as a command."""

import contextlib
import gc
import json
import shutil
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from conf.errors import EnvironmentProblem, UsageError
from featurize.configs.features import FEATURES_STAMP
from featurize.device.device_spec import describe_device
from featurize.families import get_family, mlp
from featurize.memory.allocator_settings import AllocatorSettings
from featurize.trace.tracer import TraceError
from learn import FitSettings, estimate, fit
from learn.estimators.protocol import TRAINING_FREE, get_estimator
from learn.fitting.artifacts import DEFAULT_MODELS, find_latest, load_latest
from learn.job.training_job import Case, of_configs, of_module
from learn.peers.base import analyse
from learn.rows.data import load_rows
from learn.rows.step_store import StepStore
from tests.featurize.small_nets import Computes, linear_then
from tests.learn.learn_rows import make_configs, restamp, run_estimate, write_batch
from warehouse.files.folder import DataFolder

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "A100-SXM4-40GB"
DEFAULT = "hybrid (default)"  # what comes with the project
CONFIG = mlp.Config(batch_size=256, input_size=4096, classes=10, depth=4)
MAPPING = "{family: mlp, batch_size: 256, input_size: 4096, classes: 10, depth: 4}"

FACTORIES = """
import torch
from torch import nn

answer = 42

def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

def needs(width):
    return nn.Linear(width, 10)

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
    (tmp_path / "gpufarm_test_nets.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield "gpufarm_test_nets"
    sys.modules.pop("gpufarm_test_nets", None)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("estimate") / "a'; echo foo"
    write_batch(folder, make_configs(60, families=("mlp",)))
    fit(FitSettings(target="memory", estimator="lightgbm", bin_gb=1, data=str(folder)))
    return folder


def peeking():
    """Its control flow depends on its data."""
    return nn.Sequential(Computes(lambda _, x: x + 1 if x.sum().item() > 0 else x), nn.Linear(64, 10))


@torch.library.custom_op("gpufarm_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_autograd(lambda _context, gradient: gradient * 2)


def doubling():
    """It has an operator without a fake kernel."""
    return linear_then(twice, 64, 10)


def test_a_module_and_its_config_are_the_same_job(tmp_path):
    family = get_family("mlp")
    inputs, _ = family.batch(CONFIG, "meta")
    by_module = estimate(family.build(CONFIG), inputs, estimator="trace")
    by_config, by_mapping = (estimate(job, estimator="trace") for job in (CONFIG, CONFIG.to_mapping()))
    assert by_config.peak_memory_mib == by_mapping.peak_memory_mib
    # The usual loop, which modules are taken to run in, holds a second batch for a moment, the output and the loss.
    more = by_module.peak_memory_mib - by_config.peak_memory_mib
    assert 0 <= more <= 2 * 2**-20 * inputs[0].nbytes + 2
    assert by_module.parameters == sum(p.numel() for p in family.build(CONFIG).parameters())
    assert by_module.drama == by_config.drama and by_module.step_time_ms == by_config.step_time_ms


PARTS = [
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


def test_breakdown_sums_to_the_traced_peak_and_knows_weights_and_optimizer():
    adam = estimate(CONFIG, estimator="trace")
    assert sum(adam.breakdown.values()) == pytest.approx(adam.peak_memory_mib)
    assert all(mib >= 0 for mib in adam.breakdown.values()) and list(adam.breakdown) == PARTS
    weights = 4 * adam.parameters / 2**20
    assert adam.breakdown["parameters"] == pytest.approx(weights)
    assert adam.breakdown["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    sgd = estimate(mlp.Config(**{**vars(CONFIG), "optimizer": "sgd"}), estimator="trace")
    assert sgd.breakdown["optimizer state"] == 0


def test_a_model_far_larger_than_this_machines_memory_is_only_traced():
    def large():
        return nn.Sequential(*[nn.Linear(65_536, 65_536, bias=False) for _ in range(20)], nn.Linear(65_536, 10))

    done = estimate(large, (16, 65_536), device="H200-SXM-141GB")
    assert done.parameters > 80e9 and done.peak_memory_mib > 1e6
    assert not done.fits(141_000) and any("out of memory" in text for text in done.warnings)


def test_the_module_that_was_given_is_left_as_it_is():
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    estimate(module, torch.zeros(4, 8))
    assert not module.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in module.parameters())


def test_the_callers_random_numbers_and_gradient_mode_stay_and_have_no_part_in_it():
    def made():
        return nn.Sequential(nn.Linear(torch.randint(8, 9, ()).item(), 8), nn.Dropout(), nn.Linear(8, 3))

    before = torch.get_rng_state()
    usual = estimate(made, (4, 8))
    assert torch.equal(torch.get_rng_state(), before)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert estimate(made, (4, 8)).peak_memory_mib == usual.peak_memory_mib
            assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode) and not torch.is_grad_enabled()


def test_tied_weights_are_counted_once_and_several_inputs_are_positional_arguments():
    def tied():
        embedding, out = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        out.weight = embedding.weight
        return nn.Sequential(embedding, out)

    assert estimate(tied(), torch.zeros(2, 16, dtype=torch.long)).parameters == 64_000
    assert estimate(tied, (np.int64(2), 16), input_dtype="int64").parameters == 64_000  # sizes may be NumPy's
    assert estimate(nn.Linear(3, 4), (2, 3), input_dtype="float").parameters == 16
    by_shapes, by_tensors = [(4, 8), (4, 8)], (torch.zeros(4, 8), torch.zeros(4, 8))
    two = [estimate(nn.Bilinear(8, 8, 3), inputs) for inputs in (by_shapes, by_tensors)]
    assert two[0].peak_memory_mib == two[1].peak_memory_mib


def test_fitted_models_answer_configs_and_the_trace_answers_the_rest(data):
    done = estimate(CONFIG, data=data)
    artifact = load_latest(data, "memory")
    prediction = artifact.estimator.predict(of_configs([CONFIG]))
    assert done.peak_memory_mib == prediction.point[0] and done.upper_mib == prediction.upper(0.99)[0]
    assert done.answered_by["memory"] == f"lightgbm {artifact.version}" and done.answered_by["drama"] == "trace"
    assert done.answered_by["smact"] == DEFAULT and done.estimator == "hybrid + lightgbm + trace"
    assert done.fits(done.upper_mib) and not done.fits(done.peak_memory_mib)
    said = " ".join(done.warnings)
    assert "no fitted model for mlp" in said and "for drama, step_time: answered by the trace" in said
    assert "memory: fitted on simulated rows" in said and "smact, smocc: fitted on imported rows" in said
    assert done.trace_memory_mib == estimate(CONFIG, estimator="trace").peak_memory_mib


def test_a_fitted_graph_network_answers_configs_and_modules(tmp_path, few_epochs):
    write_batch(tmp_path, make_configs(32, families=("mlp",)), source="imported", statuses=["ok"] * 32)
    StepStore(tmp_path).prepare(load_rows(tmp_path, "memory").cases, workers=0)
    fit(FitSettings(target="memory", estimator="gnn", bin_gb=1, data=str(tmp_path)))
    new = mlp.Config(batch_size=48, input_size=80, classes=10, depth=2)
    done = estimate(new, estimator="gnn", data=tmp_path)
    prediction = load_latest(tmp_path, "memory").estimator.predict([Case(new, DEVICE, training_loop=True)])
    assert done.answered_by["memory"].startswith("gnn ")
    assert done.peak_memory_mib == prediction.point[0] > 0, "the graph is that of a trace of its own"
    done = estimate(nn.Linear(64, 10), (32, 64), estimator="gnn", data=tmp_path)
    assert done.answered_by["memory"].startswith("gnn ") and done.peak_memory_mib > 0


@pytest.mark.parametrize(
    ("build", "allocator"),
    [(lambda: nn.Linear(64, 10), None), (lambda: nn.Linear(64, 10), "expandable_segments:True"), (peeking, None)],
    ids=["answered", "expandable", "not traced"],
)
def test_a_module_is_let_go_with_its_answer_or_its_error(build, allocator):
    model = build()
    with contextlib.suppress(UsageError):
        estimate(model, (4, 64), allocator=allocator)
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None


def test_a_model_of_another_family_or_device_does_not_answer(data):
    (cnn,) = make_configs(1, families=("cnn",))
    assert estimate(cnn, data=data).answered_by["memory"] == DEFAULT
    assert estimate(CONFIG, data=data, device="H200-SXM-141GB").answered_by["memory"] == DEFAULT
    with pytest.raises(UsageError, match="no fitted model for target=memory with estimator=lightgbm, family=cnn"):
        estimate(cnn, data=data, estimator="lightgbm")


def test_a_model_of_other_features_does_not_answer_and_it_is_said(data, tmp_path):
    folder = shutil.copytree(data, tmp_path / "d")
    restamp(find_latest(folder, "memory").path, feature_version="0ld")
    done = estimate(CONFIG, data=folder)
    assert done.answered_by["memory"] == DEFAULT and any("fitted with features 0ld" in w for w in done.warnings)
    with pytest.raises(EnvironmentProblem, match=r"fitted with features 0ld.*fit it again.*learn\.fit"):
        estimate(CONFIG, data=folder, estimator="lightgbm")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: estimate(CONFIG, estimator="xgb"), "unknown estimator 'xgb'; known: .*trace"),
        (lambda: estimate(CONFIG, device="A1000"), "unknown device 'A1000'; known: A10, A100-PCIE-40GB"),
        (lambda: estimate(CONFIG, optimizer="sgd"), "the trial config has optimizer=adam"),
        (lambda: estimate(CONFIG, accumulation=2), "accumulation is for modules"),
        (lambda: estimate(CONFIG, loop="endless"), "unknown loop 'endless'; known: pipeline, resident"),
        (lambda: estimate(CONFIG, (3, 4)), "leave inputs out"),
        (lambda: estimate(nn.Linear(3, 4)), "a module needs inputs"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), optimizer="ftrl"), "unknown optimizer 'ftrl'; known: adafactor"),
        (lambda: estimate(nn.Linear(3, 4), (2, 0)), "sizes must be >= 1"),
        (lambda: estimate(nn.Linear(3, 4), "2,3"), "an input is a tensor or a shape"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), estimator="lightgbm"), "modules are answered by hybrid, gnn, trace"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), cudnn_benchmark="no"), "cudnn_benchmark is true or false"),
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
    ],
)
def test_mistakes_are_named(call, said):
    with pytest.raises(UsageError, match=said):
        call()


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("model=no_such_module:net", "cannot import no_such_module"),
        ("model=NETS:nett", "has no attribute 'nett'"),
        ("model=NETS:answer", "answer is int, neither a module nor a factory"),
        ("model=NETS", "model is MODULE:FACTORY"),
        ("model=NETS:needs", "missing 1 required positional argument"),
        ("model=NETS:number", "the factory gave int"),
        (
            "model=NETS:peeks",
            "fails in operator aten::_local_scalar_dense of module '1': UnknownValue: the model reads",
        ),
        ("model=NETS:Tokens", "input_dtype=int64"),
        ("run=no-such-run", "does not exist"),
        ("config={family: mlp}", "missing"),
        ("format=xml", "unknown format 'xml'; known: json, table"),
    ],
)
def test_command_says_mistakes_in_one_line_and_exits_with_2(factories, refused, argument, said):
    shape = ["input=[8,4]"] if argument.startswith("model") else []
    assert said in refused(argument.replace("NETS", factories), *shape)


def test_command_estimates_a_factory_as_a_table(factories, shown):
    job = f"model={factories}:net", "input=[64,3,32,32]", "optimizer=sgd"
    said = shown(*job, "device=H200-SXM-141GB", "notes=all")
    words = ("H200-SXM-141GB", "peak memory", "99 % bound", "optimizer state", "smact", "at the peak: aten::")
    for word in (*words, "only adam was fitted on", "(the model) 0.0"):
        assert word in said


def test_what_a_model_prints_does_not_mix_with_the_json(factories, capsys):
    assert run_estimate(f"model={factories}:talks", "input=[4,3,32,32]", "format=json") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["parameters"] == 314 and said.err == "building\n"


def test_command_takes_allocator_settings_as_they_are_spelled_for_torch(factories, answer, refused):
    job = f"model={factories}:net", "input=[64,3,256,256]"
    default, expandable, _ = (
        answer(*job, f"allocator={text}")["breakdown"]
        for text in ("null", "expandable_segments:True,max_split_size_mb:128", "roundup_power2_divisions:[32:1,>:8]")
    )
    assert expandable["fragmentation"] < default["fragmentation"]
    assert expandable["activations"] == default["activations"]
    assert "expected True or False" in refused(*job, "allocator=expandable_segments:Maybe,max_split_size_mb:1")


def test_command_gives_json_of_the_same_figures(answer, data):
    by_mapping = answer(f"config={MAPPING}", f"data={json.dumps(str(data))}")
    assert by_mapping["peak_memory_mib"] == estimate(CONFIG, data=data).peak_memory_mib < by_mapping["upper_mib"]
    as_json = "'" + json.dumps(CONFIG.to_mapping()) + "'"  # what runs.config holds
    by_json = answer(f"config={as_json}", f"data={json.dumps(str(data))}")
    assert by_json["peak_memory_mib"] == by_mapping["peak_memory_mib"]


def test_an_own_fit_says_how_often_its_bound_held(data):
    meta = load_latest(DataFolder(data), "memory", estimator="lightgbm").meta
    done = estimate(CONFIG, estimator="lightgbm", data=data)
    assert done.bound_held_out == {"share": meta["metrics"]["coverage"]["test"], "rows": meta["rows"]["test"]}
    assert "(machine" not in str(done).splitlines()[1], "it is of its rows' own machine"


def test_command_shows_a_past_run_beside_its_estimate(answer, shown, refused, data):
    folder = f"data={json.dumps(str(data))}"
    beside = answer("run=job-000003", folder)
    assert beside["run"]["status"] == "ok" and beside["run"]["source"] == "simulated"
    assert beside["run"]["peak_memory_mib"] == pytest.approx(beside["peak_memory_mib"], rel=0.5)
    said = shown("run=job-000003", folder)
    assert "difference" in said and "simulated" in said and "has been fitted on this very run" in said
    assert "no run 'job-999999'" in refused("run=job-999999", folder)


def blocks():
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12)], nn.Linear(256, 10))


def test_an_estimate_names_what_takes_memory_at_the_peak():
    done = estimate(blocks, (4096, 256), optimizer="sgd")
    names = {name for name, _ in blocks().named_modules()}
    assert done.peak_operator.startswith("aten::") and done.peak_module in names
    assert done.peak_phase == "backward"
    assert set(done.activations) <= names and 0 < len(done.activations) <= 10
    sizes = list(done.activations.values())
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) <= done.breakdown["activations"] * 1.001
    assert sizes[0] == pytest.approx(4.0)  # a layer's output: 4096 x 256 of 4 bytes


@pytest.mark.parametrize("name", sorted(TRAINING_FREE))
def test_every_training_free_estimator_answers_modules(name):
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    job = of_module(module, [((128, 64), None)])
    if name == "llmem":
        with pytest.raises(UsageError, match="estimator=llmem has no answer: precision=fp32 is not covered"):
            estimate(module, (128, 64), estimator=name)
        return
    done = estimate(module, (128, 64), estimator=name, machine="described")
    expected = analyse(get_estimator(name)(), job, describe_device(DEVICE)).mib
    assert done.peak_memory_mib == pytest.approx(expected, rel=0.02)
    assert done.answered_by["memory"] == name and done.answered_by["step_time"] == "trace"
    assert done.breakdown == estimate(module, (128, 64), machine="described").breakdown
    without_context = any(f"{name} leaves the CUDA context out" in text for text in done.warnings)
    assert without_context == (name in ("faketensor", "xmem"))
    assert any("bound" in text for text in done.warnings)


@pytest.mark.parametrize(
    ("model", "operator", "module"),
    [(peeking, "aten::_local_scalar_dense", "1.0"), (doubling, "gpufarm_test::twice", "1")],
)
def test_a_model_that_cannot_be_traced_names_operator_and_module_and_who_may_still_answer(model, operator, module):
    def nested():
        return nn.Sequential(nn.Linear(64, 64), model())

    with pytest.raises(UsageError, match=rf"{operator} of module '{module}'.*estimator=xmem runs it for real"):
        estimate(nested, (32, 64))
    refusal = rf"faketensor has no answer: .*of module {module} .*estimator=xmem runs it for real"
    with pytest.raises(UsageError, match=refusal):
        estimate(nested, (32, 64), estimator="faketensor")
    for name in ("xmem", "deepspeed"):
        done = estimate(nested, (32, 64), estimator=name)
        assert done.peak_memory_mib == pytest.approx(sum(done.breakdown.values())) and done.peak_memory_mib > 0
        assert done.answered_by == {"memory": name} and done.estimator == name
        assert done.smact is done.drama is done.step_time_ms is done.trace_memory_mib is done.peak_operator is None
        assert done.parameters == sum(p.numel() for p in nested().parameters())
        assert any(text.startswith("smact, smocc, drama, step_time: not known, since") for text in done.warnings)


def test_a_model_that_is_wrong_for_its_input_gets_no_advice_to_try_another_estimator():
    with pytest.raises(UsageError, match="aten::addmm of module '0'") as caught:
        estimate(lambda: nn.Sequential(nn.Linear(3, 4)), (32, 64))
    assert "estimator=" not in str(caught.value)


def test_what_only_the_trace_knows_is_missing_where_it_fails_and_the_rest_is_answered(data, monkeypatch):
    def failing(*_args, **_settings):
        raise TraceError("the model cannot be traced: it fails", "aten::odd", "layers.3", NotImplementedError("meta"))

    monkeypatch.setattr("featurize.trace.tracer.trace_step", failing)
    done = estimate(CONFIG, data=data)
    assert done.answered_by["memory"].startswith("lightgbm ") and done.upper_mib > 0 and done.step_time_ms is None
    said = " ".join(done.warnings)
    assert "aten::odd of module 'layers.3'" in said and "answered by the trace" not in said
    assert estimate(CONFIG, estimator="horus").answered_by == {"memory": "horus"}
    new = mlp.Config(**{**vars(CONFIG), "depth": 7})  # no features of it are kept
    for wanted in ({"estimator": "trace"}, {"data": data, "device": "H200-SXM-141GB"}):
        with pytest.raises(UsageError, match=r"aten::odd of module 'layers\.3'"):
            estimate(new, **wanted)


def test_the_allocators_settings_reach_the_trace_and_nobody_else():
    text, settings = "expandable_segments:True", AllocatorSettings(expandable_segments=True)
    by_text, by_settings = (estimate(blocks, (4500, 256), estimator="trace", allocator=one) for one in (text, settings))
    assert by_text.breakdown == by_settings.breakdown
    for other in ("horus", None):
        done = estimate(blocks, (4500, 256), estimator=other, allocator=text)
        assert any("allocator= changes the trace's figures only" in warning for warning in done.warnings)


def test_a_job_beyond_its_share_of_the_memory_does_not_fit():
    def net():
        return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))

    plain = estimate(net, [64, 2048], estimator="trace")
    share = plain.reserved_mib / plain.device_memory_mib
    fractions = [f"per_process_memory_fraction:{share * part:.6f}" for part in (0.7, 2)]
    for estimator in ("trace", None):
        below, above = (estimate(net, [64, 2048], estimator=estimator, allocator=text) for text in fractions)
        assert not below.fits_device and not below.fits(below.device_memory_mib) and not below.to_mapping()["fits"]
        assert any("of its share of A100-SXM4-40GB" in text for text in below.warnings)
        assert above.fits_device and above.limit_mib < above.device_memory_mib
    assert plain.limit_mib == plain.device_memory_mib


def test_cudnn_benchmark_and_channels_last_are_the_modules_own_settings():
    def stage(width):
        return nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2)
        )

    def net():
        return nn.Sequential(*[stage(32 * 2**i) for i in range(4)], nn.AdaptiveAvgPool2d(1), nn.Flatten())

    shape = (16, 32, 128, 128)
    plain = estimate(net, shape)
    assert estimate(net, shape, channels_last=True).breakdown["workspace"] < plain.breakdown["workspace"]
    assert estimate(net, shape, cudnn_benchmark=True).peak_memory_mib != plain.peak_memory_mib


class Output(dict):
    """As published language models return it."""

    @property
    def logits(self):
        return self["logits"]


def test_models_that_return_objects_or_have_a_loss_of_their_own_are_estimated():
    def model():
        return nn.Sequential(nn.Embedding(100, 16), linear_then(lambda y: Output(logits=y), 16, 100))

    def pair():
        return linear_then(lambda y: {"mean": y}, 8, 8)

    assert estimate(model, (4, 32), input_dtype="int64").parameters == 100 * 16 + 16 * 100 + 100
    assert estimate(model, torch.ones(4, 32, dtype=torch.long), estimator="xmem").answered_by["memory"] == "xmem"
    with pytest.raises(UsageError, match="has no logits to take cross entropy of"):
        estimate(pair, (4, 8))
    for name in ("trace", "faketensor", "xmem"):
        own = estimate(pair, (4, 8), loss=lambda output, _: output["mean"].square().mean(), estimator=name)
        assert own.peak_memory_mib > 0


def test_an_estimator_fitted_to_compare_does_not_displace_the_hybrid(tmp_path):
    rows = {"family": {"mlp": 40}, "device": {DEVICE: 40}, "source": {"measured": 40}}
    meta = {"target": "memory", "feature_version": FEATURES_STAMP, "rows": rows}
    models = ("20260101T000000Z-a", "hybrid", "memory"), ("20260102T000000Z-b", "lightgbm", "fast/memory")
    for version, name, model in models:
        home = tmp_path / "models" / "memory" / version
        shutil.copytree(DEFAULT_MODELS / model / "model", home / "model")
        restamp(home, estimator=name, **meta)
    DataFolder.resolve(tmp_path).create()
    assert find_latest(tmp_path, "memory").meta["estimator"] == "hybrid"
    assert find_latest(tmp_path, "memory", estimator="lightgbm").version.startswith("20260102")
