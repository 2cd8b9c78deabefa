"""Estimators of others: formulas by hand, ensembles, a graph network; what they refuse and leave alone."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.device.device_spec import describe_device
from featurize.families import cnn, mlp, transformer
from featurize.job.training_settings import Training
from learn.estimators.protocol import make_estimator
from learn.job.training_job import Case, TrainingJob, of_config, of_module
from learn.judging.evaluate import evaluate
from learn.peers.base import CannotEstimate, analyse
from learn.peers.dnnmem import DNNMem
from learn.peers.faketensor import FakeTensor
from learn.peers.formulas import DeepSpeed, Horus, LLMem
from learn.peers.gpumemnet import BinnedPrediction, GPUMemNetMLP, bin_edges, classes_of
from learn.peers.xmem import ProfiledBlock, ProfilerEvent, XMem, pair
from learn.rows.data import make_bins
from learn.rows.step_store import StepStore
from tests.featurize.small_nets import Computes
from tests.learn.learn_rows import labels_of, make_configs, make_rows

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


def mib_of(method, job):
    return sum(analyse(method, job, DEVICE).values())


PARAMETERS = WIDTH * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES  # 1,057,800


def test_horus_is_800_and_parameters_and_batch_times_both():
    activations = WIDTH + WIDTH + CLASSES  # of one sample: linear, ReLU, linear
    by_hand = 800 + (PARAMETERS + B * (activations + PARAMETERS)) * 4 / MIB
    assert mib_of(Horus(), workload(small_mlp)) == pytest.approx(by_hand, rel=1e-9)


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
    states = mib_of(DeepSpeed(stage=stage, gpus=gpus), workload(small_mlp, precision=precision))
    assert states == pytest.approx(PARAMETERS * bytes_each / MIB)


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


def test_faketensor_is_what_the_tracker_counts():
    parts = FakeTensor().parts_mib(workload(small_mlp), DEVICE)
    assert parts["parameter"] == pytest.approx(PARAMETERS * 4 / MIB, rel=1e-6)
    # With this few samples the optimizer's step is the peak: parameters, gradients, Adam's two states, and two
    # temporaries of the largest weight; beside them the batch.
    by_hand = (4 * PARAMETERS + 2 * WIDTH * WIDTH + B * WIDTH) * 4 / MIB
    assert sum(parts.values()) == pytest.approx(by_hand, rel=0.01)


def test_xmem_is_near_a_liveness_by_hand():
    b = 2048
    parts = analyse(XMem(), workload(small_mlp, (b, WIDTH)), DEVICE)
    hidden = b * WIDTH * 4 / MIB  # 8 MiB
    # Second step's backward: weights, Adam's states, two batches at the step's start and then one, the linear layer's
    # and ReLU's outputs, the gradient of ReLU's output and the one of its input.
    live = 3 * PARAMETERS * 4 / MIB + hidden + 4 * hidden
    assert sum(parts.values()) == pytest.approx(live + PARAMETERS * 4 / MIB, rel=0.2)
    assert parts["parameters and buffers"] == pytest.approx(PARAMETERS * 4 / MIB)
    assert parts["optimizer state"] == pytest.approx(2 * PARAMETERS * 4 / MIB, rel=0.01)


def test_xmem_refuses_with_the_figure_what_the_machine_has_no_memory_for(monkeypatch):
    import psutil

    free = psutil.virtual_memory()._replace(available=10 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(CannotEstimate, match=r"about 17 MiB of real memory .*10 MiB are free"):
        analyse(XMem(), workload(small_mlp), DEVICE)


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
    ("method", "job", "named"),
    [
        (DeepSpeed(), workload(small_mlp, optimizer="momentum"), "optimizer=momentum"),
        (DeepSpeed(stage=2), workload(small_mlp, precision="tf32"), "precision=tf32 is not covered at stage 2"),
        (LLMem(), tokens_of(decoder, precision="fp32"), "precision=fp32"),
        (LLMem(), tokens_of(decoder, optimizer="sgd"), "optimizer=sgd"),
        (LLMem(), tokens_of(lambda: decoder(checkpoints=False)), "without activation checkpointing"),
        (LLMem(), workload(small_mlp, precision="bf16"), "Sequential is not covered: .*no nn.Embedding"),
        (LLMem(), of_config(ENCODER), "TransformerClassifier is not covered: it is not a transformer language model"),
    ],
)
def test_formulas_refuse_by_name_what_they_do_not_cover(method, job, named):
    with pytest.raises(CannotEstimate, match=named):
        analyse(method, job, DEVICE)


def broken():
    """Fails in the second layer's forward pass."""
    return nn.Sequential(OrderedDict(first=nn.Linear(WIDTH, 16), second=nn.Linear(17, CLASSES)))


