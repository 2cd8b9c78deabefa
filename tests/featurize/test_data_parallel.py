"""One rank of DistributedDataParallel in a trace, against two real ranks that talk over gloo, and compiled models as
Dynamo cuts them."""

from typing import Any

import pytest
import torch
from rank_watch import Watch, reduced_buckets
from real_ranks import run_ranks
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from conf.errors import UsageError
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.recording.compiled import in_pieces
from featurize.recording.step_trace import Collective
from featurize.timing.collectives import ALL_REDUCE, BROADCAST
from featurize.timing.simulation import delays_ms
from featurize.trace.tracer import trace_step
from tests.featurize.small_nets import Block, Computes, Stack

WIDTH = 96


def uneven(unused=False):
    """Layers of uneven sizes, used in another order than they were registered, one of them frozen and one in half
    precision, with buffers."""

    def forward(net, x):
        x = torch.relu(net.norm(net.wide(net.frozen(x))))
        return net.head(net.last(net.narrow(x)).bfloat16()).float()

    return Computes(
        forward,
        last=nn.Linear(1031, 7),
        wide=nn.Linear(WIDTH, 2111),
        narrow=nn.Linear(2111, 1031),
        norm=nn.BatchNorm1d(2111),
        frozen=nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        head=nn.Linear(7, 300).bfloat16(),
        unused=nn.Linear(401, 701) if unused else None,
    )


CASES = (
    ({}, False),
    ({"bucket_cap_mb": 2, "gradient_as_bucket_view": True}, False),
    ({"bucket_cap_mb": 3, "find_unused_parameters": True}, True),
    ({"static_graph": True}, True),
)


def train_all(_rank):
    """One of two real processes, which trains all cases."""
    return [train(options, unused) for options, unused in CASES]


def train(options, unused):
    """Three steps, and the bytes of each bucket that was reduced in the last one."""
    watch = Watch()
    model = reduced_buckets(DistributedDataParallel(uneven(unused), **options), watch)
    for _ in range(3):
        watch.sent.clear()
        model.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, WIDTH)), torch.zeros(4, dtype=torch.long)).backward()
    return [nbytes for _, nbytes in watch.sent]


@pytest.fixture(scope="module")
def real_bytes(tmp_path_factory):
    return run_ranks(train_all, tmp_path_factory.mktemp("ranks"), 2)[0]


def traced(unused=False, settings=None, **options):
    parallel = Parallel(**{"ddp": 2, **options}) if options.get("ddp") != 1 else None
    inputs = torch.empty(4, WIDTH, device="meta")
    return trace_step(lambda: uneven(unused), inputs, settings=settings or Training(), parallel=parallel)


def bucket_bytes(trace):
    return [one.nbytes for one in trace.collectives if one.kind == ALL_REDUCE]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_buckets_are_those_of_two_real_ranks(real_bytes, case):
    options, unused = CASES[case]
    assert len(real_bytes[case]) >= 3
    assert bucket_bytes(traced(unused, **options)) == real_bytes[case]


def test_memory_grows_by_the_buckets_and_views_leave_the_gradients_in_them():
    alone, copies, views = (traced(**options) for options in ({"ddp": 1}, {}, {"gradient_as_bucket_view": True}))
    total = sum(bucket_bytes(copies))
    assert sum(bucket_bytes(views)) == total == copies.breakdown["bucket"]
    assert copies.peak_live_bytes == alone.peak_live_bytes + total
    assert "bucket" not in alone.breakdown and alone.breakdown["gradient"] == total
    assert views.breakdown["gradient"] == 0 and views.breakdown["bucket"] == total
    assert views.peak_live_bytes == alone.peak_live_bytes


def test_a_step_of_several_micro_steps_reduces_once():
    once, four = traced(), traced(settings=Training(accumulation=4))
    assert bucket_bytes(once) == bucket_bytes(four)
    assert [one.kind for one in once.collectives] == [one.kind for one in four.collectives]
    assert min(one.after for one in four.collectives if one.kind == ALL_REDUCE) > len(once.operators)


def test_a_backward_pass_with_reentrant_checkpoints_inside_reduces_once():
    def sends(**settings):
        inputs = torch.zeros(2, 6, dtype=torch.long, device="meta")
        parallel = Parallel(ddp=2, bucket_cap_mb=0.1)
        return bucket_bytes(trace_step(decoder, inputs, settings=Training(**settings), parallel=parallel))

    assert sends(checkpointing="full", checkpoint_reentrant=True) == sends()


