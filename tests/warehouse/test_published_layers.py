"""Published times of layers and all-reduces land in the table of kernels; layers are traced as the kernels they run."""

import json

import pytest

from learn.fitting.kernel_fit import LIGER, SAILOR, kernel_times
from learn.fitting.published_jobs import layer_calls
from tests.warehouse.warehouse_rows import ask, csv_file, take_in

CONFIG = json.dumps({"bsz": 2, "hidden_size": 512, "intermediate_size": 1024, "dtype": "torch.bfloat16"})


def sailor_row(**cells):
    return {
        "model": "OPT-350",
        "layer": "head",
        "gpu": "V100-16",
        "tp": 1,
        "batch_per_gpu": 1,
        "what_was_measured": "forward time",
        "value": 0.02,
        "unit": "s",
        **cells,
    }


def liger_row(**cells):
    return {
        "model": "swiglu",
        "provider": "huggingface",
        "mode": "full",
        "x_name": "T",
        "x_value": 256,
        "config": CONFIG,
        "gpu": "NVIDIA B200",
        "value": 0.5,
        "unit": "ms",
        **cells,
    }


def landed(folder, source, rows):
    return take_in(folder / "data", source, csv_file(folder / f"{source}.csv", *rows)).files[0]


def test_layers_are_learned_from_and_what_is_no_layer_is_named(tmp_path):
    rows = [sailor_row(), sailor_row(layer="embedding"), sailor_row(layer="block", tp=2)]
    file = landed(tmp_path, "sailor", rows)
    assert (file.new, dict(file.statuses)) == (2, {"ok": 2, "invalid": 1})
    landed(tmp_path, "liger", [liger_row(), liger_row(provider="liger"), liger_row(value="-")])
    times, left_out = kernel_times(tmp_path / "data", 10)
    assert {(row.source, row.group, row.device.name, row.measured_ms) for row in times} == {
        (SAILOR, "head", "V100-SXM2-16GB", 20.0),
        (LIGER, "silu", "B200-SXM-180GB", 0.5),
    }
    assert left_out == {"layers that end with an all-reduce": 1}


@pytest.mark.parametrize("phase, products", [("forward", 3), ("backward", 6), (None, 9)])
def test_a_gated_layer_has_three_products_forward_and_two_for_each_backward(a100, phase, products):
    sizes = {"width": 512, "inner": 1024, "length": 256, "samples": 2}
    calls = layer_calls("silu", sizes, phase, "bfloat16", a100)
    of_products = calls.within("product")
    assert calls.count[of_products].sum() == products
    assert (calls.count * calls.flops)[of_products].sum() == products * 2 * 512 * 512 * 1024


def test_a_rank_computes_its_part_of_a_block(a100):
    sizes = {"width": 256, "heads": 4, "length": 128, "samples": 1, "vocabulary": 1024}
    whole, half = (layer_calls("block", {**sizes, "ranks": ranks}, "forward", "tf32", a100) for ranks in (1, 2))
    products = [float((one.count * one.flops)[one.within("product")].sum()) for one in (whole, half)]
    assert products[0] == 2 * products[1]


@pytest.fixture
def a100():
    from featurize.device.device_spec import load_device

    return load_device("A100-SXM4-40GB")


CELLS = {
    "gpu": "A100-SXM4",
    "gpus": "4",
    "precision": "fp32",
    "size_bytes": "4096",
    "what_was_measured": "all-reduce",
    "value": "31.5",
    "unit": "us",
}


def test_an_all_reduce_lands_once_with_its_elements_and_ranks(folder, tmp_path):
    path = csv_file(tmp_path / "a.csv", CELLS, CELLS | {"gpu": "A100-PCIE-40GB", "precision": "fp16"})
    assert [take_in(folder.root, "allreduce", path).files[0].new for _ in range(2)] == [2, 0]
    rows = ask(folder, "SELECT device_name, operator, dims, dtype, duration_us, timing FROM kernels ORDER BY 1")
    dims = [json.loads(row[2]) for row in rows]
    assert [row[0] for row in rows] == ["A100-PCIE-40GB", "A100-SXM4-80GB"]
    assert [one["shapes"] for one in dims] == [[[2048]], [[1024]]] and dims[0]["arguments"] == {"ranks": 4}
    assert {(row[1], row[4], row[5]) for row in rows} == {("nccl::all_reduce", 31.5, "loop")}


VALID = {"allreduce": CELLS, "sailor": sailor_row(), "liger": liger_row()}
INVALID = {
    "allreduce": {
        "value is not a time > 0": CELLS | {"value": "-1"},
        "unknown unit 'GB/s'; known: ms, s, us": CELLS | {"unit": "GB/s"},
        "gpus is not a whole number >= 2 and < 2^40: '1'": CELLS | {"gpus": "1"},
        "gpus is not a whole number >= 2 and < 2^40: '2.5'": CELLS | {"gpus": "2.5"},
        "gpus is not a whole number >= 2 and < 2^40: '1e30'": CELLS | {"gpus": "1e30"},
        "no gpu": CELLS | {"gpu": ""},
        "what_was_measured is not an all-reduce": CELLS | {"what_was_measured": "all-gather time"},
        "unknown precision 'int8'; known: bf16, fp16, fp32": CELLS | {"precision": "int8"},
        "size_bytes is not a number of bytes of whole elements": CELLS | {"size_bytes": "6"},
        "size_bytes is not a whole number >= 2 and < 2^40: ''": CELLS | {"size_bytes": ""},
        f"size_bytes is not a whole number >= 2 and < 2^40: '{2**40}'": CELLS | {"size_bytes": f"{2**40}"},
    },
    "sailor": {
        "value is not a time > 0": sailor_row(value=0),
        "samples is not a whole number >= 1 and < 2^40: '0'": sailor_row(batch_per_gpu=0),
        "no gpu": sailor_row(gpu=""),
    },
    "liger": {
        "value is not a time > 0": liger_row(value="nan"),
        "length is not a whole number >= 1 and < 2^40: '-256'": liger_row(x_value=-256),
        "width is not a whole number >= 1 and < 2^40: None": liger_row(config='{"intermediate_size": 8}'),
        "config is not a JSON object": liger_row(config="[]"),
        "unknown dtype 'torch.int8'; known: torch.bfloat16, torch.float32": liger_row(
            config=CONFIG.replace("bfloat16", "int8")
        ),
    },
}


@pytest.mark.parametrize("source", INVALID)
def test_a_row_that_makes_no_sense_is_named_and_left_out(tmp_path, source):
    rows = INVALID[source]
    report = landed(tmp_path, source, [*rows.values(), VALID[source]])
    assert report.invalid == {reason: [at] for at, reason in enumerate(rows, 1)}
    assert (report.rows, report.new) == (len(rows) + 1, 1)


def test_a_row_with_more_cells_than_the_header_is_named_and_left_out(folder, tmp_path):
    path = csv_file(tmp_path / "a.csv", CELLS)
    path.write_text(path.read_text(encoding="utf-8") + ",".join([*CELLS.values(), "more"]) + "\n", encoding="utf-8")
    assert take_in(folder.root, "allreduce", path).files[0].invalid == {"more cells than the header has columns": [2]}
