"""`learn.benchmark published=FOLDER paper=true`: the paper's tables from a small folder of published files."""

import json

import pytest

from conf.cli import command_line as cli
from learn.benchmark import entry
from learn.judging import benchmark_view
from tests.learn.learn_rows import published_mlp, write_published


@pytest.fixture
def folder(tmp_path, fakes, monkeypatch):
    """30 MLPs of 1.0 to 6.8 GB, of which `hundreds` (100 MiB a sample) knows each, and two well-known models."""
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
            (published_mlp(batch, depth=1 + i % 10), 100 * batch, "SUCCESSFUL", batch / 70)
            for i, batch in enumerate(range(10, 70, 2))
        ],
    )
    lines = ["model,batch_size,actual_mib,horus_mib", "lenet,2,1000,1500", "lenet,4,2000,1000"]
    (place / "known.csv").write_text("\n".join(lines) + "\n")
    return place


def run(*argv):
    return cli.run("benchmark", entry, list(argv))


def test_the_papers_tables_hold_ours_beside_theirs(folder, tmp_path, capsys):
    out, page = tmp_path / "paper.json", tmp_path / "paper.html"
    code = run(
        f"published={json.dumps(str(folder))}",
        "paper=true",
        "workers=0",
        "rows=28",
        "folds=2",
        f"data={tmp_path / 'data'}",
        f"out={out}",
        f"report={page}",
    )
    printed = capsys.readouterr()
    assert code == 0, printed.err
    tables = json.loads(out.read_text())
    accuracy = {row["bins"]: row for row in tables["memory"]}
    assert list(accuracy) == ["1 GB", "2 GB", "8 GB"] and {row["n"] for row in accuracy.values()} == {28}
    assert all(row["hundreds"] == 1.0 for row in accuracy.values()) and accuracy["8 GB"]["lightgbm"] == 1.0
    assert accuracy["1 GB"]["lightgbm"] < 1.0
    assert [(f["low"], f["high"]) for f in accuracy["2 GB"]["theirs"]] == [(0.95, 0.98)]
    assert accuracy["8 GB"]["theirs"] is None, "theirs is known of 1 to 2 GB for MLPs"

    levels = {(row["family"], row["target"]): row for row in tables["utilization"]}
    assert levels["mlp", "smact"]["lightgbm"] > 0.5 and levels["mlp", "smact"]["theirs"][0]["low"] == 0.92
    assert levels["mlp", "drama"]["n"] is None and levels["mlp", "drama"]["theirs"][0]["low"] == 0.88

    models = {row["model"]: row for row in tables["models"]}
    errors = {title: row["horus (published)"] for title, row in models.items()}
    assert errors == {"lenet batch 2": 0.5, "lenet batch 4": -0.5, "mean error": 0.5, "median error": 0.5}
    assert {row["estimator"] for row in tables["latency"]} >= {"lightgbm", "hundreds", "xMem (published)"}
    assert any("a sample of 28 rows" in note for note in tables["notes"])
    assert any(note.startswith("drama is not judged: no rows are left") for note in tables["notes"])
    for text in ("95% to 98%", "+50.0%", "2.29 to 2.37 ms", "left out"):
        assert text in printed.out
    assert page.read_text().count("<svg") == 3 and "perceptrons, lightgbm: answered 28/28" in printed.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["paper=true"], "give published=FOLDER with it"),
        (["published=here", "paper=true", "split=holdout"], "split: paper=true takes published, rows, seed"),
        (["published=here", "paper=true", "target=smact"], "target: paper=true takes published, rows"),
    ],
)
def test_mistakes_name_what_paper_takes(argv, message, refused):
    assert message in refused(*argv, run=run)


def test_a_folder_without_the_papers_data_is_refused(tmp_path, refused):
    (tmp_path / "timm.csv").write_text("model,module,batch_size,max_gpu_memory_mib\nnet,nets,8,4900\n")
    message = refused(f"published={tmp_path}", "paper=true", run=run)
    assert "no file of GPUMemNet's sets or of well-known models" in message
