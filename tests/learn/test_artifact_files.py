"""Artifacts that are not what was written: named in a line, never parsed, and the next answer is taken."""

import json
import os
import random
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from learn_rows import make_configs, write_batch

from learn import FitSettings, artifact_files, estimate, fit
from learn.artifact_files import checked, read_json
from learn.artifacts import DEFAULT_MODELS, default_artifact, find_latest, load_latest, newest, versions
from learn.learned.lightgbm_text import problem_of_text

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = make_configs(80)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A data folder with two versions of lightgbm's, the second one newer."""
    folder = tmp_path_factory.mktemp("artifacts") / "a'; echo foo"
    write_batch(folder, CONFIGS)
    for minute in (1, 2):
        settings = FitSettings(target="memory", estimator="lightgbm", data=str(folder), seed=minute)
        fit(settings, now=datetime(2026, 11, 20, 10, minute, tzinfo=UTC))
    return folder


@pytest.fixture
def data(fitted, tmp_path, monkeypatch):
    """A copy of one's own to damage; nothing is remembered of others."""
    monkeypatch.setattr(artifact_files, "_verified", {})
    monkeypatch.setattr(artifact_files, "_said", set())
    shutil.copytree(fitted, tmp_path / "b'; echo", symlinks=True)
    return tmp_path / "b'; echo"


def both(data):
    older, newer = (data / "models" / "memory" / one.version for one in versions(data, "memory"))
    return older, newer


def without_checksums(version):
    meta = json.loads((version / "meta.json").read_text())
    (version / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k not in ("files", "own_sha256")}))


