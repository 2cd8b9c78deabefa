"""Constants of hosts, of NVLink and of power, fitted to imported rows."""

import dataclasses
import math

import pytest

import warehouse
from featurize.device.device_spec import load_device
from featurize.job.layout import Parallel
from featurize.job.training_settings import EAGER, MEGATRON
from featurize.timing.collectives import ALL_REDUCE, LinkConstants, collective_s, fabric_of_axis, packaged_links
from featurize.timing.step_time import load_efficiencies, overlap_times
from featurize.timing.times import HostTime
from learn.fitting import constants_fit
from learn.fitting.constants_fit import fit_hosts, fit_links
from tests.learn.learn_rows import import_csv
from warehouse.exchange.published_kernels import KERNEL_TABLES
from warehouse.exchange.published_tables import TABLES
from warehouse.files.folder import DataFolder

PACKAGED = {name: HostTime(factor=5.0, machines=2.0) for name in (EAGER, MEGATRON)}


def imported(folder, source, rows):
    import_csv(folder / "data", folder / f"{source}.csv", source, TABLES[source].names.split(", "), rows)


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
    assert fit_hosts(folder, load_efficiencies(), [], PACKAGED) == (PACKAGED, [], {})


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
    hosts, scores, _ = fit_hosts(tmp_path / "data", load_efficiencies(), [], PACKAGED)
    spread = math.log(1.44) / math.sqrt(3)  # of two equal machines and one 1.44 times slower
    assert [host.machines for host in hosts.values()] == pytest.approx(2 * [math.exp(1.2816 * spread)], rel=1e-3)
    assert {host.factor for host in hosts.values()} == {5.0} and not scores


def test_the_fit_finds_the_factor_that_made_the_steps_with_either_kind_of_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(constants_fit, "_LEAST", 4)
    imported(tmp_path, "vtrain", [timed(layers, width, 1.0) for layers, width in ((2, 64), (2, 128))])
    of_steps, _ = constants_fit._megatron_times(tmp_path / "data", load_efficiencies())
    assert len(of_steps) == 4  # each step with PyTorch's and with Megatron's own layers
    made = [(*one[:4], overlap_times(one[1], one[2] + 9.0 * (one[3] - one[2]))) for one in of_steps]
    monkeypatch.setattr(constants_fit, "_megatron_times", lambda data, learned: (made, {}))
    hosts, (score,), _ = fit_hosts(tmp_path / "data", load_efficiencies(), [], PACKAGED)
    assert hosts[MEGATRON].factor == pytest.approx(9.0, rel=0.03) and hosts[EAGER] == PACKAGED[EAGER]
    assert score.count == 4 and score.figures["mean_error"] < 0.03


TRUE = LinkConstants(launch_us=40.0, reached=0.7, copy_gb_s=600.0)
SIZES = [2**20, 2**24, 2**28]


def all_reduces(folder, gpu, counts):
    rows = []
    for ranks in counts:
        fabric = fabric_of_axis(load_device(gpu), Parallel(ddp=ranks), ranks, 1, fitted=TRUE)
        for nbytes in SIZES:
            us = collective_s(ALL_REDUCE, nbytes, fabric) * 1e6
            rows.append([gpu, ranks, "fp32", nbytes, "all-reduce", us, "us"])
    names = KERNEL_TABLES["allreduce"][0].split(", ")
    import_csv(folder / "data", folder / f"{gpu}.csv", "allreduce", names, rows)


def test_a_folder_without_all_reduces_fits_nothing(tmp_path):
    assert fit_links(DataFolder(tmp_path / "data").create()) == (packaged_links(), [], {})


def test_rows_that_the_constants_do_not_hold_for_are_left_out_with_the_reason(tmp_path):
    all_reduces(tmp_path, "H100-SXM5-80GB", (8,))
    all_reduces(tmp_path, "A100-SXM4-80GB", (16,))
    constants, scores, left_out = fit_links(tmp_path / "data")
    assert (constants, scores) == (packaged_links(), [])
    assert left_out == {
        "all-reduces on H100-SXM5-80GB: not over NVLink up to Ampere": 3,
        "all-reduces between more than 8 GPUs": 3,
    }


def test_the_fit_finds_the_constants_that_made_the_rows_and_is_judged_on_what_was_left_out(tmp_path):
    all_reduces(tmp_path, "A100-SXM4-80GB", (2, 8))
    all_reduces(tmp_path, "V100-SXM2-16GB", (8,))
    constants, scores, _ = fit_links(tmp_path / "data")
    assert constants.reached == pytest.approx(0.7, rel=0.02) and constants.copy_gb_s == pytest.approx(600, rel=0.05)
    assert constants.launch_us == pytest.approx(40, rel=0.05)
    assert {score.by for score in scores} == {"learned from", "GPU models left out", "numbers of GPUs left out"}
    left_out = [score for score in scores if score.by == "GPU models left out" and "V100" in score.rows]
    assert left_out[0].count == 3 and left_out[0].figures["mean_error"] < 0.05


LIMITS = {"A40": (300, 200, 125), "V100": (250, 175, 125)}


def write(data, name, limits_w, batch=512, timed=("A40", "V100")):
    """Import made-up rows: a job that is as slow as its power is low, and one that waits for its input."""
    names, rows = TABLES["zeus"].names.split(", "), []
    for gpu, limit_w in ((gpu, limit_w) for gpu, limits in limits_w.items() for limit_w in limits):
        for model, dataset, power_w, epoch_s in (
            ("shufflenetv2", "cifar100", 0.7 * limit_w, 2000 / limit_w),
            ("ncf", "movielens-1m", 60, 900),
        ):
            job = dict(zip(names, (model, dataset, gpu, 1, batch, "fp32", "adam", limit_w), strict=False))
            rows.append({**job, "what_was_measured": "average power", "value": power_w, "unit": "W"})
            if gpu in timed:
                rows.append({**job, "what_was_measured": "time per epoch", "value": epoch_s, "unit": "s"})
    import_csv(data, data.parent / name, "zeus", [*names, "note"], rows)


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
    monkeypatch.setattr(constants_fit, "zeus_calls", lambda *_: None)
    write(folder, "unknown.csv", {"GTX-1": (100,), "A40": (300,)}, batch=64, timed=("GTX-1",))
    rows, left_out = constants_fit.power_rows(folder, lambda *_: None)
    assert len(rows) == 2
    assert left_out == {"no description of GTX-1": 1, "jobs without both power and time at a limit": 1}


@pytest.mark.slow
def test_values_are_fitted_and_judged_with_each_gpu_model_left_out(folder, monkeypatch):
    monkeypatch.setattr(constants_fit, "_DESCENT", dataclasses.replace(constants_fit._DESCENT, iterations=5))
    rows, _ = constants_fit.power_rows(folder, lambda *_: None)
    section, scores = constants_fit.fit_power(rows, load_efficiencies(), lambda *_: None)
    assert set(section) == {"sm", "fp32", "tensor", "dram", "exponent", "feed"}
    judged = {(score.by, score.rows): score for score in scores}
    assert judged["learned from", "lower"].count == 4  # the job that waits for its input is not learned from
    assert judged["GPU models left out", "the board's own"].figures["power_median"] < 0.5
