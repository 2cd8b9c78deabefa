"""Published times of all-reduces, as rows of the table `kernels`."""

import csv
import json

import pytest

from conf.errors import UsageError
from tests.warehouse.warehouse_rows import ask
from warehouse.exchange.ingesting import IngestSettings, ingest
from warehouse.exchange.published_kernels import KERNEL_TABLES

CELLS = {
    "gpu": "A100-SXM4",
    "gpus": "4",
    "precision": "fp32",
    "size_bytes": "4096",
    "what_was_measured": "all-reduce",
    "value": "31.5",
    "unit": "us",
}


def all_reduce_file(path, *rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, KERNEL_TABLES["allreduce"][0].split(", "))
        writer.writeheader()
        writer.writerows(rows)
    return path


def take_in(folder, path, **changes):
    return ingest(IngestSettings(source="allreduce", path=str(path), data=str(folder.root), **changes)).files[0]


def test_an_all_reduce_lands_once_with_its_elements_and_ranks(folder, tmp_path):
    path = all_reduce_file(tmp_path / "a.csv", CELLS, CELLS | {"gpu": "A100-PCIE-40GB", "precision": "fp16"})
    assert (take_in(folder, path).new, take_in(folder, path).new) == (2, 0)
    rows = ask(folder, "SELECT device_name, operator, dims, dtype, duration_us, timing FROM kernels ORDER BY 1")
    dims = [json.loads(row[2]) for row in rows]
    assert [row[0] for row in rows] == ["A100-PCIE-40GB", "A100-SXM4-80GB"]
    assert [one["shapes"] for one in dims] == [[[2048]], [[1024]]] and dims[0]["arguments"] == {"ranks": 4}
    assert {(row[1], row[4], row[5]) for row in rows} == {("nccl::all_reduce", 31.5, "loop")}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"value": "-1"}, "value is not a time > 0 in us"),
        ({"value": "nan"}, "value is not a time > 0 in us"),
        ({"unit": "ms"}, "value is not a time > 0 in us"),
        ({"gpus": "1"}, "gpus is not a whole number from 2 to 72"),
        ({"gpus": "2.5"}, "gpus is not a whole number from 2 to 72"),
        ({"gpus": "1e30"}, "gpus is not a whole number from 2 to 72"),
        ({"gpu": ""}, "no gpu"),
        ({"what_was_measured": "all-gather time"}, "what_was_measured is not an all-reduce"),
        ({"precision": "int8"}, "unknown precision 'int8'; known: fp32, fp16, bf16"),
        ({"size_bytes": "6"}, "size_bytes is not a number of bytes of whole elements"),
        ({"size_bytes": ""}, "size_bytes is not a number of bytes of whole elements"),
    ],
)
def test_a_row_that_makes_no_sense_is_named_and_left_out(folder, tmp_path, change, reason):
    report = take_in(folder, all_reduce_file(tmp_path / "a.csv", CELLS, CELLS | change))
    assert (report.rows, report.new, report.invalid) == (2, 1, {reason: [2]})


def test_a_row_with_more_cells_than_the_header_is_named_and_left_out(folder, tmp_path):
    path = all_reduce_file(tmp_path / "a.csv", CELLS)
    path.write_text(path.read_text(encoding="utf-8") + ",".join([*CELLS.values(), "more"]) + "\n", encoding="utf-8")
    assert take_in(folder, path).invalid == {"more cells than the header has columns": [2]}


def test_a_file_of_other_columns_is_refused(folder, tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"holds no file of source=allreduce; a\.csv: not of this source"):
        take_in(folder, tmp_path / "a.csv")
