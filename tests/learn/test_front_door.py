"""`from learn import ...` and `warehouse.connect`: plain, typed functions, whatever was imported before."""

import importlib
import inspect
import pickle
import typing

import pytest

import conf.errors
import learn
from learn import Estimate, FitSettings, UsageError, estimate, estimate_many, fit
from warehouse import connect

FUNCTIONS = [estimate, estimate_many, fit, connect]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_public_call_is_a_function_with_typed_parameters_that_can_be_pickled(function):
    assert inspect.isfunction(function)
    parameters = inspect.signature(function).parameters.values()
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters)
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty
    assert pickle.loads(pickle.dumps(function)) is function
    assert "Raises:" in function.__doc__


def test_the_types_that_a_caller_meets_come_from_the_same_place():
    assert UsageError is conf.errors.UsageError
    assert {"Estimate", "Fit", "FitSettings", "TrialConfig", "UsageError"} <= set(learn.__all__)
    assert inspect.isclass(Estimate) and inspect.isclass(FitSettings)
    assert all(hasattr(learn, name) for name in learn.__all__)


@pytest.mark.parametrize("name", ["estimate", "fit"])
def test_importing_the_command_module_is_refused_and_leaves_the_function_in_place(name):
    function = getattr(learn, name)
    with pytest.raises(ImportError, match=f"from learn import {name}"):
        importlib.import_module(f"learn.{name}")
    assert getattr(learn, name) is function
    namespace: dict[str, typing.Any] = {}
    exec(f"from learn import {name}", namespace)
    assert namespace[name] is function


def test_an_estimate_is_picklable_and_the_usage_error_is_the_one_to_catch():
    config = {"family": "mlp", "batch_size": 8, "input_size": 64, "classes": 10, "depth": 2}
    done = estimate(config, method="fast")
    assert pickle.loads(pickle.dumps(done)) == done
    with pytest.raises(UsageError):
        estimate(config, device="A1000")
