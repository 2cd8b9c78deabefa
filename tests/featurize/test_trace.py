"""Traces whose figures can be counted on paper, also of recurrent layers."""

import math
import resource
from collections import Counter

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.device.device_spec import load_device
from featurize.job.training_settings import Training
from featurize.operators.library_calls import workspace_bytes
from featurize.recording.step_trace import BLOCK_KINDS
from featurize.trace.tracer import trace_step
from tests.featurize.small_nets import Computes, linear_then
from tests.featurize.trace_sums import alive, bytes_of

A100 = load_device("A100-SXM4-40GB")
BATCH, WIDTH, HIDDEN, CLASSES = 64, 1000, 2000, 10
MLP_BYTES = 4 * (WIDTH * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def vectors(device, batch=BATCH, width=WIDTH, classes=CLASSES):
    return (torch.randn(batch, width, device=device),), torch.randint(classes, (batch,), device=device)


def images(device, batch=4, side=16):
    return (torch.randn(batch, 3, side, side, device=device),), torch.randint(CLASSES, (batch,), device=device)


def test_adam_peaks_in_its_update_with_five_times_the_parameters():
    trace = trace_step(mlp, vectors, settings=Training(optimizer="adam"), training_loop=False)
    assert trace.parameter_bytes == MLP_BYTES and trace.parameters == MLP_BYTES // 4
    loss = 4
    assert trace.breakdown == dict.fromkeys(BLOCK_KINDS, 0) | {
        "parameter": MLP_BYTES,
        "gradient": MLP_BYTES,
        "optimizer_state": 2 * MLP_BYTES,
        "batch": BATCH * (WIDTH * 4 + 8),
        "activation": loss,
        "temporary": MLP_BYTES,  # the for-each update's square roots
    }
    assert trace.peak_live_bytes == 5 * MLP_BYTES + BATCH * (WIDTH * 4 + 8) + loss


TILES = 4 * 4 * 4  # images, and tiles of 4 x 4 in an output of 14 x 14


@pytest.mark.parametrize(
    ("layer", "elements"),
    [
        pytest.param(nn.Conv2d(3, 8, 3), 36 * (TILES * (3 + 8) + 3 * 8), id="plain"),
        pytest.param(nn.Conv2d(3, 8, 3, dilation=2), 0, id="dilated"),
        pytest.param(nn.Conv2d(3, 8, 3, stride=2), 0, id="stride 2"),
        pytest.param(nn.Conv2d(3, 8, 5), 0, id="5x5"),
        pytest.param(nn.Conv2d(3, 9, 3, groups=3), 0, id="grouped"),
    ],
)
def test_without_tensor_cores_for_fp32_plain_3x3_convolutions_take_winograds_transforms(layer, elements):
    trace = trace_step(nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten()), images)
    calls = [block.call for block in trace.blocks if block.call and block.call.kind == "conv_forward"]
    assert workspace_bytes(calls[0], load_device("V100-SXM2-16GB")) == 4 * elements


def test_convolutions_copy_their_tensors_unless_channels_last():
    layers = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    trace = trace_step(nn.Sequential(*layers), images, settings=Training(channels_last=True))
    calls = [block.call for block in trace.blocks if block.call and block.call.kind.startswith("conv")]
    assert calls and all(call.channels_last for call in calls)
    assert sum(workspace_bytes(call, A100) for call in calls) == 0


@pytest.mark.parametrize(
    ("last", "shape", "elements"),
    [
        pytest.param(
            lambda: Computes(lambda _, x: torch.softmax(x @ x.transpose(1, 2), -1).mean(1)),
            (8, 32, 16),
            {"aten::_softmax_backward_data": 8 * 32 * 32},
            id="scores",
        ),
        pytest.param(
            lambda: Computes(lambda _, x: torch.roll(x, (1, 2), (1, 2)).mean((1, 2))),
            (8, 4, 4, 16),
            {"aten::roll": 8 * 4 * 4 * 16},
            id="shifted",
        ),
        pytest.param(
            lambda: Computes(lambda net, x: net.norm(x.transpose(1, 2)).mean(2), norm=nn.LayerNorm(32)),
            (8, 32, 16),
            dict.fromkeys(("aten::native_layer_norm", "aten::native_layer_norm_backward"), 8 * 32 * 16),
            id="norm of what is transposed",
        ),
    ],
)
def test_kernels_that_make_a_tensor_of_their_own_are_known_by_it(last, shape, elements):
    given = torch.empty(shape, device="meta"), torch.empty(shape[0], dtype=torch.long, device="meta")
    trace = trace_step(lambda: nn.Sequential(nn.Linear(16, 16), last()), *given)
    blocks = [trace.blocks[event.block] for event in trace.events if event.step == 2]
    found = {block.operator: block.call.nbytes for block in blocks if block.call and block.call.kind == "temporary"}
    assert found == {operator: 4 * count for operator, count in elements.items()}


