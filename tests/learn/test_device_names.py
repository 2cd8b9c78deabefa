"""Names of GPU models, in Python and on the command line, and the lines about the card."""

import json
import re
import sys
from pathlib import Path

import pytest
from torch import nn

import conf
from conf.cli import command_line as cli
from conf.errors import UsageError
from conf.files.identity import version_of
from farm.serving.bodies import device_at
from farm.serving.gate import Problem
from farm.submit import entry as submit_entry
from featurize.configs.trial import config_from_mapping
from featurize.device.device_spec import describe_device, device_names, load_device
from featurize.families import zoo
from learn import devices_that_fit, estimate
from learn.job.training_job import Case, load_factory
from tests.learn.learn_rows import write_batch
from warehouse.files.folder import DataFolder

CONFIG = {"family": "mlp", "batch_size": 8, "input_size": 64, "classes": 10, "depth": 2}
NAMES = [
    ("h100", "H100-SXM5-80GB"),
    ("H100-sxm5-80gb", "H100-SXM5-80GB"),
    ("H200", "H200-SXM-141GB"),
    ("Rtx-409", "RTX-4090"),
    ("a100", "A100-SXM4-40GB"),
    ("b", "B200-SXM-180GB"),
    ("V100-SXM2-32GB", "V100-SXM2-32GB"),
]


def submit(*arguments):
    return cli.run("submit", submit_entry, arguments)


