"""The training-free memory estimators: formulas by hand on small models, what they refuse, what they leave alone."""

import dataclasses
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.device.device_spec import describe_device
from featurize.families import transformer
from featurize.training.training_step import Training
from learn import FitSettings, estimate, fit
from learn.estimators.protocol import get_estimator
from learn.job.training_job import TrainingJob, of_config
from learn.judging.evaluate import evaluate
from learn.peers.base import CannotEstimate, analyse
from learn.peers.dnnmem import DNNMem
from learn.peers.faketensor import FakeTensor
from learn.peers.formulas import DeepSpeed, Horus, LLMem
from learn.peers.xmem import ProfiledBlock, ProfilerEvent, XMem, pair, replay
from learn.rows.data import make_bins
from tests.featurize.small_nets import Computes
from tests.learn.learn_rows import labels_of, make_configs, make_rows, write_batch

MIB = 2**20
DEVICE = describe_device("A100-SXM4-40GB")
METHODS = [Horus, FakeTensor, DNNMem, XMem, DeepSpeed]  # those that take any model
B, WIDTH, CLASSES = 64, 1024, 8


def small_mlp():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def workload(build, shape=(B, WIDTH), dtype=torch.float32, **settings):
    def batch(device):
        return (torch.zeros(shape, dtype=dtype, device=device),), torch.zeros(
            shape[:1], dtype=torch.long, device=device
        )

    return TrainingJob("test", build, batch, Training(**settings), shape[0])


PARAMETERS = WIDTH * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES  # 1,057,800


def test_horus_is_800_and_parameters_and_batch_times_both():
    activations = WIDTH + WIDTH + CLASSES  # of one sample: linear, ReLU, linear
    by_hand = 800 + (PARAMETERS + B * (activations + PARAMETERS)) * 4 / MIB
    assert analyse(Horus(), workload(small_mlp), DEVICE).mib == pytest.approx(by_hand, rel=1e-9)


def test_horus_counts_in_place_activations_and_no_pooling_or_dropout():
    def net():
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        )

    parts = Horus().parts_mib(workload(net, (2, 3, 8, 8)), DEVICE)
    of_one = 3 * 4 * 8 * 8 + 4 + 2  # convolution, normalisation, ReLU; adaptive pooling; linear
    assert parts["activations"] == pytest.approx(2 * of_one * 4 / MIB)


@pytest.mark.parametrize(
    ("stage", "gpus", "precision", "bytes_each"),
    [
        (0, 1, "fp32", 16),
        (0, 8, "bf16", 16),
        (1, 4, "fp16", 4 + 12 / 4),
        (1, 4, "fp32", 8 + 8 / 4),
        (2, 4, "bf16", 8),
        (3, 4, "bf16", 18 / 4 + 4 * (WIDTH * WIDTH + WIDTH) / PARAMETERS),  # the largest layer is gathered
    ],
)
def test_deepspeed_model_states_by_stage(stage, gpus, precision, bytes_each):
    answer = analyse(DeepSpeed(stage=stage, gpus=gpus), workload(small_mlp, precision=precision), DEVICE)
    assert answer.mib == pytest.approx(PARAMETERS * bytes_each / MIB)


@pytest.mark.parametrize(
    ("method", "settings", "named"),
    [
        (DeepSpeed(), {"optimizer": "momentum"}, "optimizer=momentum"),
        (DeepSpeed(stage=2), {"precision": "tf32"}, "precision=tf32 is not covered at stage 2"),
    ],
)
def test_deepspeed_refuses_by_name_what_it_does_not_cover(method, settings, named):
    answer = analyse(method, workload(small_mlp, **settings), DEVICE)
    assert answer.mib is None and named in answer.reason


