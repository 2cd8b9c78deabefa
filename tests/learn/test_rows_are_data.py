"""Rows of a warehouse are data: none makes anything import or run code, and a bad one costs itself and no command."""

import json
import os
import pickle
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from omegaconf import OmegaConf

from conf.errors import UsageError
from featurize.configs.trial import UnreadableConfig, config_of_row, config_of_user, trusting
from featurize.families import zoo
from featurize.job.code_names import CodeName, NotTrusted, TrustedName, library_problem
from learn import estimate
from learn.job.training_job import Case
from learn.rows.data import load_rows
from tests.learn.learn_rows import make_configs, runs_of, write_batch
from warehouse.files.folder import DataFolder

ROOT = Path(__file__).resolve().parents[2]
EVIL = """
from pathlib import Path
Path(__file__).with_name("it ran").touch()
from torch import nn
def build(): return nn.Linear(4, 2)
"""
TRUSTED = """
import functools, os, torch
from os import system
from torch import nn
from torch.nn import Linear
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
    def forward(self, x):
        return self.linear(x)
class Command:
    def __init__(self, command): os.system(command)
def build(): return Net()
def run(command): os.system(command)
made = functools.partial(run)
"""
OWN = {"family": "zoo", "model": "rows_are_data_evil:build", "inputs": "float32[4]", "batch_size": 8}


@pytest.fixture
def ran(place, monkeypatch):
    """The file that code of two modules leaves, one of strangers and one that the user trusts: both can be imported."""
    modules = {"rows_are_data_evil": EVIL, "rows_are_data_trusted": TRUSTED}
    for name, text in modules.items():
        (place / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{ROOT}")
    yield place / "it ran"
    for name in modules:
        sys.modules.pop(name, None)
    zoo._read.cache_clear()


def own_config(**changes):
    return zoo.Config(**{key: value for key, value in (OWN | changes).items() if key != "family"})


@pytest.mark.slow
def test_no_command_imports_what_a_row_names(ran, data):
    write_batch(data, make_configs(60))
    write_batch(data, make_configs(1), job="odd", statuses=["ok"], config=json.dumps(OWN))
    for module, *argv in (
        ("estimate", "run=odd-000000"),
        ("fit", "target=memory", "estimator=lightgbm"),
        ("benchmark", "estimators=[horus,lightgbm]", "workers=1", "rows=20"),
    ):
        line = [sys.executable, "-m", f"learn.{module}", *argv, f"data={json.dumps(str(data))}"]
        done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=300)
        assert not ran.exists(), module
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == (2 if module == "estimate" else 0), done.stderr
        said = done.stdout + done.stderr
        assert "rows_are_data_evil:build comes from stored data" in " ".join(said.split()), said
        assert module == "estimate" or "odd-000000" in said


def test_a_typed_config_a_trusted_module_and_a_task_run_code_and_nothing_else_does(ran, tmp_path, shown, refused):
    for stored in (OWN, own_config()):
        with pytest.raises(UsageError, match="comes from stored data, so it is not imported"):
            estimate(stored)
        assert not ran.exists()
    assert estimate(OWN, trust=["rows_are_data_evil"]).parameters == 10
    assert ran.exists()
    shown("estimate", "config={family: zoo, model: 'rows_are_data_evil:build', inputs: 'float32[4]', batch_size: 8}")
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(json.dumps(OWN | {"inputs": "float32[2,4]"}) + "\n")
    asked = "estimate", f"configs={json.dumps(str(jobs))}", "format=json"
    assert "comes from stored data" in refused(*asked)
    shown(*asked, "trust=rows_are_data_evil")


def test_trust_is_kept_by_copies_between_processes_and_lost_in_text():
    one = config_of_user(OWN)
    assert isinstance(one.model, CodeName) and isinstance(pickle.loads(pickle.dumps(one)).model, CodeName)
    of_row = config_of_row(json.dumps(OWN), trust=["rows_are_data_evil"])
    assert isinstance(of_row.model, TrustedName) and isinstance(pickle.loads(pickle.dumps(of_row)).model, TrustedName)
    assert isinstance(trusting(one, ["rows_are_data_evil"]).model, CodeName), "what the user typed stays the user's"
    for lost in (json.loads(json.dumps(one.to_mapping())), OWN):
        assert not isinstance(config_of_row(json.dumps(lost)).model, CodeName)
    assert one == own_config() and Case(one).key == Case(own_config()).key
    assert type(trusting(own_config(), ["rows_are_data"]).model) is str
    with pytest.raises(UsageError, match="trust must name modules"):
        estimate(OWN, trust=["os; rm"])


