"""`python -m learn.build_defaults`: a folder of published files in, a folder of models out, whole or not at all."""

import contextlib
import csv
import dataclasses
import datetime
import errno
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from learn_rows import write_runs

from conf import cli
from conf.errors import UsageError
from featurize.families import mlp
from learn import build_defaults
from learn.artifacts import DEFAULT_MODELS
from learn.build_defaults import (
    TARGETS,
    WHERE,
    BuildSettings,
    build,
    entry,
    ingest_published,
    published_sources,
)
from learn.cases import of_configs
from learn.estimators import get_estimator
from learn.learned import hybrid
from learn.model_card import write_card
from warehouse import connect, dataset
from warehouse.export import ExportSettings, export

ROOT = Path(__file__).resolve().parents[2]
HEADER = ("Filename", "Depth", "Total Parameters", "Batch Size", "Max GPU Memory (MiB)", "Avg GPUTL", "Avg SMACT",
          "Avg SMOCC", "Avg DRAMA", "Status")  # fmt: skip
TIMM = ("model", "module", "batch_size", "max_gpu_memory_mib", "faketensor_peak_mib")
ROWS = 36
CONFIG = mlp.Config(batch_size=24, input_size=300, classes=4, depth=2)


def published(folder, timm=True):
    """Files as others publish them: MLPs, each of another shape, and with `timm` one image model."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "mlp.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(HEADER)
        for i in range(ROWS):
            batch, depth = 8 * (1 + i % 6), 1 + i % 4
            name = (
                f"input:{100 + 20 * i}_output:4_depth:{depth}_arch:pyramid_batch:{batch}_act:elu_dropout:0.25_"
                "dropout:True_batchnorm:True.out"
            )
            figures = (1500 + 600 * i, 80, 0.1 + i / 50, 0.05 + i / 100, 0.25)
            rows.writerow((name, depth, 1000, batch, *figures, "SUCCESSFUL"))
    if timm:
        with open(folder / "timm.csv", "w", newline="") as file:
            csv.writer(file).writerows([TIMM, ("resnet10t", "resnet", 8, 2000, 1)])
    return folder


def small(patched):
    """A build of seconds: fewer trees, without the project's own data set."""
    patched.setattr(dataset, "repository_folder", lambda: ROOT / "nowhere")
    patched.setattr(hybrid, "_OTHERS", dataclasses.replace(hybrid._OTHERS, rounds=10))


def run(*argv):
    return cli.run("build_defaults", entry, list(argv))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def old_models(folder):
    (folder / "memory").mkdir(parents=True)
    (folder / "memory" / "meta.json").write_text("{}")
    (folder / "MODEL_CARD.md").write_text("# Model card: of before")
    return contents(folder)


def nobody(_step, _done, _of):
    pass


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("build") / "a'; echo foo, [b] {c}*?"


@pytest.fixture(scope="module")
def built(place):
    """The folder that the command wrote, and what it printed."""
    published(place / "files")
    out = place / "out" / "models"
    argv = [f"path={place / 'files'}", f"out={out}", f"data={place / 'data'}", "workers=0"]
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()) as said:
        small(patched)
        assert run(*argv) == 0
    return out, said.getvalue()


@pytest.mark.slow
def test_the_command_writes_a_model_a_target_and_a_card(built):
    out, said = built
    assert said == f"{out}\n"
    assert {path.name for path in out.iterdir()} == {*TARGETS, "MODEL_CARD.md"}
    assert [path.name for path in out.parent.iterdir()] == ["models"], "nothing is left beside it"
    assert out.stat().st_mode & 0o777 == 0o755, "others may read it"
    for target in TARGETS:
        meta = json.loads((out / target / "meta.json").read_text())
        assert (meta["target"], meta["estimator"]) == (target, "hybrid")
        assert set(meta["rows"]["source"]) == {"imported"}
        assert meta["rows"]["family"]["mlp"] == ROWS
        prediction = get_estimator("hybrid").load(out / target / "model").predict(of_configs([CONFIG]))
        assert prediction.point[0] > 0 and not prediction.refusals
    card = (out / "MODEL_CARD.md").read_text()
    assert all(f"| {target} | mlp {ROWS}" in card for target in ("smact", "smocc")) and f"mlp {ROWS}, timm 1" in card


