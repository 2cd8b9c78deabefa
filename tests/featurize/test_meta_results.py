"""Remembered results give the same trace as running every operator."""

import pytest
import torch
from small_configs import small_config
from torch import nn

from featurize.operators.cuda_policy import fused_kernels
from featurize.recording import recorder
from featurize.recording.recorder import meta_result
from featurize.trace import trace_cache
from featurize.trace.tracer import trace_config, trace_step
from tests.family_cases import FAMILIES
from tests.featurize.small_nets import Computes


def _of_sizes(a, b, c):
    """Return calls of operators whose results have sizes of their tensors, 0 or 1."""
    aten = torch.ops.aten

    def laid_out(*sizes, dtype=torch.float32):
        return torch.empty(sizes, dtype=dtype, device="meta")

    image, channels, logits = laid_out(a, b, c, c), [laid_out(b) for _ in range(4)], laid_out(a, b)
    target, zero = laid_out(a, dtype=torch.int64), laid_out()
    statistics = [*channels[1:], laid_out(b), laid_out(b)]
    return [
        (aten.native_batch_norm.default, (image, *channels, True, 0.1, 1e-5)),
        (aten.native_batch_norm.default, (image, *channels, False, 0.1, 1e-5)),
        (aten.native_batch_norm_backward.default, (image, image, *statistics, True, 1e-5, [True, True, True])),
        (aten.native_batch_norm_backward.default, (image, image, *statistics, False, 1e-5, [True, False, True])),
        (aten.native_batch_norm.default, (image.to(memory_format=torch.channels_last), *channels, True, 0.1, 1e-5)),
        (aten.native_batch_norm.default, (image.half(), *channels, True, 0.1, 1e-5)),
        (aten.mm.default, (laid_out(a, b), laid_out(b, c))),
        (aten.mm.default, (laid_out(b, a).t(), laid_out(c, b).t())),
        (aten.mm.default, (laid_out(a, 2 * b)[:, :b], laid_out(b, c))),
        (aten.addmm.default, (laid_out(c), laid_out(a, b), laid_out(c, b).t())),
        (aten.bmm.default, (laid_out(a, b, c), laid_out(a, c, b))),
        (aten.sum.dim_IntList, (logits, [0], True)),
        (aten.sum.dim_IntList, (logits, [1])),
        (aten.nll_loss_forward.default, (logits, target, None, 1, -100)),
        (aten.nll_loss_backward.default, (zero, logits, target, None, 1, -100, zero)),
    ]


def test_results_with_sizes_of_the_arguments_are_those_of_running_the_operator(monkeypatch):
    monkeypatch.setattr(recorder, "_known", {})
    known = []
    for sizes in ((3, 4, 5), (6, 7, 8), (4, 4, 5), (5, 5, 9), (3, 1, 5), (2, 2, 2), (1, 9, 2), (5, 9, 5), (4, 1, 1)):
        for func, args in _of_sizes(*sizes):
            made, computed = meta_result(func, func._schema.name, args, {}), func(*args)
            pairs = [(out,) if isinstance(out, torch.Tensor) else out for out in (made, computed)]
            for one, other in zip(*pairs, strict=True):
                assert (one is None) == (other is None)
                if other is not None:
                    assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        known.append(len(recorder._known))
    assert known[1] - known[0] == 2, "only those on another layout run again on other sizes"


def test_a_product_with_a_bias_is_that_of_its_parts():
    x, weight = torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta")
    with fused_kernels():
        made = torch.addmm(torch.empty(3, 1, device="meta"), x, weight, beta=0.5)
        assert (made.shape, made.stride(), made.dtype) == ((3, 5), (5, 1), torch.float32)
        with pytest.raises(RuntimeError, match=r"4, 5.*3, 4"):
            torch.addmm(torch.empty(5, device="meta"), weight, x)
        with pytest.raises(RuntimeError, match=r"size 1.*size 7|\(1\).*\(7\)"):  # which PyTorch's meta kernel lets pass
            torch.addmm(torch.empty(7, device="meta"), x, torch.empty(4, 1, device="meta"))


@pytest.mark.spread(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_traced_the_same_also_with_results_of_other_sizes_in_memory(monkeypatch, family):
    monkeypatch.setattr(recorder, "_known", {})
    trace_config(small_config(family, 1))
    config = small_config(family, 0)
    quick = trace_config(config)
    monkeypatch.setattr(recorder, "meta_result", lambda func, _name, args, kwargs: func(*args, **kwargs))
    trace_cache.clear()
    assert quick == trace_config(config)


def test_whole_numbers_and_fractions_promote_differently():
    x = torch.empty(3, dtype=torch.long, device="meta")
    mul = torch.ops.aten.mul.Tensor
    assert meta_result(mul, "aten::mul", (x, 2), {}).dtype is torch.long
    assert meta_result(mul, "aten::mul", (x, 2.0), {}).dtype is torch.float32


@pytest.mark.parametrize("again", range(2))
def test_an_operator_that_points_its_argument_to_other_memory_is_run_each_time(again):
    """The shape stays as it was."""
    tensor, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    meta_result(torch.ops.aten.set_.source_Tensor, "aten::set_", (tensor, other), {})
    assert tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    part = torch.empty(8, device="meta")[:4]
    meta_result(torch.ops.aten.as_strided_.default, "aten::as_strided_", (part, [4], [1], 4), {})
    assert part.storage_offset() == 4


def test_values_read_from_real_scalars_are_read_each_time():
    keep = [torch.tensor(kept) for kept in (True, False, True, False)]

    def forward(net, x):
        for line, kept in zip(net.lines, keep, strict=True):
            x = line(x) if kept else x
        return x

    lines = nn.ModuleList(nn.Linear(4, 4) for _ in keep)
    trace = trace_step(Computes(forward, lines=lines), torch.empty(2, 4, device="meta"))
    assert [op.module for op in trace.operators if op.name == "aten::addmm"] == ["lines.0", "lines.2"]


@pytest.mark.needs_torch("2.13", "a meta kernel that checks the type of what is changed in place")
def test_what_cuda_refuses_in_place_is_refused():
    whole = torch.empty(3, dtype=torch.long, device="meta")
    with pytest.raises(RuntimeError):
        meta_result(torch.ops.aten.div_.Tensor, "aten::div_", (whole, 2), {})