def trusted_config(factory, **changes):
    values = {**OWN, "model": f"rows_are_data_trusted:{factory}", **changes}
    return config_of_row(json.dumps(values), trust=["rows_are_data_trusted"])


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("os.system", "name what the module itself defines"),
        ("os.popen", "name what the module itself defines"),
        ("torch.hub.load", "name what the module itself defines"),
        ("run.__call__", "name what the module itself defines"),
        ("system", "is builtin_function_or_method, neither a class of nn.Module nor a function"),
        ("made", "is partial, neither a class of nn.Module nor a function"),
        ("Command", "is type, neither a class of nn.Module nor a function"),
        ("Linear", "is defined in torch.nn.modules.linear; name it as torch.nn.modules.linear:Linear, and trust that"),
    ],
)
def test_of_a_trusted_module_data_may_name_only_what_it_defines(ran, factory, message):
    arguments = {"arguments": json.dumps({"command": f"touch {shlex.quote(str(ran))}"})}
    with pytest.raises(NotTrusted, match=message):
        zoo.build(trusted_config(factory, **arguments))
    assert not ran.exists()


def test_a_trusted_modules_own_classes_and_functions_are_built_and_the_user_may_name_anything(ran):
    assert [type(zoo.build(trusted_config(name))).__name__ for name in ("Net", "build")] == ["Net", "Net"]
    linear = trusted_config("torch.nn.Linear", arguments='{"in_features":4,"out_features":2}')
    assert type(zoo.build(config_of_user(linear.to_mapping()))).__name__ == "Linear"


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("os:system", {}),
        ("torchvision:os.system", {}),
        ("torchvision.models:resnet.torch.load", {}),
        ("torchvision.io:read_file", {}),
        ("torchvision.models._api:get_model", {"name": "resnet18"}),
        ("torchvision.models:get_model", {"name": "resnet18"}),
        ("torchvision.models:list_models", {}),
        ("torchvision.models:resnet18", {"weights": "DEFAULT"}),
        ("torchvision.models:resnet18", {"pretrained": True}),
        ("torchvision.models:resnet18", {"norm_layer": "torch.nn.Identity"}),
        ("torchvision.models.segmentation:fcn_resnet50", {}),  # fetches a backbone unless it is told not to
        ("timm:create_model", {"model_name": "hf-hub:someone/model"}),
        ("timm:create_model", {"model_name": "no_such_model"}),
        ("timm:create_model", {"model_name": "resnet18", "pretrained": True}),
        ("timm:create_model", {"model_name": "resnet18", "checkpoint_path": "x"}),
        ("timm:create_model", {"model_name": "resnet18", "pretrained_cfg": {"url": "x"}}),
        ("timm.models:load_checkpoint", {}),
        ("timm.utils:random_seed", {}),
        ("transformers:pipeline", {"task": "fill"}),
        ("transformers:AutoModel", {}),
        ("transformers.utils.hub:cached_file", {}),
        ("transformers:TimmWrapperModel", {}),
        ("transformers:GPT2LMHeadModel", {"trust_remote_code": True}),
        ("transformers:GPT2LMHeadModel", {"_name_or_path": "x"}),
        ("transformers:GPT2LMHeadModel", {"attn_implementation": "someone/kernel"}),
        ("transformers:GPT2LMHeadModel", {"dtype": "load"}),
        ("transformers:GPT2LMHeadModel", {"quantization_config": {"load_in_4bit": True}}),
        ("transformers:GPT2LMHeadModel", {"n_layer": 100_000_000}),
        ("transformers:DetrForObjectDetection", {"use_pretrained_backbone": True}),
    ],
)
def test_data_may_name_only_models_of_libraries_made_of_plain_data(model, arguments):
    text = json.dumps({**OWN, "model": model, "inputs": "float32[3,32,32]", "arguments": json.dumps(arguments)})
    try:
        config = config_of_row(text)
    except UnreadableConfig:
        return
    with pytest.raises(NotTrusted):
        zoo.build(config)
    assert zoo.kind(config).startswith("zoo/") or model.startswith(("torchvision.models", "timm", "transformers:G"))


def test_data_may_name_every_model_of_our_own_search_space():
    space = OmegaConf.to_container(OmegaConf.load(str(resources.files("conf").joinpath("arch/zoo.yaml"))).space)
    for entry in space["model"]:
        one = zoo.Config(**zoo.repair({"model": entry, "batch_size": 2}, lambda _: 0.5))
        assert library_problem(one.model, one.arguments) is None, entry
        zoo._load(one.model, one.arguments)
        assert zoo.kind(one).split("/")[0] in zoo.LIBRARIES, entry


