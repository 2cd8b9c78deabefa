"""Values that a model reads back: batch, buffers and constants have their own, and computed ones have few defaults."""

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.recording import values
from featurize.trace.tracer import trace_step
from learn import estimate


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
        lambda self, ids, mask, x: torch.arange(4, device=x.device)[2].item() == 2,
        # What language models ask: whether several texts are packed into one row.
        lambda self, ids, mask, x: (torch.diff(torch.arange(3, device=x.device) + 3) == 1).cumsum(-1)[-1].eq(2).all(),
        lambda self, ids, mask, x: (torch.tensor([0.5, 1.5], device=x.device) * 2).sum() == 4,
    ],
)
def test_values_of_the_batch_and_of_buffers_are_read_back(ask):
    assert layers(ask)[0] == 1
    assert layers(lambda *asked: not ask(*asked))[0] == 0


@pytest.mark.parametrize(
    "ask, assumed",
    [
        (
            lambda self, ids, mask, x: (
                not torch.isnan(x).any() and torch.isfinite(x).all() and not torch.isinf(x).any()
            ),
            values.FINITE,
        ),
        (
            lambda self, ids, mask, x: (
                torch.bincount(x.topk(2, dim=-1).indices.flatten(), minlength=6).tolist() == [2] * 6
            ),
            values.SPREAD,
        ),
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

    draws, before = [], torch.get_rng_state()
    layers(ask)
    of_the_first = list(draws)
    layers(ask)
    assert draws == of_the_first * 2 and draws[0] != draws[1]
    assert torch.equal(torch.get_rng_state(), before)


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

    line = reads.__code__.co_firstlineno + 1
    with pytest.raises(UsageError, match=rf"test_values_read.py:{line}\)"):
        estimate(lambda: Reads(reads), {"ids": IDS, "mask": MASK}, estimator="trace")
