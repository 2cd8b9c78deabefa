"""The tables `collocations` and `ranks`: their rows through landing, checks and import."""

import pytest
from warehouse_rows import ask, collocations, csv_file, findings_of, ranks, run_row, samples, take_in

from conf.errors import UsageError
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from warehouse.ingest import print_report
from warehouse.tables.schema import NOT_TOGETHER

UUID = "GPU-11111111-2222-3333-4444-555555555555"


def land_pair(folder, **columns):
    """Two measured runs that shared a GPU, after a run of the first alone."""
    writer = RunWriter(folder)
    where = {"source": "measured", "device_name": "NVIDIA T4", "device_uuid": UUID}
    writer.write(run_row(0, **where), samples(1))
    for member in (0, 1):
        figures = {
            "member": [member],
            "slowdown": [1.5],
            "solo_step_ms": [10.0],
            "shared_step_ms": [15.0],
            "joint_memory_mib": [900.0],
            "solo_run_id": ["J-000000" if member == 0 else None],
            **columns,
        }
        writer.write(run_row(1 + member, group_id="G", **where), samples(1), collocations=collocations(**figures))


def test_a_pair_that_can_be_has_no_finding(folder):
    land_pair(folder)
    assert findings_of(folder) == []


def test_checks_name_members_that_cannot_be(folder):
    land_pair(folder, slowdown=[3.0], solo_gpu_util=[1.5], died_of=[5])
    RunWriter(folder).write(run_row(7), samples(1), collocations=collocations(group_id=["H"]))
    assert {finding.rule: finding.count for finding in findings_of(folder)} == {
        "impossible.collocations.slowdown": 2,
        "range.collocations.solo_gpu_util": 2,
        "impossible.collocations.member": 2,
        "impossible.collocations.died_of": 2,
        "collocations.members": 1,
    }


SINGLE = {
    "model": "BERT",
    "dataset": "SQuAD",
    "batchsize": 32,
    "amp": 0,
    "speed": 80,
    "gpu_util": 90,
    "gmem_util": 60,
    "gmem": 8000,
    "label": 2,
}

LSTM = {**SINGLE, "model": "LSTM", "dataset": "Wikitext2", "amp": 1, "gpu_util": 50, "gmem_util": 40, "gmem": 4000}

PAIR = {
    "model1": "BERT",
    "dataset1": "SQuAD",
    "gpu_num1": 1,
    "batchsize1": 32,
    "amp1": 0,
    "speed1": 0.8,
    "model2": "LSTM",
    "dataset2": "Wikitext2",
    "gpu_num2": 1,
    "batchsize2": 32,
    "amp2": 1,
    "speed2": 0.5,
    "gpu_util": 99.5,
    "gmem_util": 70,
    "gmem": 12020,
}

GAVEL_ROW = {
    "table": "simulation_throughputs.json",
    "gpu": "p100",
    "job_a": "LM (batch size 5)",
    "gpus_a": 1,
    "job_b": "",
    "gpus_b": "",
    "iters_per_s_a": 40.0,
    "iters_per_s_b": "",
    "slowdown_a": "",
    "provenance": "here",
}


def members(tmp_path, columns):
    return ask(tmp_path / "data", f"SELECT {columns} FROM collocations ORDER BY group_id, member")


@pytest.fixture
def lucid(tmp_path):
    csv_file(tmp_path / "lucid" / "single.csv", SINGLE, LSTM)
    csv_file(tmp_path / "lucid" / "pairs.csv", PAIR)
    return tmp_path / "lucid"


def test_lucid_pairs_carry_both_jobs_figures_alone_and_land_once(tmp_path, lucid):
    assert [file.new for file in take_in(tmp_path / "data", "lucid", lucid).files] == [2, 2]
    columns = "model, slowdown, solo_gpu_util, solo_memory_util, solo_memory_mib, joint_memory_mib, precision, run_id"
    assert members(tmp_path, columns) == [
        ("BERT", 1.25, 0.9, 0.6, 8000.0, 12020.0, "fp32", None),
        ("LSTM", 2.0, 0.5, 0.4, 4000.0, 12020.0, "fp16", None),
    ]
    alone = "SELECT count(*) FROM collocations JOIN runs ON solo_run_id = runs.run_id AND runs.gpu_util = solo_gpu_util"
    assert ask(tmp_path / "data", alone) == [(2,)]
    assert [file.new for file in take_in(tmp_path / "data", "lucid", lucid).files] == [0, 0]
    assert findings_of(DataFolder(tmp_path / "data")) == []


