"""Power is fitted to jobs of an imported table under several limits."""

from __future__ import annotations

import csv
import dataclasses

import pytest

import learn.fitting.constants_fit as power_fit
import warehouse
from featurize.timing.step_time import load_efficiencies
from warehouse.exchange.ingesting import IngestSettings, ingest
from warehouse.exchange.published_tables import TABLES

LIMITS = {"A40": (300, 200, 125), "V100": (250, 175, 125)}


def write(data, name, limits_w, batch=512, timed=("A40", "V100")):
    """Import made-up rows: a job that is as slow as its power is low, and one that waits for its input."""
    names = TABLES["zeus"].names.split(", ")
    path = data.parent / name
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, [*names, "note"])
        table.writeheader()
        for gpu, limits in limits_w.items():
            for limit_w in limits:
                for model, dataset, power_w, epoch_s in (
                    ("shufflenetv2", "cifar100", 0.7 * limit_w, 2000 / limit_w),
                    ("ncf", "movielens-1m", 60, 900),
                ):
                    job = dict(zip(names, (model, dataset, gpu, 1, batch, "fp32", "adam", limit_w), strict=False))
                    table.writerow({**job, "what_was_measured": "average power", "value": power_w, "unit": "W"})
                    if gpu in timed:
                        table.writerow({**job, "what_was_measured": "time per epoch", "value": epoch_s, "unit": "s"})
    ingest(IngestSettings(source="zeus", path=str(path), data=str(data)))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "data", "power.csv", LIMITS)
    return tmp_path / "data"


def test_the_time_of_an_epoch_becomes_that_of_a_step_where_the_samples_are_known(folder):
    with warehouse.connect(folder) as connection:
        steps = connection.execute(
            "SELECT DISTINCT device_name, step_time_ms FROM runs WHERE step_time_ms > 0 ORDER BY ALL"
        ).fetchall()
    assert ("A40", pytest.approx(2000 / 300 / 98 * 1e3)) in steps  # 98 batches of 512 hold 50,000 images
    assert {name for name, _ in steps} == {"A40", "V100-PCIE-32GB"}


def test_jobs_without_a_time_and_gpus_without_a_description_are_left_out_with_the_reason(folder, monkeypatch):
    monkeypatch.setattr(power_fit, "zeus_calls", lambda *_: None)
    write(folder, "unknown.csv", {"GTX-1": (100,), "A40": (300,)}, batch=64, timed=("GTX-1",))
    rows, left_out = power_fit.power_rows(folder, lambda *_: None)
    assert len(rows) == 2
    assert left_out == {"no description of GTX-1": 1, "jobs without both power and time at a limit": 1}


@pytest.mark.slow
def test_values_are_fitted_and_judged_with_each_gpu_model_left_out(folder, monkeypatch):
    monkeypatch.setattr(power_fit, "_DESCENT", dataclasses.replace(power_fit._DESCENT, iterations=5))
    rows, _ = power_fit.power_rows(folder, lambda *_: None)
    section, scores = power_fit.fitted_power(rows, load_efficiencies(), lambda *_: None)
    assert set(section) == {"sm", "fp32", "tensor", "dram", "exponent", "feed"}
    judged = {(score.by, score.rows): score for score in scores}
    assert judged["learned from", "lower"].count == 4  # the job that waits for its input is not learned from
    assert judged["GPU models left out", "the board's own"].figures["power_median"] < 0.5
