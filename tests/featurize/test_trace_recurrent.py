"""Recurrent layers as cuDNN runs them, against sizes that can be counted and a reserve that was published."""

import pytest
import torch
from torch import nn

from featurize.device.device_spec import load_device
from featurize.operators.library_calls import workspace_bytes
from featurize.trace.tracer import trace_step
from tests.featurize.small_nets import Computes
from tests.featurize.trace_sums import bytes_of

A100 = load_device("A100-SXM4-40GB")
STEPS, BATCH, INPUT, HIDDEN, LAYERS = 250, 100, 123, 320, 4


def recurrent(kind, **settings):
    """A recurrent stack and a classifier of its last output."""

    def forward(net, x):
        output = net.rnn(x)[0]
        return net.head(output[:, -1] if net.rnn.batch_first else output[-1])

    width = (settings.get("proj_size") or HIDDEN) * (2 if settings.get("bidirectional") else 1)
    return Computes(forward, rnn=getattr(nn, kind)(INPUT, HIDDEN, LAYERS, **settings), head=nn.Linear(width, 10))


def traced(kind="LSTM", precision="fp32", inputs=None, **settings):
    shape = (BATCH, STEPS, INPUT) if settings.get("batch_first") else (STEPS, BATCH, INPUT)
    inputs = inputs or (torch.empty(shape, device="meta"),)
    return trace_step(lambda: recurrent(kind, **settings), inputs, optimizer="sgd", precision=precision)


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
    trace = traced(kind)
    assert trace.parameters == parameters and reserve in blocks(trace, "aten::_cudnn_rnn")
    calls = [block.call for block in trace.blocks if block.call is not None and block.call.kind == "recurrent"]
    assert [workspace_bytes(call, A100) for call in calls] == [workspace] * 4  # forward and backward of both steps


def test_outputs_states_and_gradients_are_counted_once():
    trace = traced("LSTM")
    output, state = 4 * STEPS * BATCH * HIDDEN, 4 * LAYERS * BATCH * HIDDEN
    assert blocks(trace, "aten::_cudnn_rnn") == [output, state, state, 736_000_000]
    weights = 4 * (trace.parameters - 10 * HIDDEN - 10)
    assert blocks(trace, "aten::_cudnn_rnn_backward") == [weights]  # one buffer; batch and states need none
    assert bytes_of(trace, "gradient") == 2 * trace.parameter_bytes


def test_one_call_replaces_the_time_steps_and_counts_their_products():
    trace = traced("LSTM")
    ops = {op.name: op for op in trace.operators if "rnn" in op.name}
    matrices = 4 * HIDDEN * (INPUT + HIDDEN) + (LAYERS - 1) * 4 * HIDDEN * 2 * HIDDEN
    assert ops["aten::_cudnn_rnn"].flops == 2 * STEPS * BATCH * matrices
    assert ops["aten::_cudnn_rnn_backward"].flops == 4 * STEPS * BATCH * matrices


@pytest.mark.parametrize(
    "kind, settings",
    [("RNN", {}), ("LSTM", {"batch_first": True, "dropout": 0.1}), ("GRU", {"bidirectional": True, "bias": False})],
)
def test_every_kind_gives_every_parameter_a_gradient(kind, settings):
    trace = traced(kind, **settings)
    assert bytes_of(trace, "gradient") == 2 * trace.parameter_bytes
    both = 2 if settings.get("bidirectional") else 1
    assert 4 * STEPS * BATCH * HIDDEN * both in blocks(trace, "aten::_cudnn_rnn")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_autocast_runs_cudnn_in_fp16(precision):
    trace = traced("LSTM", precision=precision)
    assert {op.dtype for op in trace.operators if "rnn" in op.name} == {"float16"}
    assert blocks(trace, "aten::_cudnn_rnn")[-1] == 736_000_000 // 2
    assert bytes_of(trace, "gradient") == 2 * trace.parameter_bytes  # wide again


def test_layers_in_bfloat16_are_none_of_cudnns():
    inputs = (torch.empty(5, 2, INPUT, device="meta", dtype=torch.bfloat16),)
    trace = trace_step(lambda: recurrent("GRU").to(torch.bfloat16), inputs)
    assert not any("rnn" in op.name for op in trace.operators) and len(trace.operators) > 100
