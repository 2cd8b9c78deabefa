"""Models that cannot be traced: what the reason names, and that nothing is left changed."""

import contextlib
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conf.errors import UsageError
from featurize.trace.tracer import TraceError, trace_step
from tests.featurize.small_nets import Computes

WIDTH = 8
INPUTS = (torch.empty(4, WIDTH, device="meta"),)


def net(function, then=lambda y: y):
    """A layer, a module deep inside that runs `function`, and a head, of whose output `then` is a function."""
    return Computes(
        lambda net, x: then(net.head(net.body(net.stem(x)))),
        stem=nn.Linear(WIDTH, WIDTH),
        body=nn.Sequential(nn.Tanh(), nn.Sequential(Computes(lambda _, x: function(x)))),
        head=nn.Linear(WIDTH, 3),
    )


@pytest.fixture
def without_meta_kernel():
    """An operator that nobody has told the shape of its output."""
    library = torch.library.Library("gpufarm_test", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CPU")
    yield torch.ops.gpufarm_test.opaque
    library._destroy()


def failure(model, inputs=INPUTS, **more):
    with pytest.raises(TraceError) as caught:
        trace_step(model, inputs, **more)
    return caught.value


TARGET = torch.empty(4, dtype=torch.long, device="meta")


@pytest.mark.parametrize("target", [None, TARGET])
@pytest.mark.parametrize(
    "function, operator",
    [
        (lambda x: x * x.sum().item(), "aten::_local_scalar_dense"),
        (lambda x: x if x.sum() > 0 else -x, "aten::_local_scalar_dense"),
        (lambda x: x if (x > 0).any() else -x, "aten::_local_scalar_dense"),
        (lambda x: x[x > 0], "aten::index"),
        (lambda x: x @ torch.empty(3, 3, device=x.device), "aten::mm"),
    ],
)
def test_an_operator_that_needs_values_is_named_with_its_module(function, operator, target):
    error = failure(lambda: net(function), target=target)
    assert (error.operator, error.module) == (operator, "body.1.0")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # as a child sends it
    assert f"in operator {operator} of module 'body.1.0'" in str(error)
    assert error.__cause__ is not None and "\n" not in str(error)


def test_an_operator_without_a_meta_kernel_is_named(without_meta_kernel):
    error = failure(lambda: net(without_meta_kernel))
    assert (error.operator, error.module) == ("gpufarm_test::opaque", "body.1.0")


def raises(x):
    raise ValueError("no such mode\nand more")


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


def reading_loss(y, target):
    return F.cross_entropy(y, target) / y.sum().item()


@pytest.mark.parametrize(
    ("function", "width", "more", "operator", "module"),
    [
        # An error of the backward pass is of the module that it derives, one of the loss of none.
        (Broken.apply, WIDTH, {}, "aten::_local_scalar_dense", "body.1.0"),
        (torch.relu, WIDTH, {"target": TARGET, "loss": reading_loss}, "aten::_local_scalar_dense", ""),
        (raises, WIDTH, {}, "", "body.1.0"),
        # Inputs that do not fit the model are the first operator's failure.
        (torch.relu, WIDTH + 1, {}, "aten::addmm", "stem"),
    ],
)
def test_an_error_names_where_it_is_of(function, width, more, operator, module):
    error = failure(lambda: net(function), (torch.empty(4, width, device="meta"),), **more)
    assert (error.operator, error.module) == (operator, module)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: net(raises), "the model cannot be traced: it fails in module 'body.1.0': ValueError: no such mode"),
        (lambda: {}["hidden_size"], "the model cannot be built on the meta device: KeyError: 'hidden_size'"),
    ],
)
def test_an_error_of_the_models_own_is_told_in_one_line(model, message):
    assert str(failure(model)) == message


@pytest.mark.parametrize("function", [torch.relu, lambda x: x * x.sum().item()], ids=["traced", "failed"])
@pytest.mark.parametrize("training", [True, False])
def test_a_live_module_is_left_as_it_was(function, training):
    model = net(function)
    model.norm = nn.BatchNorm1d(3)
    model.train(training)
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    model.head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with contextlib.suppress(TraceError):
        trace_step(model, INPUTS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["stem.weight"]
    assert not model.head.weight.requires_grad
    assert all(module.training is training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(4, 4).requires_grad_(False)])
def test_a_model_with_nothing_to_train_is_refused_in_these_words(model):
    with pytest.raises(UsageError, match="nothing to train"):
        trace_step(model, torch.empty(2, 4, device="meta"))
