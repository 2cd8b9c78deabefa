"""Hostile trials: whatever one reports, raises, writes or leaves behind, it ends as exactly one run."""

import json
import os
import time

import psutil
import pytest

from featurize.configs.trial import config_of_user
from tests.surroundings import ENDS_WITHIN_S
from workers.devices import TrialSettings, WindowSettings
from workers.task import Task
from workers.trial.reports import READINGS_KEPT, ReportReader

SHORT = WindowSettings(kind="fixed", seconds=0.0, warmup_steps=0, warmup_max_seconds=0, min_steps=1)


def hostile(name, path="", timeout_s=30.0, **settings):
    config = {
        "family": "zoo",
        "model": "hostile_models:act",
        "inputs": "float32[4]",
        "batch_size": 2,
        "arguments": json.dumps({"name": name, "path": str(path)}),
        "target": "int64[1]<3",
        "optimizer": "sgd",
        "precision": "fp32",
    }
    return Task(
        job_id="zoo-00000000",
        task_index=0,
        attempt=1,
        config=config_of_user({key: value for key, value in config.items() if key != "target"}),
        settings=TrialSettings(window=SHORT, timeout_s=timeout_s, **settings),
    )


@pytest.fixture
def notes(place):
    yield place
    for pid in pids_in(place):
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()


def pids_in(folder):
    return [int(name) for name in os.listdir(folder) if name.isdigit()]


def await_gone(pids):
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(alive, timeout=ENDS_WITHIN_S)[1]


def ends_well(worker, spec):
    """The run, after which the worker still runs trials on the same server, and no process or descriptor is left."""
    server = worker._server.pid
    opened = len(os.listdir("/proc/self/fd"))
    result = worker.run(spec)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert worker._server.pid == server, result.run.error
    assert not psutil.Process(worker._server.pid).children()
    json.dumps(result.run.columns(), default=str).encode()  # no surrogate is left
    assert "\x00" not in (result.run.error or "") and len(result.run.error or "") < 50_000
    return result


