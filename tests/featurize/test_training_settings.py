"""The effect of each training setting on a traced step, counted on paper or on a real step on the CPU."""

import dataclasses
import functools
import math

import pytest
import torch
from torch import nn

from conf.errors import EnvironmentProblem, UsageError
from featurize.job.training_settings import LOW_PRECISIONS, OPTIMIZERS, Training
from featurize.nets.vision import import_library
from featurize.trace.tracer import trace_step
from featurize.training.training_step import TrainingStep, make_optimizer
from tests.featurize.small_nets import Block, Stack
from tests.featurize.trace_sums import alive_after, bytes_of, most_of

BATCH, WIDTH, BLOCKS, CLASSES = 256, 128, 4, 8


class Scaled(Block):
    def forward(self, x, *, scale=1.0):
        return x + scale * super().forward(x)


class Net(Stack):
    def __init__(self):
        head, first = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, WIDTH)
        super().__init__((Scaled(WIDTH) for _ in range(BLOCKS)), head, first)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def batch(device, dtype=torch.float32):
    return (torch.zeros(BATCH, WIDTH, device=device, dtype=dtype),), torch.zeros(BATCH, dtype=torch.long, device=device)


@functools.cache
def traced(**settings):
    return trace_step(Net, batch, settings=Training(**settings), training_loop=False)


def weights(dtype_bytes=4):
    return dtype_bytes * sum(p.numel() for p in Net().parameters())


def real_step(**settings):
    torch.manual_seed(0)
    model = Net()
    step = TrainingStep(model, Training(**settings), "cpu")
    torch.manual_seed(1)
    step((torch.randn(BATCH, WIDTH),), torch.arange(BATCH) % CLASSES)
    return step


@functools.cache
def gradients(**settings):
    return [p.grad.clone() for p in real_step(**settings).model.parameters()]


@pytest.mark.parametrize(
    ("settings", "phase", "kind", "bytes_a_weight"),
    [
        ({}, "forward", "gradient", 0),
        ({"accumulation": 3}, "forward", "gradient", 4),
        ({"set_to_none": False}, "forward", "gradient", 4),
        ({"optimizer_in_backward": True}, "optimizer", "optimizer_state", 8),
        ({"ema": True}, "optimizer", "buffer", 4),
        ({"offload_optimizer": True}, "optimizer", "gradient", 4),
        *(
            ({"precision": precision}, "optimizer", kind, nbytes)
            for precision in LOW_PRECISIONS
            for kind, nbytes in (("parameter", 2), ("gradient", 2), ("optimizer_state", 4))
        ),
    ],
    ids=str,
)
def test_bytes_for_each_weight_after_a_phase_follow_the_settings(settings, phase, kind, bytes_a_weight):
    assert alive_after(traced(**settings), 2, phase)[kind] == weights(bytes_a_weight)


def test_an_optimizer_on_the_host_never_has_state_on_the_device():
    assert bytes_of(traced(offload_optimizer=True), "optimizer_state") == 0


# -- optimizers


@pytest.mark.parametrize(
    "settings, copies",
    [
        ({"optimizer": "momentum"}, 0),
        ({"optimizer": "momentum", "weight_decay": 1e-4}, 1),
        ({"optimizer": "momentum", "weight_decay": 1e-4, "implementation": "fused"}, 0),
        ({"optimizer": "rmsprop", "weight_decay": 1e-4}, 2),  # one is of the roots that it always takes
        ({"optimizer": "adam", "weight_decay": 1e-4}, 1),  # whose copy ends before it takes the roots
        ({"optimizer": "lion", "weight_decay": 1e-4}, 0),
    ],
)
def test_weight_decay_copies_all_gradients_where_torch_does(settings, copies):
    taken = most_of(traced(**settings), "temporary", phases=("optimizer",))
    assert taken == pytest.approx(copies * weights(), abs=weights() / 2)  # Lion takes one tensor after the other


@pytest.mark.parametrize("optimizer", [name for name, one in OPTIMIZERS.items() if not one.cuda_only])
def test_the_traced_state_of_an_optimizer_is_that_of_a_real_step(optimizer):
    states = real_step(optimizer=optimizer).optimizer.state.values()
    on_device = [  # step counters stay on the host
        t for state in states for name, t in state.items() if isinstance(t, torch.Tensor) and name != "step"
    ]
    real = sum(t.numel() * t.element_size() for t in on_device)
    assert alive_after(traced(optimizer=optimizer), 2, "optimizer")["optimizer_state"] == real