@pytest.mark.parametrize("method", [m for m in METHODS if m is not DeepSpeed])
def test_a_model_that_fails_is_a_reason_that_names_operator_and_module_and_leaves_torch_as_it_was(method):
    reason = r" fails in operator torch.nn.functional.linear of module second \(Linear\): "
    before = state_of_torch()
    with pytest.raises(CannotEstimate, match=reason) as raised:
        analyse(method(), workload(broken), DEVICE)
    assert "Traceback" not in str(raised.value) and state_of_torch() == before


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_own_model_and_torch_are_left_as_they_were(method):
    model, state = small_mlp().eval(), state_of_torch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    of_own = mib_of(method(), workload(lambda: model))
    assert of_own == pytest.approx(mib_of(method(), workload(small_mlp)), rel=0.02)
    assert state_of_torch() == state
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_fit_leaves_refused_rows_out_of_its_figures_and_says_so():
    configs = make_configs(60, families=("mlp",))
    rows = make_rows("memory", configs, labels_of(configs)["peak_memory_mib"])
    bins = make_bins(rows.target, rows.label, rows.family, bin_gb=1)
    found = evaluate("deepspeed", rows, bins)
    assert {config.optimizer for config in found.test_rows.configs} == {"adam"}
    assert len(found.figures.rows) == len(found.test_rows) == found.test["n"]
    assert all(np.isfinite(row.estimate) for row in found.figures.rows)
    assert any("have no answer and are in no figure: optimizer=sgd" in text for text in found.warnings)
    with pytest.raises(UsageError, match=r"llmem has no answer for any of the .* precision=fp32"):
        evaluate("llmem", rows, bins)


# -- GPUMemNet's ensembles


CEILING_MIB = 8000.0


@pytest.fixture(scope="module")
def rows():
    """Two families; what needs more than the ceiling is out of memory."""
    configs = make_configs(80)
    need = labels_of(configs)["peak_memory_mib"]
    censored = need > CEILING_MIB
    return make_rows("memory", configs, np.where(censored, CEILING_MIB, need), censored=censored)


@pytest.fixture(scope="module", autouse=True)
def few_members(module_patch):
    """Ensembles of three, whose mean shows what one of five does."""
    module_patch.setattr(GPUMemNetMLP, "members", 3)


@pytest.fixture(scope="module", params=("gpumemnet_mlp", pytest.param("gpumemnet_transformer", marks=pytest.mark.wide)))
def fitted(request, rows):
    return make_estimator(request.param, seed=1).fit(rows)


def binned(edges, mass, scores=((),), **more):
    n = len(mass)
    kind = np.zeros(n, dtype=int)
    return BinnedPrediction(
        np.asarray(edges, float), np.asarray(mass, float), 1.0, [np.asarray(s) for s in scores], kind, **more
    )


def test_quantiles_and_masses_are_linear_inside_a_bin():
    p = binned([[0, 10, 20, 40]], [[0.2, 0.3, 0.5]])
    assert [p.quantile(q)[0] for q in (0.1, 0.2, 0.35, 0.75)] == pytest.approx([5, 10, 15, 30])
    assert p.bin_probabilities(np.array([5.0, 15.0, 50.0]))[0] == pytest.approx([0.1, 0.25, 0.65, 0])
    assert p.point[0] == 40


