"""The section of recorded histories: each is compared for its own GPU, and one that cannot be costs itself alone."""

from types import SimpleNamespace

import pytest

from featurize.device.device_spec import load_device
from featurize.trace import tracer as trace
from featurize.trace.tracer import trace_config
from infra.offline.probe_sections import comparisons_of, histories
from tests.infra.lent_results import plant
from tests.planted_histories import planted_history

GPU = load_device("H100-SXM5-80GB")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "probes" / "histories"
    folder.mkdir(parents=True)
    keep(folder, "good", planted_history())
    return folder


def keep(folder, name, history):
    plant(folder, name, [history])


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
    assert failed.keys() == {"untraceable", "odd", "cut"}
    assert "cannot be traced" in failed["untraceable"] and failed["cut"].startswith("history 'cut'")


def test_a_job_without_a_history_and_a_damaged_file_have_their_reasons_and_cost_no_comparison(folder, tmp_path):
    plant(folder, "out", [], "CUDA out of memory")
    plant(folder, "former", [{"trace": []}])
    (folder / "torn.json.xz").write_bytes(b"no xz")
    compared, failed = comparisons_of(tmp_path)
    assert len(compared) == 1 and failed["out"] == "CUDA out of memory"
    assert failed["former"].startswith("history former is incomplete: missing config, conf")
    assert failed["torn"].startswith("torn.json.xz cannot be read")


def test_a_recording_that_was_cut_off_is_compared_and_says_why(tmp_path):
    plant(tmp_path / "probes" / "histories", "short", [planted_history()], cut_off="it took more than 60 s")
    compared, failed = comparisons_of(tmp_path)
    assert not failed and [one.cut_off for one in compared] == ["it took more than 60 s"]
    assert "Recorded in part: it took more than 60 s." in str([*histories(SimpleNamespace(work=tmp_path))])