def test_block_wise_state_is_a_byte_an_element_and_a_float_for_every_256_of_them():
    sizes = [p.numel() for p in Net().parameters()]
    by_parameter = sum(8 * n if n < 4096 else 2 * n + 2 * 4 * math.ceil(n / 256) for n in sizes)
    code_books = 2 * 4 * 256
    assert alive_after(traced(optimizer="adamw_8bit"), 2, "optimizer")["optimizer_state"] == by_parameter + code_books


def test_paged_state_of_large_tensors_is_not_on_the_device():
    width = 400  # 160,000 weights: above what is paged
    inputs, settings = torch.empty(4, width, device="meta"), Training(optimizer="paged_adamw")
    trace = trace_step(nn.Linear(width, width), inputs, settings=settings, training_loop=False)
    assert alive_after(trace, 2, "optimizer")["optimizer_state"] == 2 * 4 * width  # the bias alone


# -- gradients


@pytest.mark.parametrize("settings", [{}, {"zero_grad": "after_forward"}], ids=str)
def test_accumulated_gradients_of_equal_batches_are_those_of_one(settings):
    for summed, single in zip(gradients(accumulation=4, **settings), gradients(**settings), strict=True):
        assert torch.allclose(summed, single, atol=1e-6)


def test_gradients_live_through_the_forward_pass_where_zero_grad_follows_it():
    late, usual = (most_of(traced(**more), None, ("forward",)) for more in ({"zero_grad": "after_forward"}, {}))
    assert late - usual == weights()


def test_an_output_that_is_not_held_ends_with_its_step():
    held, freed = (
        trace_step(Net, batch, settings=Training(holds_output=holds), training_loop=True) for holds in (True, False)
    )
    outputs = 4 * BATCH * CLASSES
    assert sum(alive_after(held, 1, "optimizer").values()) - sum(alive_after(freed, 1, "optimizer").values()) >= outputs


def test_clipping_by_norm_and_by_value_does_what_torch_does():
    plain = gradients(optimizer="sgd")
    expected = [g.clone() for g in plain]
    total = torch.linalg.vector_norm(torch.stack([g.norm() for g in expected]))
    assert total > 0.01
    for found, wanted in zip(gradients(optimizer="sgd", clip_norm=0.01), expected, strict=True):
        assert torch.allclose(found, wanted * 0.01 / (total + 1e-6), atol=1e-8)
    for found, wanted in zip(gradients(optimizer="sgd", clip_value=1e-4), expected, strict=True):
        assert torch.equal(found, wanted.clamp(-1e-4, 1e-4))


class OwnClipping(Net):
    def clip_grad_norm_(self, groups):
        raise AssertionError("only wrappers clip by themselves")


def test_a_models_own_clipping_is_left_alone():
    of_model = trace_step(OwnClipping, batch, settings=Training(clip_norm=1.0), training_loop=False)
    assert of_model.operators == traced(clip_norm=1.0).operators


def test_an_optimizer_in_the_backward_pass_keeps_one_gradient_at_a_time_and_trains_alike():
    trace = traced(optimizer_in_backward=True)
    largest = 4 * 4 * WIDTH * WIDTH
    assert most_of(trace, "gradient") <= 2 * largest
    phases = [op.phase for op in trace.operators]
    assert "backward" in phases[phases.index("optimizer") :]
    usual, inside = real_step(optimizer="sgd"), real_step(optimizer="sgd", optimizer_in_backward=True)
    for a, b in zip(usual.model.parameters(), inside.model.parameters(), strict=True):
        assert torch.allclose(a, b)
        assert b.grad is None


# -- activations


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpointing": "full"},
        {"checkpointing": "full", "checkpoint_every": 3},
        {"checkpointing": "selective"},
        {"checkpointing": "full", "checkpoint_reentrant": True},
        {"offload_activations": True},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_what_is_recomputed_or_moved_changes_no_gradient_and_takes_less(settings):
    for found, wanted in zip(gradients(**settings), gradients(), strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)
    assert most_of(traced(**settings), "activation") < most_of(traced(), "activation")


def test_selective_checkpointing_saves_products_and_recomputes_the_rest():
    def count(trace, name):
        return sum(op.name == name for op in trace.operators)

    plain, selective, full = traced(), traced(checkpointing="selective"), traced(checkpointing="full")
    assert count(selective, "aten::addmm") == count(plain, "aten::addmm") < count(full, "aten::addmm")
    assert count(selective, "aten::gelu") == count(full, "aten::gelu") == count(plain, "aten::gelu") + BLOCKS
    assert most_of(full, "activation") < most_of(selective, "activation") < most_of(plain, "activation")


