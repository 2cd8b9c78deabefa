"""Workspaces without cuDNN: formulas, small trees, and the file that comes with the project."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from conf.errors import EnvironmentProblem, UsageError
from featurize.cudnn import libraries
from featurize.cudnn.distilled import FILE, distilled_for
from featurize.cudnn.signature import OPERATIONS, ConvolutionSignature, SearchSettings
from featurize.cudnn.workspace_formulas import FEATURES, WorkspaceFormula, described, workspace_class
from featurize.device_spec import device_names, load_device
from learn import estimate
from tests.featurize.asking_cudnn.cudnn_library import needs_cudnn

A100 = load_device("A100-SXM4-40GB")
SEARCH = SearchSettings()
MIB = 2**20


def signature(**changes):
    plain = ConvolutionSignature(
        "forward", (32, 64, 56, 56), (64, 64, 3, 3), (32, 64, 56, 56), (1, 1), (1, 1), (1, 1), "float32", False
    )
    return plain._replace(**changes)


def test_a_formula_counts_copies_with_channels_padded_to_16_bytes():
    odd = signature(image=(2, 6, 10, 10), kernel=(10, 3, 3, 3), response=(2, 10, 10, 10), dtype="float16")
    convolutions = described([odd], allow_tf32=True, sm_count=108)
    assert convolutions.features.shape == (1, len(FEATURES))

    def size(padding):
        return convolutions.bytes_of(WorkspaceFormula(padding, 1, 0, 2))[0]

    assert size("exact") == 2 * 200 * (6 + 2 * 10)
    assert size("padded") == 2 * 200 * (8 + 2 * 16)
    assert size("by group") == 2 * 200 * (2 * 8 + 2 * 2 * 8)


def test_what_tells_two_convolutions_apart_is_a_feature():
    plain = signature()
    others = [
        signature(dtype="float16"), signature(dtype="bfloat16"), signature(channels_last=True),
        signature(kernel=(64, 32, 3, 3)), signature(stride=(2, 2)), signature(padding=(0, 0)),
    ]  # fmt: skip
    rows = described([plain, *others], allow_tf32=True, sm_count=108).features
    exact = described([plain], allow_tf32=False, sm_count=108).features
    assert len({tuple(row) for row in (*rows, *exact)}) == len(others) + 2


def test_classes_of_workspaces_are_nothing_below_one_mib_and_powers_of_two():
    sizes = np.array([0, 1, MIB - 1, MIB, 2 * MIB - 1, 2 * MIB, 1024 * MIB])
    assert workspace_class(sizes).tolist() == [0, 1, 1, 2, 2, 3, 12]


def test_the_file_that_comes_along_is_small_and_answers_for_every_described_device_since_volta():
    assert FILE.stat().st_size < 3e6
    asked = [
        signature(operation=operation, dtype=dtype, channels_last=last)
        for operation in OPERATIONS for dtype in ("float32", "float16") for last in (False, True)
    ]  # fmt: skip
    for device in map(load_device, device_names()):
        if device.compute_capability is None or device.compute_capability < (7, 0):
            with pytest.raises(UsageError, match=f"{device.name} has|cuDNN does not run on {device.name}, an AMD GPU"):
                distilled_for(device)
            continue
        answers = distilled_for(device).workspaces(asked, SEARCH)
        assert answers.keys() == set(asked)
        assert all(size is None or 0 <= size < 2**30 for size in answers.values()), device.name


def test_kernels_for_the_tensor_cores_take_copies_unless_the_tensors_lie_in_their_layout():
    plain, last = signature(dtype="float16"), signature(dtype="float16", channels_last=True)
    answers = distilled_for(A100).workspaces([plain, last], SEARCH)
    assert answers[plain] == 2 * 32 * 64 * 56 * 56 * 2 + 2 * 64 * 64 * 9  # input, weight, output
    assert answers[last] < MIB


@needs_cudnn
def test_cudnn_itself_says_the_same_of_a_common_convolution(tmp_path):
    from featurize.cudnn.libraries import installed_libraries
    from featurize.cudnn.oracle import CudnnOracle

    asked = [signature(operation=operation, dtype="float16") for operation in OPERATIONS]
    oracle = CudnnOracle(installed_libraries(), A100, None)
    answers = oracle.answers(asked, SEARCH)
    oracle.close()
    distilled = distilled_for(A100).workspaces(asked, SEARCH)
    own = np.array([answers[one].plans[0].workspace_bytes for one in asked])
    assert workspace_class(own).tolist() == workspace_class(np.array([distilled[one] for one in asked])).tolist()


def test_an_unknown_generation_lists_those_that_were_distilled():
    with pytest.raises(UsageError, match=r"knows compute capabilities .*8\.0.*; .* has 3\.5"):
        distilled_for(replace(A100, compute_capability=(3, 5)))


@pytest.mark.parametrize("content", [b"", b"no file of arrays", None])
def test_a_damaged_or_missing_file_is_one_message(tmp_path, content):
    path = tmp_path / "a'; echo weights.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EnvironmentProblem, match="holds no distilled workspaces"):
        distilled_for(A100, path)


def network():
    return nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(2))


@pytest.mark.parametrize("workspaces", ["distilled", "auto"])
def test_an_estimate_without_cudnn_is_of_distilled_workspaces_and_says_so(tmp_path, monkeypatch, workspaces):
    monkeypatch.setattr(libraries, "missing_from_extra", lambda extra: "not installed")
    asked = {"estimator": "trace", "data": str(tmp_path / "data")}
    plain = estimate(network, [64, 64, 56, 56], **asked)
    distilled = estimate(network, [64, 64, 56, 56], workspaces=workspaces, **asked)
    assert distilled.breakdown["workspace"] != plain.breakdown["workspace"]
    assert any("distinct convolutions: distilled from cuDNN 9." in warning for warning in distilled.warnings)


def test_an_estimate_says_what_of_the_job_the_distilled_models_do_not_know(monkeypatch):
    def notes(net=network, **settings):
        done = estimate(net, [8, 64, 28, 28], estimator="trace", workspaces="distilled", **settings)
        return [
            note.partition("fitted without ")[2].partition(",")[0] for note in done.warnings if "fitted wit" in note
        ]

    assert notes() == []
    assert notes(cudnn_benchmark=True) == ["cudnn_benchmark"]
    assert notes(lambda: network().double(), input_dtype="float64") == ["float64"]
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert notes() == ["deterministic algorithms"]
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setenv("TORCH_CUDNN_USE_HEURISTIC_MODE_B", "1")
    assert notes() == ["heuristics of mode B"]


def test_auto_guesses_where_nobody_knows_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(libraries, "missing_from_extra", lambda extra: "not installed")
    old = replace(A100, name="K80", compute_capability=(3, 7))
    asked = {"estimator": "trace", "data": str(tmp_path / "data"), "device": old}
    plain = estimate(network, [64, 64, 56, 56], **asked)
    assert estimate(network, [64, 64, 56, 56], workspaces="auto", **asked).reserved_mib == plain.reserved_mib
