"""Fitting what kernels keep busy: made-up measurements are explained, held-out rows have no part, too few keep it."""

import dataclasses

import numpy as np
import pytest
from learn_rows import make_configs, write_batch

from featurize.device.device_spec import load_device
from featurize.timing.calls import kernel_calls
from featurize.timing.step_time import load_efficiencies, time_step
from featurize.trace.tracer import trace_config
from learn.fitting.constants_fit import ActivityFit, judged_activity
from learn.fitting.kernel_rows import MeasuredActivity, measured_activity
from learn.judging.scores import score_table

A100 = load_device("A100-SXM4-40GB")
LEARNED = load_efficiencies()


def silent(*_):
    pass


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


def test_every_family_is_judged_and_printed(rows):
    scores, learned = judged_activity(ActivityFit(rows[:8], LEARNED), 2, silent)
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
