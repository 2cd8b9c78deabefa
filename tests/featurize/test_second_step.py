"""The second step is made of the first one where the model keeps nothing, and runs where it does.

A trace without a loop's variables shows how the step goes in a usual loop.
"""

import itertools
import random
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from featurize.device.device_spec import load_device
from featurize.families import get_family, loss_of
from featurize.memory.cudnn_workspaces import reserved_by_scenario
from featurize.memory.replay import replay
from featurize.trace import tracer
from featurize.trace.tracer import trace_step
from featurize.training.training_step import Training
from tests.featurize.small_configs import small_config

TARGET = torch.zeros(4, dtype=torch.long)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.line = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        return self.line(self.norm(self.conv(x)).relu_().mean((2, 3)))

    def more(self, x, calls):
        """Every second step does more."""
        y = Plain.forward(self, x)
        return y * 2 if calls % 2 == 0 else y


class Counts(Plain):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.more(x, self.calls)


calls_of_all = 0


class CountsInGlobal(Plain):
    def forward(self, x):
        global calls_of_all
        calls_of_all += 1
        return self.more(x, calls_of_all)


class CountsOnHost(Plain):
    """A tensor on the host counts, past autograd's own counter of changes."""

    def __init__(self):
        super().__init__()
        self.calls = torch.zeros((), dtype=torch.long)

    def forward(self, x):
        self.calls.data += 1
        return self.more(x, int(self.calls))


class CountsInHook(Plain):
    """A hook counts in its closure."""

    def __init__(self):
        super().__init__()
        calls = [0]
        self.line.register_forward_pre_hook(lambda *_: calls.append(calls[-1] + 1))
        self.line.register_forward_hook(lambda _module, _args, y: y if calls[-1] % 2 else y * 2)


class KeepsOutput(Plain):
    def __init__(self):
        super().__init__()
        self.outputs = deque(maxlen=1)

    def forward(self, x):
        y = super().forward(x)
        self.outputs.append(y)
        return y


class Draws(Plain):
    """A layer runs in some steps."""

    def forward(self, x):
        return self.more(x, 2 if random.random() < 0.5 else 1)


class Goes(Plain):
    """An iterator cannot be looked into."""

    numbers = None

    def forward(self, x):
        self.numbers = self.numbers or (number for number in range(1, 10))
        return self.more(x, next(self.numbers))


class Reads(Plain):
    """The second step's decision is known, as the buffer's value is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.step += 1
        return self.more(x, self.step.item())


class MakesMask(Plain):
    """The first call makes what later ones read."""

    mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(1024, 1024, device=x.device)
        return super().forward(x) + self.mask.sum()


class CountingLoss(nn.CrossEntropyLoss):
    """Every second loss is a sum of two."""

    calls = 0

    def forward(self, y, target):
        self.calls += 1
        return sum(super(CountingLoss, self).forward(y, target) for _ in range(self.calls))


OFTEN = (Counts, CountsInGlobal, CountsOnHost, CountsInHook, KeepsOutput)
KEEP = (*OFTEN, Draws, Goes, Reads, MakesMask)
SETTINGS = ({}, {"precision": "fp16", "clip_norm": 1.0, "ema": True}, {"optimizer": "sgd"})
CASES = [*itertools.product((Plain, *OFTEN), SETTINGS), *((model, {}) for model in KEEP[len(OFTEN) :])]


def traced(model, training_loop, target=TARGET, loss=None, **settings):
    global calls_of_all
    calls_of_all = 0
    torch.manual_seed(0)
    random.seed(1)  # which draws a number above one half, and then one below
    batch = torch.empty(4, 3, 8, 8, device="meta")
    return trace_step(model, batch, target, loss and loss(), settings=Training(**settings), training_loop=training_loop)


def in_order(trace):
    """Return the operators, and the events with their blocks, which are numbered as they come."""
    numbers = {}
    events = [
        (numbers.setdefault(event.block, len(numbers)), event._replace(block=0), trace.blocks[event.block])
        for event in trace.events
    ]
    return trace.operators, events


@pytest.mark.spread(8)
@pytest.mark.parametrize("training_loop", [True, False])
@pytest.mark.parametrize(("model", "settings"), [*CASES, (Plain, {"loss": CountingLoss})])
def test_the_trace_is_that_of_two_steps_that_run(monkeypatch, model, training_loop, settings):
    quick = traced(model, training_loop, **settings)
    monkeypatch.setattr(tracer.SecondStep, "goes_alike", lambda _: False)
    both = traced(model, training_loop, **settings)
    assert in_order(quick) == in_order(both)
    assert training_loop or in_order(quick.in_a_loop) == in_order(both.in_a_loop)


@pytest.mark.spread(4)
@pytest.mark.parametrize("model", [one for one in (Plain, *KEEP) if one is not CountsInGlobal])
def test_that_no_target_is_given_changes_nothing(model):
    """A first call of the model, which shows its output, is none of the job's."""
    assert in_order(traced(model, True)) == in_order(traced(model, True, target=None))


@pytest.mark.parametrize("model, passes", [(Plain, 1), *((model, 2) for model in KEEP)])
def test_only_a_model_that_keeps_something_runs_its_second_step(model, passes):
    ran = []
    hook = module_hooks.register_module_forward_pre_hook(lambda module, _: ran.append(module))
    try:
        traced(model, True)
    finally:
        hook.remove()
    assert sum(isinstance(module, Plain) for module in ran) == passes


A100 = load_device("A100-SXM4-40GB")


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ["cnn", "gpt", "mlp", "vit"])
def test_a_trace_without_a_loop_shows_the_loop_that_a_trace_in_it_has(name):
    config, family = small_config(name, 0), get_family(name)

    def traced(training_loop):
        return trace_step(
            lambda: family.build(config),
            lambda on: family.batch(config, on),
            loss=loss_of(config),
            settings=config,
            device=A100,
            training_loop=training_loop,
        )

    shown, wanted = traced(False).in_a_loop, traced(True)
    assert shown.operators == wanted.operators and shown.breakdown == wanted.breakdown
    assert sorted(block[:4] for block in shown.blocks) == sorted(block[:4] for block in wanted.blocks)
    assert replay(shown, A100) == replay(wanted, A100)
    assert reserved_by_scenario(shown, A100) == reserved_by_scenario(wanted, A100)
