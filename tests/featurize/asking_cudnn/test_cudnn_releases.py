"""A release of PyTorch has its own cuDNN, which may not be the one that was asked."""

import pytest
from torch import nn

from featurize.cudnn.signature import SearchSettings
from featurize.memory.cudnn_workspaces import convolution_workspaces, cudnn_of, for_release, release_note
from tests.featurize.asking_cudnn.test_workspaces import A100, Answering, calls_of


@pytest.fixture(scope="module")
def answered():
    _, trace = calls_of(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 3, padding=1))
    return convolution_workspaces(trace, A100, Answering(2**20), SearchSettings())


def sources(workspaces):
    return {(call.shapes[1][2:], workspace.source) for call, workspace in workspaces.items()}


@pytest.mark.parametrize(
    ("torch_version", "cudnn"), [("2.4.1+cu121", (9, 1, 0)), ("2.10.0", (9, 10, 2)), ("1.13", None), ("local", None)]
)
def test_a_release_of_torch_names_its_cudnn(torch_version, cudnn):
    assert cudnn_of(torch_version) == cudnn


def test_before_cudnn_9_8_pointwise_kernels_in_fp32_take_no_workspace(answered):
    old = for_release(answered, A100, torch_version="2.4.1")
    assert sources(old) == {((1, 1), "guessed"), ((3, 3), "oracle")}
    pointwise = [workspace for call, workspace in old.items() if call.shapes[1][2:] == (1, 1)]
    assert {(w.sizes, w.problem) for w in pointwise} == {((0,), "cuDNN 9.1.0 takes none for 1x1 kernels in fp32")}


def test_what_was_asked_stands_for_later_releases_for_unknown_ones_and_where_all_engines_are_tried(answered):
    for torch_version in ("2.10.0", "9.0"):
        assert for_release(answered, A100, torch_version=torch_version) == answered
    assert for_release(answered, A100, torch_version="2.4.1", benchmark=True) == answered


def test_other_types_and_layouts_are_left_as_answered():
    _, trace = calls_of(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1), precision="bf16")
    half = convolution_workspaces(trace, A100, Answering(2**20), SearchSettings())
    assert for_release(half, A100, torch_version="2.4.1") == half


def test_another_release_than_was_asked_is_said_with_what_stays_guessed(answered):
    assert release_note(answered, torch_version="2.10.0+cu128") == (
        "workspaces: PyTorch 2.10.0 comes with cuDNN 9.10.2, and 9.99.0 was asked: two versions can choose different "
        "engines"
    )
    old = for_release(answered, A100, torch_version="2.4.1")
    note = release_note(old, torch_version="2.4.1")
    assert note is not None and note.endswith("; 2 convolutions with 1x1 kernels stay guessed")


def test_a_release_that_leaves_every_convolution_guessed_is_said():
    _, trace = calls_of(nn.Conv2d(64, 64, 1))
    old = for_release(
        convolution_workspaces(trace, A100, Answering(2**20), SearchSettings()), A100, torch_version="2.4"
    )
    note = release_note(old, torch_version="2.4")
    assert note is not None and note.startswith("workspaces: PyTorch 2.4 comes with cuDNN 9.1.0; ")
    assert note.endswith(f"{len(old)} convolutions with 1x1 kernels stay guessed")


def test_the_same_release_and_an_unknown_one_need_no_note(answered, monkeypatch):
    monkeypatch.setattr(Answering, "version", "9.10.1")
    _, trace = calls_of(nn.Conv2d(64, 64, 3))
    same = convolution_workspaces(trace, A100, Answering(2**20), SearchSettings())
    assert release_note(same, torch_version="2.10.0") is None
    assert release_note(answered, torch_version="9.0") is None
    assert release_note({}, torch_version="2.4.1") is None