def test_in_a_training_loop_the_next_batch_is_there_before_the_last_is_given_back():
    batch = BATCH * (WIDTH * 4 + 8)
    loop, single = (trace_step(mlp, vectors, training_loop=loop) for loop in (True, False))
    assert max(alive(loop, i)["batch"] for i in range(len(loop.events))) == 2 * batch
    assert bytes_of(single, "batch") == batch


def test_in_a_training_loop_output_and_loss_live_until_the_next_ones_are_assigned():
    logits, hidden = 4 * BATCH * CLASSES, 4 * BATCH * HIDDEN
    sgd = Training(optimizer="sgd")
    loop, single = (trace_step(mlp, vectors, settings=sgd, training_loop=loop) for loop in (True, False))
    at = {}
    for index, event in enumerate(loop.events):
        if event.step == 2 and loop.blocks[event.block].operator == "aten::addmm" and event.nbytes > 0:
            at[event.nbytes] = alive(loop, index + 1)
    # While the hidden layer is made, the last step's logits and loss are still there, and its gradients are not.
    expected = {"parameter": MLP_BYTES, "batch": BATCH * (WIDTH * 4 + 8), "activation": logits + 4}
    assert at[hidden] == Counter({**expected, "temporary": hidden})  # relu keeps its result, not this
    # While the next logits are made, those are as well; relu's result is kept beside them.
    assert at[logits]["activation"] == 2 * logits + 4 + hidden
    # Nothing is left of a step without them.
    left = alive(single, 1 + max(i for i, e in enumerate(single.events) if e.step == 1))
    assert left["temporary"] == 0 and left["activation"] <= 4


@pytest.mark.parametrize(
    "shape, target", [((4, CLASSES), (4,)), ((4, 7, CLASSES), (4, 7)), ((4, CLASSES, 6, 5), (4, 6, 5))]
)
def test_a_target_that_is_not_given_suits_the_output(shape, target):
    def shaped():
        return linear_then(lambda y: y.view(shape), WIDTH, math.prod(shape[1:]))

    trace = trace_step(shaped, (torch.empty(4, WIDTH, device="meta"),))
    batch = [block.nbytes for block in trace.blocks if block.kind == "batch"]
    assert batch == [4 * 4 * WIDTH, 8 * math.prod(target)] * 2
    assert any(op.name.startswith("aten::nll_loss") for op in trace.operators)


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (mlp, {"device": "H9000"}, UsageError, "unknown device 'H9000'"),
        (
            lambda: linear_then(lambda y: {"logits": y}, WIDTH, CLASSES),
            {},
            UsageError,
            "no logits to take cross entropy of",
        ),
    ],
)
def test_what_cannot_be_traced_as_it_is_asked_for_is_refused(model, options, error, message):
    with pytest.raises(error, match=message):
        trace_step(model, vectors(torch.device("meta"))[0], **options)


def test_a_model_far_larger_than_the_machine_is_traced_without_allocating_it():
    def huge():
        return nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(64)))  # 17 G parameters

    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = trace_step(huge, lambda d: vectors(d, width=16384))
    assert trace.parameter_bytes == 64 * 4 * 16384**2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 * 1024


@pytest.mark.parametrize(
    ("precision", "function", "name", "written"),
    [
        ("bf16", lambda y: y.sum(1), "aten::sum", 256 * 512),
        ("fp16", lambda y: y.sum(1), "aten::sum", 256 * 512),
        ("fp16", lambda y: y.softmax(-1).sum(1), "aten::_softmax", 256 * 8 * 512),
    ],
)
def test_autocast_gives_floats_of_halves_without_a_copy(precision, function, name, written):
    given = torch.empty(256, 8, 64, device="meta")
    trace = trace_step(lambda: linear_then(function, 64, 512), given, settings=Training(precision=precision))
    made = next(op for op in trace.operators if op.phase == "forward" and op.name == name)
    assert (made.bytes_read, made.bytes_written) == (2 * 256 * 8 * 512, 4 * written)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("region", "inside"),
    [
        (lambda x: torch.autocast(x.device.type, enabled=False), "float32"),
        (lambda x: torch.cuda.amp.autocast(False), "float32"),
        (lambda x: torch.amp.autocast("cuda", dtype=torch.bfloat16), "bfloat16"),
        (lambda x: torch.autocast(x.device.type, torch.float16), "float16"),
        (lambda x: torch.autocast("cpu", enabled=False), "outside"),
        (lambda x: torch.autocast("cuda"), "float16"),
    ],
)
def test_what_a_model_says_of_autocast_itself_holds(precision, region, inside):
    def forward(net, x):
        x = net.one(x).float()
        with region(x):
            x = net.two(x)
        return net.one.weight.sum() + x

    model = Computes(forward, one=nn.Linear(WIDTH, WIDTH), two=nn.Linear(WIDTH, CLASSES))
    trace = trace_step(model, vectors, settings=Training(precision=precision))
    outside = "float32" if precision == "fp32" else "bfloat16"
    found = [op.dtype for op in trace.operators if op.name == "aten::addmm" and op.phase == "forward"]
    assert found == [outside, outside if inside == "outside" else inside]


