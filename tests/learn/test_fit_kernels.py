"""Fits of the kernel model and of what kernels keep busy to made-up measurements; what cannot be learned is said."""

import dataclasses
import json
from functools import partialmethod

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from featurize.device.device_spec import load_device
from featurize.timing.calls import kernel_calls
from featurize.timing.step_time import efficiencies_text, load_efficiencies, read_efficiencies, time_step
from featurize.trace.tracer import trace_config
from learn.estimators.kernel_fitting import MeasuredTime, TimeFit
from learn.fit_kernels import FitKernelsSettings, fit_kernels
from learn.fitting.constants_fit import ActivityFit, judge_activity
from learn.fitting.kernel_formulas import score_of
from learn.fitting.kernel_rows import MeasuredActivity, kernel_times, measured_activity, measured_times
from learn.judging.scores import score_table
from tests.learn.learn_rows import import_llm_foundry, make_configs, write_batch
from warehouse.exchange.ingesting import IngestSettings, ingest

QUICK = {"iterations": 10}  # for tests that show nothing of how good a fit is
DEVICES = ("A100-SXM4-40GB", "V100-SXM2-32GB", "RTX-3090")
SLOWER = 1.7  # than the model that comes along says: what a fit has to find


def silent(*_):
    pass


def rows_of(configs, factor=1.0):
    rows = []
    for at, config in enumerate(configs):
        device = load_device(DEVICES[at % len(DEVICES)])
        trace = trace_config(config)
        rows.append(
            MeasuredTime(
                name=f"{config.family} {at}",
                source=("one", "two")[at % 2],
                group=config.family,
                device=device,
                calls=kernel_calls(trace.operators),
                measured_ms=factor * time_step(trace, device, config).step_time_ms,
            )
        )
    return rows


@pytest.fixture(scope="module")
def fit():
    return TimeFit(rows_of(make_configs(40), SLOWER), {})


def test_a_fit_explains_steps_that_are_slower_than_the_known_ones(fit):
    everything = np.ones(len(fit.rows), dtype=bool)
    begin = fit.fitted(everything, iterations=0)
    before = np.median(np.abs(fit.log_ratios(begin)))
    after = np.abs(fit.log_ratios(fit.fitted(everything)))
    assert np.median(after) < 0.1 < before
    learned = fit.fitted(everything, iterations=30).parameters
    for name, least, most in (("sm_rate", 0, 1), ("wave", 0, 1)):
        assert least <= learned.by_group[name].min() <= learned.by_group[name].max() <= most


def test_rows_that_nobody_answers_are_printed_beside_those_with_figures():
    answered, without = score_of("fit", "one", np.array([0.1, -0.2])), score_of("fit", "two", np.array([np.nan]))
    for scores in ([answered, without], [without, answered]):
        cells = [str(cell) for row in score_table(scores).rows for cell in row.cells]
        assert sum(cell.startswith("nan") for cell in cells) == 4, "two factors, a bias, a mean error"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    data = tmp_path_factory.mktemp("steps")
    configs = make_configs(24, seed=3)
    write_batch(data, configs[:22], source="measured", job="real", statuses=["ok"] * 22)
    write_batch(data, configs[22:], source="simulated", job="sim", statuses=["ok"] * 2)
    write_batch(data, configs[22:23], source="measured", job="odd", statuses=["ok"], device="GPU-of-nobody")
    import_llm_foundry(data, tmp_path_factory.mktemp("published") / "llm.csv", {}, {"Model": "9t"})
    return data


def test_measured_steps_are_learned_from_and_the_rest_is_left_out_with_its_reason(folder):
    rows, left_out = measured_times(folder, silent)
    by_source = {source: [row for row in rows if row.source == source] for source in {row.source for row in rows}}
    assert {source: len(of) for source, of in by_source.items()} == {"farm": 22, "llm_foundry": 1}
    assert left_out == {"no description of GPU-of-nobody": 1, "llm_foundry: 9t in amp_bf16": 1}
    (step,) = by_source["llm_foundry"]
    assert step.run_id.startswith("llm_foundry-")
    assert step.measured_ms == pytest.approx(4 * 512 / 409_600 * 1e3)  # one micro-step of one GPU
    assert step.device.name == "H100-SXM5-80GB"
    assert step.calls.kind.count("attention") == 1  # twelve equal layers are one kernel that runs twelve times
    drawn = measured_times(folder, silent, 5)[0]
    assert sorted(row.source for row in drawn) == ["farm"] * 5 + ["llm_foundry"]


