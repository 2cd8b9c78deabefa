"""Constants that a model makes and reads back have their values; everything else has none."""

import pytest
import torch
from torch import nn

from featurize.trace import TraceError, trace_step

X = torch.empty(2, 6, device="meta")


class Asks(nn.Module):
    """Takes the way that `ask` says; the two ways differ in the operators that run."""

    def __init__(self, ask):
        super().__init__()
        self.line, self.ask = nn.Linear(6, 3), ask

    def forward(self, x):
        y = self.line(x)
        return y.tanh() if self.ask(x, y) else y.sigmoid()


def way(ask):
    names = {op.name for op in trace_step(lambda: Asks(ask), X).operators}
    return "tanh" if "aten::tanh" in names else "sigmoid"


def positions(x, y):
    """What language models ask of their positions: whether several texts are packed into one row."""
    ids = torch.arange(x.shape[1], device=x.device).unsqueeze(0) + 3
    steps = torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)[:, -1].eq(0).all()


def test_a_decision_on_constants_is_taken_as_it_would_be():
    assert way(positions) == "tanh"
    assert way(lambda x, y: not positions(x, y)) == "sigmoid"
    assert way(lambda x, y: torch.arange(4, device=x.device)[2].item() == 2) == "tanh"
    assert way(lambda x, y: torch.tensor([False, True]).to(x.device).any()) == "tanh"


def test_a_decision_on_what_the_step_computes_is_refused():
    for ask in (lambda x, y: y.sum() > 0, lambda x, y: (y > 0).any(), lambda x, y: x.argmax().item() == 1):
        with pytest.raises(TraceError, match="_local_scalar_dense"):
            way(ask)


def test_a_constant_that_was_written_to_is_no_constant():
    def ask(x, y):
        flags = torch.zeros(2, dtype=torch.bool, device=x.device)
        flags[0] = y.sum() > 0
        return flags.any()

    with pytest.raises(TraceError, match="_local_scalar_dense"):
        way(ask)


def test_a_view_of_a_constant_that_was_written_to_is_no_constant():
    def ask(x, y):
        flags = torch.zeros(2, dtype=torch.bool, device=x.device)
        first = flags[:1]
        flags.copy_(y[0, :2] > 0)
        return first.any()

    with pytest.raises(TraceError, match="_local_scalar_dense"):
        way(ask)
