"""Questions of a trace to cuDNN about its convolutions, a replay's use of the answers, and other releases of cuDNN."""

import pytest
import torch
from torch import nn

from featurize.cudnn.oracle import cudnn_of
from featurize.cudnn.signature import EnginePlan, OracleAnswer, SearchSettings
from featurize.device.device_spec import load_device
from featurize.job.training_settings import Training
from featurize.memory.cudnn_workspaces import (
    convolution_workspaces,
    for_release,
    release_note,
    workspaces_note,
)
from featurize.memory.replay import replay
from featurize.trace.tracer import trace_step
from learn import estimate
from tests.featurize.asking_cudnn.cudnn_library import needs_cudnn
from tests.featurize.small_nets import Computes

A100 = load_device("A100-SXM4-40GB")


def network(*layers):
    return Computes(lambda net, x: net.layers(x).flatten(2).mean(2), layers=nn.Sequential(*layers))


def calls_of(*layers, shape=(2, 64, 16, 16), **settings):
    trace = trace_step(network(*layers), torch.empty(shape, device="meta"), **settings)
    return list(dict.fromkeys(b.call for b in trace.blocks if b.call is not None and b.call.spare)), trace


class Answering:
    """An oracle that answers with the same plans for everything, or with a problem."""

    version = "9.99.0"

    def __init__(self, *sizes):
        self.answer = OracleAnswer(
            plans=tuple(EnginePlan(f"eng{n}", n) for n in sizes), problem="" if sizes else "none"
        )

    def answers(self, signatures, search):
        return dict.fromkeys(signatures, self.answer)


OF_ONES = (1, 1), (1, 1), (1, 1)  # stride, padding and dilation
PLAIN = (1, 1), (0, 0), (1, 1)
HALVED = (2, 2), (1, 1), (1, 1)
LARGE, SMALL = (2, 64, 16, 16), (2, 32, 8, 8)  # of an image


@pytest.mark.parametrize(
    ("layers", "given", "asked"),
    [
        pytest.param(
            (nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 32, 3, stride=2, padding=1)),
            {},
            [
                ("forward", LARGE, (64, 64, 3, 3), LARGE, *OF_ONES, "float32", False),
                ("forward", LARGE, (32, 64, 3, 3), SMALL, *HALVED, "float32", False),
                ("data_gradient", LARGE, (32, 64, 3, 3), SMALL, *HALVED, "float32", False),
                ("weight_gradient", LARGE, (32, 64, 3, 3), SMALL, *HALVED, "float32", False),
                ("weight_gradient", LARGE, (64, 64, 3, 3), LARGE, *OF_ONES, "float32", False),
            ],
            id="forward and both gradients",
        ),
        pytest.param(
            (nn.Conv2d(64, 64, 1), nn.ConvTranspose2d(64, 32, 2, stride=2)),
            {},
            [
                ("forward", LARGE, (64, 64, 1, 1), LARGE, *PLAIN, "float32", False),
                *(
                    (way, (2, 32, 32, 32), (64, 32, 2, 2), LARGE, (2, 2), (0, 0), (1, 1), "float32", False)
                    for way in ("data_gradient", "forward", "weight_gradient")
                ),
                ("weight_gradient", LARGE, (64, 64, 1, 1), LARGE, *PLAIN, "float32", False),
            ],
            id="a transposed convolution is the gradient of its mirror",
        ),
        pytest.param(
            (nn.Conv1d(64, 32, 3, dilation=2),),
            {"shape": (2, 64, 100)},
            [
                (way, (2, 64, 1, 100), (32, 64, 1, 3), (2, 32, 1, 96), (1, 1), (0, 0), (1, 2), "float32", False)
                for way in ("forward", "weight_gradient")
            ],
            id="one spatial dimension becomes two",
        ),
        pytest.param(
            (nn.Conv2d(64, 64, 3, padding=1, groups=64),),
            {"settings": Training(precision="fp16")},
            [(way, LARGE, (64, 1, 3, 3), LARGE, *OF_ONES, "float16", False) for way in ("forward", "weight_gradient")],
            id="depthwise in fp16",
        ),
        pytest.param(
            (nn.Conv2d(64, 64, 3, groups=4),),
            {},
            [
                (way, LARGE, (64, 16, 3, 3), (2, 64, 14, 14), *PLAIN, "float32", False)
                for way in ("forward", "weight_gradient")
            ],
            id="grouped",
        ),
        pytest.param(
            (nn.Conv2d(64, 32, 3).to(memory_format=torch.channels_last),),
            {"settings": Training(precision="bf16")},
            [
                (way, LARGE, (32, 64, 3, 3), (2, 32, 14, 14), *PLAIN, "bfloat16", True)
                for way in ("forward", "weight_gradient")
            ],
            id="channels last in half precision",
        ),
    ],
)
def test_a_step_asks_for_its_convolutions(layers, given, asked):
    calls, _ = calls_of(*layers, **given)
    assert [call.convolution for call in calls] == asked


