"""`python -m learn.build_defaults`: published files in, a folder of models out, whole or not at all.

The second part is on the models of `method=fast`, which it fits as well."""

import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conf.cli import command_line as cli
from featurize.configs.features import feature_columns
from featurize.families import mlp
from featurize.job.training_settings import PRECISIONS
from learn import build_defaults, estimate, estimate_many
from learn.build_defaults import TARGETS, WHERE, BuildSettings, build, entry
from learn.commands.fit import FitSettings, fit
from learn.estimation.fast_estimates import BOUND, FAST_LOOPS
from learn.estimators import hybrid
from learn.estimators.protocol import get_estimator
from learn.estimators.tabular import LightGBMEstimator
from learn.fitting.artifacts import DamagedArtifact, default_artifact
from learn.fitting.config_models import (
    DEVICES,
    FAMILIES,
    _without_input,
    drawn_cases,
    fit_config_model,
    labelled_rows,
)
from learn.job.training_job import of_configs
from learn.rows.data import Rows, get_target
from learn.rows.step_store import StepRecord, StepStore, compute
from tests.learn.learn_rows import make_configs, make_rows, write_batch, write_csv
from tests.warehouse.warehouse_rows import GPUMEMNET_HEADER as HEADER
from warehouse.exchange import dataset
from warehouse.exchange.exporting import ExportSettings, export

ROOT = Path(__file__).resolve().parents[2]
ROWS = 36


def published(folder, timm=True):
    """Files as others publish them: MLPs, each of another shape, and with `timm` one image model."""
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
    if timm:
        names = ("model", "module", "batch_size", "max_gpu_memory_mib", "faketensor_peak_mib")
        write_csv(folder / "timm.csv", names, [("resnet10t", "resnet", 8, 2000, 1)])
    return folder


def run(*argv):
    return cli.run("build_defaults", entry, list(argv))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("build") / "a'; echo foo, [b] {c}*?"


@pytest.fixture
def quick(monkeypatch):
    """A build of seconds: fewer trees and configurations, and without the project's own data set."""
    monkeypatch.setattr(build_defaults, "CASES", 60)
    monkeypatch.setattr(dataset, "repository_folder", lambda: ROOT / "nowhere")
    monkeypatch.setattr(hybrid, "_OTHERS", dataclasses.replace(hybrid._OTHERS, rounds=10))


@pytest.mark.slow
def test_the_command_writes_a_model_a_target_and_a_card_and_the_same_ones_again(place, quick, shown):
    published(place / "files")
    outs = place / "first" / "models", place / "second" / "models"
    for out in outs:
        argv = f"path={place / 'files'}", f"out={out}", f"data={place / 'data'}"
        assert shown(*argv, run=run).endswith(f"{out}\n")
        assert [path.name for path in out.parent.iterdir()] == ["models"], "nothing is left beside it"
    assert {path.name for path in outs[0].iterdir()} == {*TARGETS, "MODEL_CARD.md", "fast"}
    assert {path.name for path in (outs[0] / "fast").iterdir()} == {*FAST_LOOPS, BOUND}
    for target in TARGETS:
        meta = json.loads((outs[0] / target / "meta.json").read_text())
        assert (meta["target"], meta["estimator"]) == (target, "hybrid")
        assert set(meta["rows"]["source"]) == {"imported"}
        assert meta["rows"]["family"]["mlp"] == ROWS
        config = mlp.Config(batch_size=24, input_size=300, classes=4, depth=2)
        prediction = get_estimator("hybrid").load(outs[0] / target / "model").predict(of_configs([config]))
        assert prediction.point[0] > 0 and not prediction.refusals
    card = (outs[0] / "MODEL_CARD.md").read_text()
    assert all(f"| {target} | mlp {ROWS}" in card for target in ("smact", "smocc")) and f"mlp {ROWS}, timm 1" in card
    assert "and timm models" in card and "**And on**" not in card
    first, second = map(contents, outs)
    assert first.keys() == second.keys()
    when = {"created_at": 0, "own_sha256": 0}  # the JSON's own checksum covers when it was made
    for name, content in first.items():
        if name.endswith("meta.json"):
            assert {**json.loads(content), **when} == {**json.loads(second[name]), **when}
        else:
            assert content == second[name], name


