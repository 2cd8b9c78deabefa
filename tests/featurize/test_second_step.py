"""The second step is made of the first one where the model keeps nothing, and runs where it does.

A trace without a loop's variables shows how the step goes in a usual loop.
"""

import random
import weakref
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
from featurize.trace.trace_cache import State
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


class CountsInMapping(Plain):
    def __init__(self):
        super().__init__()
        self.state = {"steps": [0]}

    def forward(self, x):
        self.state["steps"][0] += 1
        return self.more(x, self.state["steps"][0])


class Counter:
    def __init__(self):
        self.calls = 0


class CountsInObject(Plain):
    def __init__(self):
        super().__init__()
        self.counter = Counter()

    def forward(self, x):
        self.counter.calls += 1
        return self.more(x, self.counter.calls)


class CountsInClass(Plain):
    of_all = 0

    def forward(self, x):
        CountsInClass.of_all += 1
        return self.more(x, CountsInClass.of_all)


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


class CountsInBackward(Plain):
    """A hook of the backward pass counts."""

    def __init__(self):
        super().__init__()
        self.calls = 1
        self.line.register_full_backward_hook(self.count)

    def count(self, *_):
        self.calls += 1

    def forward(self, x):
        return self.more(x, self.calls)


class CountsInHook(Plain):
    """A hook counts in its closure."""

    def __init__(self):
        super().__init__()
        calls = 0

        def count(*_):
            nonlocal calls
            calls += 1
            return None if calls % 2 else _[-1] * 2

        self.line.register_forward_hook(count)


class Draws(Plain):
    """A layer runs in some steps."""

    def forward(self, x):
        return self.more(x, 2 if random.random() < 0.5 else 1)


class Goes(Plain):
    """An iterator cannot be looked into."""

    def __init__(self):
        super().__init__()
        self.numbers = None

    def forward(self, x):
        self.numbers = self.numbers or (number for number in range(1, 10))
        return self.more(x, next(self.numbers))


class Grows(Plain):
    """Each step finds, and leaves, one more row."""

    rows = None

    def forward(self, x):
        y = super().forward(x)
        row = y[:1].detach().clone()
        self.rows = row if self.rows is None else torch.cat([self.rows, row])
        return y


class KeepsOutput(Plain):
    def __init__(self):
        super().__init__()
        self.outputs = deque(maxlen=1)

    def forward(self, x):
        y = super().forward(x)
        self.outputs.append(y)
        return y


class Reads(Plain):
    """The second step's decision is known, as the buffer's value is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.step += 1
        y = super().forward(x)
        return y + 1 if self.step.item() > 1 else y


class MakesMask(Plain):
    """The first call makes what later ones read."""

    mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(1024, 1024, device=x.device)
        return super().forward(x) + self.mask.sum()


class CountingLoss(nn.Module):
    """Every second loss is a mean of two."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, y, target):
        self.calls += 1
        loss = nn.functional.cross_entropy(y, target)
        return loss if self.calls % 2 else (loss + nn.functional.cross_entropy(y, target)) / 2


class GivesObject(Plain):
    """The output holds tensors in an object, as caches of keys and values are."""

    def forward(self, x):
        y = super().forward(x)
        cache = Counter()
        cache.rows = [y + 1, y + 2]
        return y, cache


KEEP = (
    Counts,
    CountsInMapping,
    CountsInObject,
    CountsInClass,
    CountsInGlobal,
    CountsOnHost,
    CountsInBackward,
    CountsInHook,
    Draws,
    Goes,
    Grows,
    KeepsOutput,
    Reads,
    MakesMask,
)


def traced(model, training_loop, *, target=TARGET, loss=None, **settings):
    global calls_of_all
    CountsInClass.of_all = calls_of_all = 0
    torch.manual_seed(0)
    random.seed(1)  # which draws a number above one half, and then one below
    batch = torch.empty(4, 3, 8, 8, device="meta")
    return trace_step(model, batch, target, loss, settings=Training(**settings), training_loop=training_loop)


def of_events(trace):
    """Return the events with their blocks, which are numbered as they come."""
    numbers = {}
    numbered = (numbers.setdefault(event.block, len(numbers)) for event in trace.events)
    return [
        (number, event._replace(block=0), trace.blocks[event.block])
        for number, event in zip(numbered, trace.events, strict=True)
    ]