def test_the_layout_follows_the_dimensions_and_the_order_of_the_channels():
    volume, _ = calls_of(nn.Conv3d(64, 32, 3), shape=(2, 64, 8, 8, 8))
    last = volume[0].convolution._replace(image=(2, 64, 8, 8), channels_last=True)
    assert (volume[0].convolution.layout, last.layout, last.strides_of((2, 3, 5, 7))) == (
        "ncdhw",
        "nhwc",
        (105, 1, 21, 3),
    )


def test_depthwise_layers_in_fp32_are_not_cudnns():
    depthwise, _ = calls_of(nn.Conv2d(64, 64, 3, groups=64))
    assert depthwise[0].convolution is None


def test_answers_take_the_place_of_guesses_and_say_so():
    _, trace = calls_of(nn.Conv2d(64, 64, 3, padding=1))
    guessed = replay(trace, A100)
    workspaces = convolution_workspaces(trace, A100, Answering(100 * 2**20), SearchSettings())
    asked = replay(trace, A100, workspaces=workspaces)
    assert asked.peak_allocated > guessed.peak_allocated + 90 * 2**20 and not guessed.workspaces
    assert {(w.source, w.cudnn, w.engine) for w in asked.workspaces.values()} == {("oracle", "9.99.0", "eng104857600")}
    assert workspaces_note(workspaces) == "workspaces of 2 distinct convolutions: cuDNN 9.99.0 for 2"


def test_what_cudnn_does_not_answer_is_guessed_and_says_why():
    _, trace = calls_of(nn.Conv2d(64, 64, 3, padding=1))
    workspaces = convolution_workspaces(trace, A100, Answering(), SearchSettings())
    assert {(w.source, w.problem) for w in workspaces.values()} == {("guessed", "none")}
    assert replay(trace, A100, workspaces=workspaces).peak_allocated == replay(trace, A100).peak_allocated


def test_a_benchmark_takes_the_largest_workspace_that_fits():
    _, trace = calls_of(nn.Conv2d(64, 64, 3, padding=1))
    search = SearchSettings(benchmark=True)
    workspaces = convolution_workspaces(trace, A100, Answering(2**20, 80 * 2**30, 2**30), search)
    memory = replay(trace, A100, cudnn_benchmark=True, workspaces=workspaces)
    assert memory.fits and 2**30 < memory.peak_allocated < 2 * 2**30
    assert memory.peak_parts["workspace"] == 2**30


@needs_cudnn
def test_an_estimate_by_cudnn_says_which_version_answered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = network(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    plain = estimate(job, [64, 64, 56, 56], estimator="trace", data=str(tmp_path / "data"))
    asked = estimate(job, [64, 64, 56, 56], estimator="trace", data=str(tmp_path / "data"), workspaces="cudnn")
    assert asked.breakdown["workspace"] != plain.breakdown["workspace"]
    assert any("distinct convolutions: cuDNN 9." in warning for warning in asked.warnings)


@pytest.fixture(scope="module")
def answered():
    _, trace = calls_of(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 3, padding=1))
    return convolution_workspaces(trace, A100, Answering(2**20), SearchSettings())


@pytest.mark.parametrize(
    ("torch_version", "cudnn"), [("2.4.1+cu121", (9, 1, 0)), ("2.10.0", (9, 10, 2)), ("1.13", None), ("local", None)]
)
def test_a_release_of_torch_names_its_cudnn(torch_version, cudnn):
    assert cudnn_of(torch_version) == cudnn


def test_before_cudnn_9_8_pointwise_kernels_in_fp32_take_no_workspace(answered):
    old = for_release(answered, A100, torch_version="2.4.1")
    assert {(call.shapes[1][2:], one.source) for call, one in old.items()} == {((1, 1), "guessed"), ((3, 3), "oracle")}
    pointwise = [workspace for call, workspace in old.items() if call.shapes[1][2:] == (1, 1)]
    assert {(w.sizes, w.problem) for w in pointwise} == {((0,), "cuDNN 9.1.0 takes none for 1x1 kernels in fp32")}


def test_what_was_asked_stands_for_later_releases_for_unknown_ones_and_where_all_engines_are_tried(answered):
    for torch_version in ("2.10.0", "9.0"):
        assert for_release(answered, A100, torch_version=torch_version) == answered
    assert for_release(answered, A100, torch_version="2.4.1", benchmark=True) == answered


def test_another_release_than_was_asked_is_said_with_what_stays_guessed(answered):
    assert release_note(answered, torch_version="2.10.0+cu128") == (
        "workspaces: PyTorch 2.10.0 comes with cuDNN 9.10.2, and 9.99.0 was asked: two versions can choose different "
        "engines"
    )
    old = for_release(answered, A100, torch_version="2.4.1")
    note = release_note(old, torch_version="2.4.1")
    assert note is not None and note.endswith("; 2 convolutions with 1x1 kernels stay guessed")
