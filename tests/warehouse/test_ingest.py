"""Other people's measurements become rows of `runs`: once each, whole, with what makes no sense counted and named."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warehouse
from conf.errors import EnvironmentProblem
from conf.files.identity import mapping_hash
from featurize.configs.trial import config_from_mapping, config_hash
from featurize.families import cnn, layers_of
from featurize.job.training_settings import ACTIVATIONS
from tests.warehouse.warehouse_rows import (
    GPUMEMNET_HEADER as HEADER,
    TIMM_HEADER as TIMM,
    TRANSFORMER,
    cnn_name,
    csv_table,
    mlp_name,
    take_in,
)
from warehouse.exchange import ingesting
from warehouse.exchange.published import dense_parameters, pool_intervals
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.folder import DataFolder
from warehouse.reading.connection import select

OLD_HEADER = HEADER[:5]
ROOT = Path(warehouse.__file__).parent.parent


def measured(name, batch, memory, status="SUCCESSFUL", depth=3):
    return (name, depth, 100, batch, memory, 80, 0.5, -1, 0.25, status)


@pytest.fixture
def place(tmp_path):
    return tmp_path / "a'; echo foo [b]*?"


@pytest.fixture
def take(place):
    return lambda path, source="gpumemnet", **settings: take_in(place / "data", source, path, **settings)


def rows(place, columns="*", where="true"):
    return select(place / "data", f"SELECT {columns} FROM runs WHERE {where} ORDER BY run_id")


ROWS = [
    measured(mlp_name(), 32, 1500),
    measured(mlp_name(64), 64, 1600),
    measured(cnn_name(), 4, 39_000, "OOM_CRASH"),
    measured(TRANSFORMER, 8, 2000),
]


def test_rows_land_with_their_configuration_labels_and_environment(place, take):
    (report,) = take(csv_table(place / "some.csv", HEADER, ROWS)).files
    assert (report.rows, report.new, report.already_there) == (4, 4, 0)
    assert report.statuses == {"ok": 3, "oom": 1}
    (one,) = rows(place, where="batch_size = 64")
    wanted = {
        "job_id": "import-gpumemnet",
        "family": "mlp",
        "status": "ok",
        "source": "imported",
        "oom_kind": None,
        "device_name": "A100-SXM4-40GB",
        "device_memory_mib": 40_960,
        "torch_version": "2.4.1",
        "cuda_version": "12.2",
        "precision": "fp32",
        "optimizer": "adam",
        "peak_memory_mib": 1600,
        "gpu_util": 0.8,
        "smact": 0.5,
        "smocc": None,
        "drama": 0.25,
        "parameters": 100,
        "step_time_ms": None,
        "error": None,
        "error_type": None,
    }
    assert {name: one[name] for name in wanted} == wanted
    (oom,) = rows(place, where="status = 'oom'")
    assert (oom["oom_kind"], oom["peak_memory_mib"], oom["family"]) == ("device", 39_000, "cnn")
    assert oom["error"] == "crashed out of memory"
    assert rows(place, where="family = 'transformer'")[0]["parameters"] is None


def test_configs_are_complete_and_known_by_the_farms_own_hash(place, take):
    take(csv_table(place / "some.csv", HEADER, [*ROWS, measured(cnn_name("dense", 16, 64), 4, 3000)]))
    take(csv_table(place / "timm.csv", TIMM, [("resnet10t", "resnet", 8, 2000, 1)]), "timm")
    landed = rows(place)
    assert {row["family"] for row in landed} == {"mlp", "cnn", "transformer", "timm"}
    for row in landed:
        config = config_from_mapping(json.loads(row["config"]))
        assert config.to_mapping() == json.loads(row["config"])
        assert config_hash(config) == row["config_hash"] == mapping_hash(json.loads(row["config"]))


def test_a_dense_networks_parameters_are_counted_as_the_family_counts_them():
    for at in range(200):
        values = dict(
            batch_size=2,
            image_size=8 + at,
            channels=1 + at % 3,
            classes=2 + at,
            base_filters=16,
            depth=4 + at % 29,
            activation=ACTIVATIONS[at % len(ACTIVATIONS)],
            batch_norm=at % 2 == 0,
            topology="dense",
            softmax=True,
            growth_rate=32 if at % 5 else 7,
        )
        for interval in pool_intervals(values["image_size"], values["depth"]):
            config = cnn.Config(**values, pool_interval=interval)
            assert dense_parameters(config.to_mapping()) == sum(layer.parameters for layer in layers_of(config))


def test_how_dense_blocks_are_pooled_is_told_by_the_parameters(place, take):
    name = cnn_name("dense", 48, 64)
    first, second = pool_intervals(64, 48)
    config = dict(
        batch_size=4,
        image_size=64,
        channels=3,
        classes=7,
        base_filters=16,
        depth=48,
        topology="dense",
        activation="silu",
        softmax=True,
    )
    counts = [
        sum(layer.parameters for layer in layers_of(cnn.Config(**config, pool_interval=i))) for i in (first, second)
    ]
    table = [(name, 48, count, 4, 2000 + at) for at, count in enumerate([*counts, 1])]
    take(csv_table(place / "dense.csv", OLD_HEADER, table))
    landed = rows(place, "json_extract(config, '$.pool_interval')::int AS interval, peak_memory_mib AS m")
    assert {row["m"]: row["interval"] for row in landed} == {2000: first, 2001: second, 2002: first}
    assert first != second


def test_ingesting_twice_adds_nothing_from_wherever_and_a_grown_file_only_its_new_rows(place, take):
    path = csv_table(place / "some.csv", HEADER, ROWS)
    take(path)
    before = rows(place)
    (again,) = take(path).files
    assert (again.new, again.already_there) == (0, 4)
    (elsewhere,) = take(csv_table(place / "deep" / "er" / "other.csv", HEADER, ROWS[::-1])).files
    assert elsewhere.new == 0 and rows(place) == before
    (grown,) = take(csv_table(path, HEADER, [*ROWS[:1], measured(mlp_name(99), 99, 1700), *ROWS[1:]])).files
    assert (grown.rows, grown.new, grown.already_there) == (5, 1, 4)
    assert len(rows(place)) == 5


def test_the_same_measurements_with_other_columns_are_the_same_runs(place, take):
    csv_table(place / "set" / "full.csv", HEADER, ROWS)
    csv_table(place / "set" / "an_old.csv", OLD_HEADER, [row[:5] for row in ROWS])
    full, old = take(place / "set").files
    assert (full.path.name, full.new, old.new) == ("full.csv", 4, 0), "the one that tells more lands first"


def test_rows_that_make_no_sense_land_as_invalid_and_are_named_by_reason(place, take):
    table = [
        measured(mlp_name(), 32, 0),
        measured(mlp_name(), 32, 1500, depth=0),
        ROWS[0],
        measured("what?", 3, -1),
        measured(mlp_name(), 32, 1800, "EXPLODED"),
        measured(mlp_name(), 32, 9e30),
        measured(mlp_name(), 33, 1500),
    ]
    (report,) = take(csv_table(place / "some.csv", HEADER, table)).files
    invalid = {
        "never started: no memory": [1],
        "never started: depth 0": [2],
        "file name: no known first key": [4],
        "status EXPLODED": [5],
        "peak_memory_mib: 9e+30 MiB, on a device of 40,960 MiB": [6],
        "batch size is not the one in the file name": [7],
    }
    assert (report.statuses, report.invalid) == ({"invalid": 6, "ok": 1}, invalid)
    invalid_rows = rows(place, where="status = 'invalid'")
    assert {row["error"] for row in invalid_rows} == invalid.keys()
    assert {row["family"] for row in invalid_rows} == {"mlp", "unknown"}
    assert all(row["peak_memory_mib"] != -1 for row in invalid_rows)


def test_a_folder_is_searched_below_and_other_files_are_named(place, take):
    csv_table(place / "set" / "A" / "mlp.csv", OLD_HEADER, [ROWS[0][:5]])
    csv_table(place / "set" / "B" / "mlp.csv", HEADER, [ROWS[1]])
    csv_table(place / "set" / "odd.csv", ("x", "y"), [(1, 2)])
    csv_table(place / "set" / "timm.csv", TIMM, [("net", "nets", 8, 2000, 1)])
    csv_table(place / "set" / "known.csv", ("model", "batch_size", "actual_mib"), [("vgg16", 4, 3000)])
    report = take(place / "set")
    assert {(file.path.parent.name, file.new) for file in report.files} == {("A", 1), ("B", 1)}
    assert {path.name: why.split(";")[0] for path, why in report.left.items()} == {
        "odd.csv": "unknown header",
        "timm.csv": "its rows are of source=timm",
        "known.csv": "well-known models by name: no configurations of a family that could be rebuilt",
    }


MAPPING = dict(
    family="timm",
    device_name="NVIDIA-L4",
    columns="{peak_memory_mib: mem, batch_size: bs, config.model: net, smact: sm, status: end}",
    constants="{optimizer: sgd, torch_version: 2.6.0, device_memory_mib: 23034}",
)


def test_any_csv_is_read_by_a_mapping_of_its_columns(place, take):
    header = ("net", "bs", "mem", "sm", "end", "note")
    table = [
        ("resnet18", 8, 2100.5, 0.5, "ok", "x"),
        ("resnet18", 999, "", -1, "OOM", "x"),
        ("resnet18", 8, 10, 50, "ok", ""),
        ("resnet18", 8, -3, 0.5, "ok", ""),
        ("resnet18", 8, 90_000, 0.5, "ok", ""),
        ("resnet18", "", 10, 0.5, "ok", ""),
        ("resnet18", 8, "", "nan", "", ""),
        ("resnet18", 8, 10, "", "meh", ""),
        ("resnet18", -8, 2000, "", "ok", ""),
        ("resnet18", 8, "inf", "", "ok", ""),
    ]
    path = csv_table(place / "mine.csv", header, table)
    (report,) = take(path, "csv", **MAPPING).files
    assert report.statuses == {"ok": 1, "oom": 1, "invalid": 8}
    reasons = (
        "-3 MiB is not a need",
        "90,000 MiB, on a device of 23,034 MiB",
        "smact must be in [0, 1], got 50",
        "no batch size",
        "no figure",
        "unknown status 'meh'",
        "batch_size: -8",
        "peak_memory_mib: must be a number, got 'inf'",
    )
    assert [text for text in reasons if text not in " | ".join(report.invalid)] == []
    one, two = sorted(rows(place, where="status != 'invalid'"), key=lambda row: row["status"])
    assert (one["peak_memory_mib"], one["smact"], one["optimizer"], one["device_name"]) == (
        2100.5,
        0.5,
        "sgd",
        "NVIDIA-L4",
    )
    assert (one["job_id"], one["torch_version"], one["device_memory_mib"]) == ("import-csv", "2.6.0", 23034)
    assert (two["status"], two["oom_kind"], two["peak_memory_mib"], two["smact"]) == ("oom", "device", None, None)
    config = config_from_mapping(json.loads(one["config"]))
    assert (config.model, config.batch_size, config.optimizer) == ("resnet18", 8, "sgd")
    assert take(path, "csv", **MAPPING).files[0].new == 0


def test_a_field_of_the_trial_config_is_a_number_where_its_cell_is_one_and_else_text(place, take):
    cells = (".5", "8", "true", "1e999", "[" * 100_000)
    path = csv_table(place / "mine.csv", ("net", "mem"), [(cell, 100) for cell in cells])
    about = {"family": "timm", "device_name": "NVIDIA-L4", "constants": "{batch_size: 8}"}
    take(path, "csv", **about, columns="{peak_memory_mib: mem, config.model: net}")
    fields = [json.loads(row["config"])["model"] for row in rows(place)]
    assert sorted(fields, key=str) == sorted((0.5, 8, True, *cells[3:]), key=str)


def test_a_cell_of_a_column_of_truth_values_is_true_or_false(place, take):
    cells = ("true", "0", "False", "maybe", "")
    path = csv_table(place / "mine.csv", ("net", "mem", "mps"), [("resnet18", 100, cell) for cell in cells])
    about = {"family": "timm", "device_name": "NVIDIA-L4", "constants": "{batch_size: 8, prepared: true}"}
    (report,) = take(path, "csv", **about, columns="{peak_memory_mib: mem, config.model: net, mps: mps}").files
    assert report.invalid == {"mps: must be true or false, got 'maybe'": [4]}
    landed = rows(place, "mps, prepared")
    assert sorted(str(row["mps"]) for row in landed) == ["False", "False", "None", "None", "True"]
    assert all(row["prepared"] for row in landed)


def test_a_constant_that_no_table_can_hold_makes_its_rows_invalid(place, take):
    path = csv_table(place / "mine.csv", ("net", "mem"), [("resnet18", 100)])
    about = {"family": "timm", "device_name": "NVIDIA-L4", "constants": r'{batch_size: 8, worker: "\ud800"}'}
    (report,) = take(path, "csv", **about, columns="{peak_memory_mib: mem, config.model: net}").files
    ((reason, _),) = report.invalid.items()
    assert reason.startswith("worker: ") and "surrogates not allowed" in reason


def test_the_same_cells_under_other_constants_or_on_another_card_are_other_runs(place, take):
    path = csv_table(place / "mine.csv", ("net", "bs", "mem", "end"), [("resnet18", 999, "", "OOM")])
    about = {**MAPPING, "columns": "{peak_memory_mib: mem, batch_size: bs, config.model: net, status: end}"}
    reports = [take(path, "csv", **about | {"constants": f"{{precision: {one}}}"}) for one in ("fp32", "bf16")]
    assert [report.files[0].new for report in reports] == [1, 1]
    assert {row["precision"] for row in rows(place)} == {"fp32", "bf16"}
    timm = csv_table(place / "timm.csv", TIMM, [("net", "nets", 8, 2000, 1)])
    assert [take(timm, "timm", device_name=name).files[0].new for name in (None, "H100-SXM5-80GB", None)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "expected_text"),
    [
        (["source=hearsay"], "unknown source 'hearsay'; known: allreduce, csv, dataset, deeplearningexamples, dgxc, "),
        (["source=gpumemnet", "path=nowhere"], "path=nowhere: there is no such file or folder"),
        (["path=x"], "missing source=..."),
        (["source=timm"], "holds no file of source=timm; some.csv: its rows are of source=gpumemnet"),
        (["source=gpumemnet", "family=cnn"], "family: for source=csv only"),
        (["source=csv"], "family=... is missing"),
        (["source=csv", "family=cmm", "columns={smact: a}"], "unknown family 'cmm'; known: cnn, "),
        (["source=csv", "family=cnn", "columns={smact: a}"], "device_name=... is missing"),
        (["source=csv", "family=cnn", "device_name=x"], "columns='{peak_memory_mib: COLUMN, ...}' is missing"),
        (["source=csv", "family=cnn", "device_name=x", "columns=mem"], "columns must be written as"),
        (
            ["source=csv", "family=cnn", "device_name=x", "columns={smat: Depth, run_id: Depth}"],
            "columns: unknown smat, run_id; known: ",
        ),
        (
            ["source=csv", "family=cnn", "device_name=x", "columns={smact: Deep}"],
            "no column Deep; the file has Filename",
        ),
    ],
)
def test_bad_input_is_one_message_and_writes_nothing(place, refused, arguments, expected_text):
    path = csv_table(place / "some.csv", HEADER, ROWS)
    if not any(text.startswith("path=") for text in arguments):
        arguments = [*arguments, f"path={path}"]
    asked = [*arguments, f"data='{str(place / 'data').replace(chr(39), chr(92) + chr(39))}'"]
    assert expected_text in refused("ingest", *asked) and not (place / "data").exists()


KILLED = """
import os, signal, sys
from warehouse.files import counting
from warehouse.exchange.ingesting import IngestSettings, ingest
landed = 0
write = counting.Listing.write
def dying(listing):
    global landed
    if landed == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    landed += 1
    write(listing)