NESTED = "[" * 100_000 + "]" * 100_000
ODD = (
    "no json",
    "",
    "[]",
    "3",
    "null",
    '"text"',
    "{}",
    NESTED,
    '{"family": "mlp", "batch_size": ' + NESTED + "}",
    '{"family": ' + "9" * 6000 + "}",
    '{"family": "mlp", "batch_size": NaN}',
    '{"family": "cnn", "depth": Infinity}',
    '{"family": ["mlp"]}',
    '{"family": {"a": 1}}',
    '{"family": "\\u001b[31mred"}',
    '{"family": "../../etc"}',
    json.dumps({"family": "mlp", "x": "y" * 10_000_000}),
    '{"family": "mlp", "batch_size": 0, "input_size": 4, "classes": 2, "depth": 1}',
    '{"family": "mlp", "batch_size": -1, "input_size": 4, "classes": 2, "depth": 1}',
    '{"family": "mlp", "batch_size": 9223372036854775808, "input_size": 4, "classes": 2, "depth": 1}',
    '{"family": "mlp", "batch_size": 4, "input_size": 4, "classes": 2, "depth": 2000000000}',
    '{"family": "mlp", "batch_size": [4], "input_size": {}, "classes": null, "depth": "1"}',
    '{"family": "mlp", "batch_size": 4, "input_size": 4, "classes": 2, "depth": 1, "activation": ["relu"]}',
    '{"family": "mlp", "batch_size": 4, "input_size": 4, "classes": 2, "depth": 1, "dropout": {"a": []}}',
    json.dumps({**OWN, "arguments": "{a: &a [1,1], b: &b [*a,*a]}"}),
    json.dumps({**OWN, "inputs": f"float32[{'9' * 5000}]"}),
    json.dumps({**OWN, "inputs": None}),
    json.dumps({**OWN, "model": "a:b\\n"}),
    '{"family": "dlrm", "batch_size": 4, "rows": "x"}',
    '{"family": "timm", "batch_size": 4, "model": "hf_hub:x/y", "image_size": null}',
)


@pytest.mark.parametrize("text", ODD, ids=lambda text: text[:40])
def test_a_config_that_is_none_is_one_short_reason_without_control_characters(text):
    try:
        config = config_of_row(text)
    except UnreadableConfig as error:
        assert len(str(error)) < 500 and str(error).isprintable()
    else:
        assert config.family == "timm"  # whether timm has a model of that name is asked when it is built


def test_odd_rows_cost_themselves_and_are_counted_and_named(data):
    write_batch(data, make_configs(40), statuses=["ok"] * 40)
    odd = [text for text in ODD if "timm" not in text]
    for place, text in enumerate(odd):
        write_batch(data, make_configs(1), job=f"odd-{place}", statuses=["ok"], config=text)
    rows = load_rows(data, "memory")
    assert len(rows) == 40 and rows.counts["unreadable"] == len(odd)
    said = "\n".join(rows.left_out)
    assert "odd-0-000000" in said and "their configs cannot be read" in said and len(rows.left_out) == 1
    assert all(text.isprintable() for text in rows.left_out)


def test_labels_that_are_no_figures_and_names_that_are_none_cost_their_rows(data):
    configs = make_configs(50)
    write_batch(data, configs[:40], statuses=["ok"] * 40)
    nan, inf = float("nan"), float("inf")
    for job, columns in (
        ("nan", {"peak_memory_mib": nan}),
        ("inf", {"peak_memory_mib": inf}),
        ("below", {"peak_memory_mib": -1.0}),
        ("card", {"device_memory_mib": inf}),
        ("name", {"device_name": "A100\x1b[31m"}),
        ("long", {"device_name": "A" * 5000}),
    ):
        run = runs_of(configs[40:41], job=job, statuses=["ok"])[0] | columns
        path = DataFolder.resolve(data).root / "runs" / f"family={run['family']}" / f"{job}.parquet"
        schema = pa.parquet.read_table(next(path.parent.glob("*.parquet")), partitioning=None).schema
        pa.parquet.write_table(pa.table({name: [run.get(name)] for name in schema.names}, schema=schema), path)
    rows = load_rows(data, "memory", device_name=None)
    assert len(rows) == 40 and rows.counts["absurd"] == 6
    assert any("makes no sense" in text and text.isprintable() for text in rows.left_out)
