"""`python -m learn.benchmark`: figures by hand, rows that go wrong, the command line, who is fitted on which rows."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from conf.errors import UsageError
from learn.benchmark import BenchmarkSettings, benchmark
from learn.estimators import protocol as estimators
from learn.estimators.trees import LightGBMEstimator
from learn.judging import benchmark_view
from learn.judging.scores import sample
from learn.rows.data import load_rows
from tests.learn.learn_rows import make_configs, published_mlp, write_batch, write_published
from tests.surroundings import ENDS_WITHIN_S

pytestmark = pytest.mark.usefixtures("fakes")


def write(path, rows):
    """Rows are (batch, MiB, status) or (batch, MiB, status, topology)."""
    named = ((published_mlp(batch, *topology), mib, status, -1) for batch, mib, status, *topology in rows)
    return write_published(path, named)


def settings(path, **values):
    return BenchmarkSettings(**{"published": str(path), "estimators": ("hundreds",), "workers": 0, **values})


OK = "SUCCESSFUL"


def test_figures_are_those_worked_by_hand(tmp_path):
    # estimates 100, 200, 400, 1000, 50000; labels 200, 300, 600 and two rows that ran out of memory
    path = write(
        tmp_path / "some.csv",
        [(1, 200, OK), (2, 300, OK), (4, 600, OK), (10, 39_000, "OOM_CRASH"), (500, 39_000, "OOM_CRASH"), (6, 0, OK)],
    )
    done = benchmark(settings(path))
    (figures,) = done.figures
    assert (figures.file, figures.estimator, figures.ok, figures.oom) == ("some", "hundreds", 3, 2)
    assert (figures.answered_ok, figures.answered_oom, figures.refusals) == (3, 2, {})
    assert figures.raw.median == pytest.approx(1 / 3)  # of 1/2, 1/3, 1/3
    assert figures.raw.p90 == pytest.approx(1 / 3 + 0.8 * (1 / 2 - 1 / 3))
    assert figures.raw.under == 1.0
    assert figures.constant == 100  # of 100, 100, 200
    assert figures.shifted.median == 0 and figures.shifted.under == pytest.approx(1 / 3)
    assert figures.fit_right == pytest.approx(4 / 5)
    assert any("1 rows make no sense" in note and "never started" in note for note in done.notes)
    assert figures.median_seconds > 0 and done.card_mib == 40_326


@pytest.mark.slow
def test_a_process_that_dies_hangs_or_hoards_costs_its_row_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HUNDREDS_DIES", "1")
    path = write(tmp_path / "some.csv", [(1, 200, OK), (7, 900, OK), (2, 300, OK), (3, 300, OK), (5, 600, OK)])
    chosen = settings(path, workers=2, estimators=("hundreds", "hoarder"), memory_gib=4.0)
    by_name = {figures.estimator: figures for figures in benchmark(chosen).figures}
    assert by_name["hundreds"].answered_ok == 2 and by_name["hundreds"].raw.median == pytest.approx((1 / 2 + 1 / 3) / 2)
    reasons = ("its process ended with code 9", "three is a crowd", "ZeroDivisionError: five")
    assert by_name["hundreds"].refusals == dict.fromkeys(reasons, 1)
    assert list(by_name["hoarder"].refusals) == ["MemoryError"] and by_name["hoarder"].answered_ok == 0

    path = write(tmp_path / "one.csv", [(7, 200, OK), (2, 200, OK)])
    (figures,) = benchmark(settings(path, workers=1)).figures
    assert figures.answered_ok == 1, "who takes over from a dead process answers"
    (figures,) = benchmark(settings(path, workers=1, estimators=("endless",), limit_s=0.2)).figures
    assert figures.refusals == {"took longer than limit_s=0.2": 2}


def test_rows_are_drawn_alike_for_a_seed_and_from_every_group_in_proportion():
    groups = ["a"] * 80 + ["b"] * 15 + ["c"] * 5
    drawn = sample(groups, 20, 3)
    assert drawn == sample(groups, 20, 3) != sample(groups, 20, 4) and set(drawn) < set(sample(groups, 40, 3))
    counts = {group: sum(groups[i] == group for i in drawn) for group in "abc"}
    assert abs(counts["a"] - 16) <= 1 and abs(counts["b"] - 3) <= 1 and abs(counts["c"] - 1) <= 1


WAITING = """
import os, pathlib, sys, time

