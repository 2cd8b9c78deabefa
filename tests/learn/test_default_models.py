"""The models that come with the project: whole, small, safe to load, of this code's features, true to their card."""

import json

import numpy as np
import pytest

from featurize.configs.features import FEATURES_STAMP
from featurize.families import cnn, mlp, transformer
from learn import estimate
from learn.build_defaults import LIMIT_MIB, TARGETS
from learn.estimation.fast_estimates import BOUND, FAST_LOOPS
from learn.fitting.artifacts import DEFAULT_MODELS, default_artifact, open_artifact
from learn.fitting.config_models import DEVICES
from learn.job.training_job import of_configs
from learn.rows.data import TARGETS as KNOWN_TARGETS

A100 = "A100-SXM4-40GB"
FILES = sorted(path for path in DEFAULT_MODELS.rglob("*") if path.is_file())
CARD = (DEFAULT_MODELS / "MODEL_CARD.md").read_text()
CONFIGS = (
    mlp.Config(batch_size=64, input_size=1000, classes=10, depth=3),
    cnn.Config(batch_size=16, image_size=64, channels=3, classes=10, base_filters=32, depth=6, softmax=True),
    transformer.Config(
        batch_size=16,
        vocabulary_size=60_000,
        sequence_length=128,
        embedding_size=256,
        heads=4,
        depth=3,
        feed_forward=512,
        classes=500,
    ),
)
METRICS = {  # as the card calls them
    "accuracy": "accuracy",
    "macro F1": "macro_f1",
    "median relative error": "median_relative_error",
    "share of underestimates": "underestimates",
    "labels under the 99 % bound": "coverage",
}


@pytest.fixture(autouse=True)
def no_models_of_ones_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GPUFARM_DATA", str(tmp_path_factory.getbasetemp() / "none"))


def test_there_is_a_model_for_each_target_that_was_measured_those_of_method_fast_and_nothing_else():
    assert {path.name for path in DEFAULT_MODELS.iterdir()} == {*TARGETS, "fast", "MODEL_CARD.md"}
    for target in KNOWN_TARGETS:
        assert (default_artifact(target) is not None) == (target in TARGETS)
    assert sum(path.stat().st_size for path in FILES) < min(LIMIT_MIB, 10.0) * 2**20, "all of it is small"


@pytest.mark.parametrize("target", TARGETS)
def test_a_model_loads_and_answers_every_family_that_it_was_fitted_on(target):
    artifact = default_artifact(target)
    fitted_on = artifact.meta["rows"]["family"]
    prediction = artifact.estimator.predict(of_configs([c for c in CONFIGS if c.family in fitted_on]))
    assert not prediction.refusals and np.isfinite(prediction.point).all() and (prediction.point > 0).all()
    assert (prediction.upper(0.99) > prediction.point).all()
    assert artifact.meta["target"] == artifact.estimator.target.name == target
    assert set(artifact.meta["rows"]["source"]) == {"imported"}
    assert artifact.meta["feature_version"] == FEATURES_STAMP, (
        "features have another version: python -m learn.build_defaults fits the models anew"
    )


@pytest.mark.parametrize("name", [*FAST_LOOPS, BOUND])
def test_a_model_of_method_fast_is_whole_small_and_says_how_far_it_is_off(name):
    artifact = open_artifact(DEFAULT_MODELS / "fast" / name).require()
    assert set(artifact.meta["rows"]["family"]) == {config.family for config in CONFIGS} == set(artifact.meta["errors"])
    assert set(artifact.meta["rows"]["device"]) == set(DEVICES)
    point = artifact.estimator.predict(of_configs(CONFIGS)).point
    assert np.isfinite(point).all() and (point > 0).all()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEFAULT_MODELS)))
def test_nothing_in_it_is_a_pickle(path):
    content = path.read_bytes()
    assert content[:2] not in [bytes([0x80, protocol]) for protocol in range(2, 6)]
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:  # raises for a member that is one
            assert arrays.files and not any(np.isnan(arrays[name]).any() for name in arrays.files)
    else:
        assert path.suffix in (".json", ".txt", ".md")
        text = content.decode()
        if path.suffix == ".json":
            json.loads(text)


@pytest.mark.parametrize("target", TARGETS)
def test_the_card_has_each_targets_rows_and_held_out_figures(target):
    meta = default_artifact(target).meta
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in CARD.splitlines() if line[:1] == "|"]
    (rows,) = [cells for cells in lines if cells[0] == target]
    for family, n in meta["rows"]["family"].items():
        assert f"{family} {n:,}" in rows[1]
    assert rows[2] == f"{meta['rows']['censored']:,}"
    (header,) = [cells for cells in lines if cells[0] == "" and target in cells]
    for name, metric in METRICS.items():
        (cells,) = [cells for cells in lines if cells[0] == name]
        found = meta["metrics"][metric]
        assert cells[header.index(target)] == f"{found['test']:.1%} ({found['cv_mean']:.1%})"
    assert f"version `{meta['feature_version']}`" in CARD and f"`{meta['estimator']}`" in CARD


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
def test_a_gpu_never_measured_has_a_warning_the_traces_figure_and_a_bound_by_causes(config):
    here = estimate(config, machine="described")
    assert here.answered_by["memory"] == "hybrid (default)"
    assert not any("nothing was measured on" in text for text in here.warnings)
    for device in DEVICES:
        if device == A100:
            continue
        there = estimate(config, device=device, machine="described")
        assert there.answered_by["memory"] == "hybrid (default)"
        (said,) = [text for text in there.warnings if f"nothing was measured on {device}, only on" in text]
        assert "memory" in said.partition(":")[0]
        assert there.peak_memory_mib == pytest.approx(there.card_mib, rel=0.03)  # of a plain loop
        above_mib = there.upper_mib - there.peak_memory_mib
        assert 0 < above_mib <= sum(there.uncertain.values()) + 1e-6 and "context and libraries" in there.uncertain


def test_a_packaged_model_may_be_a_link_to_where_it_is_installed(tmp_path):
    (tmp_path / "memory").symlink_to(DEFAULT_MODELS / "memory")
    assert open_artifact(tmp_path / "memory").meta["target"] == "memory"
