"""How an estimate is shown: `print`, a notebook, the command line and JSON, with its notes and their codes."""

import json
import logging
import os
import pty
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, asdict, replace

import pytest
from torch import nn

from featurize.families import mlp
from learn import Estimate, Note, estimate, estimate_many
from learn.estimation.estimate_view import peak_text
from learn.estimation.job_estimate import RankGroup
from learn.estimators.protocol import bound_shares, least_held
from learn.fitting.artifacts import default_artifact
from learn.job.training_job import load_factory

CONFIG = mlp.Config(batch_size=256, input_size=4096, classes=10, depth=4)
MAPPING = "config={family: mlp, batch_size: 256, input_size: 4096, classes: 10, depth: 4}"


def net():
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 28**2, 10))


@pytest.fixture(scope="module")
def done():
    return estimate(net, (64, 3, 32, 32))


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


def test_the_parts_of_an_estimate_hold_its_own_figures(done):
    assert done.memory.upper_mib == done.upper_mib and done.memory.quantile_mib(0.5) == done.quantile_mib(0.5)
    assert done.memory.fits_device is done.fits_device and done.memory.breakdown == done.breakdown
    assert done.time.step_time_ms == done.step_time_ms and done.time.samples_per_s == done.samples_per_s
    assert (done.activity.smact, done.energy.energy_j) == (done.smact, done.energy_j)
    known = {**vars(done.memory), **vars(done.time), **vars(done.activity), **vars(done.energy)}
    assert known.items() <= vars(done).items()


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("setup", "before the first step"),
        ("optimizer", "in the optimizer's step"),
        ("backward", "in the backward pass"),
    ],
)
def test_the_phase_of_the_peak_is_said(done, phase, words):
    assert peak_text(replace(done, peak_phase=phase)).endswith(f", {words}")


def test_a_copy_with_other_values_takes_no_field_that_an_estimate_does_not_have(done):
    assert done.with_values(seconds=2.0) == replace(done, seconds=2.0)
    with pytest.raises(AssertionError, match="secnods"):
        done.with_values(secnods=2.0)


def test_at_most_three_warnings_are_shown_the_most_important_first(done):
    many = with_notes(done, "info", "warning", "warning", "problem", "info", "warning")
    shown = [line for line in str(many).splitlines() if "text " in line]
    assert [re.search(r"text (\d)", line)[1] for line in shown] == ["3", "1", "2"]
    assert "3 more" in str(many) and ".notes" in str(many)
    quiet = with_notes(done, "info")
    assert "text 0" not in str(quiet) and "1 more" in str(quiet)
    assert "more" not in str(with_notes(done))
    assert many.warnings == tuple(note.text for note in many.notes)


def test_a_note_has_a_code_and_cannot_be_changed(done):
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", note.code) for note in done.notes)
    assert {note.severity for note in done.notes} <= {"problem", "warning", "info"}
    with pytest.raises(FrozenInstanceError):
        done.notes[0].code = "other"
    too_large = estimate(net, (40_000, 3, 32, 32), estimator="trace")
    assert too_large.notes[0].code == "out-of-memory" and too_large.notes[0].severity == "problem"
    assert "out-of-memory" not in {note.code for note in done.notes}


def test_an_estimate_survives_json_and_one_of_a_later_or_an_older_service_is_read(done):
    mapping = json.loads(json.dumps(done.to_mapping()))
    assert mapping["warnings"] == list(done.warnings)
    assert mapping["notes"][0].keys() >= {"code", "severity", "text"}
    assert Estimate.from_mapping(mapping) == done
    rank = {"first": 0, "count": 1, "peak_memory_mib": 1.0, "breakdown": {}}
    notes = [{**note, "later": 1} for note in mapping["notes"]]
    of_later_service = {**mapping, "later": 1, "notes": notes, "ranks": [{**rank, "later": 1}]}
    assert Estimate.from_mapping(of_later_service) == replace(done, ranks=(RankGroup(**rank),))
    assert "of another kind" not in str(replace(done, notes=(Note("code", "later", "of another kind"),)))
    of_older_service = {name: value for name, value in mapping.items() if name not in ("notes", "bound_held_out")}
    assert Estimate.from_mapping(of_older_service).warnings == done.warnings


