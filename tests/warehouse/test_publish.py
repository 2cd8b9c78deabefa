"""A published snapshot: whole, readable by anybody, accepted by Croissant's validator, and without anybody's names."""

import datetime
import getpass
import json
import os
import platform
import re
import subprocess
import sys

import duckdb
import pytest

from conf.errors import EnvironmentProblem, UsageError
from tests.warehouse.warehouse_rows import ask, run_row, samples
from warehouse.exchange.publishing import PublishSettings, publish
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import sha256_of, snapshot_names, take_snapshot
from warehouse.files.writer import RunWriter
from warehouse.reading.checks import Finding
from warehouse.tables.schema import COLUMNS, STATUSES

DAY = datetime.datetime(2026, 3, 4, 5, 6, 7, tzinfo=datetime.UTC)
PRIVATE = ("host17", "example.org", "someone", "10.1.2.3", "GPU-0a1b2c3d", "secret-folder", platform.node())


def measured(index, **changes):
    return run_row(index) | {
        "source": "measured",
        "device_name": "NVIDIA H100 80GB HBM3",
        "device_uuid": "GPU-0a1b2c3d-0000-1111-2222-333344445555",
        "node": "host17.example.org",
        "worker": "ray-0",
        "config": json.dumps({"family": "cnn", "model": "/home/someone/secret-folder/net.py", "depth": index}),
        "error": 'File "/home/someone/secret-folder/trial.py", line 7\non host17 (10.1.2.3)',
        "telemetry_missing": json.dumps({"dcgm": "no answer at http://host17:9400/metrics"}),
        "smact": 0.25,
        "finished_at": DAY,
        **changes,
    }


def fill(folder):
    """Land runs of all sources and statuses, and jobs."""
    writer = RunWriter(folder)
    for index in range(5):
        writer.write(measured(index), samples(40))
    writer.write(measured(5, status="oom", oom_kind="device", peak_memory_mib=None, smact=None), samples(2))
    writer.write(run_row(6, device_name="A100-SXM4-40GB"), samples(3))
    writer.write(measured(7, run_id="J-000007-a1", final=False), samples(3))
    writer.write_batch([run_row(8, source="imported", run_id="other-1", job_id=None)])
    space = json.dumps({"weights": "/home/someone/secret-folder/w.pt"})
    for job in ("J", "unused"):
        writer.write_job({"job_id": job, "family": "cnn", "n": 7, "space": space, "config": space, "submitted_at": 1e9})


@pytest.fixture
def filled(folder) -> DataFolder:
    fill(folder)
    return folder


