"""Stages of a pipeline in a trace, against real ranks that run torch.distributed.pipelining over gloo: bytes and what
is sent are the same."""

import itertools
from dataclasses import replace

import pytest
import torch
from pipelined_ranks import (
    CASES,
    CLASSES,
    HALVES,
    PLAN,
    Net,
    attending,
    loss_of,
    train_real as train_real,  # for `measured`
    training,
)
from real_ranks import assert_like_real, some_ranks, with_wide
from torch import nn
from uneven_net import BATCH, WIDTH, Block

from conf.errors import UsageError
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.trace.tracer import trace_step
from featurize.training.stages import DoesNotRepeat
from tests.featurize.small_nets import Computes

pytestmark = pytest.mark.needs_mode("pp")


def traced(rank=None, model=Net, inputs=None, every_pass=None, shape=(BATCH, WIDTH), settings=None, **options):
    """One GPU without options."""
    target = torch.empty(*shape[:-1], CLASSES, device="meta")
    inputs = torch.empty(shape, device="meta") if inputs is None else inputs
    parallel = Parallel(**options)
    return trace_step(
        model,
        inputs,
        target,
        loss_of,
        settings=settings or training(parallel),
        training_loop=False,
        rank=rank,
        parallel=parallel,
        every_pass=every_pass,
    )


@pytest.mark.parametrize(
    "name",
    with_wide(
        CASES,
        (
            *("1f1b", "gpipe", "three", "interleaved", "sharded", "halves", "replicas", "interleaved replicas"),
            *("sequence", "rotated", "experts"),
        ),
    ),
)
def test_bytes_and_messages_are_those_of_real_ranks(measured, name):
    case = CASES[name]
    for rank in some_ranks(Parallel(**case.options).ranks):
        assert_like_real(traced(rank, case.net, shape=case.shape, **case.options), measured[rank][name])


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("options", "rank", "settings"),
    [
        ({"pp": 3}, 1, Training(accumulation=2, precision="bf16")),
        ({"pp": 2, "schedule": "gpipe", "ddp": 2}, 3, Training(precision="fp16", checkpointing="full")),
        ({"pp": 2, "fsdp": 2, "schedule": "interleaved", **HALVES}, 0, Training()),
        ({"pp": 2, "tp": 2, "tp_plan": PLAN}, 3, Training()),
    ],
    ids=["accumulated", "gpipe", "interleaved", "split"],
)
def test_the_trace_of_passes_that_run_once_is_that_of_all(options, rank, settings):
    traces = [traced(rank, every_pass=every, settings=settings, micro_batches=6, **options) for every in (True, False)]
    # Sources in passes that do not run are left out.
    operators = [tuple(one._replace(sources=()) for one in trace.operators) for trace in traces]
    assert operators[0] == operators[1]
    assert replace(traces[0], operators=()) == replace(traces[1], operators=())


def sparse():
    """A model that computes as many rows as its second input says."""

    def forward(net, x, counts):
        x = x + net.first(x[: int(counts.sum())]).sum(0)
        for block in net.blocks:
            x = block(x)
        return net.last(x)

    blocks = nn.ModuleList(Block() for _ in range(2))
    return Computes(forward, blocks=blocks, first=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, 5))


def test_micro_batches_whose_numbers_make_them_differ_all_run():
    counts = (torch.arange(BATCH) % 7 > 0).int()
    inputs = torch.empty(BATCH, WIDTH, device="meta"), counts
    with pytest.raises(DoesNotRepeat, match="numbers of its micro-batch"):
        traced(0, sparse, inputs, every_pass=False, pp=2, micro_batches=8)
    whole, first = (traced(0, sparse, inputs, every_pass, pp=2, micro_batches=8) for every_pass in (True, None))
    assert first == whole
    rows = {one.output_shapes[0][0] for one in whole.operators if one.name == "aten::addmm"}
    assert len(rows) > 1


def test_each_kind_of_rank_is_traced_and_the_one_that_needs_the_most_stands_for_all():
    alone, together = [traced(rank, pp=3) for rank in range(3)], traced(pp=3)
    groups = together.pipeline.groups
    assert [(g.ranks, g.trace.peak_live_bytes) for g in groups] == [
        ((rank,), one.peak_live_bytes) for rank, one in enumerate(alone)
    ]
    assert together.peak_live_bytes == max(one.peak_live_bytes for one in alone)
    assert sum(one.parameter_bytes for one in alone) == traced().parameter_bytes
    assert together.pipeline.starts == ("blocks.2", "blocks.4")  # Megatron's
    assert traced(pp=4).pipeline.starts == ("blocks.1", "blocks.3", "blocks.5")  # torchtitan's
    alike = traced(pp=4, stage_starts=("blocks.2", "blocks.3", "blocks.4")).pipeline.groups
    assert [group.ranks for group in alike] == [(0,), (1, 2), (3,)]