def test_a_bucket_begins_when_its_last_gradient_is_there_and_the_optimizer_waits():
    trace = traced(bucket_cap_mb=1)
    reduced = [one for one in trace.collectives if one.kind == ALL_REDUCE]
    assert len(reduced) > 2 and [one.after for one in reduced] == sorted(one.after for one in reduced)
    assert reduced[0].after < reduced[-1].after
    phases = [op.phase for op in trace.operators]
    assert phases[reduced[0].after] == "backward" and {one.before for one in reduced} == {reduced[-1].after}
    copies_back = trace.operators[reduced[-1].before : phases.index("optimizer")]
    assert {op.name for op in copies_back} == {"aten::copy_"}


def test_buffers_are_sent_before_each_forward_pass_unless_switched_off():
    sent = [one for one in traced().collectives if one.kind == BROADCAST]
    assert [one.nbytes for one in sent] == [2 * 4 * 2111, 8]  # means and variances, then the number of batches
    assert {(one.after, one.before) for one in sent} == {(0, 0)}
    assert {one.kind for one in traced(broadcast_buffers=False).collectives} == {ALL_REDUCE}


def test_a_parameter_without_a_gradient_is_refused_as_torch_does():
    with pytest.raises(UsageError, match=r"2 parameters get no gradient \(the first: unused.weight\).*find_unused"):
        traced(unused=True)


HIDDEN = Collective(ALL_REDUCE, 8, 1, 4)


@pytest.mark.parametrize(
    ("sent", "takes_ms", "late_ms"),
    [
        ([HIDDEN], [3.0], 0.0),
        ([HIDDEN], [7.0], 1.0),
        ([HIDDEN, HIDDEN], [4.0, 4.0], 2.0),  # one after the other
        ([Collective(BROADCAST, 8, 0, 0), HIDDEN], [1.0, 6.0], 1.0),
    ],
)
def test_waiting_is_what_computation_does_not_hide(sent, takes_ms, late_ms):
    assert delays_ms(sent, takes_ms, [0.0, 2.0, 4.0, 6.0, 8.0])[-1][1] == late_ms


def decoder(width: int = 32, blocks: int = 3, embed: nn.Module | None = None) -> nn.Module:
    head = nn.Linear(width, 100, bias=False)
    return Stack((Block(width) for _ in range(blocks)), head, first=embed or nn.Embedding(100, width))


IDS = torch.arange(24).reshape(2, 12)


def pieces_of(model: nn.Module, limits: list[float]) -> tuple[Any, list[int], list[Tensor]]:
    """Return a callable that runs the model in pieces, the bytes of parameters of each, and tensors to call it."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = [*held.values(), IDS]
    ran: list[int] = []

    def forward(*given: Tensor) -> list[Tensor]:
        return [functional_call(model, dict(zip(held, given, strict=False)), given[-1])]

    def compiled(function: Any, weights: int) -> Any:
        def run(*given: Tensor) -> Any:
            ran.append(sum(one.nbytes for one in given[:weights] if one.requires_grad))
            return function(*given)

        return run

    return in_pieces(forward, tensors, len(held), limits, compiled), ran, tensors


@pytest.mark.spread(4)
@pytest.mark.parametrize("limits", [[1_000, 60_000], [20_000, 20_000], [1_000, 1_000], [70_000, 70_000]])
def test_pieces_hold_the_parameters_that_dynamo_gives_them(limits):
    from torch._dynamo.backends.distributed import DDPOptimizer  # with all of the compiler

    torch.manual_seed(0)
    model = decoder()
    cut = DDPOptimizer(limits[-1], lambda graph, _inputs: graph, first_bucket_cap=limits[0])
    torch._dynamo.reset()
    torch.compile(model, backend=cut.compile_fn)(IDS)
    run, ran, tensors = pieces_of(model, limits)
    run(*tensors)
    assert len(ran) > 1
    assert ran == [bucket.size for bucket in cut.buckets]


def test_a_bucket_is_reduced_while_the_pieces_before_it_run_backwards():
    trace = trace_step(
        lambda: decoder(256),
        torch.zeros(2, 12, dtype=torch.long),
        loss=lambda output, _: output.sum(),
        settings=Training(compile=True),
        parallel=Parallel(ddp=2, bucket_cap_mb=1.0),
    )
    ready = [one.after for one in trace.collectives]
    assert len(ready) > 4 and ready == sorted(set(ready)), "each after a piece of its own"
