"""`farm.grow` as its user meets it: what a night leaves, killed at every step or not, and what the next one does."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from unittest import mock

import psutil
import pytest
from fastapi import FastAPI

from conf.errors import UsageError
from farm.dispatch import dispatcher as dispatch
from farm.dispatch.executors import InlineExecutor
from farm.grow import NightStop, _cycle_lock, _StatusLine, notify
from farm.nights.journal import STEPS, Journal
from farm.queue.jobs import Queue
from featurize.configs.space import default_space, parse_space, sample_range
from featurize.configs.trial import canonical_json
from tests.farm.canary_nights import SMALL_NIGHT
from tests.farm.test_serving_connections import listening
from tests.surroundings import PATIENCE_S, await_, run_command
from tests.warehouse.warehouse_rows import ask
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import snapshot_names

SMALL = (*SMALL_NIGHT, "canaries=skip")


def small_night(root, *arguments):
    """The command line of a small night."""
    return "grow", *SMALL, f"data={root}", *arguments


def grow(root, *arguments):
    return run_command(*small_night(root, *arguments))


def runs(root, columns="config_hash, status"):
    return ask(root, f"SELECT {columns} FROM runs ORDER BY ALL")


def cycles(root):
    return Journal(DataFolder.resolve(root)).cycles()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "a'; echo data"


def test_a_night_measures_lands_reports_and_tells_how_it_ended_and_the_next_one_goes_on(root, tmp_path, outcome):
    note = tmp_path / "note"
    keep = f"notify.command=cat > {note}; echo $GPUFARM_OUTCOME >> {note}"
    api, got = FastAPI(), []

    @api.post("/night", status_code=500)
    def told(message: dict):
        got.append(message)

    with listening(application=api) as (port, _):
        webhook = f"notify.webhook=http://127.0.0.1:{port}/night"
        code, out, err = outcome(*small_night(root, "n=2", keep, webhook))
        assert code == 0, "a message that cannot be told costs nothing"
    (cycle,), folder = cycles(root), DataFolder.resolve(root)
    assert (cycle.outcome, list(cycle.steps)) == ("done", list(STEPS)) and len(runs(root)) == 2
    assert snapshot_names(folder) == [cycle.name] and cycle.done("land")["findings"] == []
    page = folder.root / cycle.done("report")["html"]
    assert cycle.name in page.read_text() and (folder.reports / "latest.html").read_text() == page.read_text()
    assert cycle.said.startswith("2 runs were simulated (")
    assert cycle.said in json.loads((folder.reports / "latest.json").read_text())["said"]["sentence"]
    assert f"cycle {cycle.name} done: {cycle.said}\n" in out and str(page) in out
    assert "notify.webhook" in err and "500" in err
    (message,), (text, _, outcome_line) = got, note.read_text().rpartition("}")
    assert json.loads(text + "}") == message and outcome_line.strip() == "done"
    assert (message["cycle"], message["outcome"], message["run"]["runs"]) == (cycle.name, "done", 2)
    assert grow(root, "n=1") == 0
    hashes = [name for name, _ in runs(root)]
    assert len(hashes) == len(set(hashes)) == 3, "nothing is measured twice"
    first, second = cycles(root)
    (before,), (after,) = (cycle.done("choose")["next_index"].values() for cycle in (first, second))
    assert after > before >= 2 and second.done("land")["snapshot"] == second.name


def test_a_dry_run_says_what_it_would_cost_and_makes_no_folder(root, shown):
    output = shown(*small_night(root, "n=6", "dry_run=true"))
    assert "6 of 40 candidates (mlp: 6)" in output and "hours of simulated runs" in output and "out of memory" in output
    assert "measured" not in output and "GPU-hours" not in output
    output = shown(*small_night(root, "hours=0.0001", "dry_run=true"))
    assert 1 <= int(re.search(r"(\d+) of 40 candidates", output)[1]) <= 40, "as many as may fit"
    assert not root.exists()


@pytest.mark.parametrize(
    ("argument", "expected_text"),
    [
        ("seed=1", "give n=... (configurations) or hours=..."),
        ("n=0", "n must be an integer >= 1, got 0"),
        ("policy=random", "active, coverage, stratified, uniform"),
        ("families=[mpl]", "mlp"),
        ("families=[]", "families must name some of these, each once: cnn, "),
        ("canaries=no", "accept, compare, skip"),
        ("space={colour:3}", "no family here has colour"),
        ("space={depth:[2,-7]}", "depth"),
        ("learn.targets=[memry]", "memory"),
        ("notify.webhook=ftp://x", "http:// or https://"),
        ("device=tpu", "A100-SXM4-40GB"),
        ("nn=3", "n"),
        ("+arch=cnn", "unknown key 'arch'"),
    ],
)
def test_a_mistake_is_one_line_with_the_choices_and_nothing_is_written(root, refused, argument, expected_text):
    needed = [] if argument == "seed=1" or argument.startswith("n=") else ["n=3"]
    assert expected_text in refused(*small_night(root, *needed, argument)) and not root.exists()


@pytest.mark.slow
def test_a_night_whose_time_is_up_takes_the_rest_out_and_the_next_one_leaves_out_what_waits(root):
    assert grow(root, "hours=0.00000001", "n=5") == 0
    (cycle,) = cycles(root)
    with Queue.open(root / "queue.sqlite") as queue:
        counts = queue.counts(cycle.done("run")["job_id"])
        assert cycle.done("run")["ended"] == "time" and counts.pending == 0 and counts.cancelled
        assert len(runs(root)) == counts.done == 5 - counts.cancelled
        waiting = sample_range(parse_space("mlp", default_space("mlp")), 0, counts.done, counts.done + 2)
        other = dataclasses.replace(queue.jobs()[0], job_id="mlp-waiting", n=2)
        queue.submit(other, enumerate(canonical_json(config.to_mapping()) for config in waiting))
        assert grow(root, "n=3") == 0
        assert queue.counts("mlp-waiting").queued == 2, "another's job is not this night's"
    plan = json.loads((root / cycles(root)[1].done("choose")["plan"]).read_text())
    assert [entry["place"][1] - counts.done for entry in plan] == [2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "outcome"), [(signal.SIGINT, ""), (signal.SIGTERM, "cut short")])
def test_a_signal_while_the_workers_close_ends_the_night_although_all_trials_ran(root, monkeypatch, number, outcome):
    close, timers = InlineExecutor.close, []

    def interrupted(executor):
        os.kill(os.getpid(), number)
        timers.append(signal.getitimer(signal.ITIMER_REAL))  # what closes must not be interrupted
        close(executor)

    with monkeypatch.context() as patched:
        patched.setattr(InlineExecutor, "close", interrupted)
        assert grow(root, "n=1", "learn.targets=[memory]") == 130
    (cycle,) = cycles(root)
    assert cycle.outcome == outcome and timers == [(0.0, 0.0)]
    assert len(runs(root)) == 1 and (cycle.done("run") is None) == cycle.open
    assert cycle.open or cycle.done("learn")["results"] == []


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_long_trial(root):
    """A trial of ten minutes is given back: its task has no attempt, and none of the farm's processes is left."""
    long = ("device=cpu", "window=fixed", "window.seconds=600", "trial.timeout_s=1000")
    command = [sys.executable, "-m", "farm.grow", *SMALL, f"data={root}", "n=2", *long, "log.format=json"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **output, start_new_session=True)
    for line in process.stdout:
        if json.loads(line)["event"] == "handed_out":
            break
    servers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    psutil.wait_procs(servers, timeout=60)
    assert not [one for one in servers if one.is_running()]
    (cycle,) = cycles(root)
    with Queue.open(root / "queue.sqlite") as queue:
        counts = queue.counts(cycle.job("grow"))
    assert cycle.open and (counts.queued, counts.leased, counts.done) == (2, 0, 0)


