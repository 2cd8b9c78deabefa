"""`python -m learn.build_defaults`: published files in, a folder of models out, whole or not at all.

The second part is on the models of `method=fast`, which it fits as well."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conf.errors import UsageError
from featurize.families import mlp
from learn import build_defaults
from learn.build_defaults import TARGETS, WHERE
from learn.estimation.fast_estimates import BOUND, FAST_LOOPS
from learn.estimators import hybrid
from learn.estimators.protocol import get_estimator
from learn.fitting.artifacts import default_artifact
from learn.fitting.config_models import fit_config_model, labelled_rows
from learn.job.training_job import of_configs
from learn.rows.data import Rows, get_target
from learn.rows.step_store import StepRecord, StepStore
from tests.learn.learn_rows import make_configs, make_rows, write_csv
from tests.surroundings import run_command
from tests.warehouse.warehouse_rows import GPUMEMNET_HEADER as HEADER
from warehouse.exchange import dataset

ROOT = Path(__file__).resolve().parents[2]
ROWS = 36


def published(folder):
    """Files as others publish them: MLPs, each of another shape, and one image model."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(ROWS):
        batch, depth = 8 * (1 + i % 6), 1 + i % 4
        name = (
            f"input:{100 + 20 * i}_output:4_depth:{depth}_arch:pyramid_batch:{batch}_act:elu_dropout:0.25_"
            "dropout:True_batchnorm:True.out"
        )
        figures = (1500 + 600 * i, 80, 0.1 + i / 50, 0.05 + i / 100, 0.25)
        rows.append((name, depth, 1000, batch, *figures, "SUCCESSFUL"))
    write_csv(folder / "mlp.csv", HEADER, rows)
    names = ("model", "module", "batch_size", "max_gpu_memory_mib", "faketensor_peak_mib")
    write_csv(folder / "timm.csv", names, [("resnet10t", "resnet", 8, 2000, 1)])
    return folder


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_the_command_writes_a_model_a_target_and_a_card(tmp_path, monkeypatch, shown):
    """It has fewer trees and configurations than the packaged one, and lacks the project's own data set."""
    monkeypatch.setattr(build_defaults, "CASES", 60)
    monkeypatch.setattr(dataset, "repository_folder", lambda: ROOT / "nowhere")
    monkeypatch.setattr(hybrid, "_OTHERS", dataclasses.replace(hybrid._OTHERS, rounds=10))
    place = tmp_path / "a'; echo foo, [b] {c}*?"
    out = place / "first" / "models"
    argv = f"path={published(place / 'files')}", f"out={out}", f"data={place / 'data'}"
    assert shown("build_defaults", *argv).endswith(f"{out}\n")
    assert [path.name for path in out.parent.iterdir()] == ["models"], "nothing is left beside it"
    assert {path.name for path in out.iterdir()} == {*TARGETS, "MODEL_CARD.md", "fast"}
    assert {path.name for path in (out / "fast").iterdir()} == {*FAST_LOOPS, BOUND}
    for target in TARGETS:
        meta = json.loads((out / target / "meta.json").read_text())
        assert (meta["target"], meta["estimator"]) == (target, "hybrid")
        assert set(meta["rows"]["source"]) == {"imported"}
        assert meta["rows"]["family"]["mlp"] == ROWS
        config = mlp.Config(batch_size=24, input_size=300, classes=4, depth=2)
        prediction = get_estimator("hybrid").load(out / target / "model").predict(of_configs([config]))
        assert prediction.point[0] > 0 and not prediction.refusals
    card = (out / "MODEL_CARD.md").read_text()
    assert all(f"| {target} | mlp {ROWS}" in card for target in ("smact", "smocc")) and f"mlp {ROWS}, timm 1" in card
    assert "and timm models" in card and "**And on**" not in card


def test_what_is_wrong_is_said_together_and_nothing_is_written(tmp_path, refused):
    (tmp_path / "thesis.tex").write_text("years of work")
    error = refused("build_defaults", "path=/no/such/folder", f"out={tmp_path}")
    assert "path=/no/such/folder: there is no such file or folder; out=" in error
    assert "is there already; name a new folder or an empty one" in error
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_without_published_files_only_the_models_of_method_fast_are_fitted_to_the_packaged_ones(tmp_path, monkeypatch):
    def labelled(cases, steps, models, names):
        asked.append((cases, steps._data, models, names))
        return {"memory": Rows(get_target("memory"), ())}

    asked = []
    text = SimpleNamespace(save=lambda folder: (folder / "model.txt").write_text("trees"))
    monkeypatch.setattr(build_defaults, "CASES", 0)
    monkeypatch.setattr(build_defaults, "labelled_rows", labelled)
    monkeypatch.setattr(build_defaults, "fit_config_model", lambda _name, _rows, seed: (text, {"seed": seed}))
    assert run_command("build_defaults", f"out={tmp_path / 'models'}", f"data={tmp_path / 'data'}", "seed=3") == 0
    packaged = {target: default_artifact(target).estimator for target in TARGETS}
    assert asked == [((), str(tmp_path / "data"), packaged, (*FAST_LOOPS, BOUND))]
    models = contents(tmp_path)
    assert list(models) == ["models/fast/memory/meta.json", "models/fast/memory/model/model.txt"]
    assert json.loads(models["models/fast/memory/meta.json"])["seed"] == 3


def test_without_published_files_the_targets_whose_models_are_not_packaged_are_named(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(build_defaults, "default_artifact", lambda target: None if target == "smact" else object())
    error = refused("build_defaults", f"out={tmp_path / 'models'}")
    assert error == f"error: no models of smact are packaged, so path= is needed; {WHERE}\n"


KILLED = """
import os, signal, sys
from learn.build_defaults import BuildSettings, build
def dying(step, done, of):
    os.kill(os.getpid(), signal.SIGKILL)
build(BuildSettings(path=sys.argv[1], out=sys.argv[2], data=sys.argv[3]), dying)
"""


@pytest.mark.slow
def test_a_killed_build_writes_nothing_where_the_models_would_be(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            KILLED,
            str(published(tmp_path / "files")),
            str(tmp_path / "models"),
            str(tmp_path / "data"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "models").exists()


# -- the models of `method=fast`: what they are fitted to


def test_method_fast_learns_figures_of_models_and_what_they_leave_of_the_trace():
    cases, steps = of_configs(make_configs(1)), StepStore()
    values = {"job_step_time_ms": 2.0, "job_input_share": 0.5, "job_priced_drama": 0.25}
    steps.keep(cases[0], StepRecord(values=values))
    prediction = SimpleNamespace(point=np.ones(1), upper=lambda _level: np.full(1, 2.0))
    model = SimpleNamespace(predict=lambda _cases, _steps: prediction)
    labels = labelled_rows(cases, steps, dict.fromkeys(TARGETS, model), (*FAST_LOOPS, BOUND))
    assert {name: rows.label.tolist() for name, rows in labels.items()} == {
        **{target: [1.0] for target in TARGETS},
        **{BOUND: [2.0], "drama": [0.5], "step_time": [1.0]},
    }


def test_a_family_without_held_out_rows_is_refused_since_its_errors_are_unknown():
    rows = make_rows("memory", make_configs(20, families=("mlp",)), range(1000, 1020))
    with pytest.raises(UsageError, match="no rows of cnn, transformer are held out, so the errors of memory are"):
        fit_config_model("memory", rows, 0)
