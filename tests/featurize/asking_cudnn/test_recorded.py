"""What a run records of cuDNN's answers, and how it is read back."""

import json
from typing import ClassVar

import pytest
import torch
from torch import nn

from featurize.cudnn.oracle import CRASHED
from featurize.cudnn.recorded import answers_to_record, read_answers
from featurize.cudnn.signature import EnginePlan, OracleAnswer, SearchSettings
from featurize.trace import trace_step

SEARCH = SearchSettings(benchmark=True)


class Answering:
    """Answers each operation with plans of its own; about weight gradients it crashes."""

    version = "9.99.0"
    plans: ClassVar = {"forward": (64, 0, 512), "data_gradient": (8,)}

    def answers(self, signatures, search):
        return {signature: self.answer(signature) for signature in signatures}

    def answer(self, signature):
        sizes = self.plans.get(signature.operation, ())
        plans = tuple(EnginePlan(f"eng{size}", size) for size in sizes)
        return OracleAnswer(plans=plans, problem="" if plans else CRASHED)


@pytest.fixture
def recorded():
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten())
    trace = trace_step(module, torch.empty(2, 3, 9, 9, device="meta"))
    return answers_to_record(trace, Answering(), SEARCH)


def test_every_convolution_is_recorded_once_with_engine_bytes_layout_and_version(recorded):
    assert recorded["cudnn"] == "9.99.0" and recorded["search"]["benchmark"] is True
    operations = [entry["signature"].operation for entry in recorded["convolutions"]]
    assert sorted(operations) == ["data_gradient", "forward", "forward", "weight_gradient", "weight_gradient"]
    first = recorded["convolutions"][0]
    assert (first["engine"], first["workspace_bytes"], first["layout"]) == ("eng64", 64, "nchw")
    assert first["tried_bytes"] == [64, 0, 512]


def test_what_was_recorded_is_read_back_from_json(recorded):
    version, search, answers = read_answers(json.loads(json.dumps(recorded)))
    assert (version, search) == ("9.99.0", SEARCH) and len(answers) == 5
    for signature, answer in answers.items():
        sizes = [plan.workspace_bytes for plan in answer.plans]
        assert sizes == list(Answering.plans.get(signature.operation, ()))
        assert bool(answer.problem) == (signature.operation == "weight_gradient")


@pytest.mark.parametrize(
    "change",
    [
        {"cudnn": 9}, {"search": {"heuristics": "Z"}}, {"search": None}, {"convolutions": [{}]}, {"convolutions": 5},
        {"convolutions": [{"signature": ["forward"], "problem": "x"}]},
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused(recorded, change):
    with pytest.raises(ValueError, match="no answers of cuDNN"):
        read_answers({**json.loads(json.dumps(recorded)), **change})
    with pytest.raises(ValueError, match="no answers of cuDNN"):
        read_answers([1])


def test_negative_bytes_and_missing_engines_are_refused(recorded):
    content = json.loads(json.dumps(recorded))
    content["convolutions"][0]["workspace_bytes"] = -1
    with pytest.raises(ValueError, match="no answers of cuDNN"):
        read_answers(content)