def other_digit(path, seed=0):
    """One digit of a leaf's value becomes another."""
    text = path.read_text()
    at = text.index("leaf_value=", len(text) // 3) + len("leaf_value=")
    at += next(i for i, char in enumerate(text[at:]) if char in "123456")
    path.write_text(text[:at] + str(int(text[at]) + 3) + text[at + 1 :])


def test_every_file_of_a_version_is_in_its_json_with_checksum_and_size(data):
    import hashlib

    _, newer = both(data)
    meta = json.loads((newer / "meta.json").read_text())
    there = {str(path.relative_to(newer)) for path in newer.rglob("*") if path.is_file()} - {"meta.json"}
    assert set(meta["files"]) == there and {"model/model.txt", "report.json"} <= there
    for name, about in meta["files"].items():
        content = (newer / name).read_bytes()
        assert about == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    own = {key: value for key, value in meta.items() if key != "own_sha256"}
    text = json.dumps(own, sort_keys=True, separators=(",", ":"))
    assert meta["own_sha256"] == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("name", ["memory", "smact", "smocc", "fast/memory"])
def test_the_models_that_come_along_are_what_their_checksums_say(name):
    folder = DEFAULT_MODELS / name
    own = "meta.json"
    meta = read_json(folder / own)
    checked(folder, meta, own)  # as if it were anybody's: its structure too
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {own}
    assert set(meta["files"]) == there and meta["own_sha256"]


def damage_digit(version):
    other_digit(version / "model" / "model.txt")


def damage_cut(version):
    path = version / "model" / "model.txt"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_state(version):
    path = version / "model" / "estimator.json"
    path.write_text(path.read_text().replace("1", "2", 1))


def damage_meta(version):
    path = version / "meta.json"
    path.write_text(path.read_text().replace("lightgbm", "forest", 1))


def damage_cut_meta(version):
    path = version / "meta.json"
    path.write_bytes(path.read_bytes()[:300])


def damage_nested_meta(version):
    (version / "meta.json").write_text("[" * 100_000)


def damage_shape_of_meta(version):
    (version / "meta.json").write_text('{"estimator": "lightgbm", "rows": [], "target": 3}')


def damage_gone(version):
    (version / "model" / "estimator.json").unlink()


def damage_more(version):
    (version / "model" / "correction-3.txt").write_text("0.5\n")


def damage_link(version):
    path = version / "model" / "model.txt"
    os.replace(path, version.parent.parent / "elsewhere.txt")
    path.symlink_to(version.parent.parent / "elsewhere.txt")


def damage_names(version):
    meta = json.loads((version / "meta.json").read_text())
    meta["files"]["../../../../etc/passwd"] = {"sha256": "0" * 64, "bytes": 1}
    del meta["own_sha256"]
    (version / "meta.json").write_text(json.dumps(meta))


def damage_garbage(version):
    (version / "model" / "model.txt").write_bytes(b"\x00\xff" * 500)


def damage_report(version):
    path = version / "report.json"
    path.write_text(path.read_text()[:-10])


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.spread(2)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_version_is_named_in_one_line_and_the_older_one_answers(data, damage, capsys):
    older, newer = both(data)
    before = newest(data, "memory").estimator.predict
    damage(newer)
    found = newest(data, "memory")
    assert found.version == older.name and before is not None
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and newer.name in said[0] and "Traceback" not in said[0]
    find_latest(data, "memory")
    load_latest(data, "memory")
    assert len(capsys.readouterr().err.splitlines()) <= 1  # said once a process and reason


def test_without_any_whole_version_the_model_that_comes_along_answers(data, capsys):
    case = CONFIGS[0]
    assert estimate(case, data=str(data)).answered_by["memory"].startswith("lightgbm 2026")
    for version in both(data):
        damage_digit(version)
    done = estimate(case, data=str(data))
    assert done.answered_by["memory"] == "hybrid (default)"
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def test_a_damaged_model_of_the_projects_own_leaves_the_trace(data, tmp_path, monkeypatch, capsys):
    home = tmp_path / "defaults"
    shutil.copytree(DEFAULT_MODELS, home)
    monkeypatch.setattr("learn.artifacts.DEFAULT_MODELS", home)
    assert default_artifact("memory") is not None
    other_digit(home / "memory" / "model" / "correction-0.txt")
    assert default_artifact("memory") is None
    assert "memory is damaged: model/correction-0.txt" in capsys.readouterr().err
    done = estimate(CONFIGS[0], data=str(tmp_path / "none"[:0] or data.parent / "b'; echo"), estimator="trace")
    assert done.answered_by["memory"] == "trace"


def test_a_version_without_checksums_is_said_so_once_and_checked_by_its_structure(data, capsys):
    older, newer = both(data)
    without_checksums(newer)
    for _ in range(3):
        assert newest(data, "memory").version == newer.name
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "no checksum" in said[0] and newer.name in said[0]
    damage_cut(newer)
    assert newest(data, "memory").version == older.name
    assert "tree" in capsys.readouterr().err


def test_what_was_verified_is_not_read_again_until_it_changes(data, monkeypatch):
    counted = []
    real = artifact_files.sha256_of
    monkeypatch.setattr(artifact_files, "sha256_of", lambda path: counted.append(path) or real(path))
    for _ in range(3):
        newest(data, "memory")
    assert len(counted) == len(set(counted))
    _, newer = both(data)
    os.utime(newer / "model" / "model.txt", ns=(1, 1))
    newest(data, "memory")
    assert len(counted) > len(set(counted))


def texts():
    """Texts as LightGBM writes them: grown trees, categories, nothing to split."""
    import lightgbm

    rng = np.random.default_rng(0)
    table = rng.random((200, 4))
    table[:, 1] = rng.integers(0, 9, 200)
    labels = (table[:, 0] * (table[:, 1] == 3), np.ones(200), table[:, 0] + table[:, 1])
    shared = {"verbosity": -1, "min_data_in_leaf": 3, "num_leaves": 9, "min_data_per_group": 2, "seed": 1}
    return [
        lightgbm.train(shared, lightgbm.Dataset(table, label, categorical_feature=[1]), num_boost_round=9)
        .model_to_string()
        for label in labels
    ]  # fmt: skip


def test_no_cut_of_a_text_is_taken_for_whole():
    draw = random.Random(20)
    for text in texts():
        assert problem_of_text(text) is None and problem_of_text(f"-0.25\n{text}") is None
        whole = text.index("\npandas_categorical:") + len("\npandas_categorical:")
        for at in {0, 1, 5, *(draw.randrange(whole) for _ in range(300))}:
            assert problem_of_text(text[:at]) is not None, at


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("split_feature", "99", "splits on a feature"),
        ("split_feature", "-1", "splits on a feature"),
        ("split_feature", "0.5", "not a whole number"),
        ("left_child", "77", "structure is invalid|backwards"),
        ("left_child", "0", "backwards"),
        ("right_child", "-99", "the tree structure is invalid"),
        ("leaf_value", "nan", "not a number"),
        ("leaf_value", "x", "not a number"),
        ("threshold", "nan", "not a number"),
        ("decision_type", "64", "does not exist"),
    ],
)
def test_trees_that_point_outside_of_themselves_are_refused(key, value, message):
    import re

    text = texts()[2]
    line = next(line for line in text.split("\n") if line.startswith(f"{key}="))
    other = f"{key}={value}" + line[line.index(" ") :] if " " in line else f"{key}={value}"
    changed = text.replace(line, other, 1)
    sizes = re.search(r"tree_sizes=(\d+)", changed)
    size = int(sizes[1]) + len(other) - len(line)
    changed = changed.replace(sizes[0], f"tree_sizes={size}", 1)
    assert re.search(message, problem_of_text(changed))


def test_a_flipped_or_cut_text_never_ends_the_process(tmp_path):
    """What passes is loaded and asked, in a process of its own: LightGBM would take ours with it."""
    code = """
import random, sys
import numpy as np, lightgbm
from learn.learned.lightgbm_text import booster_of, problem_of_text
texts = open(sys.argv[1]).read().split("\\0")
draw, taken = random.Random(7), 0
for text in texts:
    for _ in range(250):
        at = draw.randrange(len(text))
        changed = text[:at] + chr(draw.randrange(32, 127)) + text[at + 1:] if draw.random() < 0.7 else text[:at]
        if problem_of_text(changed) is None:
            taken += 1
            try:
                booster_of(changed).predict(np.ones((3, 4)), num_threads=1)
            except (lightgbm.basic.LightGBMError, ValueError):
                pass
print("alive", taken)
"""
    path = tmp_path / "texts"
    path.write_text("\0".join(texts()))
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("alive"), done.stderr[-2000:]