@pytest.mark.parametrize(("given", "name"), [*NAMES, ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB")])
def test_case_a_beginning_and_the_driver_s_name_are_enough_in_python(given, name):
    assert load_device(given) == describe_device(given) == load_device(name)
    assert estimate(CONFIG, device=given, estimator="trace").device == name


@pytest.mark.parametrize(("given", "name"), NAMES[:3])
def test_case_and_a_beginning_are_enough_on_the_command_line(given, name):
    commands = {
        "estimate": [f"device={given}"],
        "submit": ["+arch=mlp", "n=1", f"device={given}"],
        "grow": ["n=1", f"device='{given}'"],
    }
    assert {cli.load_config(command, words).device.name for command, words in commands.items()} == {name}


def test_an_ambiguous_beginning_lists_its_candidates(refused):
    with pytest.raises(
        UsageError, match=r"^device 'H' is ambiguous: H100-NVL-94GB, H100-PCIE-80GB, H100-SXM5-80GB, H200-SXM-141GB$"
    ):
        estimate(CONFIG, device="H")
    of_estimate = refused("device=H", f"config='{json.dumps(CONFIG)}'")
    assert "device 'H' is ambiguous: H100-NVL-94GB, H100-PCIE-80GB, H100-SXM5-80GB" in of_estimate
    said = refused("+arch=mlp", "n=1", "device=c", "polcy=x", run=submit)
    assert "device 'c' is ambiguous: cpu, cuda" in said and "unknown key 'polcy'" in said


def test_an_unknown_device_of_an_estimate_lists_gpu_models_only(refused):
    config = f"config='{json.dumps(CONFIG)}'"
    assert f"unknown device 'B1000'; known: {', '.join(device_names())}\n" in refused("device=B1000", config)
    assert "auto, cpu, cuda, simulated" in refused("+arch=mlp", "n=1", "device=B1000", run=submit)
    listed = next(line for line in cli.help_text("estimate").splitlines() if line.strip().startswith("device="))
    assert f"[{' | '.join(device_names())}]" in listed
    for backend in ("cpu", "auto", "cuda", "simulated"):
        assert "an estimate is for a GPU model" in refused(f"device={backend}", config)


def test_the_card_s_memory_and_whether_the_job_fits_stand_in_table_and_json(shown, answer, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUFARM_DATA", str(tmp_path))
    config = json.dumps(CONFIG)
    table = " ".join(shown(f"config='{config}'", "device=h200").split())
    assert "memory of the card │ 143,156 MiB" in table and "fits │ yes" in table
    large = json.dumps(CONFIG | {"input_size": 65_536, "depth": 3, "topology": "uniform"})
    for text, method, fits in ((config, "full", True), (large, "full", False), (config, "fast", True)):
        said = answer(f"config='{text}'", "device=V100", f"method={method}")
        assert said["device_memory_mib"] == load_device("V100-SXM2-32GB").memory_mib
        assert said["fits"] is fits


FACTORIES = """
from torch import nn
def net(width=4): return nn.Linear(8, width)
class Config:
    def __init__(self, width=4): self.width = width
class Model(nn.Module):
    config_class = Config
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(8, config.width)
    def forward(self, x): return self.layer(x)
there = nn.Linear(8, 4)
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "a_users_nets.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GPUFARM_DATA", str(tmp_path))
    yield "a_users_nets"
    sys.modules.pop("a_users_nets", None)


@pytest.mark.parametrize(
    ("name", "arguments", "parameters"),
    [("net", ["arguments={width: 10}"], 90), ("Model", ["arguments={width: 10}"], 90), ("Model", [], 36)],
)
def test_a_model_on_the_command_line_takes_arguments(factories, answer, name, arguments, parameters):
    assert answer(f"model={factories}:{name}", "input=[2,8]", *arguments)["parameters"] == parameters


@pytest.mark.parametrize(
    ("job", "arguments", "message"),
    [
        ("model=a_users_nets:Model", "{widht: 10}", "has no widht; near names: width"),
        ("model=a_users_nets:net", "[3]", "arguments must be a JSON object"),
        ("model=a_users_nets:there", "{width: 3}", "takes no arguments"),
        (f"config='{json.dumps(CONFIG)}'", "{width: 3}", "arguments are for model="),
    ],
)
def test_arguments_that_are_wrong_are_told(factories, refused, job, arguments, message):
    inputs = ["input=[2,8]"] if job.startswith("model") else []
    assert message in refused(job, *inputs, f"arguments={arguments}")


def test_transformers_models_are_estimated_from_their_configuration(answer, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("GPUFARM_DATA", str(tmp_path))
    arguments = "arguments={n_layer: 1, n_embd: 64, n_head: 2, vocab_size: 1000}"
    done = answer("model=transformers:GPT2LMHeadModel", arguments, "input=[2,16]", "input_dtype=int64")
    assert done["parameters"] < 200_000
    assert isinstance(
        load_factory("transformers:GPT2LMHeadModel", {"n_layer": 1, "n_embd": 64, "n_head": 2})(), nn.Module
    )


@pytest.fixture
def own_device(tmp_path):
    """A description of one's own: an A100 with half the memory, of another name."""
    folder = tmp_path / "a'; echo ${foo}"
    folder.mkdir()
    text = (Path(conf.__file__).parent / "device" / "A100-SXM4-40GB.yaml").read_text()
    path = folder / "lab.yaml"
    path.write_text(re.sub(r"(?m)^memory_mib: \d+", "memory_mib: 20000", text.replace("A100-SXM4-40GB", "Lab ${GPU}")))
    return path


def test_a_file_of_one_s_own_is_a_device_wherever_one_is_taken(own_device, answer):
    assert estimate(CONFIG, device=str(own_device), estimator="trace").device == "Lab ${GPU}"
    assert [fit.device for fit in devices_that_fit(CONFIG, devices=[str(own_device)])] == ["Lab ${GPU}"]
    done = answer(f"config='{json.dumps(CONFIG)}'", f"device={own_device}", "device.memory_mib=1500")
    assert (done["device"], done["device_memory_mib"]) == ("Lab ${GPU}", 1500)
    submitted = cli.load_config("submit", ["+arch=mlp", "n=1", f"device={own_device}", "device.count=1"])
    assert (submitted.device.name, submitted.device.memory_mib) == ("Lab ${GPU}", 20000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("- 1", "holds no description of a GPU model"),
        ("a: [", "is not YAML"),
        ("name: x\nfans: 3", "missing bandwidth_gb_s"),
        ("name: x\nfans: 3", "unknown fans"),
        ("llvm_target: gfx942\ncompute_capability: '8.0'", "missing bandwidth_gb_s"),
        ("x: " + "1" * 70_000, "holds no description"),
    ],
)
def test_a_file_that_describes_no_device_is_refused(tmp_path, refused, text, message):
    path = tmp_path / "lab.yaml"
    if text is not None:
        path.write_text(text)
    assert message in refused(f"config='{json.dumps(CONFIG)}'", f"device={path}")
    with pytest.raises(UsageError, match=re.escape(message)):
        estimate(CONFIG, device=str(path))


def test_a_client_of_the_service_and_a_row_name_no_file(own_device, tmp_path, refused):
    with pytest.raises(Problem) as of_client:
        device_at(str(own_device), "/device")
    assert "unknown device" in of_client.value.errors[0][1]
    assert Case(config_from_mapping(CONFIG), str(own_device)).spec is None
    data = DataFolder(tmp_path / "data").create()
    write_batch(data, [config_from_mapping(CONFIG)], source="measured", device=str(own_device))
    assert "unknown device" in refused("run=job-000000", f"data={json.dumps(str(data.root))}")


SPELLINGS = {
    "timm:resnet50": "write timm.models:resnet50 or timm:create_model with arguments {model_name: resnet50}",
    "torchvision:resnet50": "write torchvision.models:resnet50",
    "transformers:gpt2": "write transformers:GPT2LMHeadModel or transformers:GPT2Model",
}


@pytest.mark.parametrize("model", SPELLINGS)
def test_a_library_s_model_under_another_spelling_is_told_the_one_that_works(model):
    if version_of(model.partition(":")[0]) is None:
        pytest.skip("not installed")
    advice = re.escape(SPELLINGS[model])
    with pytest.raises(UsageError, match=advice):
        load_factory(model)
    with pytest.raises(UsageError, match=advice):
        zoo.layers(zoo.Config(model=model, inputs="float32[3,8,8]", batch_size=1))
    first = SPELLINGS[model].removeprefix("write ").partition(" ")[0]
    assert callable(load_factory(first))