counting.Listing.write = dying
ingest(IngestSettings(source="gpumemnet", path=sys.argv[1], data=sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("survived", [0, 1, 2])
def test_a_kill_leaves_whole_batches_and_a_repeat_adds_the_rest_once(place, take, survived):
    csv_table(place / "set" / "a.csv", HEADER, ROWS[:2])
    csv_table(place / "set" / "b.csv", HEADER, [*ROWS[2:], measured(cnn_name(depth=5), 4, 3000)])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(place / "set"), str(place / "data"), str(survived)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == -signal.SIGKILL
    assert len(rows(place)) == [0, 2, 4][survived]
    take(place / "set")
    assert len(rows(place)) == 5 and len({row["run_id"] for row in rows(place)}) == 5
    folder = DataFolder.resolve(place / "data")
    compact(folder, now_s=2e10, settings=CompactionSettings(min_files=2))
    compact(folder, now_s=3e10, settings=CompactionSettings(min_files=2))
    assert len(rows(place)) == 5, "what the kill left is swept up and never counts"
    assert sum(file.new for file in take(place / "set").files) == 0


def test_a_second_ingest_at_the_same_time_is_refused(place, take):
    path = csv_table(place / "some.csv", HEADER, ROWS)
    folder = DataFolder.resolve(place / "data").create()
    with ingesting._lock(folder), pytest.raises(EnvironmentProblem, match="another ingest is at work"):
        take(path)
    assert take(path).files[0].new == 4