@pytest.mark.slow
def test_the_same_build_gives_the_same_models_and_takes_the_place_of_older_ones(built, place, monkeypatch):
    small(monkeypatch)
    again = place / "again" / "models"
    old_models(again)
    steps = []
    settings = BuildSettings(path=str(place / "files"), out=str(again), data=str(place / "data"), workers=0)
    assert build(settings, progress=lambda step, _done, _of: steps.append(step)) == again
    assert not any("tracing" in step for step in steps), "features are kept in data="
    first, second = contents(built[0]), contents(again)
    assert first.keys() == second.keys(), "nothing of the older ones is left"
    assert [path.name for path in again.parent.iterdir()] == ["models"]
    for name, content in first.items():
        if name.endswith("meta.json"):
            one, two = json.loads(content), json.loads(second[name])
            when = {"created_at": 0, "own_sha256": 0}  # the JSON's own checksum covers when it was made
            assert {**one, **when} == {**two, **when}
        else:
            assert content == second[name], name


def test_what_is_wrong_is_said_together_and_nothing_is_written(tmp_path, capsys):
    argv = ["path=/no/such/folder", "seed=-1", "workers=half", f"out={tmp_path / 'new' / 'models'}"]
    assert run(*argv) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    for said in (
        "seed must be an integer >= 0, got -1",
        "workers must be an integer >= 0, got 'half'",
        "path=/no/such/folder: there is no such file or folder",
    ):
        assert said in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("distil=5", "unknown key 'distil'"),
        ("seed=null", "seed must be an integer >= 0, got None"),
        ("workers=-1", "workers must be an integer >= 0, got -1"),
        ("sead=1", "unknown key 'sead'; did you mean seed?"),
        ("path=null", "path must be a path, got None"),
        ("path=", "path must be a path, got ''"),
        ("out=", "out must be a path, got ''"),
        ("path=a, [b] 'c'", "path=a, [b] 'c': there is no such file or folder"),
        ("path=5", "path=5: there is no such file or folder"),
    ],
)
def test_a_bad_value_is_named(tmp_path, capsys, argument, said):
    assert run(f"path={tmp_path}", argument) == 2
    assert said in capsys.readouterr().err


def test_where_the_files_are_has_to_be_said(capsys):
    assert run() == 2
    assert "missing path=... (folder of published measurements" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["5", "true", "a, [b] {c}: 'd'"])