def test_bound_is_the_quantile_at_the_rank_of_the_held_out_scores():
    scores = np.arange(1, 100) / 100  # 99 of them: the 0.9 bound is the 90th, 0.90
    p = binned([[0, 1, 2]], [[0.8, 0.2]], [scores])
    assert p.upper(0.9)[0] == pytest.approx(1.5)
    assert p.upper(0.5)[0] == 1, "never below the point"
    assert binned([[0, 1]], [[1.0]]).upper() is None


def test_classes_are_learnt_and_out_of_memory_is_the_top_bin(fitted, rows):
    p = fitted.predict(rows.cases)
    for family, width in (("mlp", 1024), ("cnn", 8192)):
        of = rows.family == family
        exact = of & ~rows.censored
        right = np.floor((p.point - 1) / width)[exact] == np.floor(rows.label / width)[exact]
        assert right.mean() > 0.8
    top = rows.censored & (rows.family == "cnn")
    assert (p.point[top] > CEILING_MIB).mean() > 0.8
    assert p.bin_probabilities(np.array([CEILING_MIB]))[top, -1].mean() > 0.6


def test_an_unseen_family_and_a_module_are_refused_by_row(rows):
    estimator = make_estimator("gpumemnet_mlp").fit(rows.subset(rows.family == "mlp"))
    module = of_module(lambda: nn.Linear(8, 2), [((4, 8), None)])
    unseen = cnn.Config(batch_size=2, image_size=32, channels=3, classes=10, base_filters=8, depth=2)
    answer = estimator.predict([Case(unseen), rows.cases[1], Case(device=DEVICE.name, module=module)])
    assert "mlp" in answer.refusals[0] and "module" in answer.refusals[2] and len(answer.refusals) == 2
    assert np.isnan(answer.upper(0.9)[[0, 2]]).all() and answer.upper(0.9)[1] > 0


# -- the graph network


STEPS = StepStore()  # of the cases that the tests share
BATCH, LAYER = 64, 512


def need(cases):
    """MiB: a context, and three times what the trace finds beyond."""
    return np.array([400 + 3 * STEPS.record(case).values["job_allocated_mib"] for case in cases])


def test_a_module_is_answered_like_the_configs():
    configs = [
        mlp.Config(batch_size=32 * n, input_size=192 + 64 * n, classes=10, depth=1 + n % 4) for n in range(1, 25)
    ]
    bare = make_rows("memory", configs, np.ones(24), training_loop=True)
    fitted = make_estimator("gnn", seed=1).fit(
        make_rows("memory", configs, need(bare.cases), training_loop=True), STEPS
    )
    layers = nn.Linear(LAYER, LAYER), nn.ReLU(), nn.Linear(LAYER, LAYER), nn.ReLU(), nn.Linear(LAYER, 10)
    module = of_module(lambda: nn.Sequential(*layers), [((BATCH, LAYER), None)])
    case = Case(device=DEVICE.name, training_loop=True, module=module)
    answer = fitted.predict([case], STEPS)
    assert not answer.refusals
    assert answer.point[0] == pytest.approx(need([case])[0], rel=0.4)


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


def test_out_of_memory_is_the_top_bin_on_the_largest_card_and_at_least_its_own_bin_on_others():
    configs = [mlp.Config(batch_size=8 * (i + 1), input_size=64, classes=10, depth=2) for i in range(60)]
    label = np.concatenate([np.linspace(500, 13_000, 40), np.full(10, 24_000), np.full(10, 80_000)])
    rows = make_rows("memory", configs, label, censored=label >= 24_000)
    edges = bin_edges(rows)
    assert list(edges[-2:]) == [80_000, 81_024] and edges[-3] < 24_000
    classes, or_above = classes_of(rows, edges)
    small, large = rows.label == 24_000, rows.label == 80_000
    assert set(classes[large]) == {len(edges) - 2} and set(classes[small]) == {len(edges) - 3}
    assert or_above[small].all() and not or_above[~small].any()