def test_lucid_pairs_without_any_figures_alone_are_refused_until_those_are_there(tmp_path, lucid):
    with pytest.raises(UsageError, match="ingest the file of jobs alone first"):
        take_in(tmp_path / "data", "lucid", lucid / "pairs.csv")
    take_in(tmp_path / "data", "lucid", lucid / "single.csv")
    (report,) = take_in(tmp_path / "data", "lucid", lucid / "pairs.csv").files
    assert report.new == 2


def test_a_pair_that_takes_the_memory_of_one_alone_did_not_share_the_gpu(tmp_path, lucid):
    odd = {**PAIR, "speed1": 1.1, "speed2": 1.0, "gmem": 8020}
    csv_file(lucid / "pairs.csv", PAIR, odd, {**PAIR, "speed1": "", "gmem": 12021})
    (*_, report) = sorted(take_in(tmp_path / "data", "lucid", lucid).files, key=lambda file: file.rows)
    assert report.doubts == {NOT_TOGETHER: [2, 2]} and len(report.invalid) == 1
    rows = ask(tmp_path / "data", "SELECT status, doubt, count(*) FROM collocations GROUP BY ALL ORDER BY ALL")
    assert rows == [("invalid", None, 1), ("ok", NOT_TOGETHER, 2), ("ok", None, 3)]


def test_gavel_pairs_have_slowdowns_of_their_own_table(tmp_path, capsys):
    other_job = {**GAVEL_ROW, "job_a": "A3C", "iters_per_s_a": 4.0}
    pair = {**GAVEL_ROW, "job_b": "A3C", "gpus_b": 1, "iters_per_s_a": 20.0, "iters_per_s_b": 3.2, "slowdown_a": 2.0}
    none = {**pair, "job_a": "A3C", "iters_per_s_a": 0, "iters_per_s_b": 0}
    tables = [{**row, "table": "oracle_throughputs.json"} for row in (GAVEL_ROW, other_job, pair)]
    tables[2] |= {"iters_per_s_a": 30.0, "slowdown_a": 1.3333}
    several = [{**GAVEL_ROW, "gpus_a": 2, "iters_per_s_a": 70.0}, {**pair, "gpus_a": 2, "gpus_b": 2}]
    path = csv_file(tmp_path / "gavel.csv", GAVEL_ROW, other_job, pair, none, *tables, *several)
    print_report(take_in(tmp_path / "data", "gavel", path))
    assert "gavel.csv: members of pairs" in capsys.readouterr().out
    rows = ask(
        tmp_path / "data",
        "SELECT series, name, model, devices, slowdown FROM collocations WHERE slowdown IS NOT NULL ORDER BY ALL",
    )
    assert rows == [
        ("oracle_throughputs", "A3C", "A3C", None, pytest.approx(1.25)),
        ("oracle_throughputs", "LM (batch size 5)", "LM", None, pytest.approx(4 / 3)),
        ("simulation_throughputs", "A3C", "A3C", None, pytest.approx(1.25)),
        ("simulation_throughputs", "LM (batch size 5)", "LM", 2, pytest.approx(3.5)),
        ("simulation_throughputs", "LM (batch size 5)", "LM", None, pytest.approx(2.0)),
    ]
    assert ask(tmp_path / "data", "SELECT count(*) FROM collocations WHERE status = 'invalid'") == [(3,)]


UUIDS = ["GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-7777-8888-9999-000000000000"]


def of_two(index, **changes):
    """A measured run of two ranks."""
    given = {"source": "measured", "device_name": "NVIDIA T4", "device_uuid": UUIDS[0], "node": "machine-of-ours"}
    return run_row(index, **given, parallel="ddp=2", worst_rank=1, **changes)


def test_checks_name_ranks_that_are_lost_or_cannot_be(folder):
    RunWriter(folder).write(of_two(1), samples(2, t_ms=[5.0, 5.0], rank=[0, 1]), None, ranks(rank=[0, 2]))
    RunWriter(folder).write(of_two(2), samples(1), None, ranks())
    (folder.partition("ranks", "cnn") / "J-000002.parquet").unlink()
    findings = {finding.rule: finding.examples for finding in findings_of(folder)}
    assert findings["ranks.rows"] == ("J-000002: 0 ranks, ranks=2",)
    assert findings["impossible.ranks.number"] == ("J-000001-r00001 rank=2",)
    assert "duplicate.sample" not in findings, "two ranks are read at one time"