# -- mistakes


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"optimizer": "ftrl"}, "optimizer must be one of adam, .*, got 'ftrl'"),
        ({"precision": "int8"}, "precision must be one of fp32, .*, got 'int8'"),
        ({"quantize": "int4"}, "quantize must be one of nf4, .*, got 'int4'"),
        ({"checkpointing": True}, "checkpointing must be one of full, selective, got True"),
        (
            {"implementation": "fast", "zero_grad": "never", "framework": "jax"},
            "implementation must be one of .*; zero_grad must be one of .*; framework must be one of eager",
        ),
        ({"compile": "fast"}, "compile must be true, false or one of default, .*, got 'fast'"),
        (
            {"grad_scaler": 1, "float8_skip": [1]},
            "must be true, false or null, got 1; float8_skip must be a list of modules' names",
        ),
        ({"accumulation": 0}, "accumulation must be an integer >= 1, got 0"),
        ({"clip_norm": float("nan")}, "clip_norm must be a number > 0, got nan"),
        ({"weight_decay": -1e-4}, "weight_decay must be a number >= 0, got -0.0001"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "either clip_norm or clip_value"),
        ({"ema": 1}, "ema must be true or false, got 1"),
        ({"optimizer": "rmsprop", "implementation": "fused"}, "optimizer=rmsprop has no implementation=fused"),
        ({"optimizer": "lion", "implementation": "foreach"}, "optimizer=lion has no implementation=foreach"),
        ({"optimizer_in_backward": True, "accumulation": 2, "clip_norm": 1.0}, "leave accumulation, clip_norm out"),
        ({"optimizer_in_backward": True, "precision": "fp16"}, "leave grad_scaler out"),
        ({"checkpoint_every": 2}, "checkpoint_every needs checkpointing"),
        ({"checkpointing": "selective", "checkpoint_reentrant": True}, "is not reentrant"),
        ({"quantize_skip": ["head"]}, "quantize_skip needs quantize"),
        ({"precision": "fp16-true", "grad_scaler": True}, "grad_scaler refuses fp16 gradients"),
        ({"offload_optimizer": True, "optimizer": "lion"}, "runs adam, adamw, sgd, momentum, nesterov, adagrad on"),
        ({"offload_optimizer": True, "precision": "fp16"}, "take precision=bf16"),
    ],
)
def test_wrong_and_contradicting_settings_are_named(settings, message):
    with pytest.raises(UsageError, match=message):
        Training(**settings)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Training)])
def test_every_setting_has_a_rule(name):
    with pytest.raises(UsageError, match=f"{name} must be .*, got -1"):
        Training(**{name: -1})


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (
            lambda: trace_step(lambda: nn.Linear(WIDTH, CLASSES), batch, settings=Training(checkpointing="full")),
            UsageError,
            r"call torch\.utils\.checkpoint",
        ),
        (
            lambda: make_optimizer("adamw_8bit", nn.Linear(2, 2).parameters()),
            EnvironmentProblem,
            "runs on CUDA only",
        ),
    ],
    ids=["no blocks", "package"],
)
def test_settings_that_a_model_or_this_machine_cannot_have_are_refused(ask, error, message):
    with pytest.raises(error, match=message):
        ask()


def test_checkpointing_leaves_the_users_configuration_as_it_is():
    transformers = import_library("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=50)
    batch = dict.fromkeys(("input_ids", "labels"), torch.ones(2, 8, dtype=torch.long))
    trace_step(lambda: transformers.GPT2LMHeadModel(config), batch, settings=Training(checkpointing="full"))
    assert config.use_cache is True


@pytest.mark.parametrize(
    ("implementation", "operators", "launches"), [("fused", 2, 1 + 2), ("foreach", 7, None), ("loop", 7, 7 * 37)]
)
def test_launches_of_the_optimizer_follow_its_implementation(implementation, operators, launches):
    """A kernel holds 36 tensors of four lists: parameters, gradients and two moments (MultiTensorApply.cuh)."""
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(37)))
    settings = Training(optimizer="adam", implementation=implementation)
    steps = trace_step(model, torch.empty(4, 32, device="meta"), settings=settings).operators
    counts = [op.launches for op in steps if op.phase == "optimizer"]
    assert (len(counts) if implementation != "loop" else len(counts) / 37) == operators
    assert launches is None or sum(counts) == launches