def test_a_notebook_shows_the_breakdown_as_a_bar_without_script(done):
    page = replace(
        done, breakdown={"<script>alert(1)</script>": 100.0, "context": 50.0}, notes=(Note("c", "warning", "<b>x"),)
    )._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page and "&lt;b&gt;x" in page
    assert 'class="stack tall"' in page and "width:66.667%" in page
    assert "src=" not in page and "href=" not in page and "99 % bound" in page
    assert "@scope (.gpufarm-blocks)" in page and ":root" not in page  # a notebook's own page keeps its style


@pytest.mark.parametrize("show", [str, lambda done: done._repr_html_()])
def test_the_bound_says_what_held_on_left_out_rows(done, show):
    held = least_held(bound_shares().held)
    assert done.bound_held_out == asdict(held), "the bound is by causes"
    text = f"{100 * held.share:.1f} % held on {held.rows:,} rows of {held.groups} left-out {held.kind}"
    assert text in show(done)
    assert "not checked on left-out rows" in show(replace(done, bound_held_out={}))
    checked = replace(done, bound_held_out={"share": 0.9806, "rows": 1806})
    assert "98.1 % held on 1,806 held-out rows" in show(checked)


def test_the_model_that_comes_along_says_how_often_its_bound_held(shown):
    assert default_artifact("memory").meta["rows"]["test"] == 1806
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
    known = [{"batch_size": 256, "memory_mib": by_model.peak_memory_mib}]
    assert estimate(CONFIG, known=known).bound_held_out == {}, "the bound is another"
    assert "99.0 % held on" in shown(MAPPING)


def test_the_command_prints_three_notes_and_all_where_asked(shown, answer, refused):
    text = shown(MAPPING, "machine=eager")
    assert text.count("\nnote: ") <= 3 and "notes=all shows" in text and "machine eager" in text
    assert "loop resident" in text
    everything = shown(MAPPING, "notes=all")
    assert everything.count("\nnote: ") > text.count("\nnote: ") and "notes=all" not in everything
    mapping = answer(MAPPING)
    assert len(mapping["notes"]) == len(mapping["warnings"]) == everything.count("\nnote: ")
    assert "notes" in refused(MAPPING, "notes=some")


def test_many_configurations_show_a_bar_on_a_terminal_alone(capsys, monkeypatch):
    jobs = [replace(CONFIG, batch_size=8 * n) for n in range(1, 3)]
    assert len(estimate_many(jobs, estimator="trace")) == 2
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    monkeypatch.setattr("learn.estimation.estimating.MANY", 2)
    terminal, child = pty.openpty()
    with ThreadPoolExecutor(1) as reader, os.fdopen(child, "w") as stderr:
        shown = reader.submit(lambda: b"".join(iter(lambda: read_terminal(terminal), b"")).decode())
        monkeypatch.setattr(sys, "stderr", stderr)
        assert len(estimate_many(jobs, estimator="trace")) == 2
        stderr.close()
        assert "2/2" in shown.result() and 'method="fast"' in shown.result()
    os.close(terminal)


def read_terminal(terminal):
    """Return what was written since; nothing once the other end is closed."""
    try:
        return os.read(terminal, 4096)
    except OSError:  # EIO, on Linux
        return b""


def test_libraries_do_not_warn_of_their_own_parts_before_an_answer(tmp_path, monkeypatch, caplog):
    (tmp_path / "gpufarm_noisy.py").write_text(
        "import logging, torch\n"
        "logging.getLogger('torchao').warning('Failed to load a kernel')\n"
        "logging.getLogger('gpufarm_noisy').warning('of my own')\n"
        "def net():\n    logging.getLogger('torchao').warning('and more')\n    return torch.nn.Linear(8, 8)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(load_factory("gpufarm_noisy:net")(), nn.Linear)
    logging.getLogger("torchao").warning("asked for outside")
    assert [record.getMessage() for record in caplog.records] == ["of my own", "asked for outside"]