@pytest.mark.slow
def test_runs_of_the_data_set_are_fitted_on_beside_the_published_ones_and_the_card_says_so(
    place, quick, monkeypatch, capsys
):
    files, runs, out = published(place / "mlps", timm=False), place / "measured", place / "with set"
    configs = [
        mlp.Config(batch_size=16, input_size=200 + 50 * i, classes=3, depth=2, precision=("fp32", "bf16")[i % 2])
        for i in range(12)
    ]
    write_batch(
        runs,
        configs,
        source="measured",
        device="NVIDIA H100 80GB HBM3",
        device_memory_mib=81_559.0,
        device_uuid="GPU-1",
        finished_at=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    )
    export(ExportSettings(data=str(runs), out=str(place / "set")))
    monkeypatch.setattr(dataset, "repository_folder", lambda: place / "set")
    assert run(f"path={files}", f"out={out}") == 0
    assert "the models are fitted without it" in capsys.readouterr().out
    for target in TARGETS:
        rows = json.loads((out / target / "meta.json").read_text())["rows"]
        assert rows["source"] == {"imported": ROWS, "measured": 12}
    card = (out / "MODEL_CARD.md").read_text()
    assert f"- **Rows**: imported {ROWS}, measured 12; of devices: " in card
    assert "**And on** 12 runs that the farm measured" in card and "timm" not in card.partition("## What they know")[2]


def test_what_is_wrong_is_said_together_and_nothing_is_written(tmp_path, refused):
    (tmp_path / "thesis.tex").write_text("years of work")
    error = refused("path=/no/such/folder", f"out={tmp_path}", run=run)
    assert "path=/no/such/folder: there is no such file or folder; out=" in error
    assert "is there already; name a new folder or an empty one" in error
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_a_set_of_the_project_that_cannot_be_read_stops_the_build(tmp_path, monkeypatch, capsys):
    (tmp_path / "set" / "h100").mkdir(parents=True)
    (tmp_path / "set" / "h100" / "h100-2026-01-02-runs.parquet").write_bytes(b"no parquet")
    monkeypatch.setattr(dataset, "repository_folder", lambda: tmp_path / "set")
    assert run(f"path={published(tmp_path / 'files')}", f"out={tmp_path / 'models'}") == 2
    assert "runs.parquet" in capsys.readouterr().err and not (tmp_path / "models").exists()


