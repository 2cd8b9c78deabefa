"""Features move only with their version: golden values, artifacts of hashes, and source text that changes nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import golden_features
import pytest
from golden_features import differences, golden, same_libraries

from featurize.configs.features import FEATURES_STAMP, FEATURES_VERSION, HISTORY, is_current
from featurize.families import family_names
from featurize.timing.activity import INSTRUCTIONS_PER_ELEMENT
from learn.rows.step_store import record_version

ROOT = Path(__file__).resolve().parents[2]
STORED = golden()
CASES = STORED["cases"]
TRACED_HERE = same_libraries(STORED)  # under other releases, what needs no trace is compared alone


def test_the_golden_values_are_of_todays_version():
    assert STORED["version"] == FEATURES_VERSION, golden_features.HOW
    assert set(HISTORY) == set(range(1, FEATURES_VERSION + 1)) and all(HISTORY.values())


@pytest.mark.parametrize("name", CASES)
def test_no_feature_moves_while_the_version_stays(name):
    lines = list(differences(name, CASES[name], traced=TRACED_HERE))
    assert not lines, "\n".join([*lines, golden_features.HOW])


def test_every_family_has_a_golden_case_and_modules_have_some():
    assert {case["config"]["family"] for case in CASES.values() if "config" in case} == set(family_names())
    assert {name for name, case in CASES.items() if "config" not in case} == set(golden_features.MODULES)


@pytest.mark.skipif(not TRACED_HERE, reason="other releases")
def test_a_constant_of_kernels_that_differs_moves_golden_values(monkeypatch):
    monkeypatch.setattr("featurize.timing.activity.INSTRUCTIONS_PER_ELEMENT", 1.01 * INSTRUCTIONS_PER_ELEMENT)
    moved = list(differences("mlp", CASES["mlp"]))
    assert moved and all("mlp: step " in line for line in moved)


def test_values_that_moved_are_not_written_until_the_version_is_raised(tmp_path, monkeypatch):
    path = tmp_path / "a'; echo foo.json"
    monkeypatch.setattr(golden_features, "GOLDEN", path)
    moved = json.loads(json.dumps({**STORED, "cases": {"mlp": CASES["mlp"]}}))
    moved["cases"]["mlp"]["values"]["plan"]["layers"] += 1
    path.write_text(json.dumps(moved))
    with pytest.raises(
        SystemExit, match=r"plan layers is .*\n.*raise FEATURES_VERSION in featurize/configs/features\.py"
    ):
        golden_features.write()
    assert json.loads(path.read_text()) == moved
    path.write_text(json.dumps({**moved, "version": FEATURES_VERSION - 1}))
    golden_features.write()
    assert golden()["version"] == FEATURES_VERSION and not list(differences("mlp", golden()["cases"]["mlp"]))


def test_only_todays_version_is_current():
    assert is_current(FEATURES_STAMP)
    assert not any(map(is_current, ("0ld", "1", "", FEATURES_VERSION, None)))


def test_a_space_in_every_docstring_of_featurize_changes_no_version(tmp_path):
    code = tmp_path / "a'; echo foo"
    for package in ("conf", "featurize", "learn", "warehouse"):
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    for path in (code / "featurize").rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8").replace('"""', '""" ', 1), encoding="utf-8")
    program = (
        "import featurize\n"
        "from featurize.configs.features import FEATURES_STAMP\n"
        "from learn.fitting.artifacts import DEFAULT_MODELS, open_artifact, require_current\n"
        "from learn.rows.step_store import record_version\n"
        "require_current(open_artifact(DEFAULT_MODELS / 'memory'))\n"
        "print(featurize.__file__, FEATURES_STAMP, record_version(), sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(code)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(code / "featurize" / "__init__.py"), FEATURES_STAMP, record_version()]
