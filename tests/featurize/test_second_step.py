"""The second step is made of the first one where the model keeps nothing, and runs where it does.

A trace without a loop's variables shows how the step goes in a usual loop.
"""

import itertools
import random
from collections import deque
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from featurize.device.device_spec import load_device
from featurize.families import get_family, loss_of
from featurize.job.training_settings import Training
from featurize.memory.cudnn_workspaces import reserved_by_scenario
from featurize.memory.replay import replay
from featurize.trace import tracer
from featurize.trace.tracer import trace_step
from tests.featurize.small_configs import small_config
from tests.featurize.small_nets import Computes
from tests.featurize.trace_sums import most_of

TARGET = torch.zeros(4, dtype=torch.long)


def plain(net, x):
    return net.line(net.norm(net.conv(x)).relu_().mean((2, 3)))


def more(net, x, calls):
    """Every second step does more."""
    y = plain(net, x)
    return y * 2 if calls % 2 == 0 else y


def counts(net, x):
    net.calls += 1
    return more(net, x, net.calls)


calls_of_all = 0


def counts_in_global(net, x):
    global calls_of_all
    calls_of_all += 1
    return more(net, x, calls_of_all)


def counts_on_host(net, x):
    """A tensor on the host counts, past autograd's own counter of changes."""
    net.on_host.data += 1
    return more(net, x, int(net.on_host))


def keeps_output(net, x):
    net.outputs.append(plain(net, x))
    return net.outputs[-1]


def draws(net, x):
    """A layer runs in some steps."""
    return more(net, x, 2 if random.random() < 0.5 else 1)


def goes(net, x):
    """An iterator cannot be looked into."""
    net.numbers = net.numbers or (number for number in range(1, 10))
    return more(net, x, next(net.numbers))


def reads(net, x):
    """The second step's decision is known, as the buffer's value is."""
    net.step += 1
    return more(net, x, net.step.item())


def makes_mask(net, x):
    """The first call makes what later ones read."""
    if net.mask is None:
        net.mask = torch.ones(1024, 1024, device=x.device)
    return plain(net, x) + net.mask.sum()


def network(compute):
    """A network that `compute` runs, and whatever the functions above keep in it."""
    layers = {"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "line": nn.Linear(8, 5)}
    kept = {"calls": 0, "on_host": torch.zeros((), dtype=torch.long), "outputs": deque(maxlen=1), "numbers": None}
    return Computes(compute, **layers, **kept, mask=None, step=nn.Buffer(torch.zeros((), dtype=torch.long)))


def counts_in_hook():
    """A hook counts in its closure."""
    net, calls = network(plain), [0]
    net.line.register_forward_pre_hook(lambda *_: calls.append(calls[-1] + 1))
    net.line.register_forward_hook(lambda _module, _args, y: y if calls[-1] % 2 else y * 2)
    return net


class CountingLoss(nn.CrossEntropyLoss):
    """Every second loss is a sum of two."""

    calls = 0

    def forward(self, y, target):
        self.calls += 1
        return sum(super(CountingLoss, self).forward(y, target) for _ in range(self.calls))


OFTEN = (counts, counts_in_global, counts_on_host, counts_in_hook, keeps_output)
KEEP = (*OFTEN, draws, goes, reads, makes_mask)
SETTINGS = ({}, {"precision": "fp16", "clip_norm": 1.0, "ema": True}, {"optimizer": "sgd", "channels_last": True})
CASES = [*itertools.product((plain, *OFTEN), SETTINGS), *((model, {}) for model in KEEP[len(OFTEN) :])]


def traced(model, training_loop, target=TARGET, loss=None, **settings):
    global calls_of_all
    calls_of_all = 0
    torch.manual_seed(0)
    random.seed(1)  # which draws a number above one half, and then one below
    batch = torch.empty(4, 3, 8, 8, device="meta")
    build = model if model is counts_in_hook else partial(network, model)
    return trace_step(build, batch, target, loss and loss(), settings=Training(**settings), training_loop=training_loop)


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
@pytest.mark.parametrize(("model", "settings"), [*CASES, (plain, {"loss": CountingLoss})])
def test_the_trace_is_that_of_two_steps_that_run(monkeypatch, model, training_loop, settings):
    quick = traced(model, training_loop, **settings)
    monkeypatch.setattr(tracer.SecondStep, "goes_alike", lambda _: False)
    both = traced(model, training_loop, **settings)
    assert in_order(quick) == in_order(both)
    assert training_loop or in_order(quick.in_a_loop) == in_order(both.in_a_loop)


@pytest.mark.spread(4)
@pytest.mark.parametrize("model", [one for one in (plain, *KEEP) if one is not counts_in_global])
def test_that_no_target_is_given_changes_nothing(model):
    """A first call of the model, which shows its output, is none of the job's."""
    assert in_order(traced(model, True)) == in_order(traced(model, True, target=None))


@pytest.mark.parametrize("model, passes", [(plain, 1), *((model, 2) for model in KEEP)])
def test_only_a_model_that_keeps_something_runs_its_second_step(model, passes):
    ran = []
    hook = module_hooks.register_module_forward_pre_hook(lambda module, _: ran.append(module))
    try:
        traced(model, True)
    finally:
        hook.remove()
    assert sum(isinstance(module, Computes) for module in ran) == passes


A100 = load_device("A100-SXM4-40GB")


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("name", "changed"),
    # A model in channels-last format takes a copy of its inputs.
    [("cnn", {}), ("gpt", {}), ("mlp", {}), ("vit", {"channels_last": True})],
)
def test_a_trace_without_a_loop_shows_the_loop_that_a_trace_in_it_has(name, changed):
    config, family = replace(small_config(name, 0), **changed), get_family(name)

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
    assert most_of(shown, "activation", ("forward",)) == most_of(wanted, "activation", ("forward",))
    assert replay(shown, A100) == replay(wanted, A100)
    assert reserved_by_scenario(shown, A100) == reserved_by_scenario(wanted, A100)
