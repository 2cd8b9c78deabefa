"""The family `rnn`: parameters by formula, what each task reads, and cuDNN's one call in the trace."""

import dataclasses
import functools
import itertools
import warnings

import pytest
import torch
from family_table import FAMILY
from plan_checks import on_meta, parameters_of
from torch.utils.flop_counter import FlopCounterMode

from featurize.families import layers_of, rnn
from featurize.job.layers import totals
from featurize.trace.tracer import trace_config

SMALL = FAMILY["rnn"].small


small = functools.partial(dataclasses.replace, SMALL)


def cases():
    for cell, task, both, depth in itertools.product(rnn.GATES, rnn.TASKS, (False, True), (1, 3)):
        if not (both and task == "language_model"):
            yield small(cell=cell, task=task, bidirectional=both, depth=depth)


CASES = list(cases())


@pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.cell}-{c.task}-{c.bidirectional}-{c.depth}")
def test_parameters_flops_and_outputs_are_the_modules(config):
    module, (inputs, targets) = on_meta(config), rnn.batch(config, "meta")
    with FlopCounterMode(display=False) as counter:
        output = module(*inputs)
    sums = totals(layers_of(config))
    assert sums.parameters == parameters_of(module)
    assert config.batch_size * sums.flops == counter.get_total_flops()
    places = (7, 50) if config.task == "language_model" else (5,)
    assert output.shape == (3, *places) and targets.shape == (3, *places[:-1])
    recurrent = [layer for layer in layers_of(config) if layer.kind == config.cell]
    both = 2 if config.bidirectional else 1
    assert [layer.output_elements for layer in recurrent] == [7 * 20 * both] * config.depth


@pytest.mark.parametrize(("cell", "gates"), [("lstm", 4), ("gru", 3)])
def test_recurrent_layers_have_the_published_formulas_parameters(cell, gates):
    # 2 biases a gate, as cuDNN has it; the second layer reads both directions
    first = 2 * gates * 20 * (12 + 20 + 2)
    second = 2 * gates * 20 * (40 + 20 + 2)
    module = on_meta(small(cell=cell, bidirectional=True))
    assert parameters_of(module.body) == first + second
    assert [x.parameters for x in layers_of(small(cell=cell, bidirectional=True)) if x.kind == cell] == [first, second]


def test_the_last_state_is_where_each_direction_ends():
    config = small(bidirectional=True)
    torch.manual_seed(0)
    module = rnn.build(config)
    (tokens,), _ = rnn.batch(config, "cpu")
    outputs, last = module.body(module.embedding(tokens))
    torch.testing.assert_close(last, torch.cat([outputs[:, -1, :20], outputs[:, 0, 20:]], dim=1))
    torch.testing.assert_close(module(tokens), module.head(last))
    module = rnn.build(small(task="classify_mean"))
    outputs, _ = module.body(module.embedding(tokens))
    torch.testing.assert_close(module(tokens), module.head(outputs.mean(1)))


def test_dropout_with_one_layer_is_no_reason_for_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_meta(small(depth=1, dropout=0.5))


@pytest.mark.parametrize("cell", rnn.GATES)
def test_the_trace_has_one_call_for_all_layers_and_again_where_it_is_recomputed(cell):
    def calls(**changes):
        trace = trace_config(small(cell=cell, **changes))
        assert sum(b.nbytes for b in trace.blocks if b.kind == "gradient") == 2 * trace.parameter_bytes
        return [op.phase for op in trace.operators if op.name == "aten::_cudnn_rnn"]

    assert calls() == ["forward"]
    assert calls(activation_checkpointing=True) == ["forward", "backward"]


def test_repair_gives_language_models_one_direction():
    values = {"task": "language_model", "bidirectional": True, "classes": 9, "use_dropout": False, "dropout": 0.3}
    assert rnn.repair(values, None) == {"task": "language_model", "bidirectional": False, "dropout": 0.0}
    values = {"task": "classify_last", "bidirectional": True, "classes": 9}
    assert rnn.repair(values, None) == values