def require_same(one, other):
    assert (one is None) == (other is None)
    if one is not None:
        assert one.operators == other.operators
        assert of_events(one) == of_events(other)


def require_as_it_runs(monkeypatch, **request):
    quick = traced(**request)
    monkeypatch.setattr(tracer.SecondStep, "goes_alike", lambda _: False)
    both = traced(**request)
    require_same(quick, both)
    require_same(quick.in_a_loop, both.in_a_loop)
    assert (quick.in_a_loop is None) == request["training_loop"]


@pytest.mark.spread(5)
@pytest.mark.parametrize("training_loop", [True, False])
@pytest.mark.parametrize("model", [Plain, GivesObject, *KEEP])
@pytest.mark.parametrize("settings", [{}, {"precision": "fp16", "clip_norm": 1.0, "ema": True}, {"optimizer": "sgd"}])
def test_the_trace_is_that_of_two_steps_that_run(monkeypatch, model, training_loop, settings):
    require_as_it_runs(monkeypatch, model=model, training_loop=training_loop, **settings)


@pytest.mark.parametrize("training_loop", [True, False])
def test_a_loss_that_keeps_something_runs_twice(monkeypatch, training_loop):
    quick = traced(Plain, training_loop, loss=CountingLoss())
    monkeypatch.setattr(tracer.SecondStep, "goes_alike", lambda _: False)
    require_same(quick, traced(Plain, training_loop, loss=CountingLoss()))


def test_outputs_that_a_library_keeps_live_as_long_as_it_keeps_them(monkeypatch):
    """Hooks of all modules are the library's: who holds an output is not seen."""
    kept = deque(maxlen=1)
    hook = module_hooks.register_module_forward_hook(
        lambda module, _, y: kept.append(y) if type(module) is Plain else None
    )
    try:
        quick = traced(Plain, True)
        kept.clear()
        monkeypatch.setattr(tracer.SecondStep, "goes_alike", lambda _: False)
        require_same(quick, traced(Plain, True))
    finally:
        hook.remove()


@pytest.mark.parametrize("model", [one for one in (Plain, *KEEP) if one not in (CountsInClass, CountsInGlobal)])
def test_that_no_target_is_given_changes_nothing(model):
    """A first call of the model, which shows its output, is none of the job's."""
    require_same(traced(model, True), traced(model, True, target=None))


def test_lazy_parameters_are_made_before_the_first_step():
    def lazy():
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(5))

    assert traced(lazy, True).parameters == traced(lazy, True, target=None).parameters == 3 * 64 * 5 + 5


@pytest.mark.parametrize("model, passes", [(Plain, 1), (GivesObject, 1), *((model, 2) for model in KEEP)])
def test_only_a_model_that_keeps_something_runs_its_second_step(model, passes):
    ran = []
    hook = module_hooks.register_module_forward_pre_hook(lambda module, _: ran.append(module))
    try:
        traced(model, True)
    finally:
        hook.remove()
    assert sum(isinstance(module, Plain) for module in ran) == passes


A100 = load_device("A100-SXM4-40GB")


@pytest.mark.spread(3)
@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("name", ["cnn", "gpt", "mlp", "vit"])
def test_a_trace_without_a_loop_shows_the_loop_that_a_trace_in_it_has(name, at):
    config, family = small_config(name, at), get_family(name)

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


class ReplacesBuffer(Plain):
    """Frees a large buffer in each step before it makes the next one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("large", torch.zeros(2**20))

    def forward(self, x):
        shape, self.large = self.large.shape, None
        self.large = torch.ones(shape, device=x.device)
        return super().forward(x)


def test_a_buffer_that_each_step_replaces_is_held_once():
    held, most = 0, 0
    for event in traced(ReplacesBuffer, True).events:
        held += {2**22: 1, -(2**22): -1}.get(event.nbytes, 0)
        most = max(most, held)
    assert most == 1


def test_the_state_of_objects_keeps_none_of_their_tensors_alive():
    model = nn.Linear(2, 2)
    state, weight = State(model), weakref.ref(model.weight)
    assert state.stays(State(model))
    del model
    assert weight() is None