def test_a_second_ctrl_c_and_sigterm_after_it_leave_at_once():
    for second in (signal.SIGINT, signal.SIGTERM):
        with NightStop(None, "2026-11-20").installed() as stop, pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested and stop.interrupted
            os.kill(os.getpid(), second)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_two_never_work_on_one_folder(root, outcome):
    with _cycle_lock(DataFolder.resolve(root).create()):
        code, _, error = outcome(*small_night(root, "n=2"))
    assert code == 75 and "already works on data=" in error and not cycles(root)


@pytest.mark.slow
def test_a_step_that_fails_is_told_reported_and_tried_again_but_not_for_ever(root):
    with mock.patch("farm.grow.land", side_effect=OSError(5, "Input/output error")):
        for failure in range(3):
            assert grow(root, "n=2") == 2
            (cycle,) = cycles(root)
            assert cycle.steps["land"].failures == failure + 1 and cycle.open == (failure < 2)
    assert "land failed" in (root / "reports" / "latest.html").read_text()
    assert cycle.outcome == "failed" and len(runs(root)) == 2
    assert grow(root, "n=2") == 0 and len(runs(root)) == 4


def told_in(path):
    """A `notify.command` that keeps the message, and how to read it."""
    return f"notify.command=cat > {path}", lambda: json.loads(path.read_text())