def test_measured_operators_of_the_table_of_kernels_are_learned_from(tmp_path):
    sizes = [
        ("linear", {"B": 1, "M": 64, "N": 96, "K": 32}),
        ("bmm", {"B": 4, "M": 8, "N": 16, "K": 24}),
        (
            "conv",
            {
                "B": 2,
                "Input_Channel": 3,
                "Input_Size": 16,
                "Kernel_Szie": 3,
                "Output_Channel": 8,
                "Padding": 1,
                "Stride": 2,
            },
        ),
        ("relu", {"B": 5, "H": 7}),
        ("ln", {"B": 5, "H": 7}),
    ]
    text = {"kernel": "sgemm", "grid": "1x2x3", "block": "128x1x1", "torch": "p2.1.0", "cuda": "cu121", "cudnn": "8902"}
    rows = [
        {
            "op": op,
            "device": "Tesla T4",
            "latency_ms": 0.1,
            "warps_per_sm": 1.0,
            "blocks_per_sm": 1.0,
            **text,
            "dims": json.dumps({name: str(size) for name, size in dims.items()}),
        }
        for op, dims in sizes
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "kernels.parquet")
    ingest(IngestSettings(source="neusight", path=str(tmp_path / "kernels.parquet"), data=str(tmp_path / "data")))
    times, left_out = kernel_times(tmp_path / "data", 10)
    assert not left_out
    product, batched, convolution, relu, norm = (
        next(one for one in times if one.group == f"aten::{name}")
        for name in ("addmm", "bmm", "convolution", "relu", "native_layer_norm")
    )
    assert product.calls.flops.tolist() == [2 * 64 * 96 * 32]  # M x N times N x K
    assert (batched.calls.rows[0], batched.calls.depth[0], batched.calls.columns[0]) == (8, 16, 24)
    assert convolution.calls.flops.tolist() == [2 * (2 * 8 * 8 * 8) * 27]
    assert relu.calls.nbytes.tolist() == [2 * 4 * 35]
    assert norm.calls.kind == ("layer_norm",)
    assert {one.measured_ms for one in times} == {0.1}


def test_the_command_writes_a_file_that_estimates_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(TimeFit, "fitted", partialmethod(TimeFit.fitted, **QUICK))
    settings = FitKernelsSettings(data=str(folder), out=str(tmp_path / "parameters.json"))
    fitted = fit_kernels(settings, silent)
    learned = read_efficiencies(settings.path.read_text(encoding="utf-8"))
    assert learned.fitted_on == {"farm": 22, "llm_foundry": 1}
    assert fitted.times and fitted.left_out and not fitted.activity
    assert efficiencies_text(learned).count("most_warps") == 1  # what comes along stands without measured activity
    step = time_step(
        trace_config(make_configs(1)[0]), load_device("H100-SXM5-80GB"), make_configs(1)[0], learned=learned
    )
    assert step.step_time_ms > 0


A100 = load_device("A100-SXM4-40GB")
LEARNED = load_efficiencies()


@pytest.fixture(scope="module")
def rows():
    """Jobs whose SMs hold half the warps that the file that comes along says, and are empty in all of the latency."""
    truth = dataclasses.replace(
        LEARNED.activity,
        by_class={**LEARNED.activity.by_class, "most_warps": LEARNED.activity.by_class["most_warps"] - np.log(2)},
        single={**LEARNED.activity.single, "gap": 1.0},
    )
    learned = dataclasses.replace(LEARNED, activity=truth)
    rows = []
    for config in make_configs(24):
        trace = trace_config(config)
        activity = time_step(trace, A100, config, learned=learned).activity
        rows.append(
            MeasuredActivity(
                family=config.family,
                group=f"{config.family} {len(rows) % 6}",
                device=A100,
                calls=kernel_calls(trace.operators),
                smact=activity.smact,
                smocc=activity.smocc,
                input_ms=0.0,
            )
        )
    return rows


def test_a_fit_explains_measured_activity(rows):
    fit = ActivityFit(rows, LEARNED)
    everything = np.ones(len(rows), dtype=bool)
    before = fit.errors(*fit.fitted(everything, iterations=0))
    after = fit.errors(*fit.fitted(everything, iterations=150))
    for first, last in zip(before, after, strict=True):
        assert np.median(np.abs(last)) < 0.02 and np.abs(last).mean() < 0.6 * np.abs(first).mean()


def test_rows_that_were_left_out_have_no_part_in_the_fit(rows):
    left_out = np.array([row.group.endswith("0") for row in rows])
    spoiled = [
        dataclasses.replace(row, smact=0.0, smocc=0.0) if mine else row
        for row, mine in zip(rows, left_out, strict=True)
    ]
    clean, other = (ActivityFit(of, LEARNED).fitted(~left_out, iterations=5)[0] for of in (rows, spoiled))
    assert np.array_equal(clean.by_class["most_warps"], other.by_class["most_warps"])


def test_every_family_is_judged_and_printed(rows, monkeypatch):
    monkeypatch.setattr(ActivityFit, "fitted", partialmethod(ActivityFit.fitted, **QUICK))
    scores, learned = judge_activity(ActivityFit(rows[:8], LEARNED), 2, silent)
    assert {(one.rows, one.by) for one in scores} == {
        (family, split) for family in ("cnn", "mlp") for split in ("learned from", "groups left out")
    }
    assert "occupancy, median" in {column.name for column in score_table(scores).columns}
    assert 0 <= learned.single["gap"] <= 1


def test_measured_jobs_are_traced_and_simulated_ones_never_count(tmp_path):
    write_batch(tmp_path / "own", make_configs(32), source="measured")
    jobs, left_out = measured_activity(str(tmp_path / "own"), silent)
    assert {job.family for job in jobs} == {"cnn", "mlp"} and not left_out
    assert all(0 < job.smocc <= job.smact <= 1 for job in jobs)
    write_batch(tmp_path / "simulated", make_configs(32), source="simulated")
    assert measured_activity(str(tmp_path / "simulated"), silent) == ([], {})
