"""Files beside an estimate: a memory snapshot that PyTorch's viewer opens, from Python and from the command line."""

import pickle

import pytest
from torch import nn
from torch.cuda import _memory_viz

from conf.errors import UsageError
from featurize.families import mlp
from learn import estimate, estimate_many


def net():
    return nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8))


def reserved_bytes(path):
    snapshot = pickle.loads(path.read_bytes())
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    return sum(segment["total_size"] for segment in snapshot["segments"])


def test_a_snapshot_and_a_report_are_of_the_same_step(tmp_path):
    page, snapshot = tmp_path / "a'; echo.html", tmp_path / "a'; echo.pickle"
    done = estimate(net, [32, 64], report=page, snapshot=snapshot, estimator="trace")
    assert reserved_bytes(snapshot) == round(done.reserved_mib * 2**20)
    assert page.read_text().startswith("<!doctype html>")


def test_the_command_writes_the_snapshot_and_names_it(tmp_path, shown):
    path = tmp_path / "snapshot.pickle"
    argv = ["model=torch.nn:Linear", "arguments={in_features: 64, out_features: 8}", "input=[32,64]"]
    assert f"snapshot: {path}" in shown(*argv, "trust=[torch]", f"snapshot={path}")
    assert reserved_bytes(path) > 0


def test_a_snapshot_is_of_one_traced_job(tmp_path):
    with pytest.raises(UsageError, match=r"snapshot=.* is a folder; name a file, as in snapshot=snapshot\.pickle"):
        estimate(net, [32, 64], snapshot=tmp_path)
    with pytest.raises(UsageError, match="snapshot: of one estimate only"):
        estimate_many([mlp.Config(batch_size=32, input_size=64, classes=8, depth=2)], snapshot=tmp_path / "a.pickle")
