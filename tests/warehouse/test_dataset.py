"""Measured runs leave a data folder as a data set and come back from it: whole, once, and without anybody's names."""

import datetime
import fcntl
import json
import os
import shutil

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from warehouse_rows import ask, collocations, kernels, ranks, run_row, take_in

from conf.errors import CommandError, EnvironmentProblem, UsageError
from warehouse.exchange import dataset, ingesting
from warehouse.exchange.dataset import (
    ExportSettings,
    export,
    find_parts,
    read_part,
    repository_folder,
    scrub,
    thin,
    to_bytes,
)
from warehouse.exchange.dataset_card import card
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from warehouse.tables.schema import RUN_SCHEMA, SCHEMA_VERSION, TELEMETRY_SCHEMA

DAY = datetime.datetime(2026, 3, 4, 5, 6, 7, 891011, tzinfo=datetime.UTC)
TRACEBACK = """Traceback (most recent call last):
  File "/home/a person/gpu farm/workers/trial.py", line 7, in run_trial
torch.OutOfMemoryError: on host17.example.org (10.1.2.3), see /home/someone/logs/trial.log and host17"""


def gpu_run(index, **changes):
    return (
        run_row(index)
        | {
            "config": json.dumps({"family": "cnn", "depth": index // 2, "batch_size": index % 2}),
            "batch_size": index % 2,
            "source": "measured",
            "device_name": "NVIDIA H100 80GB HBM3",
            "device_uuid": "GPU-0a1b2c3d-0000-1111-2222-333344445555",
            "device_memory_mib": 81559.0,
            "node": "host17.example.org",
            "worker": "ray-0",
            "torch_version": "2.13.0+cu130",
            "smact": 0.1 + index / 100,
            "telemetry_missing": json.dumps({"dcgm": "no answer at http://host17:9400/metrics"}),
            "finished_at": DAY + datetime.timedelta(minutes=index),
        }
        | changes
    )


def readings(n, start_ms=0.0, every_ms=20.0, **columns):
    times = [start_ms + every_ms * i for i in range(n)]
    return pa.table(
        {
            "t_ms": times,
            "sensor": ["nvml"] * n,
            "phase": ["window"] * n,
            "power_w": [100.0 + i for i in range(n)],
            **columns,
        }
    )


@pytest.fixture
def out(tmp_path):
    return tmp_path / "a'; echo out [b]*?"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with seven runs, and their data set: each test has its copy.

    Two runs have kernels, one was profiled without any, one ran on two GPUs, two shared one; a row was imported.
    """
    place = tmp_path_factory.mktemp("made")
    folder = DataFolder.resolve(place / "data").create()
    writer = RunWriter(folder)
    writer.write(gpu_run(0), readings(50), kernels(2, dims=[json.dumps({"shapes": [[2, 3]]})] * 2))
    writer.write(gpu_run(1), readings(50), kernels(3))
    writer.write(gpu_run(2), readings(50), kernels(0))
    alone = {"solo_run_id": ["J-000000"], "name": ["cnn at /home/someone/nets"]}
    writer.write(gpu_run(3, group_id="G"), readings(50), collocations=collocations(**alone))
    writer.write(gpu_run(4, status="oom", oom_kind="device", peak_memory_mib=None, error=TRACEBACK), readings(2))
    of_two = gpu_run(5, family="mlp", memory_fraction=0.25, parallel="ddp=2", worst_rank=1)
    uuids = [of_two["device_uuid"], "GPU-ffff"]
    writer.write(of_two, readings(3, rank=[0, 1, 1]), ranks=ranks(device_uuid=uuids, node=["host17", "host18"]))
    later = gpu_run(6, group_id="G", finished_at=DAY + datetime.timedelta(days=1))
    writer.write(later, readings(3), collocations=collocations(member=[1]))
    imported = {"run_id": "other-1", "family": "cnn", "status": "ok", "source": "imported", "device_name": "T4"}
    writer.write(imported, readings(0), kernels(1))
    exported(folder, place / "set")
    return place


@pytest.fixture
def filled(folder, made):
    shutil.copytree(made / "data", folder.root, dirs_exist_ok=True)
    return folder


@pytest.fixture
def sent(out, made):
    """The data set of `filled`."""
    return shutil.copytree(made / "set", out)


def exported(folder, out, **settings):
    return export(ExportSettings(data=str(folder.root), out=str(out), **settings))


def loaded(out, data):
    return take_in(data, "dataset", out)


def rewrite(path, described=None, without=(), **values):
    """Write a part's table with other metadata and without columns, or with one value in all of a column's rows."""
    table = pq.ParquetFile(path).read().drop_columns(list(without))
    for name, value in values.items():
        at = table.schema.get_field_index(name)
        column = pa.array([value] * table.num_rows, table.schema.field(at).type)
        table = table.set_column(at, table.schema.field(at), column)
    metadata = json.loads(table.schema.metadata[b"gpufarm_dataset"]) | (described or {})
    pq.write_table(table.replace_schema_metadata({b"gpufarm_dataset": json.dumps(metadata)}), path)


def files(out):
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


# Questions that a folder and one that loaded its data set answer alike.
ALIKE = (
    "SELECT task_index, family, status, source, device_name, smact, peak_memory_mib, memory_fraction, finished_at, "
    "kernel_rows, parallel, ranks, worst_rank, collocation_rows FROM runs WHERE source <> 'imported' ORDER BY ALL",
    "SELECT task_index, sensor, rank, count(*), min(t.power_w), max(t.power_w) FROM telemetry t "
    "JOIN runs USING (run_id) WHERE task_index = 5 GROUP BY ALL ORDER BY ALL",
    "SELECT operator, duration_us, count, timing, dims, device_name, torch_version, family, source FROM kernels "
    "WHERE source <> 'imported' ORDER BY ALL",
    "SELECT rank, status, peak_memory_mib FROM ranks ORDER BY rank",
    "SELECT member, group_size, sharing FROM collocations ORDER BY member",
)
# A question about the folder that loaded the set, and its answer.
PUBLIC = {
    "SELECT DISTINCT job_id FROM runs": [("dataset-J",)],  # not counted as one of its own jobs
    "SELECT bool_and(starts_with(kernel_row, run_id || '-k')), count(DISTINCT kernel_row) FROM kernels "
    "JOIN runs USING (run_id)": [(True, 5)],
    "SELECT bool_and(starts_with(rank_row, run_id)), count(DISTINCT device_uuid), count(node) FROM ranks": [
        (True, 2, 0)
    ],
    "SELECT count(*) FROM ranks JOIN runs USING (run_id, device_uuid)": [(1,)],
    "SELECT count(DISTINCT group_id), min(member.name) FROM collocations AS member "
    "JOIN runs USING (run_id, group_id) WHERE group_id <> 'G'": [(1, "cnn at nets")],
    "SELECT member FROM collocations JOIN runs ON solo_run_id = runs.run_id AND task_index = 0": [(0,)],
    "SELECT count(*) FROM kernels": [(5,)],
    "SELECT count(*) FROM runs": [(7,)],
}


def test_what_is_loaded_is_what_was_measured_and_a_second_time_adds_nothing(filled, sent, tmp_path):
    other = tmp_path / "other"
    assert sum(file.new for file in loaded(sent, other).files) == 7
    again = loaded(sent, other)
    assert [(file.rows, file.new) for file in again.files] == [(file.rows, 0) for file in again.files]
    assert [sql for sql in ALIKE if ask(other, sql) != ask(filled, sql)] == []
    assert {sql: ask(other, sql) for sql in PUBLIC} == PUBLIC
    card_text = (sent / "README.md").read_text()
    for kind, rows in (("kernels", 5), ("ranks", 2), ("collocations", 2)):
        assert f"| `{kind}` | {rows} |" in card_text
    # Nor does the folder that measured them get anything twice.
    assert sum(file.new for file in loaded(sent, filled.root).files) == 0


def test_the_same_runs_give_the_same_bytes_also_from_a_folder_that_has_loaded_them(filled, sent, tmp_path):
    before = files(sent)
    exported(filled, sent)
    assert files(sent) == before
    loaded(sent, tmp_path / "other")
    compact(DataFolder.resolve(tmp_path / "other"), settings=CompactionSettings(min_files=2))
    exported(DataFolder.resolve(tmp_path / "other"), tmp_path / "copy")
    assert files(tmp_path / "copy") == before


def test_kernels_of_chosen_families_only_and_none_where_they_are_not_wanted(filled, out, tmp_path):
    exported(filled, out, families=["mlp"])
    assert not [name for name in files(out) if "kernels" in name]
    assert "Columns of kernels" not in (out / "README.md").read_text()
    bare = tmp_path / "bare"
    exported(filled, bare, kernels=False)
    assert not [name for name in files(bare) if "kernels" in name]
    loaded(bare, tmp_path / "other")
    assert ask(tmp_path / "other", "SELECT count(kernel_rows) FROM runs") == [(0,)]


def test_another_machine_s_runs_of_the_same_job_and_day_are_added(sent, tmp_path):
    second = DataFolder.resolve(tmp_path / "second")
    RunWriter(second).write(gpu_run(0, device_uuid="GPU-ffff"), readings(2))
    assert exported(second, sent).added.total() == 1
    loaded(sent, tmp_path / "other")
    counted = "SELECT count(*), count(DISTINCT run_id), count(DISTINCT device_uuid) FROM runs WHERE task_index = 0"
    assert ask(tmp_path / "other", counted) == [(2, 2, 2)]


def test_names_of_machines_users_and_folders_stay_at_home(sent):
    texts = [(sent / "README.md").read_text()]
    for part in find_parts(sent):
        texts += [str(read_part(sent, part, kind).to_pylist()) for kind in dataset.KINDS]
    for name in ("host17", "example", "someone", "a person", "/home", "10.1.2.3", "0a1b2c3d", "ray-0"):
        assert not any(name in text for text in texts), name
    (row,) = [
        row for part in find_parts(sent) for row in read_part(sent, part, "runs").to_pylist() if row["status"] == "oom"
    ]
    assert 'File "trial.py", line 7, in run_trial' in row["error"] and "trial.log" in row["error"]


def test_scrubbing_leaves_figures_and_ratios_alone():
    text = "2/3 of 81559 MiB; DCGM 3.1.8; MiB/s; see https://box:9400/metrics and ~/x/y.log, 1.5e-3"
    assert scrub(text) == "2/3 of 81559 MiB; DCGM 3.1.8; MiB/s; see https://ADDRESS/metrics and y.log, 1.5e-3"
    assert scrub("no room in /home/someone or /Users/someone/") == "no room in NAME or NAME"


def test_telemetry_is_thinned_and_the_window_keeps_its_ends():
    n = 101
    phases = [None] * 10 + ["window"] * 50 + [None] * 41
    samples = readings(n, phase=phases, quality=["repeated" if i % 5 == 4 else "measured" for i in range(n)])
    samples = samples.append_column("run_id", pa.array(["J-1"] * n))
    whole = pa.table(
        {name: samples[name] if name in samples.column_names else pa.nulls(n) for name in TELEMETRY_SCHEMA.names}
    )
    kept = thin(whole.cast(TELEMETRY_SCHEMA), 10)
    times = kept["t_ms"].to_pylist()
    assert 20 <= len(times) <= 23 and times == sorted(times)
    window = kept.filter(pc.equal(kept["phase"], "window"))["t_ms"].to_pylist()
    assert (window[0], window[-1]) == (200.0, 1180.0)
    repeated = kept.filter(pc.equal(kept["quality"], "repeated"))["t_ms"].to_pylist()
    assert repeated == [1180.0], "a reading of its own is preferred"


def test_only_what_gpus_measured_unless_asked_and_the_card_says_so(folder, out):
    writer = RunWriter(folder)
    writer.write(gpu_run(0), readings(2))
    writer.write(gpu_run(1, device_uuid=None, device_name="AMD EPYC"), readings(2))
    writer.write(gpu_run(2, source="simulated", device_uuid="SIM-H100-0"), readings(2))
    writer.write(gpu_run(3, status="crashed", device_uuid=None, device_name=None), readings(0))
    lost = gpu_run(4, status="crashed", source="simulated", device_uuid=None, device_name=None)
    writer.write(lost, readings(0))
    report = exported(folder, out)
    assert (report.added.total(), report.without_device) == (1, 1)
    assert "1 run is measured on real GPUs" in (out / "README.md").read_text()
    assert exported(folder, out, source="simulated").added.total() == 1
    assert exported(folder, out, source="cpu").added.total() == 1
    assert any("simulated-NVIDIA-H100" in name for name in files(out))


def test_runs_that_lack_fields_are_exported_and_loaded(folder, out, tmp_path):
    """As rows that a program writes: ids, a status and a device, and no more than that."""
    writer = RunWriter(folder)
    row = {"job_id": "J", "attempt": 1, "family": "cnn", "status": "ok", "source": "simulated", "finished_at": None}
    for index, started in enumerate((None, DAY)):
        changes = {"run_id": f"J-00000{index}", "task_index": index, "started_at": started}
        writer.write(row | changes | {"device_name": "A100-SXM4-40GB"}, pa.table({"t_ms": pa.array([], pa.float64())}))
    writer.write(gpu_run(2, source="simulated", device_uuid="SIM-A100-0"), readings(2))
    assert exported(folder, out, source="simulated").added.total() == 3
    assert "cnn/simulated-A100-SXM4-40GB-undated-runs.parquet" in files(out)
    assert sum(file.new for file in loaded(out, tmp_path / "other").files) == 3
    assert exported(folder, out, source="simulated").there == 3


def test_too_large_a_data_set_is_refused_and_nothing_is_written(folder, out):
    RunWriter(folder).write(gpu_run(0), readings(2))
    with pytest.raises(UsageError, match=r"more than max_mb=0\.005"):
        exported(folder, out, max_mb=0.005)
    assert not out.exists()


def test_a_data_folder_without_such_runs_says_so(folder, out):
    RunWriter(folder).write(run_row(0) | {"device_name": "A100-SXM4-40GB"}, readings(1))
    with pytest.raises(UsageError, match="no runs for source=measured; known: measured, cpu, simulated"):
        exported(folder, out)
    with pytest.raises(UsageError, match="unknown source 'gpu'; known: cpu, measured, simulated; hz must be"):
        ExportSettings(out=str(out), source="gpu", hz=0)


def test_a_kill_between_the_two_files_leaves_no_run_and_the_next_ingest_completes_it(sent, tmp_path, monkeypatch):
    land = ingesting.land_batch

    def killed(folder, kind, family, table):
        if kind == "runs" and family == "mlp":
            raise KeyboardInterrupt
        return land(folder, kind, family, table)

    monkeypatch.setattr(ingesting, "land_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        loaded(sent, tmp_path / "other")
    assert ask(tmp_path / "other", "SELECT DISTINCT family FROM runs") == [("cnn",)]
    monkeypatch.undo()
    assert sum(file.new for file in loaded(sent, tmp_path / "other").files) == 1
    counts = (
        "SELECT count(DISTINCT run_id), count(*), count(DISTINCT (run_id, t_ms)) FROM telemetry WHERE family = 'mlp'"
    )
    ((runs, samples, distinct),) = ask(tmp_path / "other", counts)
    assert runs == 1 and samples == distinct


def test_an_export_that_was_killed_between_two_files_doubles_no_sample(filled, made, out, monkeypatch):
    write = dataset.write_file

    def killed(path, content):
        if path.name.endswith("-runs.parquet"):
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(dataset, "write_file", killed)
    with pytest.raises(KeyboardInterrupt):
        exported(filled, out)
    monkeypatch.undo()
    assert find_parts(out) == []
    exported(filled, out)
    assert files(out) == files(made / "set")


def test_two_exports_into_one_folder_take_turns(filled, sent):
    before, holder = files(sent), os.open(sent, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        with pytest.raises(EnvironmentProblem, match="another export is at work on out="):
            exported(filled, sent)
    finally:
        os.close(holder)
    exported(filled, sent)
    assert files(sent) == before


def test_older_files_are_read_and_newer_ones_refused_before_anything_lands(sent, tmp_path):
    rewrite(sent / find_parts(sent)[0].path("runs"), {"schema_version": 1}, without=["smact"])
    assert sum(file.new for file in loaded(sent, tmp_path / "other").files) == 7
    assert ask(tmp_path / "other", "SELECT count(*) FROM runs WHERE smact IS NULL")[0][0] == 5
    rewrite(sent / find_parts(sent)[-1].path("runs"), {"schema_version": SCHEMA_VERSION + 1})
    with pytest.raises(
        EnvironmentProblem, match=f"schema version {SCHEMA_VERSION + 1}, this code knows up to {SCHEMA_VERSION}"
    ):
        loaded(sent, tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_metadata_of_any_shape_and_what_cannot_be_read_land_nothing(sent, tmp_path):
    path = sent / find_parts(sent)[0].path("runs")
    described = (
        "",
        "null",
        "[" * 100_000,
        "[1]",
        "5",
        '{"schema_version": 1e400}',
        '{"schema_version": true}',
        '{"schema_version": "1"}',
        '{"schema_version": ' + "9" * 5000 + "}",
        '{"schema_version": 1, "kind": []}',
    )
    table = pq.ParquetFile(path).read()
    for text in described:
        pq.write_table(table.replace_schema_metadata({dataset._METADATA: text}), path)
        with pytest.raises(CommandError, match=r"is not of a data set|moved or renamed"):
            loaded(sent, tmp_path / "other")
    beyond = pa.array([2**62] * table.num_rows, RUN_SCHEMA.field("started_at").type)
    impossible = to_bytes(
        find_parts(sent)[0], "runs", table.set_column(table.schema.get_field_index("started_at"), "started_at", beyond)
    )
    for content in (impossible, impossible[:100]):
        path.write_bytes(content)
        with pytest.raises(CommandError, match=r"runs\.parquet cannot be read"):
            loaded(sent, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_commands_say_what_they_did_and_a_set_without_runs_is_told_in_one_line(
    folder, out, tmp_path, shown, refused
):
    RunWriter(folder).write(gpu_run(0), readings(2))
    data = f"data={folder.root}"
    assert "1 runs added" in shown("export", f"out={out}", data)
    taken_in = shown("ingest", "source=dataset", f"path={out}", f"data={tmp_path / 'other'}")
    assert "cnn/NVIDIA-H100-80GB-HBM3-2026-03-04-runs.parquet" in taken_in
    empty = tmp_path / "empty"
    empty.mkdir()
    error = refused("ingest", "source=dataset", f"path={empty}", data)
    assert "holds no runs yet: no GPU has measured anything" in error
    assert "missing path=" in refused("ingest", "source=gpumemnet", data)


def test_the_project_s_own_card_is_true():
    root = repository_folder()
    parts = find_parts(root)
    tables = {kind: [read_part(root, part, kind) for part in parts] for kind in dataset.KINDS}
    assert (root / dataset.CARD).read_text() == card(tables)
    assert sum(path.stat().st_size for path in root.rglob("*.parquet")) <= 20e6


@pytest.fixture(scope="module")
def of_all_kinds(tmp_path_factory):
    """The data set of a run that has rows in every table."""
    place = tmp_path_factory.mktemp("all")
    folder = DataFolder.resolve(place / "data").create()
    RunWriter(folder).write(gpu_run(7, family="mlp"), readings(3), kernels(), ranks(), collocations())
    exported(folder, place / "set")
    return place / "set"


@pytest.mark.parametrize("kind", dataset.KINDS)
@pytest.mark.parametrize("leads", ["a file", "a folder", "a pipe"])
def test_nothing_is_read_through_links_that_lead_out_of_a_data_set(of_all_kinds, out, tmp_path, kind, leads):
    shutil.copytree(of_all_kinds, out)
    path = next(out.glob(f"mlp/*-{kind}.parquet"))
    moved = path.parent if leads == "a folder" else path
    elsewhere = moved.rename(tmp_path / "elsewhere")
    if leads == "a pipe":
        os.mkfifo(moved)
    else:
        moved.symlink_to(elsewhere)
    with pytest.raises(EnvironmentProblem, match="leads out of the data set, or no plain file"):
        loaded(out, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("kind", "column", "value", "words"),
    [
        ("kernels", "timing", "stopwatch", "timing must be one of"),
        ("kernels", "duration_us", None, "duration_us is required"),
        ("runs", "run_id", "../../planted", "row 1: "),
        ("runs", "run_id", "/tmp/planted", "row 1: "),
        ("runs", "family", "../../planted", "row 1: "),
    ],
)
def test_rows_of_a_data_set_that_break_the_schema_or_name_paths_land_nothing(
    of_all_kinds, out, tmp_path, kind, column, value, words
):
    shutil.copytree(of_all_kinds, out)
    rewrite(next(out.glob(f"mlp/*-{kind}.parquet")), **{column: value})
    with pytest.raises(EnvironmentProblem, match=words):
        loaded(out, tmp_path / "other")
    assert not (tmp_path / "other").exists() and not list(tmp_path.rglob("*planted*"))
