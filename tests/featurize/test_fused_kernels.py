"""Liger's and xFormers' kernels by their names and signatures: the packages themselves need Triton or a GPU."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from featurize.job.training_settings import Training
from featurize.recording.step_trace import StepTrace
from featurize.trace.tracer import trace_step
from tests.featurize.small_nets import Computes

ROWS, WIDTH, CLASSES = 256, 64, 4096


def standing_in(monkeypatch, module: str, **members: object) -> None:
    made = ModuleType(module)
    vars(made).update(members)
    for name in (module.partition(".")[0], module):
        monkeypatch.setitem(sys.modules, name, made)


def traced(model: nn.Module, *inputs: Tensor, **settings) -> StepTrace:
    training = Training(**{"precision": "bf16-true", **settings})
    target = torch.empty((), device="meta")
    return trace_step(
        model, inputs, target, lambda output, _target: output.sum(), settings=training, training_loop=False
    )


def kept_bytes(trace: StepTrace) -> int:
    """Bytes that the first step's forward pass takes and does not give back, the batch left out."""
    events = [event for event in trace.events if event.step == 1 and event.phase == "forward"]
    return sum(event.nbytes for event in events if trace.blocks[event.block].kind != "batch")


class OnGPU(torch.autograd.Function):
    @staticmethod
    def backward(ctx, *gradients):
        raise AssertionError("the kernel needs a GPU")


class LigerFusedLinearCrossEntropyFunction(OnGPU):
    @staticmethod
    def forward(ctx, _input, weight, target, bias=None, ce_weight=None, ignore_index=-100, reduction="mean"):
        raise AssertionError("the kernel needs a GPU")

    @staticmethod
    def backward(ctx, grad_output, grad_output2):
        raise AssertionError("the kernel needs a GPU")


class LigerSiLUMulFunction(OnGPU):
    @staticmethod
    def forward(ctx, a, b):
        raise AssertionError("the kernel needs a GPU")


class LigerRMSNormFunction(OnGPU):
    @staticmethod
    def forward(ctx, X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        raise AssertionError("the kernel needs a GPU")


class LigerRopeFunction(OnGPU):
    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        raise AssertionError("the kernel needs a GPU")


def plain_loss(net: Computes, x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net.last(net.early(x)).float(), target)


def ligers_loss(net: Computes, x: Tensor, target: Tensor) -> Tensor:
    return LigerFusedLinearCrossEntropyFunction.apply(net.early(x), net.last.weight, target)[0]


def head(loss: Callable[..., Tensor]) -> Computes:
    return Computes(loss, early=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, CLASSES, bias=False))


def test_ligers_linear_cross_entropy_makes_no_logits_and_keeps_two_gradients(monkeypatch):
    fused = LigerFusedLinearCrossEntropyFunction
    module = "liger_kernel.ops.fused_linear_cross_entropy"
    standing_in(monkeypatch, module, LigerFusedLinearCrossEntropyFunction=fused)
    inputs = torch.empty(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64)
    plain, liger = (traced(head(loss), *inputs) for loss in (plain_loss, ligers_loss))
    rows = 4  # of 256: there are CLASSES / WIDTH = 64 times as many classes as the input is wide
    largest = [max(b.nbytes for b in t.blocks if b.kind in ("activation", "temporary")) for t in (plain, liger)]
    assert largest[0] == ROWS * CLASSES * 4 and largest[1] < largest[0] / 3
    assert rows * CLASSES * 2 in {block.nbytes for block in liger.blocks if block.operator == "aten::mm"}
    assert kept_bytes(liger) >= 2 * WIDTH * CLASSES + 2 * ROWS * WIDTH
    products = [sum(op.flops for op in t.operators if "mm" in op.name or "product" in op.name) for t in (plain, liger)]
    assert products[0] == products[1]
    assert "apply" not in vars(fused)  # as it was


def block(net: Computes, x: Tensor) -> Tensor:
    x = LigerRMSNormFunction.apply(net.early(x), net.norm, 1e-6)
    heads = [h(x).view(1, ROWS, WIDTH // 8, 8).transpose(1, 2) for h in (net.gate, net.up)]
    q, k = LigerRopeFunction.apply(*heads, net.angles, net.angles)
    return LigerSiLUMulFunction.apply(*(h.transpose(1, 2).reshape(ROWS, WIDTH) for h in (q, k)))


def test_ligers_norm_rotation_and_gate_keep_inputs_and_overwrite(monkeypatch):
    functions = {"rms_norm": LigerRMSNormFunction, "swiglu": LigerSiLUMulFunction, "rope": LigerRopeFunction}
    for module, function in functions.items():
        standing_in(monkeypatch, f"liger_kernel.ops.{module}", **{function.__name__: function})
    layers = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("early", "gate", "up")}
    net = Computes(block, norm=nn.Parameter(torch.ones(WIDTH)), angles=nn.Buffer(torch.zeros(1, ROWS, 8)), **layers)
    trace = traced(net, torch.empty(ROWS, WIDTH))
    # The input, the norm's input and output, both products (rotated where they are), an fp32 statistic for each row.
    assert kept_bytes(trace) == pytest.approx(5 * 2 * ROWS * WIDTH + 4 * ROWS, abs=64)
    kernels = [op.name.removeprefix("gpufarm::liger_") for op in trace.operators if "::liger_" in op.name]
    assert kernels == ["norm", "write_both_", "gated", "write_both_", "write_both_", "write_"]


class LowerTriangularMask:
    pass


@pytest.mark.parametrize(
    ("precision", "kernel"), [("bf16-true", "_flash_attention"), ("fp32", "_scaled_dot_product_efficient_attention")]
)
def test_xformers_attention_makes_no_scores(monkeypatch, precision, kernel):
    def needs_gpu(_inputs, op=None):
        raise AssertionError("the kernel needs a GPU")

    def attention(net: Computes, x: Tensor) -> Tensor:
        q, k, v = (part.reshape(1, ROWS, 4, WIDTH // 4) for part in net.projections(x).chunk(3, dim=-1))
        inputs = SimpleNamespace(query=q, key=k, value=v, attn_bias=LowerTriangularMask(), p=0.0, scale=None)
        return sys.modules["xformers.ops.fmha"]._memory_efficient_attention(inputs, op=None)

    standing_in(monkeypatch, "xformers.ops.fmha", _memory_efficient_attention=needs_gpu)
    net = Computes(attention, projections=nn.Linear(WIDTH, 3 * WIDTH, bias=False))
    trace = traced(net, torch.empty(1, ROWS, WIDTH), precision=precision)
    assert [op.phase for op in trace.operators if op.name.startswith(f"aten::{kernel}")] == ["forward", "backward"]
    element = 2 if precision == "bf16-true" else 4
    assert max(b.nbytes for b in trace.blocks if b.kind == "activation") <= 3 * ROWS * WIDTH * element
    assert sys.modules["xformers.ops.fmha"]._memory_efficient_attention is needs_gpu
