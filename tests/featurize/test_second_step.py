"""The second step is made of the first one where the model keeps nothing, and runs where it does."""

import pytest
import torch
from torch import nn

from featurize import tracing
from featurize.trace import trace_step
from featurize.training import Training


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.line = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        return self.line(self.norm(self.conv(x)).relu_().mean((2, 3)))


class Counts(Plain):
    """Every third step does more."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        y = super().forward(x)
        return y * 2 if self.calls % 3 == 0 else y


class Grows(Plain):
    """Each step finds, and leaves, one more row."""

    rows = None

    def forward(self, x):
        y = super().forward(x)
        row = y[:1].detach().clone()
        self.rows = row if self.rows is None else torch.cat([self.rows, row])
        return y


class Reads(Plain):
    """The second step's decision is known, as the buffer's value is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.step += 1
        y = super().forward(x)
        return y + 1 if self.step.item() > 2 else y


MODELS = (Plain, Counts, Grows, Reads)


def traced(model, training_loop, **settings):
    torch.manual_seed(0)
    batch = torch.empty(4, 3, 8, 8, device="meta")
    return trace_step(model, batch, settings=Training(**settings), training_loop=training_loop)


def of_events(trace):
    """Return the events with their blocks, which are numbered as they come."""
    numbers = {}
    numbered = (numbers.setdefault(event.block, len(numbers)) for event in trace.events)
    return [
        (number, event._replace(block=0), trace.blocks[event.block])
        for number, event in zip(numbered, trace.events, strict=True)
    ]


@pytest.mark.parametrize("training_loop", [True, False])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", [{}, {"precision": "fp16", "clip_norm": 1.0, "ema": True}, {"optimizer": "sgd"}])
def test_the_trace_is_that_of_two_steps_that_run(monkeypatch, model, training_loop, settings):
    quick = traced(model, training_loop, **settings)
    monkeypatch.setattr(tracing.SecondStep, "goes_alike", lambda _: False)
    both = traced(model, training_loop, **settings)
    for one, other in ((quick, both), (quick.in_a_loop, both.in_a_loop)):
        assert (one is None) == (other is None) == (training_loop and one is quick.in_a_loop)
        if one is not None:
            assert of_events(one) == of_events(other) and one.operators == other.operators


@pytest.mark.parametrize("model, passes", [(Plain, 2), (Counts, 3), (Grows, 3), (Reads, 3)])
def test_only_a_model_that_keeps_something_runs_its_second_step(model, passes):
    ran = []

    class Watched(model):
        def forward(self, x):
            ran.append(x)
            return super().forward(x)

    traced(Watched, True)
    assert len(ran) == passes