def tied():
    model = Net()
    model.last = nn.Linear(WIDTH, WIDTH, bias=False)
    model.last.weight = model.first.weight
    return model


def test_a_parameter_that_two_stages_use_is_on_both():
    inputs = torch.empty(BATCH, WIDTH, device="meta")
    whole, *stages = (
        trace_step(tied, inputs, loss=lambda output, _: output.square().mean(), rank=rank, parallel=layout)
        for rank, layout in ((None, None), (0, Parallel(pp=2)), (1, Parallel(pp=2)))
    )
    assert sum(one.parameter_bytes for one in stages) == whole.parameter_bytes + WIDTH * WIDTH * 4


def widening():
    """A model that changes what some blocks give before the next ones take it."""

    def forward(net, x):
        for place, block in enumerate(net.blocks):
            x = block(nn.functional.pad(x, (0, 1)) if place else x)
        return net.last(x)

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH + n, WIDTH + n), nn.ReLU()) for n in range(4))
    return Computes(forward, blocks=blocks, last=nn.Linear(WIDTH + 3, CLASSES))


class Pair(Block):
    def forward(self, x):
        return super().forward(x[0] if isinstance(x, tuple) else x), x


def frozen_in_front():
    net = Net().requires_grad_(False)
    net.last.requires_grad_(True)
    return net


def towers():
    """Blocks in two containers."""
    return nn.Sequential(*(nn.Sequential(*(Block() for _ in range(3))) for _ in range(2)))


def sequence():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)), nn.Linear(WIDTH, 5))


def narrower():
    widths = (WIDTH, 48, 32, 16, 5)
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)))


def test_members_of_a_plain_sequence_are_shared_out_and_send_what_the_last_one_gives():
    assert traced(model=sequence, pp=3).pipeline.starts == ("2", "4")
    part = traced(model=narrower, pp=4, micro_batches=4).pipeline
    assert part.sent == tuple(BATCH // 4 * width * 4 for width in (48, 32, 16))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Net, {"pp": 8, "schedule": "gpipe", "micro_batches": 2}, r"8 stages need as many blocks .* 6 \(blocks.0, "),
        (Net, {"pp": 2, "micro_batches": 5}, r"input 1 of shape \[24, 67\] does not divide into 5 micro-batches"),
        (Net, {"pp": 2, "stage_starts": ("last",)}, "a stage cannot begin at last; at these it can: blocks.1, "),
        (Net, {"pp": 3, "stage_starts": ("blocks.2", "blocks.1")}, "in the order in which the modules run"),
        (
            widening,
            {"pp": 2},
            r"changes what blocks.1 gives \(\[6, 68\] float32\) before blocks.2 takes it \(\[6, 69\] ",
        ),
        (lambda: Net(Pair), {"pp": 2}, "blocks.0 gives the next block more than one tensor"),
        (towers, {"pp": 2}, "and this model has them in several"),
        (frozen_in_front, {"pp": 2}, "stage 0 has nothing to train"),
        (lambda: nn.Linear(WIDTH, 5), {"pp": 2}, "this model has none of 2 members or more"),
    ],
    ids=["blocks", "batch", "start", "order", "between", "tensors", "containers", "frozen", "none"],
)
def test_what_cannot_be_cut_is_refused_with_what_can(model, options, message):
    with pytest.raises(UsageError, match=message):
        traced(model=model, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"fsdp": 2, "cp": 2},
        pytest.param({"cp": 2, "tp": 2, "tp_plan": {"blocks.*.part": "replicate"}}, marks=pytest.mark.wide),
    ],
)
def test_shared_sequences_attend_in_the_type_that_shards_compute_in(options):
    """LENGTH - 32 tokens: a part of 56 suits flash attention, and no fused kernel of fp32."""
    layout = {"pp": 2, "param_dtype": "bf16", **options}
    case = attending(layout)
    shape = (case.shape[0], 224, case.shape[-1])
    trace = traced(model=lambda: case.net(), shape=shape, **layout)
    assert "aten::_scaled_dot_product_flash_attention" in {one.name for one in trace.operators}
