"""Artifacts that are not what was written: named in a line, never parsed, and the next answer is taken."""

import functools
import json
import os
import shutil
from datetime import UTC, datetime

import numpy as np
import pytest

import learn.fitting.artifacts as artifact_files
from conf.files.identity import OWN_SHA256, own_sha256
from featurize.configs.features import FEATURES_STAMP
from featurize.families import cnn, mlp, transformer
from learn import FitSettings, estimate, fit
from learn.build_defaults import TARGETS
from learn.fitting.artifacts import (
    DEFAULT_MODELS,
    default_artifact,
    newest,
    versions,
)
from learn.job.training_job import of_configs
from learn.judging.report import model_card
from learn.rows.data import TARGETS as KNOWN_TARGETS
from tests.learn.learn_rows import make_configs, restamp, write_batch

pytestmark = [pytest.mark.shares_traces, pytest.mark.usefixtures("no_models_of_ones_own")]

CONFIGS = make_configs(80)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A data folder with two versions of lightgbm's, the second one newer."""
    folder = tmp_path_factory.mktemp("artifacts") / "a'; echo foo"
    write_batch(folder, CONFIGS)
    settings = FitSettings(target="memory", estimator="lightgbm", data=str(folder))
    older = fit(settings, now=datetime(2026, 11, 20, 10, 1, tzinfo=UTC)).path
    shutil.copytree(older, older.with_name(older.name.replace("T1001", "T1002")))
    return folder


@pytest.fixture
def data(fitted, tmp_path, monkeypatch):
    """A copy of one's own to damage; nothing is remembered of others."""
    monkeypatch.setattr(artifact_files, "_verified", {})
    monkeypatch.setattr(artifact_files, "_reported", set())
    monkeypatch.setattr(artifact_files, "MOST_UNPACKED_BYTES", 2**25)
    shutil.copytree(fitted, tmp_path / "b'; echo", symlinks=True)
    return tmp_path / "b'; echo"


def both(data):
    older, newer = (data / "models" / "memory" / one.version for one in versions(data, "memory"))
    return older, newer


