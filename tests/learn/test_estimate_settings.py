"""Training settings of `learn.estimate`, as keywords, as one object and as keys of the command."""

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.training.training_step import Training
from learn import estimate
from tests.featurize.asking_cudnn.cudnn_library import stand_in_for_cudnn

SHAPE = (256, 512)


def net():
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 8))


def compiled_in_place(module):
    module.compile()
    return module


def parameters_mib():
    return 4 * sum(p.numel() for p in net().parameters()) / 2**20


def test_keywords_and_settings_give_the_same_estimate():
    chosen = {"optimizer": "adamw_8bit", "accumulation": 2, "clip_norm": 1.0, "precision": "bf16-true"}
    by_keywords = estimate(net, SHAPE, **chosen)
    by_settings = estimate(net, SHAPE, settings=Training(**chosen))
    assert by_keywords.peak_memory_mib == by_settings.peak_memory_mib
    assert by_keywords.breakdown == by_settings.breakdown


def test_settings_that_no_model_was_fitted_on_are_answered_by_the_trace_which_says_so():
    answered = estimate(net, SHAPE, ema=True, optimizer="sgd")
    assert set(answered.answered_by.values()) == {"trace"}
    assert any("no model was fitted on ema=True" in warning for warning in answered.warnings)
    assert answered.breakdown["buffers and batch"] == pytest.approx(parameters_mib(), rel=0.2)


def test_an_accumulated_step_waits_for_the_input_of_every_micro_step():
    one, four = (estimate(net, SHAPE, accumulation=n, ema=True, loop="pipeline") for n in (1, 4))
    assert four.step_time_ms > 3.5 * one.step_time_ms


@pytest.mark.parametrize(
    "given, message",
    [
        ({"accumulate": 2}, "unknown keyword 'accumulate'; known: .*accumulation"),
        ({"accumulation": 0}, "accumulation must be an integer >= 1, got 0"),
        ({"settings": Training(), "accumulation": 2}, "accumulation and settings= exclude each other"),
        ({"settings": {"accumulation": 2}}, "settings must be a featurize.job.training_settings.Training, got dict"),
        ({"accumulation": 4, "estimator": "horus"}, "horus has no answer: it does not know accumulation=4"),
        ({"optimizer": "adafactor", "estimator": "horus"}, "horus has no answer: it does not know optimizer=adafactor"),
        *(
            ({"torch_version": odd}, r"torch_version is a release of PyTorch as text, 2\.0 to 2\.14, got")
            for odd in ("1.13", "newest", "2.4 beta", 2.4, "9.0")
        ),
    ],
)
def test_wrong_settings_are_named(given, message):
    with pytest.raises(UsageError, match=message):
        estimate(net, SHAPE, **given)


def test_settings_are_keys_of_the_command(answer, refused):
    settings = "accumulation=2", "clip_norm=1", "optimizer=lion", "set_to_none=false"
    job = "model=tests.learn.test_estimate_settings:net", "input=[8,512]", *settings
    assert any("accumulation=2, clip_norm=1" in warning for warning in answer(*job)["warnings"])
    assert "quantize_skip needs quantize" in refused(*job, "quantize_skip=[head]")


def test_a_run_is_not_estimated_with_its_own_measurement(refused):
    assert "known=runs cannot be combined with run=" in refused("run=job-000001", "known=runs")


def test_a_release_of_torch_chooses_the_cudnn_of_the_workspaces(monkeypatch):
    from featurize.memory.cudnn_workspaces import GUESSED

    convolutions = nn.Sequential(
        nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(), nn.Linear(64 * 64, 4)
    )
    answers = {}
    for release in ("2.4", "2.13"):
        with stand_in_for_cudnn(monkeypatch):
            done = estimate(convolutions, (8, 64, 8, 8), workspaces="cudnn", torch_version=release)
        answers[release] = " ".join(done.warnings)
        assert f"torch_version={release}: only cuDNN's workspaces follow it" in answers[release]
    assert "PyTorch 2.4 comes with cuDNN 9.1.0" in answers["2.4"] and f"stay {GUESSED}" in answers["2.4"]
    assert f"stay {GUESSED}" not in answers["2.13"]


@pytest.mark.parametrize(
    "wrap, words",
    [
        (lambda module: torch.compile(module), "is compiled"),
        (lambda module: nn.Sequential(torch.compile(module)), "is compiled"),
        (compiled_in_place, "is compiled"),
        (lambda module: nn.DataParallel(module), "is an nn.DataParallel"),
    ],
    ids=["compile", "compiled_member", "compiled_in_place", "data_parallel"],
)
def test_wrappers_around_modules_are_warned_of(wrap, words):
    plain, wrapped = estimate(net(), SHAPE), estimate(wrap(net()), SHAPE)
    assert any(words in warning for warning in wrapped.warnings)
    assert not any(words in warning for warning in plain.warnings)
    if "DataParallel" in words:  # which the trace does not follow
        assert wrapped.trace_memory_mib == plain.trace_memory_mib
    else:
        assert wrapped.trace_memory_mib == pytest.approx(plain.trace_memory_mib, rel=0.05)
