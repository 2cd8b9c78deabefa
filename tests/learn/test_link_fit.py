"""Constants of NVLink, fitted to measured all-reduces."""

import csv

import pytest

from featurize.device.device_spec import load_device
from featurize.job.layout import Parallel
from featurize.timing.collectives import ALL_REDUCE, LinkConstants, collective_s, fabric_of_axis, packaged_links
from learn.fitting.constants_fit import fitted_links
from warehouse.exchange.ingesting import IngestSettings, ingest
from warehouse.exchange.published_kernels import KERNEL_TABLES
from warehouse.files.folder import DataFolder

TRUE = LinkConstants(launch_us=40.0, reached=0.7, copy_gb_s=600.0)
SIZES = [2**20, 2**24, 2**28]


def all_reduces(folder, gpu, counts):
    device = load_device(gpu)
    path = folder / f"{gpu}.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(KERNEL_TABLES["allreduce"][0].split(", "))
        for ranks in counts:
            fabric = fabric_of_axis(device, Parallel(ddp=ranks), ranks, 1, fitted=TRUE)
            for nbytes in SIZES:
                us = collective_s(ALL_REDUCE, nbytes, fabric) * 1e6
                writer.writerow([gpu, ranks, "fp32", nbytes, "all-reduce", us, "us"])
    ingest(IngestSettings(source="allreduce", path=str(path), data=str(folder / "data")))


def test_a_folder_without_all_reduces_fits_nothing(tmp_path):
    assert fitted_links(DataFolder(tmp_path / "data").create()) == (packaged_links(), [], {})


def test_rows_that_the_constants_do_not_hold_for_are_left_out_with_the_reason(tmp_path):
    all_reduces(tmp_path, "H100-SXM5-80GB", (8,))
    all_reduces(tmp_path, "A100-SXM4-80GB", (16,))
    constants, scores, left_out = fitted_links(tmp_path / "data")
    assert (constants, scores) == (packaged_links(), [])
    assert left_out == {
        "all-reduces on H100-SXM5-80GB: not over NVLink up to Ampere": 3,
        "all-reduces between more than 8 GPUs": 3,
    }


def test_the_fit_finds_the_constants_that_made_the_rows_and_is_judged_on_what_was_left_out(tmp_path):
    all_reduces(tmp_path, "A100-SXM4-80GB", (2, 8))
    all_reduces(tmp_path, "V100-SXM2-16GB", (8,))
    constants, scores, _ = fitted_links(tmp_path / "data")
    assert constants.reached == pytest.approx(0.7, rel=0.02) and constants.copy_gb_s == pytest.approx(600, rel=0.05)
    assert constants.launch_us == pytest.approx(40, rel=0.05)
    assert {score.by for score in scores} == {"learned from", "GPU models left out", "numbers of GPUs left out"}
    left_out = [score for score in scores if score.by == "GPU models left out" and "V100" in score.rows]
    assert left_out[0].count == 3 and left_out[0].figures["mean_error"] < 0.05