def flipped(content):
    """One byte in the middle becomes another."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def stamped(meta):
    """Return the file of this content, with its own checksum."""
    return json.dumps(meta | {OWN_SHA256: own_sha256(meta)}).encode()


def naming_another_file(content):
    meta = json.loads(content)
    meta["files"]["../../../../etc/passwd"] = {"sha256": "0" * 64, "bytes": 1}
    return stamped(meta)


def without_own_checksum(content):
    return json.dumps({key: value for key, value in json.loads(content).items() if key != OWN_SHA256}).encode()


MODEL, META = "model/model.npz", "meta.json"
# File -> what becomes of its content; None: it goes.
DAMAGES = {
    "byte": (MODEL, flipped),
    "cut meta": (META, lambda content: content[:300]),
    "other meta": (META, lambda content: content.replace(b"lightgbm", b"forest", 1)),
    "nested meta": (META, lambda _: b"[" * 100_000),
    "meta of another shape": (META, lambda _: b'{"estimator": "lightgbm", "rows": [], "target": 3}'),
    "no checksums": (META, lambda content: stamped(json.loads(content) | {"files": None})),
    "names": (META, naming_another_file),
    "no own checksum": (META, without_own_checksum),
    "gone": ("model/estimator.json", None),
    "more": ("model/correction-3.txt", lambda _: b"0.5\n"),
    "cut report": ("report.json", lambda content: content[:-10]),
}


def damaged(version, name, change):
    path = version / name
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes() if path.exists() else b""))


def with_link(version):
    path = version / MODEL
    os.replace(path, version.parent.parent / "elsewhere.npz")
    path.symlink_to(version.parent.parent / "elsewhere.npz")


# What becomes of arrays of the model; the checksums are right.
TREES = {
    "endless trees": lambda arrays: {"children": np.vstack([[[1, 1], [0, 0]], arrays["children"][2:]])},
    "trees outside of themselves": lambda arrays: {"children": arrays["children"] + len(arrays["children"])},
    "more than it seems": lambda _: {"threshold": np.zeros(2**23)},  # a few kilobytes unpack to many
}


def with_trees(version, change):
    with np.load(version / MODEL) as stored:
        arrays = dict(stored)
    np.savez_compressed(version / MODEL, **arrays | change(arrays))
    restamp(version)


WAYS = {
    **{name: functools.partial(damaged, name=file, change=change) for name, (file, change) in DAMAGES.items()},
    **{name: functools.partial(with_trees, change=change) for name, change in TREES.items()},
    "link": with_link,
}


@pytest.mark.spread(4)
@pytest.mark.parametrize("damage", WAYS.values(), ids=WAYS)
def test_a_damaged_version_is_named_in_one_line_and_the_older_one_answers(data, damage, capsys):
    older, newer = both(data)
    before = newest(data, "memory", stale=True).estimator.predict
    damage(newer)
    found = newest(data, "memory", stale=True)
    assert found.version == older.name and before is not None
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and newer.name in said[0] and "Traceback" not in said[0]
    newest(data, "memory")
    assert len(capsys.readouterr().err.splitlines()) <= 1  # said once a process and reason


def test_without_any_whole_version_the_model_that_comes_along_answers(data, capsys):
    case = CONFIGS[0]
    assert estimate(case, data=str(data)).answered_by["memory"].startswith("lightgbm 2026")
    for version in both(data):
        damaged(version, MODEL, flipped)
    done = estimate(case, data=str(data))
    assert done.answered_by["memory"] == "hybrid (default)"
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def test_a_damaged_model_of_the_projects_own_leaves_the_trace(data, tmp_path, monkeypatch, capsys):
    home = tmp_path / "defaults"
    shutil.copytree(DEFAULT_MODELS, home)
    monkeypatch.setattr("learn.fitting.artifacts.DEFAULT_MODELS", home)
    damaged(home, "memory/model/correction.npz", flipped)
    assert default_artifact("memory") is None
    assert "memory is damaged: model/correction" in capsys.readouterr().err
    assert estimate(CONFIGS[0], data=str(data), estimator="trace").answered_by["memory"] == "trace"


# -- the models that come with the project


FILES = sorted(path for path in DEFAULT_MODELS.rglob("*") if path.is_file())
CARD = (DEFAULT_MODELS / "MODEL_CARD.md").read_text()
NETWORKS = (
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


def test_there_is_a_model_for_each_target_that_was_measured_those_of_method_fast_and_nothing_else():
    assert {path.name for path in DEFAULT_MODELS.iterdir()} == {*TARGETS, "fast", "MODEL_CARD.md"}
    for target in KNOWN_TARGETS:
        assert (default_artifact(target) is not None) == (target in TARGETS)
    assert sum(path.stat().st_size for path in FILES) < 10.0 * 2**20, "all of it is small"


@pytest.mark.parametrize("target", TARGETS)
def test_a_model_loads_and_answers_every_family_that_it_was_fitted_on(target):
    artifact = default_artifact(target)
    fitted_on = artifact.meta["rows"]["family"]
    prediction = artifact.estimator.predict(of_configs([c for c in NETWORKS if c.family in fitted_on]))
    assert not prediction.refusals and np.isfinite(prediction.point).all() and (prediction.point > 0).all()
    assert (prediction.upper(0.99) > prediction.point).all()
    assert artifact.meta["target"] == artifact.estimator.target.name == target
    assert set(artifact.meta["rows"]["source"]) == {"imported"}
    assert artifact.meta["feature_version"] == FEATURES_STAMP, (
        "features have another version: python -m learn.build_defaults fits the models anew"
    )


def test_the_card_has_each_targets_rows_and_held_out_figures():
    metas = {target: default_artifact(target).meta for target in TARGETS}
    assert model_card(metas, CARD) == CARD
    assert len(metas) == 3 and all(f"| {target} | cnn " in CARD for target in metas)