@pytest.mark.needs_torch("2.11", "RMS norm as one kernel")
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_rms_norm_is_one_kernel_that_keeps_a_float_a_row_unless_its_weight_is_of_another_type(weight):
    def model():
        norm = nn.RMSNorm(WIDTH).to(weight)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH).bfloat16(), norm, nn.Linear(WIDTH, CLASSES).bfloat16())

    trace = trace_step(
        model,
        torch.empty(BATCH, WIDTH, dtype=torch.bfloat16, device="meta"),
        settings=Training(optimizer="sgd"),
        training_loop=False,
    )
    made = {block.nbytes for block in trace.blocks if block.operator == "aten::_fused_rms_norm"}
    assert made == ({2 * BATCH * WIDTH, 4 * BATCH} if weight is torch.bfloat16 else set())
    backward = "aten::_fused_rms_norm_backward" in {op.name for op in trace.operators}
    assert backward is (weight is torch.bfloat16)


# -- recurrent layers as cuDNN runs them, against sizes that can be counted and a reserve that was published


STEPS, SEQUENCES, INPUT, STATES, LAYERS = 250, 100, 123, 320, 4


def recurrent(kind, **settings):
    """A recurrent stack and a classifier of its last output."""

    def forward(net, x):
        output = net.rnn(x)[0]
        return net.head(output[:, -1] if net.rnn.batch_first else output[-1])

    width = (settings.get("proj_size") or STATES) * (2 if settings.get("bidirectional") else 1)
    return Computes(forward, rnn=getattr(nn, kind)(INPUT, STATES, LAYERS, **settings), head=nn.Linear(width, 10))


def traced_recurrent(kind="LSTM", precision="fp32", inputs=None, **settings):
    shape = (SEQUENCES, STEPS, INPUT) if settings.get("batch_first") else (STEPS, SEQUENCES, INPUT)
    inputs = inputs or (torch.empty(shape, device="meta"),)
    training = Training(optimizer="sgd", precision=precision)
    return trace_step(lambda: recurrent(kind, **settings), inputs, settings=training)


def blocks(trace, operator):
    """Sizes of what one call of the operator took, without empty ones; the second step's."""
    steps = {event.block: event.step for event in trace.events if event.nbytes > 0}
    return [b.nbytes for i, b in enumerate(trace.blocks) if b.operator == operator and b.nbytes and steps[i] == 2]


@pytest.mark.parametrize(
    "kind, parameters, reserve, workspace",
    [("LSTM", 3_038_090, 736_000_000, 17_730_560), ("GRU", 2_279_370, 864_000_000, 13_169_920)],
)
def test_reserve_and_workspaces_are_what_cudnn_was_seen_to_take(kind, parameters, reserve, workspace):
    """Figures of pytorch issue 2895: 25,000 time steps of all samples together."""
    trace = traced_recurrent(kind)
    assert trace.parameters == parameters and reserve in blocks(trace, "aten::_cudnn_rnn")
    calls = [block.call for block in trace.blocks if block.call is not None and block.call.kind == "recurrent"]
    assert [workspace_bytes(call, A100) for call in calls] == [workspace] * 4  # forward and backward of both steps


def test_one_call_replaces_the_time_steps_and_its_outputs_states_gradients_and_products_are_counted_once():
    trace = traced_recurrent("LSTM")
    output, state = 4 * STEPS * SEQUENCES * STATES, 4 * LAYERS * SEQUENCES * STATES
    assert blocks(trace, "aten::_cudnn_rnn") == [output, state, state, 736_000_000]
    weights = 4 * (trace.parameters - 10 * STATES - 10)
    assert blocks(trace, "aten::_cudnn_rnn_backward") == [weights]  # one buffer; batch and states need none
    products = SEQUENCES * STEPS * (4 * STATES * (INPUT + STATES) + (LAYERS - 1) * 4 * STATES * 2 * STATES)
    flops = [(op.name, op.flops) for op in trace.operators if "rnn" in op.name]
    assert flops == [("aten::_cudnn_rnn", 2 * products), ("aten::_cudnn_rnn_backward", 4 * products)]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_autocast_runs_cudnn_in_fp16(precision):
    trace = traced_recurrent("LSTM", precision=precision)
    assert {op.dtype for op in trace.operators if "rnn" in op.name} == {"float16"}
    assert blocks(trace, "aten::_cudnn_rnn")[-1] == 736_000_000 // 2
    assert bytes_of(trace, "gradient") == 2 * trace.parameter_bytes  # wide again


def test_layers_in_bfloat16_are_none_of_cudnns():
    inputs = (torch.empty(5, 2, INPUT, device="meta", dtype=torch.bfloat16),)
    trace = trace_step(lambda: recurrent("GRU").to(torch.bfloat16), inputs)
    assert not any("rnn" in op.name for op in trace.operators) and len(trace.operators) > 100