def wait(path):
    pathlib.Path(path).write_text(f"{os.getpid()} ")
    time.sleep(600)

if __name__ == "__main__":
    from learn.rows.processes import in_processes
    from waiting import wait as imported
    list(in_processes(imported, sys.argv[1:], workers=2))
"""


def test_a_ctrl_c_ends_the_processes_that_rows_are_asked_in(tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    notes = [tmp_path / "a'; echo", tmp_path / "b"]
    with subprocess.Popen([sys.executable, "waiting.py", *notes], cwd=tmp_path, stderr=subprocess.DEVNULL) as asking:
        while not all(note.exists() and note.read_text().endswith(" ") for note in notes):
            assert asking.poll() is None
            time.sleep(0.05)
        processes = psutil.Process(asking.pid).children(recursive=True)
        asking.send_signal(signal.SIGINT)
    assert asking.returncode == -signal.SIGINT
    assert {int(note.read_text()) for note in notes} <= {process.pid for process in processes}
    assert not psutil.wait_procs(processes, timeout=ENDS_WITHIN_S)[1]


def test_command_prints_a_table_and_writes_everything(tmp_path, outcome):
    folder = tmp_path / "a'; echo foo"
    folder.mkdir()
    write(folder / "some.csv", [(1, 200, OK), (2, 400, OK, "pyramid"), (3, 300, OK), (500, 39_000, "OOM_CRASH")])
    (folder / "other.csv").write_text("x\n1\n")
    out, page = folder / "report.json", tmp_path / "page.html"
    files = (f"{key}={json.dumps(str(path))}" for key, path in (("published", folder), ("out", out), ("report", page)))
    code, out_text, err = outcome(
        "benchmark", *files, "estimators=[hundreds,llmem]", "workers=0", "by=module", "worst=1"
    )
    assert code == 0, err
    for text in (
        "memory on A100-SXM4-40GB, card 40,326 MiB",
        "2/3 + 1/1 oom",
        "+150",
        "mlp/pyramid",
        "12.5% / 12.5%",
        "+25.0%",
        "furthest off",
        "no answer for 1: three is a crowd",
        "other.csv has no known header",
        "GPUMemNet (published)",
        "95% to 98%",
    ):
        assert text in out_text, text
    assert "some, hundreds: answered 2/3 + 1/1 oom, median 50.0%, p90 50.0%, accuracy 100.0%" in err
    report = json.loads(out.read_text())
    assert report["figures"][0]["constant"] == 150 and report["settings"]["estimators"] == ["hundreds", "llmem"]
    assert [row["status"] for row in report["rows"]] == ["ok", "ok", "ok", "oom"] and "rows" not in report["figures"][0]
    assert report["rows"][2]["answers"]["hundreds"]["reason"] == "three is a crowd"
    text = page.read_text()
    assert text.count("<svg") == 5 and "three is a crowd" in text and "GPUMemNet (published)" in text
    assert "2 rows of 0-1 GB were estimated to be in 0-1 GB" in text  # of the estimator that answers
    assert "http://" not in text and "https://" not in text and "<script" not in text


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["target=speed"], "unknown target 'speed'; known: drama"),
        (["estimators=[hours]"], "unknown estimator 'hours'; known: deepspeed"),
        (["published=here", "target=power"], "published files hold target=memory, smact, smocc, drama, gpu_util, got"),
        (["published=here", "target=step_time"], "step times are compared where warehouse.ingest brought the files"),
        (["estimators=[habitat]"], "unknown estimator 'habitat'; known: deepspeed"),
        (["target=step_time", "estimators=[rooflin]"], "neusight, ranks, roofline, trace, xmem"),
        (["published=here", "source=measured"], "source= is for the warehouse's runs"),
        (["split=thirds"], "unknown split 'thirds'; known: cv, holdout, leave_one_out"),
        (["split=leave_one_out"], "give by=module or by=family or by=device or by=source"),
        (["folds=1"], "folds must be an integer >= 2, got 1"),
        (["published=/", "out=/nope/x.json"], "there is no folder /nope"),
        (["out=x.json", "report=x.json"], "out= and report= are the same file"),
        (["files=[a]"], "give published=FOLDER with it"),
        (["estimators=[]"], "estimators must name at least one of"),
        (
            ["by=colour", "split=thirds"],
            "known: cv, holdout, leave_one_out; unknown by 'colour'; known: device, family, model, module, source",
        ),
        (["by=model", "estimators=[zzz]"], "known: device, family, module, source; unknown estimator 'zzz'"),
        (["by=model", "files=[a]", "split=leave_one_out"], "give published=FOLDER with it; unknown by 'model'"),
        (["rows=0"], "rows must be an integer >= 1, got 0"),
        (["workers=-1", "limit_s=0"], "workers must be an integer >= 0, got -1; limit_s must be a number > 0, got 0"),
        (["published=/nowhere/at/all"], "published=/nowhere/at/all: there is no such file or folder"),
        (["colour=red"], "unknown key 'colour'"),
        (["paper=true"], "give published=FOLDER with it"),
        (["published=here", "paper=true", "split=holdout"], "split: paper=true takes published, rows, seed"),
        (["published=here", "paper=true", "target=smact"], "target: paper=true takes published, rows"),
    ],
)
def test_mistakes_end_with_2_and_name_the_choices(argv, said, refused):
    assert said in refused("benchmark", *argv)


# -- estimators that learn: who is fitted on which rows


@pytest.fixture(scope="module")
def warehouse_folder(tmp_path_factory):
    """Rows of two GPU models."""
    folder, configs = tmp_path_factory.mktemp("learn") / "a'; echo foo", make_configs(90)
    for device, half in (("A100-SXM4-40GB", configs[:45]), ("H200-SXM-141GB", configs[45:])):
        write_batch(folder, half, job=device, device=device)
    return folder


def test_left_out_is_answered_from_the_others_only(warehouse_folder):
    chosen = {"data": str(warehouse_folder), "estimators": ("lightgbm",), "workers": 0, "split": "leave_one_out"}
    done = benchmark(BenchmarkSettings(**chosen, by="device"))
    assert {row.group for figures in done.figures for row in figures.rows} == {"a100-sxm4-40gb", "h200-sxm-141gb"}
    given = {row.name: row.estimate for figures in done.figures for row in figures.rows}
    rows = load_rows(str(warehouse_folder), "memory")
    train, asked = (rows.subset(rows.device == device) for device in ("A100-SXM4-40GB", "H200-SXM-141GB"))
    fitted = estimators.make_estimator("lightgbm", 0).fit(train).predict(asked.cases)
    np.testing.assert_allclose([given[name] for name in asked.run_ids], fitted.point)
    assert len(given) == 90 and None not in given.values()
    assert "calibration rows are too few" in str(done.notes)
    (few,) = benchmark(BenchmarkSettings(**chosen, by="device", rows=8, family="mlp")).figures
    too_few = "cannot be fitted: target=memory: {} rows with an exact label to fit on, 10 are needed"
    assert few.refusals == {too_few.format(2): 6, too_few.format(6): 2}
    with pytest.raises(UsageError, match="all rows are of source simulated; it takes two or more"):
        benchmark(BenchmarkSettings(**chosen, by="source"))


def test_of_another_target_only_those_are_asked_that_estimate_it(warehouse_folder):
    done = benchmark(
        BenchmarkSettings(
            data=str(warehouse_folder),
            target="drama",
            rows=15,
            workers=0,
            split="holdout",
            estimators=("trace", "lightgbm"),
        )
    )
    assert {f.estimator for f in done.figures} == {"lightgbm", "trace"}
    assert done.card_mib is None and not done.relative and all(f.ok <= 15 for f in done.figures)
    assert "horus" not in BenchmarkSettings(target="drama").names
    with pytest.raises(UsageError, match="horus estimates target=memory only"):
        BenchmarkSettings(data=str(warehouse_folder), target="drama", estimators=("horus",))


# -- the paper's tables from a small folder of published files


@pytest.fixture
def paper_folder(tmp_path, fakes, monkeypatch):
    """30 MLPs of 1.0 to 6.8 GB, three without SMACT, whose memory `hundreds` knows, and two well-known models."""
    runs = (
        ("memory", True, True, ("lightgbm", "hundreds")),
        ("smact", True, False, ("lightgbm",)),
        ("drama", True, False, ("lightgbm",)),
    )
    monkeypatch.setattr(benchmark_view, "RUNS", runs)
    place = tmp_path / "a'; echo foo"
    place.mkdir()
    write_published(
        place / "perceptrons.csv",
        [
            (published_mlp(batch, depth=1 + i % 10), 100 * batch, "SUCCESSFUL", batch / 70 if batch > 14 else 0)
            for i, batch in enumerate(range(10, 70, 2))
        ],
    )
    lines = ["model,batch_size,actual_mib,horus_mib", "lenet,2,1000,1500", "lenet,4,2000,1000"]
    (place / "known.csv").write_text("\n".join(lines) + "\n")
    return place


def test_the_papers_tables_hold_ours_beside_theirs(paper_folder, tmp_path, outcome):
    out, page = tmp_path / "paper.json", tmp_path / "paper.html"
    where = f"published={json.dumps(str(paper_folder))}", f"data={tmp_path / 'data'}", f"out={out}", f"report={page}"
    code, printed, err = outcome("benchmark", *where, "paper=true", "workers=0", "rows=28", "folds=2")
    assert code == 0, err
    tables = json.loads(out.read_text())
    accuracy = {row["bins"]: row for row in tables["memory"]}
    assert list(accuracy) == ["1 GB", "2 GB", "8 GB"] and {row["n"] for row in accuracy.values()} == {28}
    assert all(row["hundreds"] == 1.0 for row in accuracy.values()) and accuracy["8 GB"]["lightgbm"] == 1.0
    assert accuracy["1 GB"]["lightgbm"] < 1.0
    assert [(f["low"], f["high"]) for f in accuracy["2 GB"]["theirs"]] == [(0.95, 0.98)]
    assert accuracy["8 GB"]["theirs"] is None, "theirs is known of 1 to 2 GB for MLPs"

    levels = {(row["family"], row["target"]): row for row in tables["utilization"]}
    assert levels["mlp", "smact"]["lightgbm"] > 0.5 and levels["mlp", "smact"]["theirs"][0]["low"] == 0.92
    assert [levels["mlp", target]["n"] for target in ("smact", "drama")] == [27, None]
    assert levels["mlp", "drama"]["theirs"][0]["low"] == 0.88

    models = {row["model"]: row for row in tables["models"]}
    assert [row["actual [MiB]"] for row in models.values()] == [1000, 2000, None, None]
    errors = {title: row["horus (published)"] for title, row in models.items()}
    assert errors == {"lenet batch 2": 0.5, "lenet batch 4": -0.5, "mean error": 0.5, "median error": 0.5}
    assert {row["estimator"] for row in tables["latency"]} >= {"lightgbm", "hundreds", "xMem (published)"}
    assert any("a sample of 28 rows" in note for note in tables["notes"])
    assert any(note.startswith("drama is not judged: no rows are left") for note in tables["notes"])
    for text in ("95% to 98%", "+50.0%", "2.29 to 2.37 ms", "left out"):
        assert text in printed
    assert page.read_text().count("<svg") == 3 and "perceptrons, lightgbm: answered 28/28" in err


def test_named_models_are_never_fitted_on(paper_folder, monkeypatch):
    fit, fitted_on = LightGBMEstimator.fit, set()
    monkeypatch.setattr(
        LightGBMEstimator, "fit", lambda self, rows, steps: fitted_on.update(rows.run_ids) or fit(self, rows, steps)
    )
    done = benchmark(settings(paper_folder, estimators=("lightgbm",), folds=2))
    assert {name.partition(":")[0] for name in fitted_on} == {"perceptrons"} and len(fitted_on) == 30
    assert any("known: never fitted on" in note for note in done.notes)


def test_doubtful_rows_can_be_left_out(tmp_path):
    path = tmp_path / "timm.csv"
    lines = [f"net,nets,{b},{m},100" for b, m in ((8, 4900), (16, 3500), (32, 5000))]
    path.write_text("\n".join(["model,module,batch_size,max_gpu_memory_mib,faketensor_peak_mib", *lines]) + "\n")
    chosen = {doubtful: benchmark(settings(path, doubtful=doubtful)) for doubtful in ("keep", "drop")}
    kept, dropped = (next(f for f in done.figures if f.estimator == "hundreds") for done in chosen.values())
    assert (kept.ok, dropped.ok) == (3, 2)
    assert any(
        "1 of its 3 rows are in doubt (judged, never fitted on): 1 more than" in note for note in chosen["keep"].notes
    )