@pytest.mark.parametrize("name", ["5", "true", "a, [b] {c}: 'd'"])
def test_a_folder_without_the_files_is_told_where_they_are_and_may_have_any_name(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    assert run(f"path={name}", f"out=models/{name}", f"data=data/{name}") == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: path={name} holds no file of source=gpumemnet; {WHERE}"
    assert not list(Path("models").iterdir())


@dataclasses.dataclass
class Text:
    """A model that is one file."""

    content: str

    def save(self, folder):
        (folder / "model.txt").write_text(self.content)


def test_without_published_files_only_the_models_of_method_fast_are_fitted_to_the_packaged_ones(tmp_path, monkeypatch):
    def labelled(cases, steps, models, names):
        asked.append((cases, steps._data, models, names))
        return {"memory": Rows(get_target("memory"), ())}

    asked = []
    monkeypatch.setattr(build_defaults, "CASES", 0)
    monkeypatch.setattr(build_defaults, "labelled_rows", labelled)
    monkeypatch.setattr(build_defaults, "fit_config_model", lambda _name, _rows, seed: (Text("trees"), {"seed": seed}))
    assert run(f"out={tmp_path / 'models'}", f"data={tmp_path / 'data'}", "seed=3") == 0
    packaged = {target: default_artifact(target).estimator for target in TARGETS}
    assert asked == [((), str(tmp_path / "data"), packaged, (*FAST_LOOPS, BOUND))]
    models = contents(tmp_path)
    assert list(models) == ["models/fast/memory/meta.json", "models/fast/memory/model/model.txt"]
    assert json.loads(models["models/fast/memory/meta.json"])["seed"] == 3


def test_without_published_files_the_targets_whose_models_are_not_packaged_are_named(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(build_defaults, "default_artifact", lambda target: None if target == "smact" else object())
    error = refused(f"out={tmp_path / 'models'}", run=run)
    assert error == f"error: no models of smact are packaged, so path= is needed; {WHERE}\n"


def test_packaged_models_that_no_longer_load_do_not_stop_a_build_from_published_files(tmp_path, monkeypatch):
    def unreadable(target):
        raise DamagedArtifact(f"{target} cannot be loaded")

    def fitted(folder, path, *_):
        folder.mkdir()
        return {"memory": path}

    def labelled(_cases, _steps, models, _names):
        asked.append(models)
        return {}

    asked = []
    monkeypatch.setattr(build_defaults, "CASES", 0)
    monkeypatch.setattr(build_defaults, "default_artifact", unreadable)
    monkeypatch.setattr(build_defaults, "fit_published", fitted)
    monkeypatch.setattr(build_defaults, "labelled_rows", labelled)
    build(BuildSettings(path=str(tmp_path), out=str(tmp_path / "models")), print)
    assert asked == [{"memory": str(tmp_path)}]


def test_models_that_are_too_large_to_come_along_are_refused(tmp_path, monkeypatch):
    large = Text("0" * (11 * 2**20))
    monkeypatch.setattr(build_defaults, "CASES", 0)
    monkeypatch.setattr(build_defaults, "labelled_rows", lambda *_: {"memory": Rows(get_target("memory"), ())})
    monkeypatch.setattr(build_defaults, "fit_config_model", lambda *_: (large, {}))
    with pytest.raises(cli.UsageError, match=r"the models take 11\.0 MiB, more than the 10 MiB that are packaged"):
        build(BuildSettings(out=str(tmp_path / "models")), print)
    assert not list(tmp_path.iterdir())


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


CONFIG = mlp.Config(batch_size=64, input_size=300, classes=4, depth=2)


def test_drawn_cases_depend_on_the_seed_alone_and_are_of_all_families_and_gpu_models():
    cases = drawn_cases(400, seed=3)
    assert cases == drawn_cases(400, seed=3) != drawn_cases(400, seed=4)
    assert Counter(case.family for case in cases) == dict.fromkeys(FAMILIES, len(cases) // 3)
    assert {case.device for case in cases} == set(DEVICES) and all(case.training_loop for case in cases)
    assert sum(case.device == "A100-SXM4-40GB" for case in cases) == len(cases) / 2
    assert {case.config.precision for case in cases} == set(PRECISIONS)
    assert any(case.config.batch_size == 1 for case in cases), "wider than a published sweep"


def test_a_trial_s_step_time_follows_from_the_usual_loop_s_trace():
    configs = [CONFIG, *make_configs(2)]
    apart, looped = (
        [compute(case).values for case in of_configs(configs, training_loop=loop)] for loop in (False, True)
    )
    derived = _without_input(looped)
    assert derived["step_time"] == pytest.approx([values["job_step_time_ms"] for values in apart])
    assert derived["drama"] == pytest.approx([values["job_priced_drama"] for values in apart])


@dataclasses.dataclass
class Figures:
    """A model that predicts 1 for every case, and its own prediction."""

    bound: float | None

    def predict(self, cases, _steps):
        self.point = np.ones(len(cases))
        return self

    def upper(self, _level):
        return None if self.bound is None else np.full(len(self.point), self.bound)


@pytest.mark.parametrize(("targets", "bound", "missing"), [(TARGETS, None, BOUND), (TARGETS[:-1], 2.0, TARGETS[-1])])
def test_models_without_a_figure_that_method_fast_learns_are_refused(targets, bound, missing):
    cases, steps = of_configs([CONFIG]), StepStore()
    values = {"job_step_time_ms": 2.0, "job_input_share": 0.5, "job_priced_drama": 0.25}
    steps.keep(cases[0], StepRecord(values=values))
    names = (*FAST_LOOPS, BOUND)
    labels = labelled_rows(cases, steps, {target: Figures(2.0) for target in TARGETS}, names)
    assert {name: rows.label.tolist() for name, rows in labels.items()} == {
        **{target: [1.0] for target in TARGETS},
        **{BOUND: [2.0], "drama": [0.5], "step_time": [1.0]},
    }
    with pytest.raises(KeyError, match=f"^'{missing}'$"):
        labelled_rows(cases, steps, {target: Figures(bound) for target in targets}, names)


def test_a_family_without_held_out_rows_is_refused_since_its_errors_are_unknown():
    rows = make_rows("memory", make_configs(20, families=("mlp",)), range(1000, 1020))
    with pytest.raises(cli.UsageError, match="no rows of cnn, transformer are held out, so the errors of memory are"):
        fit_config_model("memory", rows, 0)


def test_trees_that_learn_multiples_of_a_rough_figure_follow_it_beyond_what_they_were_fitted_on(tmp_path):
    configs = [mlp.Config(batch_size=8 + i, input_size=64 + 16 * i, classes=10, depth=1 + i % 4) for i in range(40)]
    cases, larger = of_configs(configs), of_configs([dataclasses.replace(CONFIG, input_size=16_384)])
    plain, multiples = LightGBMEstimator(1), LightGBMEstimator(1)
    multiples.times_rough = True
    rough_mib = feature_columns(configs)["rough_memory_mib"] + cases[0].spec.context_mib
    for estimator in (plain, multiples):
        estimator.fit(make_rows("memory", configs, 1.5 * rough_mib))
    wanted = 1.5 * (feature_columns([larger[0].config])["rough_memory_mib"][0] + larger[0].spec.context_mib)
    assert plain.predict(larger).point[0] < 0.5 * wanted, "trees are flat there"
    multiples.save(tmp_path)
    for estimator in (multiples, LightGBMEstimator.load(tmp_path)):
        prediction = estimator.predict(larger)
        assert prediction.point[0] == pytest.approx(wanted, rel=0.02) and prediction.upper(0.99)[0] >= wanted
        assert prediction.bin_probabilities(np.array([0.5 * wanted, 2 * wanted])).tolist() == [[0, 1, 0]]


@pytest.mark.slow
def test_a_fit_is_one_artifact_a_target(tmp_path, monkeypatch):
    folder = tmp_path / "a'; echo foo" / "fast"
    monkeypatch.setattr(build_defaults, "CASES", 60)
    build(BuildSettings(out=str(folder.parent), data=str(tmp_path / "data"), seed=1), lambda *_: None)
    assert {path.name for path in folder.iterdir()} == {*FAST_LOOPS, BOUND}
    for name, loop in {**FAST_LOOPS, BOUND: FAST_LOOPS["memory"]}.items():
        meta = json.loads((folder / name / "meta.json").read_text())
        assert meta["loop"] == loop and set(meta["errors"]) == set(FAMILIES) and meta["rows"]["fitted"] >= 50
    monkeypatch.setattr("learn.estimation.fast_estimates.DEFAULT_MODELS", folder.parent)
    done = estimate(CONFIG, method="fast", data=tmp_path / "none")
    assert done.peak_memory_mib < done.upper_mib and done.answered_by["memory"] == "lightgbm (default)"


def test_a_model_of_ones_own_folder_answers_in_place_of_the_one_that_comes_along(tmp_path):
    data = tmp_path / "a'; echo foo"
    configs = make_configs(60, families=("mlp",))
    write_batch(data, configs)
    fitted = fit(FitSettings(target="memory", estimator="lightgbm", data=str(data)))
    first, second = estimate_many(configs[:2], method="fast", data=data)
    assert first.answered_by["memory"] == f"lightgbm {fitted.path.name}" and first.loops["memory"] == "resident"
    assert first.answered_by["smact"] == "lightgbm (default)"
    assert first.peak_memory_mib <= first.upper_mib and first.peak_memory_mib != second.peak_memory_mib
    errors = fitted.meta["metrics"]
    assert first.held_out_errors["memory"] == {
        "median": errors["median_relative_error"]["test"],
        "p90": errors["p90_relative_error"]["test"],
    }
    assert estimate(configs[0], method="fast", data=data, device="H200-SXM-141GB").answered_by["memory"] == (
        "lightgbm (default)"
    ), "another GPU model than that of the folder's rows"
