"""Published steps of jobs on several GPUs land whole, with their time where the table has one."""

import contextlib
import csv
import json

import pytest

import warehouse
from warehouse.ingest import IngestSettings, ingest
from warehouse.published_parallel import PARALLEL_COLUMNS

CELLS = {
    "model": "GPT", "gpu": "H100", "gpus": 16, "tp": 2, "pp": 4, "micro_batch": 1, "global_batch": 64,
    "precision": "bf16", "what_was_measured": "iteration time", "value": 1.5, "unit": "s",
}  # fmt: skip


def landed(folder, source, *changes):
    names = [name.strip() for name in PARALLEL_COLUMNS[source].split(",")]
    path = folder / f"{source}.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*names, "seq"], restval="")
        writer.writeheader()
        writer.writerows(CELLS | change for change in changes)
    ingest(IngestSettings(source=source, path=str(path), data=str(folder / "data")))
    with contextlib.closing(warehouse.connect(folder / "data")) as connection:
        columns = "status, step_time_ms, device_name, error, origin"
        return connection.execute(f"SELECT {columns} FROM runs ORDER BY status DESC, step_time_ms").fetchall()


@pytest.mark.parametrize("source", PARALLEL_COLUMNS)
def test_a_steps_time_lands_in_ms_under_the_gpus_own_name(tmp_path, source):
    (short, long) = landed(tmp_path, source, {}, {"value": 90, "unit": "ms", "gpu": "A100-SXM4-80GB"})
    assert short[:3] == ("ok", 90.0, "A100-SXM4-80GB") and long[:3] == ("ok", 1500.0, "H100-SXM5-80GB")
    assert json.loads(long[4])["pp"] == "4"  # what no trial config describes stays readable


def test_tokens_a_second_and_gpu_become_the_steps_time_where_batch_and_length_are_known(tmp_path):
    speed = {"value": 4096, "unit": "tokens/s/GPU"}
    known, unknown = landed(tmp_path, "nemo", speed | {"seq": 2048}, speed)
    assert known[:2] == ("ok", 64 * 2048 / (4096 * 16) * 1e3)
    assert unknown[:2] == ("invalid", None)


def test_a_row_without_a_time_says_what_it_measured(tmp_path):
    (row,) = landed(tmp_path, "megatron", {"what_was_measured": "peak_memory_allocated", "unit": "MiB"})
    assert (row[0], row[1], row[3]) == ("invalid", None, "no time of a step: peak_memory_allocated")
