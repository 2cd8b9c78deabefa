"""From published rows to training jobs: the models that the rows name, without their memory."""

import importlib.util

import pytest
import torch

from conf.errors import UsageError
from featurize.recording.skeleton import build_on_meta
from featurize.training.training_step import cross_entropy
from learn.fitting.published_jobs import KNOWN_MODELS, case_of, config_of, known_workload
from warehouse.exchange.published import PublishedRow

LARGE = ("BERT_large", "xlnet_large", "gpt2_xl")


def row(**values):
    return PublishedRow(**{"file": "some", "row": 1, "status": "ok", **values})


def workload_of(published):
    return case_of(published, "A100-SXM4-40GB").job


HEADS = {
    "family": "transformer",
    "batch_size": 2,
    "vocabulary_size": 9,
    "sequence_length": 4,
    "embedding_size": 10,
    "heads": 3,
    "depth": 1,
    "feed_forward": 8,
    "classes": 2,
    "dropout": 0.1,
}


@pytest.mark.parametrize(
    ("ask", "values", "message"),
    [
        (
            config_of,
            {"status": "invalid", "reason": "file name has no known first key"},
            "some:1: file name has no known first key",
        ),
        (workload_of, {"status": "invalid", "reason": "no model name"}, "some:1: no model name"),
        (
            workload_of,
            {"model": "lenet", "batch_size": 2},
            r"unknown published model 'lenet'; known: BERT_base.*xlnet_large",
        ),
        (workload_of, {"family": "transformer", "config": HEADS}, "heads must divide"),
    ],
)
def test_rows_without_a_job_say_why(ask, values, message):
    with pytest.raises(UsageError, match=message):
        ask(row(**values))


def test_a_row_of_timm_is_a_model_that_trains_with_momentum_in_a_plain_loop():
    job = workload_of(row(model="resnet10t", group="some", batch_size=4))
    assert (job.config.model, job.training_loop, job.settings.optimizer) == ("resnet10t", True, "momentum")


@pytest.mark.spread(10)
@pytest.mark.parametrize("name", [name for name in KNOWN_MODELS if name not in LARGE])
def test_every_known_model_trains_a_step(name):
    library, kind = KNOWN_MODELS[name].args[0].partition(".")[0], KNOWN_MODELS[name].args[1]
    library = "transformers" if kind.endswith("Config") else library
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    workload = known_workload(name.upper(), 2)
    model = build_on_meta(workload.build).train()
    (inputs,), targets = workload.batch("meta")
    (workload.loss or cross_entropy)(model(inputs), targets).backward()
    assert inputs.dtype != torch.int64 or inputs.shape == (2, 512), "tokens as long as published"