@pytest.mark.parametrize("bad", [{"stage": 4}, {"gpus": 0}])
def test_deepspeed_has_stages_and_gpus(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        DeepSpeed(**bad)


def test_dnnmem_by_hand():
    # Sizes are rounded up to 512 bytes, which changes the last bias (32 bytes) and nothing else.
    def rounded(nbytes):
        return -(-nbytes // 512) * 512

    weights = 4 * (WIDTH * WIDTH + WIDTH + WIDTH * CLASSES) + rounded(4 * CLASSES)
    hidden = 4 * B * WIDTH
    parts, of_sgd = (DNNMem().parts_mib(workload(small_mlp, optimizer=name), DEVICE) for name in ("adam", "sgd"))
    expected = {
        "weights": weights / MIB,
        "weight gradients": weights / MIB,
        "optimizer state": 2 * weights / MIB,
        "buffers and batch": (hidden + rounded(8 * B)) / MIB,
        # ReLU's backward: what both hidden layers put out, and the gradients of both; the logits are gone.
        "outputs": 2 * hidden / MIB,
        "output gradients": 2 * hidden / MIB,
        "context": DEVICE.context_mib,
        "reserved buffer": 64,
    }
    assert {name: mib for name, mib in parts.items() if name in expected} == expected
    assert not of_sgd.get("optimizer state")


def test_dnnmem_counts_in_place_results_and_views_once_and_gives_convolutions_a_workspace():
    def net(inplace):
        return lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(inplace), nn.Flatten(), nn.Linear(8 * 64 * 64, 2))

    def convolution():
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    one, two, only = (
        DNNMem().parts_mib(workload(build, (samples, 8, 64, 64)), DEVICE)
        for build, samples in ((net(True), 4), (net(False), 4), (convolution, 1))
    )
    image, unrolled = 4 * 4 * 8 * 64 * 64 / MIB, 4 * 8 * 9 * 64 * 64 / MIB
    assert two["outputs"] - one["outputs"] == pytest.approx(image)
    assert only["workspace"] == pytest.approx(unrolled)


def test_faketensor_is_what_the_tracker_counts():
    parts = FakeTensor().parts_mib(workload(small_mlp), DEVICE)
    assert parts["parameter"] == pytest.approx(PARAMETERS * 4 / MIB, rel=1e-6)
    # With this few samples the optimizer's step is the peak: parameters, gradients, Adam's two states, and two
    # temporaries of the largest weight; beside them the batch.
    by_hand = (4 * PARAMETERS + 2 * WIDTH * WIDTH + B * WIDTH) * 4 / MIB
    assert sum(parts.values()) == pytest.approx(by_hand, rel=0.01)


class ReadsAFigure(nn.Sequential):
    """As models with stochastic depth: rates are read from a tensor while the model is built."""

    def __init__(self):
        super().__init__(*small_mlp())
        self.rates = torch.linspace(0, 0.5, 3, device="cpu").tolist()


def test_faketensor_takes_models_that_read_figures_while_they_are_built():
    assert analyse(FakeTensor(), workload(ReadsAFigure), DEVICE).mib == pytest.approx(
        analyse(FakeTensor(), workload(small_mlp), DEVICE).mib
    )


def test_xmem_is_near_a_liveness_by_hand():
    b = 8192
    answer = analyse(XMem(), workload(small_mlp, (b, WIDTH)), DEVICE)
    hidden = b * WIDTH * 4 / MIB  # 32 MiB
    # Second step's backward: weights, Adam's states, two batches at the step's start and then one, the linear layer's
    # and ReLU's outputs, the gradient of ReLU's output and the one of its input.
    live = 3 * PARAMETERS * 4 / MIB + hidden + 4 * hidden
    assert answer.mib == pytest.approx(live + PARAMETERS * 4 / MIB, rel=0.2)
    assert answer.parts["parameters and buffers"] == pytest.approx(PARAMETERS * 4 / MIB)
    assert answer.parts["optimizer state"] == pytest.approx(2 * PARAMETERS * 4 / MIB, rel=0.01)


def test_xmem_pairs_events_into_blocks_by_address_and_phase():
    events = [
        ProfilerEvent(1, 100, "forward", 0, True),
        ProfilerEvent(9, 77, "forward", 0, False),  # taken by no operator
        ProfilerEvent(2, 200, "backward", 0, True),
        ProfilerEvent(3, 300, "backward", 0, True),
        ProfilerEvent(3, -300, "backward", 0, True),
        ProfilerEvent(1, -100, "backward", 0, True),
        ProfilerEvent(8, -50, "backward", 0, True),  # from before the profile
        ProfilerEvent(1, 400, "optimizer", 0, True),  # the address again: another block
        ProfilerEvent(2, -200, "zero_grad", 1, False),
        ProfilerEvent(5, 500, "forward", 1, True),
    ]
    assert pair(events) == [
        ProfiledBlock(100, 0, 5, "activations"),
        ProfiledBlock(200, 2, 8, "gradients"),
        ProfiledBlock(300, 3, 4, "temporaries"),
        ProfiledBlock(400, 7, None, "optimizer state"),
        ProfiledBlock(500, 9, None, "activations"),
    ]


def test_xmem_replays_blocks_on_the_caching_allocator():
    events = [
        ProfilerEvent(1, 30 * MIB, "forward", 0, True),
        ProfilerEvent(1, -30 * MIB, "backward", 0, True),
        ProfilerEvent(2, 24 * MIB, "forward", 1, True),
    ]
    reserved, live = replay([12 * MIB], [MIB // 2], events, pair(events))
    # 12 and 30 MiB segments of their own; two small batches share one of 2 MiB; 24 MiB fit in the cached 30.
    assert reserved == (12 + 30 + 2) * MIB
    assert live == {"parameters and buffers": 12 * MIB, "batch": MIB // 2, "activations": 30 * MIB}


def test_xmem_refuses_with_the_figure_what_the_machine_has_no_memory_for(monkeypatch):
    import psutil

    free = psutil.virtual_memory()._replace(available=10 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    answer = analyse(XMem(), workload(small_mlp), DEVICE)
    assert answer.mib is None and "about 17 MiB of real memory" in answer.reason and "10 MiB are free" in answer.reason


def test_xmem_refuses_a_model_that_has_no_memory():
    model = small_mlp().to("meta")
    assert "on the meta device" in analyse(XMem(), workload(lambda: model), DEVICE).reason


def decoder(tied=False, checkpoints=True, vocabulary=50_000, hidden=64):
    """A language model with one learned table each for words and places, and a head of its own or the words' table."""

    def forward(net, tokens):
        x = net.words(tokens) + net.places(torch.arange(tokens.shape[1], device=tokens.device))[None]
        for layer in net.layers:
            x = layer(x)
        return net.head(x)

    words, head = nn.Embedding(vocabulary, hidden), nn.Linear(hidden, vocabulary, bias=False)
    if tied:
        head.weight = words.weight
    layers = nn.ModuleList(nn.TransformerEncoderLayer(hidden, 4, 128, batch_first=True) for _ in range(3))
    members = {"words": words, "places": nn.Embedding(32, hidden), "layers": layers, "head": head}
    return Computes(forward, gradient_checkpointing=checkpoints, **members)


def tokens_of(build, **settings):
    settings = {"precision": "bf16"} | settings

    def batch(device):
        tokens = torch.zeros((4, 32), dtype=torch.long, device=device)
        return (tokens,), tokens

    return TrainingJob("lm", build, batch, Training(**settings), 4)


@pytest.mark.parametrize("tied", [False, True])
def test_llmem_by_hand(tied):
    def pages(nbytes):
        return -(-nbytes // (2 * MIB)) * 2

    v, h, tokens = 50_000, 64, 4 * 32
    parts = LLMem().parts_mib(tokens_of(lambda: decoder(tied)), DEVICE)
    assert parts["context"] == DEVICE.context_mib
    assert parts["parameters"] == pages((v * h + 32 * h + 32 * MIB) * 6)  # the layers fit into one chunk
    linear = 3 * (pages(3 * h * h * 8) + pages(h * h * 8) + 2 * pages(128 * h * 8))
    assert parts["optimizer state"] == pages(v * h * 8) + pages(32 * h * 8) + linear
    assert parts["layer outputs"] == pages((2 + 3) * tokens * h * 2)
    own = 0 if tied else v * h * 2 / MIB
    assert parts["language-model head"] == pytest.approx(pages(tokens * v * 2) + 2 * pages((tokens - 4) * v * 2) + own)


def test_estimate_takes_llmems_answer_of_a_language_model():
    done = estimate(decoder, (4, 32), input_dtype="int64", precision="bf16", estimator="llmem")
    assert done.answered_by["memory"] == "llmem" and done.peak_memory_mib > DEVICE.context_mib


ENCODER = transformer.Config(
    batch_size=2,
    precision="bf16",
    vocabulary_size=100,
    sequence_length=8,
    embedding_size=16,
    heads=2,
    depth=2,
    feed_forward=32,
    classes=3,
)


@pytest.mark.parametrize(
    ("job", "named"),
    [
        (tokens_of(decoder, precision="fp32"), "precision=fp32"),
        (tokens_of(decoder, optimizer="sgd"), "optimizer=sgd"),
        (tokens_of(lambda: decoder(checkpoints=False)), "without activation checkpointing"),
        (workload(small_mlp, precision="bf16"), "Sequential is not covered: .*no nn.Embedding"),
        (of_config(ENCODER), "TransformerClassifier is not covered: it is not a transformer language model"),
    ],
)
def test_llmem_refuses_by_name_what_it_does_not_cover(job, named):
    with pytest.raises(CannotEstimate, match=named):
        LLMem().parts_mib(job, DEVICE)


def broken():
    """Fails in the second layer's forward pass."""
    return nn.Sequential(OrderedDict(first=nn.Linear(WIDTH, 16), second=nn.Linear(17, CLASSES)))


@pytest.mark.parametrize("method", [m for m in METHODS if m is not DeepSpeed])
def test_a_model_that_fails_is_a_reason_that_names_operator_and_module(method):
    reason = analyse(method(), workload(broken), DEVICE).reason
    assert "torch.nn.functional.linear" in reason and "module second (Linear)" in reason


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_cannot_be_built_is_a_reason(method):
    def build():
        raise KeyError("no weights")

    assert "building the model fails: KeyError: 'no weights'" in analyse(method(), workload(build), DEVICE).reason


def state_of_torch():
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.autograd._profiler_enabled(),
        torch.UntypedStorage.resize_,
        torch.get_rng_state().tolist(),
        len(_get_current_function_mode_stack()),
        len(_get_current_dispatch_mode_stack()),
    )


@pytest.mark.parametrize("method", METHODS)
def test_torch_is_left_as_it_was_also_after_a_failure(method):
    before = state_of_torch()
    for build in (small_mlp, broken):
        analyse(method(), workload(build), DEVICE)
        assert state_of_torch() == before


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_own_model_is_left_as_it_was(method):
    model = small_mlp().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    answer = analyse(method(), workload(lambda: model), DEVICE)
    assert answer.mib == pytest.approx(analyse(method(), workload(small_mlp), DEVICE).mib, rel=0.02)
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("method", [FakeTensor, XMem])
def test_the_workloads_own_loss_is_taken(method):
    shapes = []
    job = dataclasses.replace(
        workload(small_mlp), loss=lambda output, _: shapes.append(output.shape) or output.square().mean()
    )
    assert analyse(method(), job, DEVICE).mib > 0 and set(shapes) == {(B, CLASSES)}


def test_xmem_refuses_while_another_profiler_runs():
    with torch.profiler.profile():
        assert "profiler is running" in analyse(XMem(), workload(small_mlp), DEVICE).reason
    assert not torch.autograd._profiler_enabled()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", ["horus", "xmem"])
def test_a_scripted_model_is_refused_as_such(name):
    scripted = nn.Sequential(torch.jit.script(nn.Linear(8, 3)))
    with pytest.raises(UsageError, match=r"no answer: 0 is a scripted module, .*: give what it was made of"):
        estimate(scripted, (4, 8), estimator=name)


@pytest.mark.parametrize("name", ["faketensor", "deepspeed"])
def test_what_no_method_expects_of_a_model_is_a_reason_too(name):
    said = analyse(get_estimator(name)(), workload(lambda: nn.LazyLinear(3), (4, 8)), DEVICE)
    assert said.mib is None and "uninitialized parameter" in said.reason


@pytest.mark.parametrize("name", ["horus", "faketensor", "xmem", "trace"])
def test_a_model_that_has_run_and_keeps_its_result_is_estimated(name):
    class Keeps(nn.Linear):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    mine = Keeps(8, 3)
    mine(torch.ones(4, 8))
    last = mine.last
    assert estimate(mine, (4, 8), estimator=name).parameters == 27 and mine.last is last


def test_a_fit_leaves_refused_rows_out_of_its_figures_and_says_so():
    configs = make_configs(60, families=("mlp",))
    rows = make_rows("memory", configs, labels_of(configs)["peak_memory_mib"])
    bins = make_bins(rows.target, rows.label, rows.family, bin_gb=1)
    found = evaluate("deepspeed", rows, bins)
    assert {config.optimizer for config in found.test_rows.configs} == {"adam"}
    assert len(found.scored) == len(found.test_rows) == found.test["n"]
    assert all(np.isfinite(row.estimate) for row in found.scored)
    assert any("have no answer and are in no figure: optimizer=sgd" in text for text in found.warnings)
    with pytest.raises(UsageError, match=r"llmem has no answer for any of the .* precision=fp32"):
        evaluate("llmem", rows, bins)


def test_fit_by_a_training_free_estimator_works_and_is_not_taken_for_a_fitted_model(tmp_path):
    configs = make_configs(34, families=("mlp",))
    write_batch(tmp_path, configs)
    done = fit(FitSettings(target="memory", estimator="horus", bin_gb=1, data=str(tmp_path)))
    assert done.meta["estimator"] == "horus" and done.meta["metrics"]["median_relative_error"]["test"] is not None
    assert any("no bound" in text for text in done.meta["warnings"])
    assert estimate(configs[0], data=tmp_path).answered_by["memory"] == "hybrid (default)"
    with pytest.raises(UsageError, match="estimator=horus estimates target=memory only, got target=drama"):
        fit(FitSettings(target="drama", estimator="horus", data=str(tmp_path)))
