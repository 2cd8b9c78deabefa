"""Features move only with their version: golden values, artifacts of hashes, and source text that changes nothing."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import golden_features
import pytest
from golden_features import differences, golden, same_libraries, values_of

from conf.errors import EnvironmentProblem
from featurize import kernel_constants
from featurize.families import family_names
from featurize.version import FEATURES_STAMP, FEATURES_VERSION, HISTORY, is_current
from learn.artifact_files import stamped
from learn.artifacts import DEFAULT_MODELS, StaleArtifact, open_artifact, require_current
from learn.fastpath.fast import FastPath
from learn.step_record import record_version

ROOT = Path(__file__).resolve().parents[2]
STORED = golden()
CASES = STORED["cases"]
# Of the fast path's sketch over the traced step: step time, memory.
RATIOS = {
    "cnn": (0.508, 1.0),
    "mlp": (0.295, 0.985),
    "transformer": (0.238, 0.972),
    "cnn_long": (0.971, 1.0),
    "mlp_momentum": (0.221, 0.909),
    "transformer_adam": (0.2, 0.88),
}
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


@pytest.mark.parametrize(
    ("constant", "kind"),
    [
        pytest.param(
            "featurize.kernel_model.power.INSTRUCTIONS_PER_ELEMENT", "step",
            marks=pytest.mark.skipif(not TRACED_HERE, reason="other releases"),
        ),
        ("learn.fastpath.fast_features.KERNEL_GAP_US", "fast"),
    ],
)  # fmt: skip
def test_a_constant_of_kernels_that_differs_in_one_place_moves_golden_values(constant, kind, monkeypatch):
    monkeypatch.setattr(constant, 1.01 * getattr(kernel_constants, constant.rpartition(".")[2]))
    moved = list(differences("mlp", CASES["mlp"], traced=TRACED_HERE))
    assert moved and all(f"mlp: {kind} " in line for line in moved)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "fast" in case["values"]])
def test_the_fast_path_s_sketch_keeps_its_ratio_to_the_traced_step(name):
    """What the fast path starts from is a sketch: the same tensors, in times that it learns to correct."""
    case = CASES[name]
    sketch, traced = values_of(name, case, traced=False)["fast"], case["values"]["step"]
    time_ratio = sketch["base_step_time_00"] / (traced["job_step_time_ms"] * (1 - traced.get("job_input_share", 0.0)))
    memory_ratio = sketch["base_memory_00"] / traced["job_memory_mib"]
    assert (round(time_ratio, 3), round(memory_ratio, 3)) == RATIOS[name]


def test_every_constant_of_kernels_has_one_home():
    """Nobody else gives a name of `featurize.kernel_constants` a value, and it is read without torch."""
    names = {name for name in vars(kernel_constants) if name.isupper()}
    assert "KERNEL_GAP_US" in names and len(names) > 15
    for path in [*ROOT.glob("featurize/**/*.py"), *ROOT.glob("learn/**/*.py")]:
        if path.name == "kernel_constants.py":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            assigned = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            assert not names & assigned, f"{path} gives {names & assigned} a value of its own"


def test_values_that_moved_are_not_written_until_the_version_is_raised(tmp_path, monkeypatch):
    path = tmp_path / "a'; echo foo.json"
    monkeypatch.setattr(golden_features, "GOLDEN", path)
    moved = json.loads(json.dumps({**STORED, "cases": {"mlp": CASES["mlp"]}}))
    moved["cases"]["mlp"]["values"]["plan"]["layers"] += 1
    path.write_text(json.dumps(moved))
    with pytest.raises(SystemExit, match=r"plan layers is .*\n.*raise FEATURES_VERSION in featurize/version\.py"):
        golden_features.write()
    assert json.loads(path.read_text()) == moved
    path.write_text(json.dumps({**moved, "version": FEATURES_VERSION - 1}))
    golden_features.write()
    assert golden()["version"] == FEATURES_VERSION and not list(differences("mlp", golden()["cases"]["mlp"]))


def test_only_todays_version_is_current():
    assert is_current(FEATURES_STAMP)
    assert not any(map(is_current, ("0ld", "1", "", FEATURES_VERSION, None)))


def test_artifacts_of_an_older_version_are_refused(tmp_path):
    models = tmp_path / "a'; echo foo"
    shutil.copytree(DEFAULT_MODELS, models)

    def carry(folder: str, name: str, **stamps: str) -> None:
        path = models / folder / name
        path.write_text(json.dumps(stamped(models / folder, {**json.loads(path.read_text()), **stamps}, name)))

    carry("memory", "meta.json", feature_version="1")
    carry("fast", "fast.json", features="1")
    with pytest.raises(
        StaleArtifact, match=f"features 1, and this code computes features {FEATURES_STAMP}; fit it again"
    ):
        require_current(open_artifact(models / "memory"))
    with pytest.raises(EnvironmentProblem, match="distil it again"):
        FastPath.load(models / "fast")


def test_a_space_in_every_docstring_of_featurize_changes_no_version(tmp_path):
    code = tmp_path / "a'; echo foo"
    for package in ("conf", "featurize", "learn", "warehouse"):
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    for path in (code / "featurize").rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8").replace('"""', '""" ', 1), encoding="utf-8")
    program = (
        "import featurize, learn.fastpath.fast as fast\n"
        "from featurize.version import FEATURES_STAMP\n"
        "from learn.artifacts import DEFAULT_MODELS, open_artifact, require_current\n"
        "from learn.step_record import record_version\n"
        "fast.FastPath.load(DEFAULT_MODELS / 'fast'), require_current(open_artifact(DEFAULT_MODELS / 'memory'))\n"
        "print(featurize.__file__, FEATURES_STAMP, record_version(), sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(code)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(code / "featurize" / "__init__.py"), FEATURES_STAMP, record_version()]
