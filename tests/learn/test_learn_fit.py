"""`learn.fit` from Parquet files to an artifact, through the command's own entry."""

import json
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest

from featurize.configs.features import FEATURES_STAMP
from learn import FitSettings, fit
from learn.fitting.artifacts import newest, versions
from learn.rows.data import load_rows
from tests.learn.learn_rows import make_configs, write_batch
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import take_snapshot

N = 100


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learn") / "a'; echo foo"
    configs = make_configs(N - 20)
    # near-copies: other training settings of the same networks
    copies = [type(c)(**{**vars(c), "optimizer": "momentum"}) for c in configs[:20]]
    write_batch(folder, configs + copies)
    return folder


@pytest.fixture(scope="module")
def fitted(data):
    settings = FitSettings(target="memory", estimator="lightgbm", data=str(data))
    return fit(settings, now=datetime(2026, 11, 20, 10, 15, tzinfo=UTC))


def test_command_prints_the_figures_and_the_artifacts_path(data, shown):
    said = shown("fit", "target=smact", "estimator=lightgbm", f"data={json.dumps(str(data))}")
    for word in (
        "accuracy",
        "macro F1",
        "recall of",
        "99 % bound",
        "held out (n=",
        "simulated",
        "bins: medium is mlp",
    ):
        assert word in said
    assert said.splitlines()[-1].endswith(str(newest(data, "smact").path))


def test_artifact_holds_model_provenance_report_and_plots(data, fitted):
    assert str(fitted.path).startswith(f"{data / 'models' / 'memory'}/20261120T101500Z-")
    meta = json.loads((fitted.path / "meta.json").read_text())
    rows = load_rows(data, "memory")
    assert meta["target"] == "memory" and meta["estimator"] == "lightgbm" and meta["seed"] == 0
    assert meta["feature_version"] == FEATURES_STAMP and meta["data_fingerprint"] == rows.fingerprint()
    assert meta["rows"]["family"] == rows.count("family") and meta["rows"]["source"] == {"simulated": N}
    assert meta["rows"]["status"]["oom"] == meta["rows"]["censored"] > 0
    assert meta["environment"]["lightgbm"] and meta["bins"]["labels"][-1] == "32+ GB"
    assert any("out-of-memory rows count as members of the bin 32+ GB" in text for text in meta["warnings"])
    assert "macro F1" in (fitted.path / "report.html").read_text()
    report = json.loads((fitted.path / "report.json").read_text())
    assert not set(report["test_run_ids"]) & set(report["train_run_ids"])
    assert len(report["cv"]) == 3 and sum(m["n"] for m in report["cv"]) == len(report["train_run_ids"])


def test_it_learns_and_its_bound_holds(fitted):
    metrics = fitted.evaluation.test
    assert metrics["median_relative_error"] < 0.25 and metrics["coverage"] > 0.9 and metrics["accuracy"] > 0.7
    assert fitted.meta["metrics"]["accuracy"]["test"] == metrics["accuracy"]


def test_a_snapshots_rows_are_fitted_on_and_the_artifact_names_it(tmp_path, fitted, shown, refused):
    folder = DataFolder.resolve(tmp_path / "d")
    configs = make_configs(80, families=("mlp",))
    write_batch(folder, configs[:40])
    take_snapshot(folder, "night-1")
    write_batch(folder, configs[40:], job="later")
    arguments = ("target=smact", "estimator=lightgbm", f"data={json.dumps(str(folder.root))}")
    shown("fit", *arguments, "snapshot=night-1")
    meta = newest(folder, "smact").meta
    assert meta["snapshot"] == "night-1" and meta["rows"]["family"] == {"mlp": 40}
    assert meta["data_fingerprint"] == load_rows(folder, "smact", snapshot="night-1").fingerprint()
    assert len(load_rows(folder, "smact")) == 80 and fitted.meta["snapshot"] is None
    assert "night-1" in refused("fit", *arguments, "snapshot=night-2")


def test_a_fit_that_fails_leaves_nothing_behind(data, monkeypatch):
    from learn.judging import report

    monkeypatch.setattr(report, "write_report", Mock(side_effect=OSError(28, "No space left on device")))
    before = versions(data, "drama")
    with pytest.raises(OSError, match="No space"):
        fit(FitSettings(target="drama", estimator="lightgbm", data=str(data)))
    assert versions(data, "drama") == before and not list((data / "models" / "drama").glob(".*"))
