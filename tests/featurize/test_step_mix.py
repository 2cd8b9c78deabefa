"""Steps on batches of several shapes: joined from one run a shape, they are the steps that would really run."""

import pytest
import torch

from featurize.device.device_spec import load_device
from featurize.job.training_settings import Training
from featurize.memory.replay import replay
from featurize.nets.vision import import_library
from featurize.trace import tracer
from featurize.trace.later_steps import StepSequence
from featurize.trace.tracer import trace_step

A100 = load_device("A100-SXM4-40GB")
LENGTHS = (48, 128, 80, 128)


class EveryStepRuns(StepSequence):
    """Runs each step anew."""

    def play(self, shapes):
        for shape in shapes:
            self._sequence.append(self._ran(shape))
        return max(range(max(shapes) + 1), key=lambda shape: LENGTHS[shapes.index(shape)])


def gpt(width=64):
    transformers = import_library("transformers")
    sizes = {"n_layer": 2, "n_embd": width, "n_head": 2, "vocab_size": 500, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def tokens(length):
    ids = torch.full((4, length), 5)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def mix(lengths, **settings):
    return trace_step(gpt, None, settings=Training(**settings), batches=[tokens(length) for length in lengths])


def what_happens(trace):
    """The events, without the numbers of the blocks."""
    of_block = trace.blocks.__getitem__
    return [(e.nbytes, e.step, e.phase, of_block(e.block).kind, of_block(e.block).operator) for e in trace.events]


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"accumulation": 2, "set_to_none": False, "optimizer": "adagrad"},
        {"checkpointing": "full", "clip_norm": 1.0},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_joined_steps_are_those_that_run_one_after_the_other(settings, monkeypatch):
    joined = mix(LENGTHS, **settings)
    in_order = [LENGTHS[at] for at in joined.mix.order]
    assert in_order[: len(LENGTHS)] == list(LENGTHS) and in_order[-2:] == [128, 128]
    monkeypatch.setattr(tracer, "StepSequence", EveryStepRuns)
    every = mix(in_order, **settings)
    assert what_happens(joined) == what_happens(every)
    assert (tracer.COMPILED_SHAPES in joined.notes) == ("compile" in settings)
    assert replay(joined, A100).peak_reserved == replay(every, A100).peak_reserved


def test_batches_of_one_shape_are_the_plain_trace():
    assert mix([64] * 5) == trace_step(gpt, tokens(64), settings=Training())


def test_masks_that_are_all_ones_and_others_are_different_batches():
    padded = tokens(64)
    padded["attention_mask"][0, -1] = 0
    ids = {**tokens(64), "input_ids": torch.full((4, 64), 7)}
    trace = trace_step(gpt, None, batches=[tokens(64), padded, ids])
    assert trace.mix.shapes == 2 and trace.mix.order[:3] == (0, 1, 0)
