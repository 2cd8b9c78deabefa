"""Artifacts that are not what was written: named in a line, never parsed, and the next answer is taken."""

import functools
import io
import json
import os
import shutil
from datetime import UTC, datetime

import numpy as np
import pytest

import learn.fitting.artifacts as artifact_files
from learn import FitSettings, estimate, fit
from learn.fitting.artifacts import (
    DEFAULT_MODELS,
    add_checksums,
    default_artifact,
    find_latest,
    load_latest,
    newest,
    read_json,
    save_artifact,
    verify_files,
    versions,
)
from tests.learn.learn_rows import make_configs, write_batch

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


@pytest.mark.parametrize("name", ["memory", "smact", "smocc", "fast/memory"])
def test_the_models_that_come_along_are_what_their_checksums_say(name):
    folder = DEFAULT_MODELS / name
    meta = read_json(folder / META)
    verify_files(folder, meta)  # as if it were anybody's: its structure too
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {META}
    assert set(meta["files"]) == there and meta["own_sha256"]


def flipped(content):
    """One byte in the middle becomes another."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def outside_of_themselves(content):
    """Trees that point outside of themselves."""
    with np.load(io.BytesIO(content)) as stored:
        arrays = dict(stored)
    arrays["children"][0] = len(arrays["children"])
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


MODEL, META = "model/model.npz", "meta.json"
# File -> what becomes of its content; None: it goes.
DAMAGES = {
    "byte": (MODEL, flipped),
    "cut meta": (META, lambda content: content[:300]),
    "other meta": (META, lambda content: content.replace(b"lightgbm", b"forest", 1)),
    "nested meta": (META, lambda _: b"[" * 100_000),
    "meta of another shape": (META, lambda _: b'{"estimator": "lightgbm", "rows": [], "target": 3}'),
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


def with_stamp(version, name, change):
    """The checksums are right."""
    damaged(version, name, change)
    meta = json.loads((version / META).read_text())
    (version / META).write_text(json.dumps(add_checksums(version, meta, META)))


def with_link(version):
    path = version / MODEL
    os.replace(path, version.parent.parent / "elsewhere.npz")
    path.symlink_to(version.parent.parent / "elsewhere.npz")


def with_names(version):
    meta = json.loads((version / META).read_text())
    meta["files"]["../../../../etc/passwd"] = {"sha256": "0" * 64, "bytes": 1}
    del meta["own_sha256"]
    (version / META).write_text(json.dumps(meta))


WAYS = {name: functools.partial(damaged, name=file, change=change) for name, (file, change) in DAMAGES.items()} | {
    "trees": functools.partial(with_stamp, name=MODEL, change=outside_of_themselves),
    "link": with_link,
    "names": with_names,
    "no checksums": without_checksums,
}


@pytest.mark.spread(4)
@pytest.mark.parametrize("damage", WAYS.values(), ids=WAYS)
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


class Empty:
    def save(self, folder):
        pass


def test_two_fits_that_finish_the_same_version_at_once_leave_one(tmp_path):
    now = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)

    def save(name, extras=lambda folder: None):
        return save_artifact(tmp_path, "memory", Empty(), {}, {"by": name}, now=now, extras=extras)

    path = save("the slower one", lambda _: save("the quicker one"))
    assert json.loads((path / "report.json").read_text()) == {"by": "the quicker one"}
    assert [version.name for version in path.parent.iterdir()] == [path.name]
    with pytest.raises(OSError, match="full"):
        save_artifact(tmp_path, "memory", Empty(), {"other": 1}, {}, now=now, extras=full_disk)


def full_disk(_folder):
    raise OSError(28, "full")


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


def test_what_was_verified_is_not_read_again_until_it_changes(data, monkeypatch):
    counted = []
    real = artifact_files.sha256_of
    monkeypatch.setattr(artifact_files, "sha256_of", lambda path: counted.append(path) or real(path))
    for _ in range(3):
        newest(data, "memory")
    assert len(counted) == len(set(counted))
    _, newer = both(data)
    os.utime(newer / "model" / "model.npz", ns=(1, 1))
    newest(data, "memory")
    assert len(counted) > len(set(counted))