def settings(folder, out, **changes):
    """Settings of a call, without pages by default, which take most of its time."""
    return PublishSettings(**{"out": str(out), "data": str(folder.root), "licence": "CC-BY-4.0", "pages": 0, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One publication with pages, for the tests that only read it: the call's report, and the folder of the runs."""
    place = tmp_path_factory.mktemp("published")
    folder = DataFolder.resolve(place / "a'; echo data").create()
    fill(folder)
    return publish(settings(folder, place / "a set [x]*", pages=1)), folder


def rows(out, table, columns="*"):
    with duckdb.connect() as connection:
        files = [str(path) for path in sorted((out / table).glob("*.parquet"))]
        assert files
        connection.read_parquet(files).create_view("published")
        published_rows = connection.sql(f"SELECT {columns} FROM published ORDER BY ALL").to_arrow_table().to_pylist()
        return [tuple(row.values()) for row in published_rows]


def test_a_snapshot_becomes_tables_of_what_was_measured_and_simulated(whole):
    report, filled = whole
    out = report.root
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "collocations",
        "croissant.json",
        "jobs",
        "kernels",
        "load_example.py",
        "pages",
        "ranks",
        "runs",
        "telemetry",
    ]
    assert dict(report.rows) == {
        "runs": 7,
        "telemetry": 5 * 40 + 2 + 3,
        "kernels": 0,
        "ranks": 0,
        "collocations": 0,
        "jobs": 1,
    }
    assert report.left_out == [
        "1 runs: source imported",
        "1 runs: attempts whose labels were not trusted, measured again",
    ]
    assert sorted(rows(out, "runs", "source")) == [("measured",)] * 6 + [("simulated",)]
    assert set(rows(out, "telemetry", "DISTINCT run_id")) == set(rows(out, "runs", "run_id"))
    assert [count for (count,) in rows(out, "runs", "telemetry_rows")] == [2, 3] + [40] * 5
    assert report.snapshot in snapshot_names(filled)
    card = (out / "README.md").read_text()
    assert "7 training runs" in card and "- 1 runs: source imported" in card and "- citation: not given" in card
    assert "`peak_memory_mib` | double | peak memory that the device charged" in card


def test_the_named_snapshot_is_published_or_the_newest_and_thinned_as_asked(folder, tmp_path, no_checks):
    for index, name in enumerate(("s", "t")):
        RunWriter(folder).write(run_row(index), samples())
        take_snapshot(folder, name)
    thinned = publish(settings(folder, tmp_path / "a", snapshot="s", hz=1)).rows
    assert (thinned["runs"], thinned["telemetry"]) == (1, 1), "of readings every 100 ms, one a second"
    assert publish(settings(folder, tmp_path / "b")).rows["runs"] == 2


def test_the_same_snapshot_gives_the_same_bytes(whole, tmp_path, no_checks):
    first, folder = whole
    same = {"snapshot": first.snapshot, "name": first.root.name, "pages": 1}
    again = publish(settings(folder, tmp_path / "again", **same)).root
    files = [path.relative_to(again) for path in again.rglob("*") if path.is_file()]
    assert len([name for name in files if name.parts[0] != "pages"]) == 9 and len(files) > 12
    assert [name for name in files if (again / name).read_bytes() != (first.root / name).read_bytes()] == []


def test_names_of_machines_users_and_paths_are_nowhere(whole):
    out = whole[0].root
    texts = [(out / name).read_text() for name in ("README.md", "croissant.json")]
    for table in COLUMNS:
        texts += [str(row) for row in rows(out, table)]
    user = getpass.getuser()
    private = (*PRIVATE, str(out.parent), *([user] if user != "root" else []))
    assert [(name, text) for name in private for text in texts if name in text] == []


def test_the_loading_example_runs_from_anywhere(whole):
    done = subprocess.run([sys.executable, whole[0].root / "load_example.py"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "cnn            ok              6" in done.stdout and "most telemetry: J-00000" in done.stdout


def test_croissant_accepts_the_metadata_and_reads_the_records_of_the_snapshot(whole, tmp_path, no_checks):
    mlcroissant = pytest.importorskip("mlcroissant")
    out = tmp_path / "set"
    given = {
        "citation": "@misc{x}",
        "creators": ["Ada Lovelace", "org:ACME"],
        "url": "https://example.org/x",
        "version": "1.2.0",
        "published": "2026-11-20",
    }
    publish(settings(whole[1], out, hz=None, **given))
    dataset = mlcroissant.Dataset(jsonld=out / "croissant.json")
    assert not dataset.metadata.issues.errors and not dataset.metadata.issues.warnings
    assert [creator.name for creator in dataset.metadata.creators] == ["Ada Lovelace", "ACME"]
    runs = list(dataset.records("runs"))
    assert len(runs) == 7 and {record["runs/status"] for record in runs} == {b"ok", b"oom"}
    assert len(list(dataset.records("telemetry"))) == 205 and len(list(dataset.records("jobs"))) == 1
    sums = (
        "SELECT sum(telemetry.smact), sum(t_ms) FROM telemetry JOIN runs USING (run_id) WHERE runs.source <> 'imported'"
    )
    assert rows(out, "telemetry", "sum(smact), sum(t_ms)") == ask(whole[1], sums)


def test_the_metadata_names_every_file_with_its_digest_and_invents_nothing(whole):
    out = whole[0].root
    metadata = json.loads((out / "croissant.json").read_text())
    objects = [entry for entry in metadata["distribution"] if entry["@type"] == "cr:FileObject"]
    assert {entry["contentUrl"]: entry["sha256"] for entry in objects} == {
        path.relative_to(out).as_posix(): sha256_of(path) for path in out.rglob("*.parquet")
    }
    assert not {"citeAs", "creator", "url", "version"} & metadata.keys()
    assert metadata["license"] == "CC-BY-4.0"


HOSTILE = "<img src=x onerror=alert(1)> | ![x](http://a/b)\n\n# `head` &amp;"


def test_texts_of_rows_and_findings_are_shown_in_the_card_and_are_no_markup(folder, tmp_path, monkeypatch):
    finding = Finding(rule="impossible.x", severity="error", count=3, examples=(HOSTILE,), said="what cannot be")
    monkeypatch.setattr("warehouse.exchange.publishing.check", lambda connection: [finding])
    writer = RunWriter(folder)
    writer.write(measured(1, device_name=HOSTILE, window_kind=HOSTILE, precision=HOSTILE, family="cnn"), samples(3))
    writer.write(measured(2, torch_version=HOSTILE, error=HOSTILE, config=json.dumps({"x": HOSTILE})), samples(3))
    writer.write(measured(3, config=json.dumps(HOSTILE)), samples(3))
    report = publish(settings(folder, tmp_path / "set", pages=20))
    texts = {path.name: path.read_text() for path in (tmp_path / "set").rglob("*.*") if path.suffix in (".md", ".html")}
    card = texts["README.md"]
    assert [name for name, text in texts.items() if "<img src" in text] == []
    assert "- error: impossible.x: 3 (what cannot be), as &lt;img src=x" in card
    assert "1 checks found something; the card lists it" in report.lines()
    assert "&lt;img src=x onerror=alert(1)>" in card and "![x](" not in card and "\n# `head`" not in card
    (line,) = [line for line in card.splitlines() if line.startswith("| cnn | &lt;img")]
    assert len(re.split(r"(?<!\\)\|", line)) == 2 + 2 + len(STATUSES) + 1


def test_the_card_and_the_metadata_say_of_each_source_what_is_true_of_it(whole, tmp_path, no_checks):
    report, filled = whole
    publish(settings(filled, tmp_path / "simulated", sources=["simulated"]))
    both, simulated = (
        [(out / "README.md").read_text(), json.loads((out / "croissant.json").read_text())]
        for out in (report.root, tmp_path / "simulated")
    )
    sentences = "6 runs are measured on real GPUs; 1 run is simulated: modelled, not measured."
    assert sentences in both[1]["description"] and sentences in both[0] and "on a GPU of its own" in both[0]
    for text in (simulated[0], simulated[1]["description"]):
        assert "1 run is simulated: modelled, not measured." in text and "real GPU" not in text


def test_a_licence_must_be_given_and_what_is_missing_is_said(whole, tmp_path, shown, refused, no_checks):
    out = tmp_path / "set"
    asked = "publish", f"out='{out}'", f"data={whole[1].root}"
    assert "licence=... is missing" in refused(*asked) and not out.exists()
    output = shown(*asked, "licence=CC-BY-4.0", "creators=[Ada Lovelace]", "pages=0")
    assert not (out / "pages").exists()
    assert "205 telemetry, 0 kernels, 0 ranks, 0 collocations, 7 runs, 1 jobs" in output
    assert "not given, and so not in the card or croissant.json: citation, url, version" in output


def test_a_publication_that_fails_leaves_nothing(filled, tmp_path):
    with pytest.raises(UsageError, match="holds no runs"):
        publish(settings(DataFolder.resolve(tmp_path / "empty").create(), tmp_path / "set"))
    take_snapshot(filled, "s")
    for path in (filled.snapshots / "s" / "telemetry" / "family=cnn").glob("*3.parquet"):
        path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(EnvironmentProblem, match=r"snapshot s .* is damaged"):
        publish(settings(filled, tmp_path / "set", snapshot="s"))
    assert not list(tmp_path.glob("*set*"))


def test_what_a_killed_call_left_long_ago_is_removed_and_another_at_work_is_not_disturbed(folder, tmp_path, no_checks):
    RunWriter(folder).write(run_row(1), samples())
    old, young = (tmp_path / f".set.{token * 8}.tmp" for token in "ab")
    for path in (old, young):
        path.mkdir()
        (path / "part.parquet").write_bytes(b"torn")
    os.utime(old, (0, 0))
    publish(settings(folder, tmp_path / "set"))
    assert (tmp_path / "set" / "README.md").is_file()
    assert not old.exists() and young.exists()