def test_a_night_of_which_every_trial_failed_says_why_and_exits_with_1(root, tmp_path, outcome, monkeypatch):
    accept, statuses = dispatch.accept, ["crashed", "timeout"]

    def failing(completion, task):
        completion = accept(completion, task)
        run = dataclasses.replace(completion.result.run, status=statuses.pop(), error="ValueError: boom")
        return dataclasses.replace(completion, result=dataclasses.replace(completion.result, run=run))

    monkeypatch.setattr(dispatch, "accept", failing)
    keep, messages = told_in(tmp_path / "note")
    code, _, error = outcome(*small_night(root, "n=2", keep))
    (cycle,) = cycles(root)
    words = "every trial that ran failed (crashed 1, timeout 1); most common reason (2 of 2): ValueError: boom"
    assert [words in text for text in (error, cycle.said, messages()["said"])] == [True] * 3
    assert (code, error.count("error: ")) == (1, 1)


def test_an_activity_that_takes_two_lines_of_the_terminal_costs_no_permanent_line(monkeypatch, capsys):
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "20"}.items():
        monkeypatch.setenv(name, value)
    line = _StatusLine(quiet=False)
    line("learning memory: fold 3 of 5")
    line.say("peak memory: kept")
    capsys.readouterr()
    line("next")
    line.close()
    assert capsys.readouterr().err.count("\x1b[1A") == 1, "its own line is erased, and no other"


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr("farm.grow._COMMAND_S", 1.0)
    pid_file = tmp_path / "pid"
    (problem,) = notify({"outcome": "done"}, f"sh -c 'echo $$ >{pid_file}; exec sleep 600' | cat", None)
    assert problem == "notify.command took longer than 1 s and was killed"
    await_(lambda: not runs_on(int(pid_file.read_text())), "the end of what it started")


def runs_on(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_auto_never_goes_on_with_simulated_gpus_where_real_ones_were_measured(root, refused):
    journal = Journal(DataFolder.resolve(root).create())
    journal.end(journal.begin({"device": {"backend": "cuda"}}, "00000000").name, "done", "")
    assert "the last cycle here measured on GPUs" in refused("grow", *SMALL[1:], f"data={root}", "n=2")
    assert len(cycles(root)) == 1


MISSING = {
    "machine_of": "device=cuda: no GPU answers",
    "require_models": "nets has no attribute 'fatcory'; near names: factory",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_gpu_or_a_model_that_is_missing_tonight_is_told(root, tmp_path, monkeypatch, name):
    monkeypatch.setattr(f"farm.grow.{name}", mock.Mock(side_effect=UsageError(MISSING[name])))
    keep, messages = told_in(tmp_path / "note")
    assert grow(root, "n=2", keep) == 2
    assert [messages()[key] for key in ("outcome", "said", "cycle")] == ["failed", MISSING[name], None]
    assert not root.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "goes_on"),
    [
        ({"n": 2, "device": {"backend": "simulated", "count": 1, "spec": None}, "learn": {"targets": []}}, True),
        ({"n": 2, "limits": {"max_flops": 3}}, False),
    ],
)
def test_a_cycle_that_another_version_has_begun_goes_on_or_makes_room(root, outcome, settings, goes_on):
    Journal(DataFolder.resolve(root).create()).begin(settings, "00000000")
    code, _, err = outcome(*small_night(root, "n=1"))
    assert code == 0, err
    old, *new = cycles(root)
    if goes_on:
        assert old.outcome == "done" and old.done("run")["runs"] == 2 and not new
    else:
        assert old.outcome == "failed" and "another version" in old.said
        assert new[0].outcome == "done" and old.said in err
