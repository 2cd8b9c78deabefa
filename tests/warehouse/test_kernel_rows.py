"""The table `kernels`: of runs and imported, through landing, compaction, snapshots, checks and publication."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from warehouse_rows import ask, ask_plainly, compact_at, findings_of, kernels, ranks, run_row, samples, take_in

from conf.errors import EnvironmentProblem, UsageError
from warehouse.exchange.published_tables import NEUSIGHT_COLUMNS as COLUMNS
from warehouse.exchange.publishing import PublishSettings, publish
from warehouse.files.snapshots import take_snapshot
from warehouse.files.writer import RunWriter
from warehouse.ingest import print_report
from warehouse.reading.pairing import diff

CELLS = {
    "op": "bmm",
    "device": "NVIDIA A100-PCIE-40GB",
    "latency_ms": 0.0358,
    "dims": '{"B": "6", "K": "390", "M": "27", "N": "21"}',
    "kernel": "ampere_sgemm_128x128_nn",
    "warps_per_sm": 1.5,
    "blocks_per_sm": 0.25,
    "grid": "4x1x6",
    "block": "256x1x1",
    "torch": "p2.1.0",
    "cuda": "cu121",
    "cudnn": "8902",
}
CONVOLUTION = CELLS | {
    "op": "conv",
    "device": "Tesla T4",
    "dims": json.dumps(
        dict(
            B="38", Input_Channel="893", Input_Size="5", Kernel_Szie="3", Output_Channel="326", Padding="1", Stride="2"
        )
    ),
}
VECTORS = {"dims": '{"B": "127", "H": "168"}'}


def kernel_file(path, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_kernels_of_an_execution_that_was_killed_go_when_the_task_lands_without(folder):
    RunWriter(folder).write(run_row(1), samples(1), kernels()).unlink()  # as killed before its run landed
    RunWriter(folder).write(run_row(1), samples(1))
    assert ask(folder, "SELECT count(*) FROM kernels") == [(0,)]


def test_imported_kernels_survive_compaction_snapshot_and_any_client(folder, tmp_path, views_file):
    for at in range(3):
        take_in(folder.root, "neusight", kernel_file(tmp_path / f"{at}.parquet", CELLS | {"latency_ms": 1.0 + at}))
    writer = RunWriter(folder)
    for index in range(3):
        writer.write(run_row(index), samples(1), kernels())
    before = ask(folder, "SELECT * FROM kernels ORDER BY kernel_row")
    assert [compact_at(folder, hours).problems for hours in (0, 2)] == [[], []]
    assert len(list(folder.partition("kernels", "unknown").glob("*.parquet"))) == 1
    assert ask(folder, "SELECT * FROM kernels ORDER BY kernel_row") == before
    assert ask(folder, "SELECT count(*), count(run_id) FROM kernels") == [(9, 6)]  # imported rows have no run
    assert ask_plainly(folder, "SELECT count(*), count(run_id) FROM kernels") == [(9, 6)]
    assert take_snapshot(folder, "s").rows["kernels"] == 9
    take_in(folder.root, "neusight", kernel_file(tmp_path / "later.parquet", CELLS))
    assert ask(folder, "SELECT count(*) FROM kernels", snapshot="s") == [(9,)]
    assert [finding.line() for finding in findings_of(folder) if "kernel" in finding.rule] == []


def test_checks_name_kernels_that_are_lost_or_cannot_be(folder):
    writer = RunWriter(folder)
    writer.write(run_row(0), samples(1), kernels())
    writer.write(run_row(1), samples(1), kernels(duration_us=[0.0, 1.0]))
    writer.write(run_row(2), samples(1), kernels(1, block_x=[2048], block_y=[1], block_z=[1], dims=["{"]))
    (folder.partition("kernels", "cnn") / "J-000000.parquet").unlink()
    findings = {finding.rule: finding.examples for finding in findings_of(folder)}
    wanted = {
        "kernels.rows": ("J-000000: 0 kernels, kernel_rows=2",),
        "range.kernels.launches": ("J-000001-k00000 duration_us=0.0",),
        "impossible.kernels.block": ("J-000002-k00000 block_x=2048",),
        "schema.kernels.dims": ("J-000002-k00000 dims={",),
    }
    assert wanted.items() <= findings.items()


def test_a_publication_has_its_runs_kernels_and_imported_ones_where_they_are_named(folder, tmp_path, no_checks):
    of_ranks = ranks(device_uuid=["GPU-1", "GPU-2"])
    RunWriter(folder).write(run_row(1, source="measured", device_uuid="GPU-1"), samples(1), kernels(), of_ranks)
    take_in(folder.root, "neusight", kernel_file(tmp_path / "k.parquet", CELLS))
    settings = {"data": str(folder.root), "licence": "CC-BY-4.0", "pages": 0}
    for sources, count in ((["measured", "imported"], 3), (["measured"], 2)):
        out = tmp_path / "-".join(sources)
        report = publish(PublishSettings(out=str(out), sources=sources, **settings))
        runs, rows = (pq.read_table(out / table).to_pylist() for table in ("runs", "kernels"))
        assert len(rows) == count and runs[0]["kernel_rows"] == 2
        own = [row for row in rows if row["source"] == "measured"]
        assert {row["run_id"] for row in own} == {runs[0]["run_id"]} and runs[0]["run_id"] != "J-000001"
        assert all(row["kernel_row"].startswith(runs[0]["run_id"]) for row in own)
    uuids = {row["device_uuid"] for row in pq.read_table(out / "ranks").to_pylist()}
    assert len(uuids) == 2 and runs[0]["device_uuid"] in uuids and not {"GPU-1", "GPU-2"} & uuids
    assert "left out: 1 kernels: source imported" in report.lines()
    card = (out / "README.md").read_text()
    assert "- 1 kernels: source imported" in card and "and 2 kernels" in card and "Columns of kernels" in card


def test_a_difference_compares_the_times_of_the_same_kernels_on_the_same_software(folder, shown):
    writer = RunWriter(folder)
    same = {"source": "measured", "device_name": "T4", "torch_version": "2.13.0"}
    writer.write(run_row(0, **same), samples(1), kernels())
    take_snapshot(folder, "a")
    writer.write(run_row(1, **same), samples(1), kernels(duration_us=[12.0, 11.0]))
    writer.write(run_row(2, **same | {"torch_version": "2.14.0"}), samples(1), kernels(duration_us=[99.0, 99.0]))
    slower, equal = diff(folder, "a").kernel_shifts
    assert (slower.group, slower.pairs, slower.beyond) == ({"operator": "aten::mm0", "device_name": "T4"}, 1, 1)
    assert slower.median == pytest.approx(0.2) and slower.largest == slower.median
    assert (equal.group["operator"], equal.median, equal.beyond) == ("aten::mm1", 0.0, 0)
    assert "+20.0%" in shown("diff", "before=a", f"data={folder.root}")


def test_a_matrix_product_of_the_file_becomes_its_operator_and_shapes(folder, tmp_path):
    # The file's N is what is summed over, as its grid shows: 390 columns take four tiles of 128.
    rows = [CELLS, CELLS | {"op": "linear", "dims": '{"B": "1", "M": "58", "N": "13", "K": "141"}'}, CONVOLUTION]
    rows += [CELLS | VECTORS | {"op": op} for op in ("add", "addu", "softmax", "ln")]
    report = take_in(folder.root, "neusight", kernel_file(tmp_path / "k.parquet", *rows))
    assert (report.files[0].new, report.files[0].invalid) == (7, {})
    dims = dict(ask(folder, "SELECT operator || ' ' || (origin::JSON ->> 'op'), dims FROM kernels"))
    assert {name: json.loads(text) for name, text in dims.items()} == {
        "aten::bmm bmm": {"shapes": [[6, 27, 21], [6, 21, 390]]},
        "aten::addmm linear": {"shapes": [[141], [58, 13], [13, 141]]},
        "aten::convolution conv": {
            "shapes": [[38, 893, 5, 5], [326, 893, 3, 3], []],
            "arguments": {"stride": [2, 2], "padding": [1, 1], "dilation": [1, 1], "groups": 1},
        },
        "aten::add add": {"shapes": [[127, 168], [127, 168]]},
        "aten::add addu": {"shapes": [[127, 168], []]},
        "aten::_softmax softmax": {"shapes": [[127, 168]]},
        "aten::native_layer_norm ln": {"shapes": [[127, 168], [], [168], [168]]},
    }
    columns = "device_name, torch_version, cuda_version, cudnn_version, phase, dtype, grid_x, grid_y, grid_z, block_x, "
    columns += "duration_us, timing, run_id"
    assert ask(folder, f"SELECT {columns} FROM kernels WHERE operator = 'aten::bmm'") == [
        ("A100-PCIE-40GB", "2.1.0", "12.1", "8902", "forward", "float32", 4, 1, 6, 256, 35.8, "cuda_events", None)
    ]


def test_kernels_land_once_whatever_file_they_are_in(folder, tmp_path):
    path = kernel_file(tmp_path / "k.parquet", CELLS, CELLS, CONVOLUTION)  # equal rows of a file are two measurements
    assert take_in(folder.root, "neusight", path).files[0].new == 3
    assert take_in(folder.root, "neusight", path).files[0].already_there == 3
    more = kernel_file(tmp_path / "more.parquet", CONVOLUTION, CELLS | {"latency_ms": 2.0})
    assert take_in(folder.root, "neusight", more).files[0].new == 1
    assert ask(folder, "SELECT count(*), count(DISTINCT kernel_row) FROM kernels") == [(4, 4)]


def test_rows_that_make_no_sense_are_named_and_left_out(folder, tmp_path, capsys):
    bad = [
        {"op": "conv4d"},
        {"latency_ms": 0.0},
        {"dims": "[]"},
        {"dims": "{}"},
        {"grid": "4x1"},
        {"dims": '{"B": "6", "K": "390", "M": "-27", "N": "21"}'},
        {"block": "256x-1x1"},
        {"grid": f"{2**40}x1x6"},
    ]
    path = kernel_file(tmp_path / "k.parquet", CELLS, *(CELLS | change for change in bad))
    report = take_in(folder.root, "neusight", path)
    (file,) = report.files
    assert (file.rows, file.new, file.already_there) == (9, 1, 0)
    assert sorted(place for places in file.invalid.values() for place in places) == [2, 3, 4, 5, 6, 7, 8, 9]
    print_report(report)
    assert "invalid: grid is not of the form 1x2x3: 1 (k.parquet:6)" in capsys.readouterr().out
    assert ask(folder, "SELECT count(*) FROM kernels") == [(1,)]


def test_a_damaged_file_of_kernels_is_one_message_and_nothing_lands(folder, tmp_path):
    files = tmp_path / "published"
    files.mkdir()
    path = kernel_file(files / "k.parquet", CELLS)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(EnvironmentProblem, match=r"k\.parquet is damaged or no Parquet file"):
        take_in(folder.root, "neusight", path)
    good = kernel_file(files / "l.parquet", CELLS)
    other = kernel_file(files / "m.parquet", {"op": "bmm"})
    report = take_in(folder.root, "neusight", files)
    assert [file.path for file in report.files] == [good] and report.left.keys() == {path, other}
    assert all(name in report.left[other] for name in COLUMNS)
    with pytest.raises(UsageError, match="holds no file of source=neusight"):
        take_in(folder.root, "neusight", other)


def test_kernels_of_an_importing_that_was_killed_do_not_count_and_come_again(folder, tmp_path, monkeypatch):
    path = kernel_file(tmp_path / "k.parquet", CELLS)
    monkeypatch.setattr("warehouse.files.counting.Listing.write", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        take_in(folder.root, "neusight", path)
    monkeypatch.undo()
    assert ask(folder, "SELECT count(*) FROM kernels") == [(0,)]
    assert take_in(folder.root, "neusight", path).files[0].new == 1
