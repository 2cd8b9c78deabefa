"""Hosts' constants, fitted to imported steps."""

import csv
import math

import pytest

import learn.fitting.constants_fit as host_fit
from featurize.job.training_settings import EAGER, MEGATRON
from featurize.timing.step_time import load_efficiencies, overlapped
from featurize.timing.times import HostTime
from learn.fitting.constants_fit import fitted_hosts
from warehouse.exchange.ingesting import IngestSettings, ingest
from warehouse.exchange.published_tables import TABLES
from warehouse.files.folder import DataFolder

PACKAGED = {name: HostTime(factor=5.0, machines=2.0) for name in (EAGER, MEGATRON)}


def imported(folder, source, rows):
    names = TABLES[source].names.split(", ")
    path = folder / f"{source}.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    ingest(IngestSettings(source=source, path=str(path), data=str(folder / "data")))


def small_model(test, environment, ms, **cells):
    return {
        "model": "gpt",
        "gpu": "A100-SXM4-80GB",
        "gpus": 8,
        "tp": 1,
        "pp": 1,
        "micro_batch": 4,
        "global_batch": 32,
        "precision": "bf16",
        "what_was_measured": "iteration_time",
        "value": ms,
        "unit": "ms",
        "num_layers": 2,
        "hidden": 256,
        "test_case": test,
        "environment": environment,
        **cells,
    }


def timed(layers, width, ms):
    return {
        "model": "GPT",
        "gpu": "A100-SXM4-80GB",
        "gpus": 1,
        "tp": 1,
        "pp": 1,
        "micro_batch": 1,
        "global_batch": 1,
        "precision": "fp16",
        "what_was_measured": "iteration time",
        "value": ms,
        "unit": "ms",
        "num_layers": layers,
        "hidden": width,
        "heads": 2,
        "dp": 1,
        "micro_batches": 1,
        "pipeline_schedule": "1f1b",
    }


def test_a_folder_without_steps_keeps_the_packaged_constants(tmp_path):
    folder = DataFolder(tmp_path / "data").create()
    assert fitted_hosts(folder, load_efficiencies(), [], PACKAGED) == (PACKAGED, [], {})


def test_machines_differ_as_far_as_the_same_tests_do_on_them_and_wide_models_say_nothing(tmp_path):
    rows = [
        row
        for test, ms in (("a", 100.0), ("b", 40.0), ("c", 70.0), ("d", 10.0))
        for row in (
            small_model(test, "dev", ms),
            small_model(test, "dev second run", ms),  # the same machine once more
            small_model(test, "lts", ms * 1.44),
            small_model(test, "lts", ms, gpu="H100"),
            small_model(test, "dev", ms * 9, hidden=4096, gpu="B200"),
        )
    ]
    imported(tmp_path, "megatron", rows)
    hosts, scores, _ = fitted_hosts(tmp_path / "data", load_efficiencies(), [], PACKAGED)
    spread = math.log(1.44) / math.sqrt(3)  # of two equal machines and one 1.44 times slower
    assert [host.machines for host in hosts.values()] == pytest.approx(2 * [math.exp(1.2816 * spread)], rel=1e-3)
    assert {host.factor for host in hosts.values()} == {5.0} and not scores


def test_the_fit_finds_the_factor_that_made_the_steps_with_either_kind_of_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(host_fit, "_LEAST", 4)
    imported(tmp_path, "vtrain", [timed(layers, width, 1.0) for layers, width in ((2, 64), (2, 128))])
    of_steps, _ = host_fit._megatron_times(tmp_path / "data", load_efficiencies())
    assert len(of_steps) == 4  # each step with PyTorch's and with Megatron's own layers
    made = [(*one[:4], overlapped(one[1], one[2] + 9.0 * (one[3] - one[2]))) for one in of_steps]
    monkeypatch.setattr(host_fit, "_megatron_times", lambda data, learned: (made, {}))
    hosts, (score,), _ = fitted_hosts(tmp_path / "data", load_efficiencies(), [], PACKAGED)
    assert hosts[MEGATRON].factor == pytest.approx(9.0, rel=0.03) and hosts[EAGER] == PACKAGED[EAGER]
    assert score.count == 4 and score.figures["mean_error"] < 0.03
