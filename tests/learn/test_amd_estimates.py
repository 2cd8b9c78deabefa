"""Estimates for AMD's GPUs: what is said, refused and widened, and what a training script sees."""

import pytest
from torch import nn

from conf.errors import UsageError
from farm.sampling.forecast import Forecaster
from featurize.device.device_spec import MachineProfile, load_device
from featurize.families import cnn, mlp
from learn import devices_that_fit, estimate, estimate_many, estimate_script
from learn.estimation.job_estimate import (
    CONTEXT,
    KERNELS,
    WORKSPACES,
)
from tests.featurize.asking_cudnn.cudnn_library import stand_in_for_cudnn

CNN = cnn.Config(batch_size=64, image_size=64, channels=3, classes=10, base_filters=64, depth=3)
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


def test_a_context_that_was_measured_is_not_called_assumed():
    on = MachineProfile(name="station", context_mib=700.0, kernels_mib=40.0, cudnn_mib=50.0)
    for machine, assumed in ((None, True), ("described", True), (on, False)):
        done = estimate(MLP, device="MI210", machine=machine)
        (note,) = [text for text in done.warnings if text.startswith(NOTE)]
        assert ("its context is assumed" in note) == assumed


def test_the_bound_is_wider_by_what_is_not_known():
    on_amd, on_nvidia = (estimate(net, (64, 3, 32, 32), device=name, estimator="trace") for name in ("MI210", "A30"))
    assert on_amd.uncertain[WORKSPACES] > on_nvidia.uncertain[WORKSPACES]
    assert on_amd.uncertain[CONTEXT] == pytest.approx(5 * on_nvidia.uncertain[CONTEXT])
    assert on_amd.uncertain[KERNELS] - on_nvidia.uncertain[KERNELS] > 2 * 32
    assert on_amd.upper_mib > on_amd.peak_memory_mib


def test_auto_takes_the_guess():
    asked = estimate(net, (8, 3, 32, 32), device="MI300X", workspaces="auto")
    assert asked.peak_memory_mib == estimate(net, (8, 3, 32, 32), device="MI300X").peak_memory_mib


def test_method_fast_is_refused_and_the_choice_of_trials_does_without_it():
    for answer in (
        lambda: estimate(CNN, device="MI300X", method="fast"),
        lambda: estimate_many([CNN, MLP], device="MI300X", method="fast"),
    ):
        with pytest.raises(UsageError, match="method=fast was fitted on NVIDIA GPUs, and MI300X is an AMD GPU"):
            answer()
    outlook = Forecaster(device=load_device("MI300X"), workers=0).look([CNN, MLP])
    assert "fast" not in set(outlook.ways) and (outlook.figures["memory"] > 0).all()


def test_a_table_of_both_vendors_has_an_answer_or_a_reason_in_each_row(shown, monkeypatch):
    names = ["A100-SXM4-80GB", "MI300X", "MI250-GCD", "MI100"]
    rows = {row.device: row for row in devices_that_fit(net, (64, 3, 32, 32), devices=names)}
    assert all(rows[name].fits for name in names)
    with stand_in_for_cudnn(monkeypatch):
        rows = {row.device: row for row in devices_that_fit(net, (64, 3, 32, 32), devices=names, workspaces="cudnn")}
    assert rows["A100-SXM4-80GB"].fits and rows["MI300X"].fits is None
    assert "cuDNN does not run on MI300X, an AMD GPU: pass workspaces=guessed" in rows["MI300X"].problem

    monkeypatch.setenv("COLUMNS", "200")
    job = "model=tests.learn.test_amd_estimates:net", "input=[8,3,32,32]"
    printed = shown(*job, "device=[A100-SXM4-80GB,MI300X]")
    assert "MI300X" in printed and printed.count(NOTE) == 1


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
@pytest.mark.parametrize(
    "device, expected",
    [
        ("MI300X", (True, None, "gfx942:sramecc+:xnack-", 64, (9, 4), ["gfx942"], True)),
        ("MI210", (True, None, "gfx90a:sramecc+:xnack-", 64, (9, 0), ["gfx90a"], True)),
        ("T4", (False, "12.8", "", 32, (7, 5), ["sm_75"], False)),
    ],
)
def test_a_script_sees_what_pytorch_reports_of_the_gpu(device, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.format(expected=expected))
    done = estimate_script(["python", "train.py"], device=device, estimator="trace")
    assert done.parameters == 64 * 8 + 8
    assert any(text.startswith(NOTE) for text in done.warnings) == device.startswith("MI")
