"""GPU models: their names in Python and on the command line, and what is said, refused and widened on AMD's."""

import json
import re
from pathlib import Path

import pytest
from torch import nn

import conf
from conf.cli.command_line import load_config
from conf.cli.commands import settings_class
from conf.errors import UsageError
from farm.sampling.forecast import Forecaster
from farm.serving.bodies import device_at
from farm.serving.gate import Problem
from featurize.configs.trial import config_from_mapping
from featurize.device.device_spec import describe_device, device_names, load_device
from featurize.families import cnn, mlp
from learn import devices_that_fit, estimate, estimate_script
from learn.estimation.bounds import CONTEXT, KERNELS, WORKSPACES
from learn.job.training_job import Case
from tests.learn.learn_rows import write_batch
from warehouse.files.folder import DataFolder

pytestmark = pytest.mark.shares_traces

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


@pytest.mark.parametrize(("given", "name"), [*NAMES, ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB")])
def test_case_a_beginning_and_the_driver_s_name_are_enough_in_python(given, name):
    assert load_device(given) == describe_device(given) == load_device(name)
    assert estimate(CONFIG, device=given, estimator="trace").device == name


@pytest.mark.parametrize(("given", "name"), NAMES[:2])
def test_case_and_a_beginning_are_enough_on_the_command_line(given, name):
    commands = {
        "estimate": [f"device={given}"],
        "submit": ["+arch=mlp", "n=1", f"device={given}"],
        "grow": ["n=1", f"device='{given}'"],
    }
    assert {load_config(settings_class(command), words).device.name for command, words in commands.items()} == {name}


def test_an_ambiguous_beginning_lists_its_candidates(refused):
    of_estimate = refused("estimate", "device=H", f"config='{json.dumps(CONFIG)}'")
    assert "device 'H' is ambiguous: H100-NVL-94GB, H100-PCIE-80GB, H100-SXM5-80GB" in of_estimate
    said = refused("submit", "+arch=mlp", "n=1", "device=c", "polcy=x")
    assert "device 'c' is ambiguous: cpu, cuda" in said and "unknown key 'polcy'" in said


def test_an_unknown_device_of_an_estimate_lists_gpu_models_only(refused):
    config = f"config='{json.dumps(CONFIG)}'"
    assert f"unknown device 'B1000'; known: {', '.join(device_names())}\n" in refused(
        "estimate", "device=B1000", config
    )
    assert "auto, cpu, cuda, simulated" in refused("submit", "+arch=mlp", "n=1", "device=B1000")
    assert "an estimate is for a GPU model" in refused("estimate", "device=cpu", config)


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
    done = answer("estimate", f"config='{json.dumps(CONFIG)}'", f"device={own_device}", "device.memory_mib=1500")
    assert (done["device"], done["device_memory_mib"]) == ("Lab ${GPU}", 1500)
    submitted = load_config(settings_class("submit"), ["+arch=mlp", "n=1", f"device={own_device}", "device.count=1"])
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
    assert message in refused("estimate", f"config='{json.dumps(CONFIG)}'", f"device={path}")
    with pytest.raises(UsageError, match=re.escape(message)):
        estimate(CONFIG, device=str(path))


def test_a_client_of_the_service_and_a_row_name_no_file(own_device, tmp_path, refused):
    with pytest.raises(Problem) as of_client:
        device_at(str(own_device), "/device")
    assert "unknown device" in of_client.value.errors[0][1]
    assert Case(config_from_mapping(CONFIG), str(own_device)).spec is None
    data = DataFolder(tmp_path / "data").create()
    write_batch(data, [config_from_mapping(CONFIG)], source="measured", device=str(own_device))
    assert "unknown device" in refused("estimate", "run=job-000000", f"data={json.dumps(str(data.root))}")


# -- AMD's GPUs


CONVOLUTIONS = cnn.Config(batch_size=64, image_size=64, channels=3, classes=10, base_filters=64, depth=3)
MLP = mlp.Config(batch_size=64, input_size=4096, classes=10, depth=4)
NOTE = "on an AMD GPU: no AMD GPU was measured"
MIOPEN = "MIOpen's memory is not known, and assumed to be what cuDNN takes"


def net():
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 28**2, 10))


def test_an_answer_says_what_is_not_known_there():
    done = estimate(net, (64, 3, 32, 32), device="MI300X")
    (note,) = [text for text in done.warnings if text.startswith(NOTE)]
    assert MIOPEN in note and done.device == "MI300X"
    (note,) = [text for text in estimate(MLP, device="MI210").warnings if text.startswith(NOTE)]
    assert MIOPEN not in note
    assert not any(NOTE in text for text in estimate(MLP, device="H100").warnings)


def test_the_bound_is_wider_by_what_is_not_known():
    on_amd, on_nvidia = (estimate(net, (64, 3, 32, 32), device=name, estimator="trace") for name in ("MI210", "A30"))
    assert on_amd.uncertain[WORKSPACES] > on_nvidia.uncertain[WORKSPACES]
    assert on_amd.uncertain[CONTEXT] == pytest.approx(5 * on_nvidia.uncertain[CONTEXT])
    assert on_amd.uncertain[KERNELS] - on_nvidia.uncertain[KERNELS] > 2 * 32
    assert on_amd.upper_mib > on_amd.peak_memory_mib


def test_the_choice_of_trials_does_without_method_fast():
    outlook = Forecaster(device=load_device("MI300X"), workers=0).look([CONVOLUTIONS, MLP])
    assert "fast" not in set(outlook.ways) and (outlook.figures["memory"] > 0).all()


SCRIPT = """
import torch
properties = torch.cuda.get_device_properties(0)
seen = (torch.version.hip is not None, torch.version.cuda, properties.gcnArchName, properties.warp_size,
        torch.cuda.get_device_capability(), torch.cuda.get_arch_list(), torch.cuda.is_bf16_supported())
assert seen == {expected}, seen
model = torch.nn.Linear(64, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(16, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_scripts")
@pytest.mark.parametrize(
    "device, expected",
    [
        ("MI300X", (True, None, "gfx942:sramecc+:xnack-", 64, (9, 4), ["gfx942"], True)),
        ("MI210", (True, None, "gfx90a:sramecc+:xnack-", 64, (9, 0), ["gfx90a"], True)),
        ("T4", (False, "12.8", "", 32, (7, 5), ["sm_75"], False)),
    ],
)
def test_a_script_sees_what_pytorch_reports_of_the_gpu(device, expected, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(expected=expected))
    done = estimate_script(["python", "train.py"], device=device, estimator="trace")
    assert done.parameters == 64 * 8 + 8
    assert any(text.startswith(NOTE) for text in done.warnings) == device.startswith("MI")
