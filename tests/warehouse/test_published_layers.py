"""Published times of layers land in the table of kernels, and are traced as the kernels that such a layer runs."""

import csv
import json

import pytest

from learn.estimators.kernel_fitting import LIGER, SAILOR
from learn.fitting.kernel_rows import kernel_times
from learn.fitting.published_jobs import layer_calls
from warehouse.exchange.ingesting import IngestSettings, ingest

CONFIG = json.dumps({"bsz": 2, "hidden_size": 512, "intermediate_size": 1024, "dtype": "torch.bfloat16"})


def write(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


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
    path = write(folder / f"{source}.csv", rows)
    (file,) = ingest(IngestSettings(source=source, path=str(path), data=str(folder / "data"))).files
    return file


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


@pytest.mark.parametrize(
    "source, row, reason",
    [
        ("sailor", sailor_row(unit="ms"), "unit 'ms'; known: s"),
        ("sailor", sailor_row(batch_per_gpu=0), "samples is not a whole number > 0: '0'"),
        ("sailor", sailor_row(gpu=""), "no gpu"),
        ("liger", liger_row(x_value=-256), "length is not a whole number > 0: '-256'"),
        ("liger", liger_row(config='{"intermediate_size": 8}'), "width is not a whole number > 0: 'None'"),
        ("liger", liger_row(config=CONFIG.replace("bfloat16", "int8")), "dtype 'int8'; known: float32, bfloat16"),
    ],
)
def test_a_layer_that_makes_no_sense_is_named_and_left_out(tmp_path, source, row, reason):
    assert landed(tmp_path, source, [row]).invalid == {reason: [1]}


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
