"""Views of an estimate: `print`, a notebook, the command, JSON, its notes, and the loop of each figure."""

import json
import re
from dataclasses import replace

import pytest
from torch import nn

from featurize.device.device_spec import describe_device
from featurize.families import mlp
from featurize.timing.simulation import simulate
from featurize.trace.tracer import trace_config
from learn import Estimate, FitSettings, Note, estimate, fit
from learn.estimation.job_estimate import RankGroup
from learn.job.training_job import LOOPS, PIPELINE, RESIDENT
from tests.learn.learn_rows import make_configs, write_batch

pytestmark = pytest.mark.shares_traces

CONFIG = mlp.Config(batch_size=256, input_size=4096, classes=10, depth=4)
MAPPING = "config={family: mlp, batch_size: 256, input_size: 4096, classes: 10, depth: 4}"


@pytest.fixture(scope="module")
def done():
    layers = nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 28**2, 10)
    return estimate(nn.Sequential(*layers), (64, 3, 32, 32))


def with_notes(done, *severities):
    notes = [Note(f"code-{at}", severity, f"text {at} ({severity})") for at, severity in enumerate(severities)]
    return replace(done, notes=tuple(notes))


def test_print_shows_the_figures_the_bound_and_what_they_rest_on(done):
    text = str(done)
    assert len(text.splitlines()) < 15 and len(text) < 1200
    for name in ("peak memory", "SM activity", "SM occupancy", "DRAM activity", "step time", "99 % bound"):
        assert name in text
    assert f"{done.peak_memory_mib:,.0f} MiB (machine current)" in text
    assert f"{done.step_time_ms:,.3f} ms (loop resident)" in text and "(loop pipeline)" in text
    assert "trace" in text and "hybrid (default)" in text
    assert "Estimate(" in repr(done)


def test_at_most_three_warnings_are_shown_the_most_important_first(done):
    many = with_notes(done, "info", "warning", "warning", "problem", "info", "warning")
    shown = [line for line in str(many).splitlines() if "text " in line]
    assert [re.search(r"text (\d)", line)[1] for line in shown] == ["3", "1", "2"]
    assert "3 more" in str(many) and ".notes" in str(many)
    quiet = with_notes(done, "info")
    assert "text 0" not in str(quiet) and "1 more" in str(quiet)
    assert "more" not in str(with_notes(done))
    assert many.warnings == tuple(note.text for note in many.notes)


def test_an_estimate_survives_json_and_one_of_a_later_service_is_read(done):
    mapping = json.loads(json.dumps(done.to_mapping()))
    assert mapping["warnings"] == list(done.warnings)
    assert mapping["notes"][0].keys() >= {"code", "severity", "text"}
    assert Estimate.from_mapping(mapping) == done
    rank = {"first": 0, "count": 1, "peak_memory_mib": 1.0, "breakdown": {}}
    notes = [{**note, "later": 1} for note in mapping["notes"]]
    of_later_service = {**mapping, "later": 1, "notes": notes, "ranks": [{**rank, "later": 1}]}
    assert Estimate.from_mapping(of_later_service) == replace(done, ranks=(RankGroup(**rank),))
    assert "of another kind" not in str(replace(done, notes=(Note("code", "later", "of another kind"),)))


def test_a_notebook_shows_the_breakdown_as_a_bar_without_script(done):
    page = replace(
        done, breakdown={"<script>alert(1)</script>": 100.0, "context": 50.0}, notes=(Note("c", "warning", "<b>x"),)
    )._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page and "&lt;b&gt;x" in page
    assert 'class="stack tall"' in page and "width:66.667%" in page
    assert "src=" not in page and "href=" not in page and "99 % bound" in page
    assert "@scope (.gpufarm-blocks)" in page and ":root" not in page  # a notebook's own page keeps its style


def test_the_model_that_comes_along_says_how_often_its_bound_held(shown):
    by_model = estimate(CONFIG)
    assert by_model.bound_held_out == {
        "share": pytest.approx(0.99, abs=5e-3),
        "rows": 2400,
        "groups": 2400,
        "kind": "configurations",
    }
    assert estimate(CONFIG, coverage=0.9).bound_held_out == {}, "measured at 99 % only"
    assert estimate(CONFIG, estimator="trace").bound_held_out["kind"] in ("families", "sources", "GPU models")
    assert estimate(CONFIG, estimator="trace", device="MI300X").bound_held_out == {}, "no row is of AMD's GPUs"
    assert "99.0 % held on" in shown("estimate", MAPPING)


