"""Power is fitted to jobs of an imported table under several limits."""

from __future__ import annotations

import csv

import pytest

import warehouse
from featurize.kernel_model.step_time import load_efficiencies
from learn.kernels import power_fit
from warehouse.ingest import IngestSettings, ingest
from warehouse.published_power import ZEUS_COLUMNS

LIMITS = {"A40": (300, 200, 125), "V100": (250, 175, 125)}


@pytest.fixture
def folder(tmp_path):
    """Made-up rows: a job that is as slow as its power is low, and one that waits for its input."""
    names = ZEUS_COLUMNS.split(", ")
    with open(tmp_path / "power.csv", "w", newline="") as file:
        table = csv.DictWriter(file, [*names, "note"])
        table.writeheader()
        for gpu, limits in LIMITS.items():
            for limit_w in limits:
                for model, dataset, power_w, epoch_s in (
                    ("shufflenetv2", "cifar100", 0.7 * limit_w, 2000 / limit_w), ("ncf", "movielens-1m", 60, 900),
                ):  # fmt: skip
                    job = dict(zip(names, (model, dataset, gpu, 1, 512, "fp32", "adam", limit_w), strict=False))
                    table.writerow({**job, "what_was_measured": "average power", "value": power_w, "unit": "W"})
                    table.writerow({**job, "what_was_measured": "time per epoch", "value": epoch_s, "unit": "s"})
    ingest(IngestSettings(source="zeus", path=str(tmp_path / "power.csv"), data=str(tmp_path / "data")))
    return tmp_path / "data"


def silent(*_):
    pass


def test_the_time_of_an_epoch_becomes_that_of_a_step_where_the_samples_are_known(folder):
    with warehouse.connect(folder) as connection:
        steps = connection.execute(
            "SELECT DISTINCT device_name, step_time_ms FROM runs WHERE step_time_ms > 0 ORDER BY ALL"
        ).fetchall()
    assert ("A40", pytest.approx(2000 / 300 / 98 * 1e3)) in steps  # 98 batches of 512 hold 50,000 images
    assert {name for name, _ in steps} == {"A40", "V100-PCIE-32GB"}


@pytest.mark.slow
def test_values_are_fitted_and_judged_with_each_gpu_model_left_out(folder, monkeypatch):
    monkeypatch.setattr(power_fit, "_ITERATIONS", 5)
    section, scores = power_fit.fitted_power(power_fit.power_rows(folder, silent), load_efficiencies(), silent)
    assert set(section) == {"sm", "fp32", "tensor", "dram", "exponent", "feed"}
    judged = {(score.split, score.limit): score for score in scores}
    assert judged["learned from", "lower"].count == 4  # the job that waits for its input is not learned from
    assert judged["GPU models left out", "the board's own"].power[0] < 0.5
