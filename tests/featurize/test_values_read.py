"""Values that a model reads back: batch, buffers and constants have their own, and computed ones have few defaults."""

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.recording import values
from featurize.trace.tracer import TraceError, trace_step
from learn import estimate
from tests.featurize.small_nets import Computes

X = torch.empty(2, 6, device="meta")


def way(ask):
    """The way that a model takes where `ask` says which; the two ways differ in the operators that run."""

    def forward(net, x):
        y = net.line(x)
        return y.tanh() if ask(x, y) else y.sigmoid()

    names = {op.name for op in trace_step(lambda: Computes(forward, line=nn.Linear(6, 3)), X).operators}
    return "tanh" if "aten::tanh" in names else "sigmoid"


def positions(x, y):
    """Ask of the positions what language models ask: whether several texts are packed into one row."""
    ids = torch.arange(x.shape[1], device=x.device).unsqueeze(0) + 3
    steps = torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)[:, -1].eq(0).all()


def test_a_decision_on_constants_is_taken_as_it_would_be():
    for ask, taken in (
        (positions, "tanh"),
        (lambda x, y: not positions(x, y), "sigmoid"),
        (lambda x, y: torch.arange(4, device=x.device)[2].item() == 2, "tanh"),
        (lambda x, y: torch.tensor([False, True]).to(x.device).any(), "tanh"),
    ):
        assert way(ask) == taken


def test_a_decision_on_real_numbers_of_the_batch_is_refused():
    with pytest.raises(TraceError, match="_local_scalar_dense"):
        way(lambda x, y: x.argmax().item() == 1)


class Reads(nn.Module):
    """Adds a layer where `ask` finds the keyword arguments to be so."""

    def __init__(self, ask):
        super().__init__()
        self.table, self.more, self.ask = nn.Embedding(8, 6), nn.Linear(6, 6), ask
        self.register_buffer("limits", torch.tensor([2, 5]))

    def forward(self, ids, mask=None, labels=None, flag=None):
        x = self.table(ids)
        if self.ask(self, ids, mask, x):
            x = self.more(x)
        return {"loss": x.mean(), "logits": x}


IDS, MASK = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])


def layers(ask, **batch):
    batch = batch or {"ids": IDS, "mask": MASK, "labels": IDS, "flag": True}
    trace = trace_step(lambda: Reads(ask), batch)
    return sum(op.name in ("aten::addmm", "aten::mm") and op.phase == "forward" for op in trace.operators), trace


@pytest.mark.parametrize(
    "ask",
    [
        lambda self, ids, mask, x: not mask.all() and mask.any(),
        lambda self, ids, mask, x: ids.max().item() == 5,
        lambda self, ids, mask, x: torch.equal(mask, (ids != 0).long()),
        lambda self, ids, mask, x: mask.bool().nonzero().shape == (5, 2),
        lambda self, ids, mask, x: x[mask.bool()].shape == (5, 6) and ids[mask == 0].tolist() == [0],
        lambda self, ids, mask, x: torch.masked_select(ids, mask.bool()).numel() == 5,
        lambda self, ids, mask, x: torch.unique(ids).numel() == 6 and ids.cpu().sum() == 15,
        lambda self, ids, mask, x: [len(p) for p in ids.flatten().split([*mask.sum(1).tolist(), 1])] == [3, 2, 1],
        lambda self, ids, mask, x: (self.limits[1] - ids.shape[1]).item() == 2,
        lambda self, ids, mask, x: (torch.tensor([0.5, 1.5], device=x.device) * 2).sum() == 4,
    ],
)
def test_values_of_the_batch_and_of_buffers_are_read_back(ask):
    assert layers(ask)[0] == 1
    assert layers(lambda *asked: not ask(*asked))[0] == 0


def asks_for_finite_numbers(self, ids, mask, x):
    return not torch.isnan(x).any() and torch.isfinite(x).all() and not torch.isinf(x).any()


def routes(self, ids, mask, x):
    _, experts = x.topk(2, dim=-1)
    return torch.bincount(experts.flatten(), minlength=6).tolist() == [2] * 6


@pytest.mark.parametrize(
    "ask, assumed",
    [
        (asks_for_finite_numbers, values.FINITE),
        (routes, values.SPREAD),
        (lambda self, ids, mask, x: torch.where(x > 0)[0].numel() == 36, values.ALL_KEPT),
    ],
)
def test_numbers_that_the_step_computes_are_assumed_finite_spread_evenly_and_all_kept(ask, assumed):
    number, trace = layers(ask)
    assert number == 1 and trace.assumed == (assumed,)


def test_random_draws_are_the_same_in_every_trace_and_leave_the_callers_alone():
    def ask(self, ids, mask, x):
        draws.append(torch.randint(1000, (4,), device=x.device).tolist())
        return False

    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    draws = []
    layers(ask)
    half = len(draws)
    layers(ask)
    assert draws[:half] == draws[half:] and draws[0] != draws[1]
    assert torch.rand(1) == expected


def test_whole_numbers_without_values_count_as_one_and_the_trace_says_so_where_they_are_read():
    empty = torch.empty(2, 3, dtype=torch.long, device="meta")
    number, trace = layers(lambda self, ids, mask, x: mask.all(), ids=empty, mask=empty)
    [assumed] = trace.assumed
    assert number == 1 and assumed.startswith("whole numbers of mask that were given without values are taken to be 1")
    assert layers(lambda *_: False, ids=empty, mask=empty)[1].assumed == ()


def test_only_the_input_whose_default_is_read_is_named_with_the_module_and_the_line_that_reads_it():
    empty = torch.empty(2, 3, dtype=torch.long, device="meta")

    def derived(self, ids, mask, x):
        kept = mask.clone()
        kept[0] = (ids * 2)[0]
        return bool(kept.bool().any())

    assert layers(lambda self, ids, mask, x: mask.all(), ids=empty, mask=MASK)[1].assumed == ()
    [assumed] = layers(derived, ids=empty, mask=MASK)[1].assumed
    line = derived.__code__.co_firstlineno + 3
    assert "of ids that" in assumed and "module 'Reads'" in assumed and f"test_values_read.py:{line}" in assumed


def test_an_estimate_takes_a_keyword_batch_and_the_models_own_loss_and_says_what_it_assumes():
    batch = {"ids": IDS, "mask": MASK, "labels": IDS, "flag": None}
    done = estimate(lambda: Reads(lambda self, ids, mask, x: torch.isfinite(x).all()), batch, estimator="trace")
    assert done.parameters == 8 * 6 + 6 * 7
    assert f"assumed: {values.FINITE}" in done.warnings


def test_a_value_that_nothing_tells_is_refused_with_the_line_of_the_model():
    def reads(self, ids, mask, x):
        return bool(x.sum() > 0)

    def picks(self, ids, mask, x):
        return x[x > 0].sum() is None

    for ask in (reads, picks):
        line = ask.__code__.co_firstlineno + 1
        with pytest.raises(UsageError, match=rf"test_values_read.py:{line}\)"):
            estimate(lambda ask=ask: Reads(ask), {"ids": IDS, "mask": MASK}, estimator="trace")
