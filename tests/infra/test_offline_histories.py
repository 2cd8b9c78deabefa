"""The section of recorded histories: each is compared for its own GPU, and one that cannot be costs itself alone."""

import json
import lzma

import pytest

from featurize.device.device_spec import load_device
from featurize.trace import tracer as trace
from featurize.trace.tracer import trace_config
from infra.offline.probe_sections import comparisons_of
from tests.planted_histories import planted_history

GPU = load_device("H100-SXM5-80GB")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "probes" / "histories"
    folder.mkdir(parents=True)
    keep(folder, "good", planted_history())
    return folder


def keep(folder, name, history):
    (folder / f"{name}.json.xz").write_bytes(lzma.compress(json.dumps({**history, "name": name}).encode()))


def test_a_history_is_compared_for_the_gpu_that_it_names(folder, tmp_path):
    compared, failed = comparisons_of(tmp_path)
    assert not failed and [one.verdict for one in compared] == ["none"]


def test_a_history_that_cannot_be_compared_costs_itself_alone(folder, tmp_path, monkeypatch):
    def traced(config, **options):
        if config.batch_size == 17:
            raise trace.TraceError("the model cannot be traced: it fails", "aten::odd", "layers.3", KeyError("meta"))
        return trace_config(config, **options)

    monkeypatch.setattr(trace, "trace_config", traced)
    history = planted_history()
    keep(folder, "untraceable", {**history, "config": {**history["config"], "batch_size": 17}})
    keep(folder, "odd", {**history, "config": [1]})
    keep(folder, "cut", {**history, "trace": history["trace"][-1:]})
    compared, failed = comparisons_of(tmp_path)
    assert [one.name for one in compared] == ["good"]
    assert failed.keys() == {"untraceable.json.xz", "odd.json.xz", "cut.json.xz"}
    assert "cannot be traced" in failed["untraceable.json.xz"] and failed["cut.json.xz"].startswith("history 'cut'")


@pytest.mark.parametrize("content", ["[1]", '{"cnn": ', "3"])
def test_damaged_reasons_are_named_and_cost_no_comparison(folder, tmp_path, content):
    (folder / "failures.json").write_text(content)
    compared, failed = comparisons_of(tmp_path)
    assert len(compared) == 1 and failed.keys() == {"failures.json"}