STEP = b'{"event":"step","t_ns":1,"values":{}}\n'
BROKEN = {
    "junk": b"\x00\xff\xfe not a report\n",
    "binary without an end": bytes(range(256)) * 5000,
    "a line without an end": b"x" * (2 << 20),
    "a number": b"17\n",
    "a list": b"[]\n",
    "nothing": b"\n",
    "deep nesting": b"[" * 100_000 + b"\n",
    "many digits": b'{"event":"built","parameters":' + b"9" * 5000 + b"}\n",
    "no event": b'{"t_ns":1}\n',
    "an unknown event": b'{"event":"dance"}\n',
    "an event that is no text": b'{"event":["built"]}\n',
    "a missing key": b'{"event":"built"}\n',
    "a further key": b'{"event":"built","parameters":1,"status":"ok"}\n',
    "a wrong type": b'{"event":"built","parameters":"many"}\n',
    "a truth value": b'{"event":"built","parameters":true}\n',
    "a negative count": b'{"event":"built","parameters":-1}\n',
    "a step before its warm-up": STEP,
    "a time that is no number": b'{"event":"warmup","t_ns":NaN}\n',
    "a time before the trial": b'{"event":"warmup","t_ns":1}\n',
    "a time in the future": b'{"event":"warmup","t_ns":9000000000000000000}\n',
    "a window without a warm-up": b'{"event":"window","t_ns":1}\n',
    "a result without a window": b'{"event":"result","window_end_ns":1,"window_ended":"fixed","values":{}}\n',
    "a failure that is none": b'{"event":"failed","status":"ok","oom_kind":null,"error_type":"E","error":"",'
    b'"device_fault":false,"values":{}}\n',
    "a failure with another's columns": b'{"event":"failed","status":"crashed","oom_kind":null,"error_type":"E",'
    b'"error":"","device_fault":false,"values":{"run_id":1}}\n',
    "a failure with infinite labels": b'{"event":"failed","status":"crashed","oom_kind":null,"error_type":"E",'
    b'"error":"","device_fault":false,"values":{"peak_memory_mib":Infinity}}\n',
    "a sample of a sensor": b'{"event":"sample","sensor":"nvml","t_ns":1,"values":{"power_w":1}}\n',
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_report_against_the_rules_is_broken(case):
    reader = ReportReader(time.monotonic_ns())
    assert [*reader.feed(BROKEN[case])] == ["broken"]
    assert reader.observed.broken.isprintable()


@pytest.mark.parametrize(
    ("case", "words"), [("a line without an end", "more than 1,048,576 bytes"), ("a step before its warm-up", "step")]
)
def test_a_report_against_the_rules_ends_the_trial_as_crashed(worker, tmp_path, case, words):
    reports_file = tmp_path / "said"
    reports_file.write_bytes(BROKEN[case])
    result = ends_well(worker, hostile("says_file", reports_file))
    assert (result.run.status, result.run.error_type, result.retryable) == ("crashed", "BrokenReport", False)
    assert result.run.error.isprintable() and words in result.run.error


def test_of_a_flood_of_readings_a_part_is_kept_and_the_run_says_so(worker, monkeypatch):
    monkeypatch.setattr("workers.trial.running._GOODBYE_S", 0.5)
    monkeypatch.setattr("workers.trial.reports.READINGS_KEPT", 2000)
    monkeypatch.setattr("workers.trial.running.READINGS_KEPT", 2000)
    assert READINGS_KEPT >= 36_000, "an hour of steps is no flood"
    result = ends_well(worker, hostile("flood_of_steps", 20_000))
    assert result.run.status == "ok", result.run.error
    assert result.telemetry["sensor"].to_pylist().count("torch") == 2000
    assert result.run.telemetry_missing["torch"] == "kept 2,000 of 20,000 readings of the trial"


def test_an_error_of_50_mib_lands_as_what_it_is(worker):
    run = ends_well(worker, hostile("huge_error")).run
    assert (run.status, run.error_type) == ("crashed", "RuntimeError")
    assert "characters left out" in run.error and "end of it" in run.error and "Traceback" in run.error


def test_an_error_text_that_nothing_can_store_lands_escaped_and_claims_no_device(worker):
    result = ends_well(worker, hostile("surrogate_error"))
    assert (result.run.status, result.run.error_type, result.retryable) == ("crashed", "RuntimeError", False)
    assert r"lone \ud800 and NUL \x00 and \x1b[2Jescape" in result.run.error


@pytest.mark.parametrize(
    ("name", "error_type"),
    [
        ("keyboard_interrupt", "KeyboardInterrupt"),
        ("system_exit", "SystemExit"),
        ("unspeakable_error", "Unspeakable"),
        ("os_exit", "Exit"),
        ("closes_descriptors", "Exit"),
    ],
)
def test_however_a_trial_fails_it_is_one_crashed_run(worker, name, error_type):
    result = ends_well(worker, hostile(name))
    assert (result.run.status, result.run.error_type, result.retryable) == ("crashed", error_type, False)


@pytest.mark.parametrize(
    "name",
    [
        "closes_its_output",
        "changes_folder",
        "forks_and_both_go_on",
    ],
)
def test_a_trial_that_goes_on_whatever_it_did_trains(worker, name):
    run = ends_well(worker, hostile(name)).run
    assert run.status == "ok", run.error


def test_of_much_output_the_beginning_and_the_end_are_kept(worker):
    run = ends_well(worker, hostile("writes_much_and_fails")).run
    assert run.error_type == "RuntimeError"
    assert "first words" in run.error and "last words" in run.error and "bytes left out" in run.error


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("leaves_exec_without_environment", "worker"),
        ("daemonizes_undoing_the_subreaper", "worker"),
        ("leaves_exec_without_environment", "groupless_worker"),
        ("daemonizes_undoing_the_subreaper", "groupless_worker"),
        ("daemonizes", "groupless_worker"),
    ],
)
def test_what_a_trial_leaves_behind_is_killed_and_counted(request, notes, name, workers):
    run = ends_well(request.getfixturevalue(workers), hostile(name, notes)).run
    assert run.status == "ok", run.error
    assert pids_in(notes) and await_gone(pids_in(notes)), "a process outlived its trial"
    assert int(run.quality_reasons["processes_left"].split()[0]) >= 1 and run.quality == "suspect"


def test_what_a_killed_trial_leaves_behind_is_killed(worker, notes):
    run = ends_well(worker, hostile("daemonizes_and_hangs", notes, timeout_s=8.0)).run
    assert run.status == "timeout"
    assert len(pids_in(notes)) == 1 and await_gone(pids_in(notes))
    assert "processes_left" in run.quality_reasons


@pytest.mark.slow
def test_a_trial_that_kills_its_server_leaves_nothing_and_the_next_one_runs(worker, notes):
    result = worker.run(hostile("kills_its_server", notes))
    assert (result.run.error_type, result.retryable) == ("ServerLost", True)
    assert len(pids_in(notes)) == 1 and await_gone(pids_in(notes))
    assert worker.run(hostile("changes_folder")).run.status == "ok"