def test_the_command_prints_three_notes_and_all_where_asked(shown, answer, refused):
    text = shown("estimate", MAPPING, "machine=eager")
    assert text.count("\nnote: ") <= 3 and "notes=all shows" in text and "machine eager" in text
    assert "loop resident" in text
    everything = shown("estimate", MAPPING, "notes=all")
    assert everything.count("\nnote: ") > text.count("\nnote: ") and "notes=all" not in everything
    mapping = answer("estimate", MAPPING)
    assert len(mapping["notes"]) == len(mapping["warnings"]) == everything.count("\nnote: ")
    assert "notes" in refused("estimate", MAPPING, "notes=some")


# -- which loop the figures speak of


DEVICE = describe_device("A100-SXM4-40GB")
CONFIGS = make_configs(6, seed=3)
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
    note = "smact, smocc are for the pipeline loop and drama, step_time are for the resident loop; pass loop=pipeline"
    assert any(text.startswith(note) for text in done.warnings)


def test_all_figures_are_of_the_loop_asked_for_and_an_imported_run_is_of_a_plain_loop(tmp_path, answer):
    resident, plain = (estimate(CONFIG, loop=loop) for loop in (RESIDENT, PIPELINE))
    assert {(resident.loops[target], plain.loops[target]) for target in TARGETS} == {(RESIDENT, PIPELINE)}
    assert plain.step_time_ms > resident.step_time_ms and plain.drama < resident.drama
    write_batch(tmp_path, CONFIGS[:1], statuses=["ok"], source="imported")
    assert answer("estimate", "run=job-000000", f"data={tmp_path}")["run"]["loop"] == PIPELINE


def test_a_model_answers_only_about_the_loop_that_it_was_fitted_on(tmp_path):
    configs = make_configs(60, families=("mlp",))
    write_batch(tmp_path / "d", configs, statuses=["ok"] * 60)
    fit(FitSettings(target="smact", estimator="lightgbm", data=str(tmp_path / "d")))
    own = estimate(configs[0], data=tmp_path / "d", loop=RESIDENT)
    assert own.answered_by["smact"].startswith("lightgbm ") and own.answered_by["smocc"] == "trace"
    plain = estimate(configs[0], data=tmp_path / "d", loop=PIPELINE)
    assert plain.answered_by["smact"] == plain.answered_by["smocc"] == "hybrid (default)"


def test_beside_a_run_the_estimate_speaks_of_the_run_s_loop(data, answer, refused):
    done = answer("estimate", "run=job-000001", f"data={data}")
    assert (done["run"]["status"], done["run"]["source"]) == ("ok", "simulated")
    assert "no run 'job-999999'" in refused("estimate", "run=job-999999", f"data={data}")
    assert done["run"]["loop"] == RESIDENT and {done["loops"][target] for target in TARGETS} == {RESIDENT}
    assert done["peak_memory_mib"] == pytest.approx(done["run"]["peak_memory_mib"], rel=0.5)
    for name in UTILIZATION:
        assert done[name] == pytest.approx(done["run"][name])


@pytest.fixture
def lines(shown, monkeypatch):
    """The table of a run beside its estimate, as a function from words of a line to that line."""
    monkeypatch.setenv("COLUMNS", "140")

    def of_run(*argv):
        text = shown("estimate", *argv)
        return text, lambda words: next(line for line in text.splitlines() if words in line and "│" in line)

    return of_run


def test_a_run_shows_its_difference_unless_the_same_trace_simulated_it(data, tmp_path, lines):
    head, line_of = lines("run=job-000001", f"data={data}")
    assert "same trace" in line_of("│ step time ") and {"difference", "simulated"} <= set(re.findall(r"\w+", head))
    labels = {name: [0.9 * value for value in values] for name, values in simulated_labels(CONFIGS[:1]).items()}
    write_batch(tmp_path / "d", CONFIGS[:1], statuses=["ok"], labels=labels)
    text, line_of = lines("run=job-000000", f"data={tmp_path / 'd'}")
    assert "+11.1%" in line_of("│ step time ") and "same trace" not in text


def test_figures_of_different_loops_are_not_subtracted(data, lines):
    _, line_of = lines("run=job-000001", "loop=pipeline", f"data={data}")
    assert "other loop" in line_of("smact") and PIPELINE in line_of("smact")
    assert "other loop" not in line_of("peak memory") and "%" in line_of("peak memory")  # which hardly knows of loops
