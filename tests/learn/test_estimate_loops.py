"""Which loop an estimate's figures speak of: named on each line, and the run's own where a run stands beside it."""

import json

import pytest
from torch import nn

from featurize.device.device_spec import describe_device
from featurize.families import mlp
from featurize.timing.overlap import simulate
from featurize.timing.step_time import input_ms, time_step
from featurize.trace.tracer import trace_config
from learn import FitSettings, estimate, fit
from learn.estimation.notes import (
    LOOPS,
    PIPELINE,
    RESIDENT,
)
from learn.fitting.artifacts import default_artifact
from learn.job.training_job import Case
from learn.rows.step_store import compute
from tests.learn.learn_rows import make_configs, write_batch

DEVICE = describe_device("A100-SXM4-40GB")
CONFIGS = make_configs(6, seed=3)
CONFIG = mlp.Config(batch_size=256, input_size=4096, classes=10, depth=4)
UTILIZATION = ("smact", "smocc", "drama", "step_time_ms")
TARGETS = ("smact", "smocc", "drama", "step_time")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder whose runs carry the simulator's own figures."""
    folder = tmp_path_factory.mktemp("loops") / "a'; echo foo"
    write_batch(folder, CONFIGS, statuses=["ok"] * len(CONFIGS), labels=simulated_labels(CONFIGS))
    return folder


def simulated_labels(configs):
    steps = [simulate(trace_config(config, device=DEVICE), DEVICE, config) for config in configs]
    return {name: [step.figure(name) for step in steps] for name in ("peak_memory_mib", *UTILIZATION)}


def test_every_figure_names_its_loop():
    done = estimate(CONFIG)
    assert set(done.loops) == set(done.answered_by) == {"memory", *TARGETS}
    assert set(done.loops.values()) <= set(LOOPS)
    # Published runs wait for their input; the trace prices the GPU's own work.
    assert done.loops["smact"] == done.loops["smocc"] == PIPELINE
    assert done.loops["drama"] == done.loops["step_time"] == RESIDENT
    assert json.loads(json.dumps(done.to_mapping()))["loops"] == done.loops
    note = "smact, smocc are for the pipeline loop and drama, step_time are for the resident loop; pass loop=pipeline"
    assert any(text.startswith(note) for text in done.warnings)
    fast = estimate(CONFIG, method="fast")
    assert set(fast.loops) == set(fast.answered_by)


@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda config: config.family)
def test_of_the_farm_s_loop_an_estimate_is_what_the_simulator_says(config):
    step = simulate(trace_config(config, device=DEVICE), DEVICE, config)
    done = estimate(config, loop=RESIDENT)
    assert {done.loops[target] for target in TARGETS} == {RESIDENT}
    for name in UTILIZATION:
        assert getattr(done, name) == pytest.approx(step.figure(name))
    assert done.peak_memory_mib == pytest.approx(estimate(config).peak_memory_mib)
    assert not any("to get all for one" in text for text in done.warnings)


def test_of_a_plain_loop_every_figure_waits_for_the_input():
    done = estimate(CONFIG, loop=PIPELINE)
    looped = Case(CONFIG, DEVICE.name, training_loop=True)
    traced = compute(looped).values
    assert set(done.loops.values()) == {PIPELINE}
    assert done.smact == pytest.approx(float(default_artifact("smact").estimator.predict([looped]).point[0]))
    trace = trace_config(CONFIG, training_loop=True, device=DEVICE)
    waits = input_ms(trace, CONFIG.batch_size)
    assert done.step_time_ms == pytest.approx(time_step(trace, DEVICE, CONFIG, input_ms=waits).step_time_ms, rel=0.01)
    assert done.drama == pytest.approx(traced["job_priced_drama"])
    assert done.step_time_ms > estimate(CONFIG, loop=RESIDENT).step_time_ms


@pytest.mark.parametrize("loop", LOOPS)
def test_a_module_is_asked_about_either_loop(loop):
    done = estimate(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10)), (32, 64), loop=loop)
    assert {done.loops[target] for target in TARGETS} == {loop}
    other = estimate(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 10)), (32, 64), loop=RESIDENT)
    assert (done.step_time_ms > other.step_time_ms) == (loop == PIPELINE)


def test_a_model_answers_only_about_the_loop_that_it_was_fitted_on(tmp_path):
    configs = make_configs(60, families=("mlp",))
    write_batch(tmp_path / "d", configs, statuses=["ok"] * 60)
    fit(FitSettings(target="smact", estimator="lightgbm", data=str(tmp_path / "d")))
    own = estimate(configs[0], data=tmp_path / "d", loop=RESIDENT)
    assert own.answered_by["smact"].startswith("lightgbm ") and own.answered_by["smocc"] == "trace"
    assert any("pass loop=pipeline to use it" in text and text.startswith("smocc: ") for text in own.warnings)
    plain = estimate(configs[0], data=tmp_path / "d", loop=PIPELINE)
    assert plain.answered_by["smact"] == plain.answered_by["smocc"] == "hybrid (default)"
    assert any("pass loop=resident to use it" in text and text.startswith("smact: ") for text in plain.warnings)


def test_beside_a_run_the_estimate_speaks_of_the_run_s_loop(data, answer):
    done = answer("run=job-000001", f"data={data}")
    assert done["run"]["loop"] == RESIDENT and {done["loops"][target] for target in TARGETS} == {RESIDENT}
    for name in UTILIZATION:
        assert done[name] == pytest.approx(done["run"][name])
    said = " ".join(done["warnings"])
    assert "smact, smocc, drama, step_time: the trace also simulated this run" in said


@pytest.fixture
def lines(shown, monkeypatch):
    """The table of a run beside its estimate, as a function from words of a line to that line."""
    monkeypatch.setenv("COLUMNS", "140")

    def of_run(*argv):
        text = shown(*argv)
        return text, lambda words: next(line for line in text.splitlines() if words in line and "│" in line)

    return of_run


def test_the_table_names_the_loop_on_each_line_and_explains_it(data, lines):
    text, line_of = lines("run=job-000001", f"data={data}")
    assert RESIDENT in line_of("smact") and "same trace" in line_of("smact")
    assert "loop" not in line_of("99 % bound")
    assert "resident: one batch stays on the GPU" in text


def test_a_run_that_other_code_simulated_shows_its_difference(tmp_path, lines):
    labels = {name: [0.9 * value for value in values] for name, values in simulated_labels(CONFIGS[:1]).items()}
    write_batch(tmp_path / "d", CONFIGS[:1], statuses=["ok"], labels=labels)
    text, line_of = lines("run=job-000000", f"data={tmp_path / 'd'}")
    assert "+11.1%" in line_of("│ step time ") and "by construction" not in text


def test_figures_of_different_loops_are_not_subtracted(data, lines):
    _, line_of = lines("run=job-000001", "loop=pipeline", f"data={data}")
    assert "other loop" in line_of("smact") and PIPELINE in line_of("smact")
    assert "other loop" not in line_of("peak memory") and "%" in line_of("peak memory")  # which hardly knows of loops


def test_an_imported_run_is_of_a_plain_loop(tmp_path, answer):
    write_batch(tmp_path / "d", CONFIGS[:1], statuses=["ok"], source="imported")
    done = answer("run=job-000000", f"data={tmp_path / 'd'}")
    assert done["run"]["loop"] == PIPELINE and {done["loops"][target] for target in TARGETS} == {PIPELINE}