def test_a_folder_may_have_any_name(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    assert run(f"path={name}", f"out=models/{name}", f"data=data/{name}") == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: path={name} holds no file of source=gpumemnet; {WHERE}"
    assert not Path("models").exists(), "nor the folders above it"


def test_a_folder_that_holds_anything_but_models_is_refused_up_front(tmp_path, monkeypatch):
    monkeypatch.setattr(build_defaults, "_fit_all", lambda *_: pytest.fail("nothing is to be done"))
    home = tmp_path / "home"
    (home / "notes").mkdir(parents=True)
    (home / "thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to(home)
    for out, said in (
        (home, "home holds other files than models .no MODEL_CARD.md.; name a folder that is new, empty or of models"),
        (tmp_path / "link", "home holds other files than models"),
        (home / "thesis.tex", "thesis.tex is a file; name a folder"),
        (home / "thesis.tex" / "models", "thesis.tex is a file; name a folder"),
        ("/", "out=/ is a mount point"),
    ):
        with pytest.raises(UsageError, match=said):
            build(BuildSettings(path=str(tmp_path), out=str(out)), progress=nobody)
    assert contents(tmp_path) == {"home/thesis.tex": b"years of work"}


@pytest.mark.parametrize("key", ["path", "data"])
def test_what_the_build_reads_or_keeps_may_not_lie_in_the_folder_that_it_replaces(tmp_path, key):
    home = tmp_path / "models"
    old_models(home)
    settings = {"path": str(tmp_path), "out": str(home), key: str(home / "memory")}
    with pytest.raises(UsageError, match=rf"{key}=.*memory is inside .*models, which is written anew"):
        BuildSettings(**settings)


def one_file(_settings, _data, folder, _progress):
    (folder / "MODEL_CARD.md").write_text("# Model card: new")


def replace_failing(monkeypatch, code, which):
    """`os.replace` fails with `code` where `which(source, destination)`; the moves that were tried."""
    tried, replace = [], os.replace

    def failing(source, destination):
        tried.append((Path(source), Path(destination)))
        if which(*tried[-1]):
            raise OSError(code, os.strerror(code))
        replace(source, destination)

    monkeypatch.setattr(build_defaults.os, "replace", failing)
    return tried


def test_an_empty_folder_and_the_target_of_a_link_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(build_defaults, "_fit_all", one_file)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for _ in range(2):
        settings = BuildSettings(path=str(tmp_path), out=str(tmp_path / "link"))
        assert build(settings, progress=nobody) == tmp_path / "link"
        assert (tmp_path / "link").is_symlink() and contents(tmp_path / "empty").keys() == {"MODEL_CARD.md"}
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "link"}


def test_the_older_models_come_back_where_the_new_cannot_take_their_place(tmp_path, monkeypatch):
    monkeypatch.setattr(build_defaults, "_fit_all", one_file)
    home = tmp_path / "models"
    before = old_models(home)
    tried = replace_failing(monkeypatch, errno.ENOSPC, lambda source, _to: "-build-" in source.name)
    with pytest.raises(OSError, match="No space"):
        build(BuildSettings(path=str(tmp_path), out=str(home)), progress=nobody)
    (_, aside), new, back = tried
    assert new[1] == home and back == (aside, home)
    assert contents(home) == before and list(tmp_path.iterdir()) == [home]


def test_models_that_lie_in_a_containers_image_are_replaced_too(tmp_path, monkeypatch):
    monkeypatch.setattr(build_defaults, "_fit_all", one_file)
    home = tmp_path / "models"
    old_models(home)
    replace_failing(monkeypatch, errno.EXDEV, lambda source, _to: source == home)
    build(BuildSettings(path=str(tmp_path), out=str(home)), progress=nobody)
    assert contents(tmp_path) == {"models/MODEL_CARD.md": b"# Model card: new"}


def test_a_build_sweeps_what_killed_ones_left_and_nothing_else(tmp_path, monkeypatch):
    seen = []

    def inner(_settings, _data, folder, _progress):
        one_file(_settings, _data, folder, _progress)
        if not seen:  # another build, while this one is at work
            seen.append(folder)
            build(BuildSettings(path=str(tmp_path), out=str(tmp_path / "models")), progress=nobody)
        seen.append(folder.exists())

    monkeypatch.setattr(build_defaults, "_fit_all", inner)
    others = (".models-backup", ".models2-build-abc", "models-build-abc")
    for name in (*others, ".models-build-0ld", ".models-old-0ld"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "MODEL_CARD.md").write_text("left")
    (tmp_path / ".models-build-file").write_text("no folder")
    old_models(tmp_path / "models")
    build(BuildSettings(path=str(tmp_path), out=str(tmp_path / "models")), progress=nobody)
    assert seen[1:] == [True, True], "neither swept the other"
    assert {path.name for path in tmp_path.iterdir()} == {*others, ".models-build-file", "models"}


def test_models_that_a_killed_build_had_put_aside_come_back(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build_defaults, "_fit_all", stop)
    before = old_models(tmp_path / ".models-old-0ld")
    (tmp_path / ".models-build-0ld").mkdir()
    with pytest.raises(KeyboardInterrupt):
        build(BuildSettings(path=str(tmp_path), out=str(tmp_path / "models")), progress=nobody)
    assert contents(tmp_path / "models") == before and list(tmp_path.iterdir()) == [tmp_path / "models"]


def test_a_copy_of_gpumemnet_s_files_alone_is_enough_and_the_card_names_no_timm(tmp_path):
    files = tmp_path / "GPUMemNet" / "a'; echo Datasets" / "MLP"
    published(files, timm=False)
    assert published_sources(str(tmp_path)) == {"gpumemnet"}
    ingest_published(str(tmp_path / "GPUMemNet"), tmp_path / "data")
    with connect(tmp_path / "data") as connection:
        assert connection.sql("SELECT family, count(*) FROM runs GROUP BY ALL").fetchall() == [("mlp", ROWS)]
    meta = json.loads((DEFAULT_MODELS / "memory" / "meta.json").read_text())
    write_card(tmp_path / "with.md", {"memory": meta})
    meta["rows"]["family"] = {"mlp": ROWS}
    write_card(tmp_path / "without.md", {"memory": meta})
    sentence = "GPUMemNet's sets (arXiv 2602.17817) and timm models."
    assert sentence in (tmp_path / "with.md").read_text() and sentence not in (tmp_path / "without.md").read_text()


def test_files_that_are_not_there_leave_the_older_models_as_they_were_and_the_message_says_where_they_are(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    said = "holds no file of source=gpumemnet; GPUMemNet's files come from https://github.com/itu-rad/GPUMemNet"
    home = tmp_path / "home" / "models"
    before = old_models(home)
    with pytest.raises(UsageError, match=said):
        build(BuildSettings(path=str(files), out=str(home), workers=0), progress=nobody)
    assert contents(home) == before and [path.name for path in home.parent.iterdir()] == ["models"]


@pytest.mark.slow
def test_a_build_that_stops_half_way_leaves_the_older_models_as_they_were(tmp_path, place, built, monkeypatch):
    small(monkeypatch)
    home = tmp_path / "models"
    before = old_models(home)

    def stop(step, done, of):
        if step == "fitting smact":
            assert any(path.name.startswith(".models-") for path in tmp_path.iterdir()), "built beside its place"
            raise KeyboardInterrupt

    settings = BuildSettings(path=str(place / "files"), out=str(home), data=str(place / "data"), workers=0)
    with pytest.raises(KeyboardInterrupt):
        build(settings, progress=stop)
    assert contents(home) == before and list(tmp_path.iterdir()) == [home]


def test_models_that_are_too_large_to_come_along_are_refused(tmp_path, monkeypatch):
    def large(_settings, _data, folder, _progress):
        (folder / "model.txt").write_bytes(b"0" * (11 * 2**20))

    monkeypatch.setattr(build_defaults, "_fit_all", large)
    before = old_models(tmp_path / "models")
    with pytest.raises(UsageError, match=r"the models take 11\.0 MiB, more than the 10 MiB that come along"):
        build(BuildSettings(path=str(tmp_path), out=str(tmp_path / "models")), progress=nobody)
    assert contents(tmp_path / "models") == before and list(tmp_path.iterdir()) == [tmp_path / "models"]


KILLED = """
import os, signal, sys
from learn.build_defaults import BuildSettings, build
def dying(step, done, of):
    os.kill(os.getpid(), signal.SIGKILL)
build(BuildSettings(path=sys.argv[1], out=sys.argv[2], data=sys.argv[3], datasets=False, workers=0), progress=dying)
"""


@pytest.mark.slow
def test_a_killed_build_leaves_the_older_models_as_they_were(tmp_path, place, built):
    before = old_models(tmp_path / "models")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(place / "files"), str(tmp_path / "models"), str(place / "data")],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert contents(tmp_path / "models") == before
    assert len(list(tmp_path.iterdir())) == 2, "what it had begun"
    with pytest.raises(UsageError, match="holds no file"):
        build(BuildSettings(path=str(tmp_path), out=str(tmp_path / "models")), progress=nobody)
    assert contents(tmp_path / "models") == before and list(tmp_path.iterdir()) == [tmp_path / "models"]


def measured_set(folder, n=12):
    """A data set as `warehouse.export` writes it: MLPs that an H100 measured, in several precisions."""
    data = folder.parent / "measured"
    configs = [
        mlp.Config(batch_size=16, input_size=200 + 50 * i, classes=3, depth=2, precision=("fp32", "bf16")[i % 2])
        for i in range(n)
    ]
    ended = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    write_runs(
        data, configs, source="measured", device="NVIDIA H100 80GB HBM3", device_memory_mib=81_559.0,
        device_uuid="GPU-1", finished_at=ended,
    )  # fmt: skip
    export(ExportSettings(data=str(data), out=str(folder)))
    return folder


@pytest.mark.slow
def test_runs_of_a_data_set_are_fitted_on_beside_the_published_ones_and_the_card_says_so(place):
    published(place / "some files")
    folder = measured_set(place / "set")
    out = place / "out with set"
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()):
        small(patched)
        assert run(f"path={place / 'some files'}", f"out={out}", f"datasets='{quoted(folder)}'", "workers=0") == 0
    for target in TARGETS:
        meta = json.loads((out / target / "meta.json").read_text())
        assert meta["rows"]["source"]["measured"] == 12 and meta["rows"]["source"]["imported"] >= ROWS
        assert meta["rows"]["device"]["NVIDIA H100 80GB HBM3"] == 12
    assert "**And on** 12 runs that the farm measured" in (out / "MODEL_CARD.md").read_text()


def quoted(path):
    return str(path).replace("'", "\\'")


def test_a_data_set_that_is_not_there_is_told():
    with pytest.raises(UsageError, match="datasets must be true, false or the folder of a data set, got 'nowhere'"):
        BuildSettings(path=str(ROOT), datasets="nowhere")
