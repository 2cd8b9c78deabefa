"""`estimate` on modules, factories, configs and past runs, as a call and as a command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learn_rows import make_configs, write_runs
from torch import nn

from conf import cli
from conf.errors import UsageError
from featurize.families import get_family, mlp
from learn import estimate
from learn.artifacts import load_latest
from learn.fit import FitSettings, fit

ROOT = Path(__file__).resolve().parents[2]
CONFIG = mlp.Config(batch_size=256, input_size=4096, classes=10, depth=4)
MAPPING = "{family: mlp, batch_size: 256, input_size: 4096, classes: 10, depth: 4}"

FACTORIES = '''
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

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(100, 16), nn.Linear(16, 100)

    def forward(self, x):
        return self.out(self.embedding(x))
'''  # fmt: skip


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
    write_runs(folder, make_configs(60, families=("mlp",)))
    fit(FitSettings(target="memory", bin_gb=1, data=str(folder)))
    return folder


def run(*argv):
    from learn.estimate import entry

    return cli.run("estimate", entry, list(argv))


def test_a_module_and_its_config_are_the_same_job(tmp_path):
    family = get_family("mlp")
    inputs, _ = family.batch(CONFIG, "meta")
    by_module = estimate(family.build(CONFIG), inputs)
    by_config = estimate(CONFIG, estimator="trace")
    by_mapping = estimate(CONFIG.to_mapping(), estimator="trace")
    assert by_module.peak_memory_mib == by_config.peak_memory_mib == by_mapping.peak_memory_mib
    assert by_module.parameters == sum(p.numel() for p in family.build(CONFIG).parameters())
    assert by_module.drama == by_config.drama and by_module.step_time_ms == by_config.step_time_ms


def test_the_trace_has_no_bound_and_says_so():
    done = estimate(CONFIG, estimator="trace")
    assert done.upper_mib is None and any("no calibrated bound" in text for text in done.warnings)
    assert done.fits(done.peak_memory_mib) and not done.fits(done.peak_memory_mib - 1)
    assert done.estimator == "trace" and done.seconds > 0
    assert 0 <= done.smact <= 1 and 0 <= done.smocc <= 1 and 0 <= done.drama <= 1


def test_breakdown_sums_to_the_traced_peak_and_knows_weights_and_optimizer():
    adam = estimate(CONFIG, estimator="trace")
    assert sum(adam.breakdown.values()) == pytest.approx(adam.peak_memory_mib)
    assert all(mib >= 0 for mib in adam.breakdown.values())
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


def test_tied_weights_are_counted_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(1000, 64)
            self.out = nn.Linear(64, 1000, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, tokens):
            return self.out(self.embedding(tokens))

    assert estimate(Tied(), torch.zeros(2, 16, dtype=torch.long)).parameters == 64_000
    assert estimate(Tied, (2, 16), input_dtype="int64").parameters == 64_000


def test_several_inputs_are_positional_arguments():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, a, b):
            return self.layer(a * b)

    one = estimate(Two, [(4, 8), (4, 8)])
    assert one.peak_memory_mib == estimate(Two(), (torch.zeros(4, 8), torch.zeros(4, 8))).peak_memory_mib


def test_fitted_models_answer_configs_and_the_trace_answers_the_rest(data):
    done = estimate(CONFIG, data=data)
    artifact = load_latest(data, "memory")
    prediction = artifact.estimator.predict([CONFIG])
    assert done.peak_memory_mib == prediction.point[0] and done.upper_mib == prediction.upper(0.99)[0]
    assert done.answered_by["memory"] == f"lightgbm {artifact.version}" and done.answered_by["drama"] == "trace"
    assert done.estimator == "lightgbm + trace"
    assert done.fits(done.upper_mib) and not done.fits(done.peak_memory_mib)
    said = " ".join(done.warnings)
    assert "no fitted model for mlp" in said and "smact, smocc, drama, step_time: answered by the trace" in said
    assert "memory: fitted on simulated rows" in said
    assert done.trace_memory_mib == estimate(CONFIG, estimator="trace").peak_memory_mib


def test_the_trace_kept_as_an_artifact_does_not_displace_a_learnt_model(tmp_path):
    folder = tmp_path / "d"
    write_runs(folder, make_configs(60, families=("mlp",)))
    for estimator in ("lightgbm", "trace"):
        fit(FitSettings(target="memory", bin_gb=1, estimator=estimator, data=str(folder)))
    assert load_latest(folder, "memory", estimator="trace").estimator.predict([CONFIG]).upper() is None
    done = estimate(CONFIG, data=folder)
    assert done.answered_by["memory"].startswith("lightgbm ") and done.upper_mib is not None


def test_a_model_of_another_family_or_device_does_not_answer(data):
    (cnn,) = make_configs(1, families=("cnn",))
    assert estimate(cnn, data=data).answered_by["memory"] == "trace"
    assert estimate(CONFIG, data=data, device="H200-SXM-141GB").answered_by["memory"] == "trace"
    with pytest.raises(UsageError, match="no fitted model for target=memory with estimator=lightgbm, family=cnn"):
        estimate(cnn, data=data, estimator="lightgbm")


def test_a_model_of_other_features_does_not_answer_and_it_is_said(tmp_path):
    folder = tmp_path / "d"
    write_runs(folder, make_configs(60, families=("mlp",)))
    path = fit(FitSettings(target="memory", bin_gb=1, data=str(folder))).path
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "feature_version": "0ld"}))
    done = estimate(CONFIG, data=folder)
    assert done.answered_by["memory"] == "trace" and any("fitted with features 0ld" in w for w in done.warnings)
    with pytest.raises(UsageError, match="fitted with features 0ld"):
        estimate(CONFIG, data=folder, estimator="lightgbm")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: estimate(CONFIG, estimator="xgb"), "unknown estimator 'xgb'; known: .*trace"),
        (lambda: estimate(CONFIG, device="A1000"), "unknown device 'A1000'; known: A100-SXM4-40GB"),
        (lambda: estimate(CONFIG, optimizer="sgd"), "the trial config has optimizer=adam"),
        (lambda: estimate(CONFIG, (3, 4)), "leave inputs out"),
        (lambda: estimate(nn.Linear(3, 4)), "a module needs inputs"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), optimizer="lion"), "unknown optimizer 'lion'; known: adam"),
        (lambda: estimate(nn.Linear(3, 4), (2, 0)), "sizes must be >= 1"),
        (lambda: estimate(nn.Linear(3, 4), "2,3"), "an input is a tensor or a shape"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), estimator="lightgbm"), "modules are answered by estimator=trace"),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), input_dtype="float"), None),
        (lambda: estimate(nn.Linear(3, 4), (2, 3), input_dtype="fp99"), "input_dtype must be a torch dtype"),
        (lambda: estimate(7), "got int"),
        (lambda: estimate({"family": "cmm"}), "unknown family 'cmm'"),
        (lambda: estimate(CONFIG, data="/nonexistent/folder"), "does not exist"),
    ],
)
def test_mistakes_are_named(call, said):
    if said is None:
        assert call().parameters == 16
        return
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
        ("model=NETS:Peeks", "fails in operator torch.Tensor.item"),
        ("model=NETS:Tokens", "input_dtype=int64"),
        ("run=no-such-run", "does not exist"),
        ("config={family: mlp}", "missing"),
        ("format=xml", "give one of model=MODULE:FACTORY, config={...} and run=RUN_ID; got none"),
    ],
)
def test_command_says_mistakes_in_one_line_and_exits_with_2(factories, capsys, argument, said):
    shape = ["input=[8,4]"] if argument.startswith("model") else []
    assert run(argument.replace("NETS", factories), *shape) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_command_estimates_a_factory_as_a_table(factories, capsys):
    assert run(f"model={factories}:net", "input=[64,3,32,32]", "optimizer=sgd", "device=H200-SXM-141GB") == 0
    said = capsys.readouterr().out
    for word in ("H200-SXM-141GB", "peak memory", "not calibrated", "optimizer state", "smact"):
        assert word in said


def test_command_gives_json_of_the_same_figures(capsys, data):
    quoted = json.dumps(str(data))
    assert run(f"config={MAPPING}", "format=json", f"data={quoted}") == 0
    by_mapping = json.loads(capsys.readouterr().out)
    assert by_mapping["peak_memory_mib"] == estimate(CONFIG, data=data).peak_memory_mib
    assert by_mapping["upper_mib"] > by_mapping["peak_memory_mib"]
    as_json = "'" + json.dumps(CONFIG.to_mapping()) + "'"  # what runs.config holds
    assert run(f"config={as_json}", "format=json", f"data={quoted}") == 0
    assert json.loads(capsys.readouterr().out)["peak_memory_mib"] == by_mapping["peak_memory_mib"]


def test_command_shows_a_past_run_beside_its_estimate(capsys, data):
    quoted = json.dumps(str(data))
    assert run("run=job-000003", "format=json", f"data={quoted}") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"]["status"] == "ok" and shown["run"]["source"] == "simulated"
    assert shown["run"]["peak_memory_mib"] == pytest.approx(shown["peak_memory_mib"], rel=0.5)
    assert run("run=job-000003", f"data={quoted}") == 0
    said = capsys.readouterr().out
    assert "difference" in said and "simulated" in said and "has been fitted on this very run" in said
    assert run("run=job-999999", f"data={quoted}") == 2
    assert "no run 'job-999999'" in capsys.readouterr().err


def test_python_dash_m_works_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "learn.estimate", f"config={MAPPING}", "estimator=trace", "format=json"],
        capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["estimator"] == "trace"
    assert not list(tmp_path.iterdir())
