"""Steps on a lent machine: what comes back survives a kill at any moment, continues, and refuses to be mixed."""

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import duckdb
import pytest

from conf.errors import EnvironmentProblem, UsageError
from farm.queue.jobs import Queue
from farm.queue.queue_values import Job
from infra.offline import results, steps
from infra.offline.results import Series, outcomes_of
from infra.offline.steps import STEPS, CallStop
from tests.gpu.conftest import Recorder
from tests.surroundings import PATIENCE_S
from tests.warehouse.warehouse_rows import ask, run_row, samples
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def work(tmp_path):
    """A work folder with a queue of three tasks, of which one has landed, and a line that is being written."""
    path = tmp_path / "a'; echo foo" / "work"
    Series.begun(path)
    folder = DataFolder.resolve(path / "data").create()
    about = {"space_json": "{}", "seed": 0, "policy": "uniform", "settings_json": "{}", "device": "{}"}
    with Queue.open(folder.queue) as queue:
        job = Job(job_id="J", family="mlp", n=3, submitted_at=0.0, **about)
        queue.submit(job, [(index, "{}") for index in range(3)], now=0.0)
        RunWriter(folder).write(run_row(0, family="mlp"), samples(2))
        queue.mark_done("J", {0: "ok"})
    (path / "data" / "bench-published.jsonl").write_text('{"k": 0}\n{"k":')
    (path / "log.txt").write_text("a line\n")
    return path


@pytest.fixture
def folder(tmp_path):
    """An empty folder for results."""
    path = tmp_path / "results"
    path.mkdir()
    return path


@pytest.fixture
def packed(work, folder):
    results.pack(work, folder, {})
    return folder


def calls_of(work):
    """The rows of a work folder's calls."""
    return [json.loads(line) for line in (work / "calls.jsonl").read_text().splitlines()]


def refused(capsys, *argv):
    """The line that a call ends with, which is the only one; its exit code is 2."""
    assert steps.main(argv) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1, printed
    return printed.err


def test_an_emptied_machine_gets_back_rows_queue_and_whole_lines(packed, tmp_path):
    work = tmp_path / "elsewhere" / "work"
    results.unpack(results.newest(packed), work)
    rows = ask(work / "data", "SELECT run_id, status, t_ms FROM runs JOIN telemetry USING (run_id) ORDER BY ALL")
    assert rows == [("J-000000", "ok", 0.0), ("J-000000", "ok", 100.0)]
    with Queue.open(DataFolder.resolve(work / "data").queue) as queue:
        assert queue.pending() == 2
    assert (work / "data" / "bench-published.jsonl").read_text() == '{"k": 0}\n'
    assert Series.of_work(work) == results.newest(packed).series


def test_never_more_than_eight_files_within_the_limit_come_back(work, folder, monkeypatch):
    monkeypatch.setattr(results, "SLICE_BYTES", 2**14)
    for size in (20_000, 30_000, 60_000, 10_000):
        (work / "noise").write_bytes(os.urandom(size))
        archive = results.pack(work, folder, {"size": size})
        kept = [*(path.name for path in archive.slices), "log.txt", "summary.json"]
        assert sorted(os.listdir(folder)) == sorted(kept) and len(kept) <= 8
        assert max(path.stat().st_size for path in archive.slices) <= 2**14
    (work / "noise").write_bytes(os.urandom(200_000))
    with pytest.raises(EnvironmentProblem, match="more than 6 files of"):
        results.pack(work, folder, {})
    assert results.newest(folder).slices == archive.slices, "the older results are kept"


PACKING = """
import os, sys
from pathlib import Path
from infra.offline import results
results.SLICE_BYTES = 2**14
work, folder = Path(sys.argv[1]), Path(sys.argv[2])
for number in range(1000):
    (work / "number").write_text(str(number))
    (work / "noise").write_bytes(os.urandom(30_000))
    results.pack(work, folder, {})
    print(number, flush=True)
"""


@pytest.mark.parametrize("rounds", [1, pytest.param(7, marks=pytest.mark.wide)])
def test_killed_while_it_packs_it_leaves_the_newest_whole_results(work, packed, tmp_path, rounds):
    command = [sys.executable, "-c", PACKING, str(work), str(packed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        numbers = [int(child.stdout.readline()) for _ in range(rounds)]
        child.kill()
        numbers += map(int, child.stdout.read().split())
    assert len(os.listdir(packed)) <= 8
    results.unpack(results.newest(packed), tmp_path / "again")
    assert int((tmp_path / "again" / "number").read_text()) >= numbers[-1]
    results.pack(work, packed, {})
    assert len(os.listdir(packed)) <= 3, "what a kill left is cleared away"


@pytest.mark.parametrize(("damaged", "line"), [("slice", "is torn"), ("summary.json", "summary.json is missing")])
def test_a_torn_or_missing_file_is_one_line_and_nothing_is_done(
    work, folder, tmp_path, monkeypatch, capsys, damaged, line
):
    monkeypatch.setattr(results, "SLICE_BYTES", 2**12)
    first, *_ = results.pack(work, folder, {}).slices
    path = first if damaged == "slice" else folder / damaged
    path.write_bytes(path.read_bytes()[:-1])
    if damaged != "slice":
        path.unlink()
    error = refused(capsys, "collect", f"results={folder}", f"work={tmp_path / 'new'}", "device=simulated")
    assert path.name in error and line in error and not list(tmp_path.glob("new*"))
    results.prepare(work, folder)
    assert "the work folder is whole and is packed again" in capsys.readouterr().err
    assert results.pack(work, folder, {}) == results.newest(folder), "who has the work folder packs it again"


def test_a_line_that_a_kill_cut_off_costs_no_later_record_and_an_incomplete_one_is_left_out(tmp_path):
    path = tmp_path / "tests.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS) + '{"test": "c::o"}\n{"test": "c::o", "ou')
    Recorder(path)._append({"selected": ["d", "e", "c::n"]})
    Recorder(path)._append({"test": "d", "outcome": "passed", "reason": ""})
    assert outcomes_of(path).counts == {"passed": 2, "failed": 1, "skipped": 0, "not run": 1}, "e, of the last call"


def test_a_second_signal_does_not_keep_a_call_from_packing():
    with CallStop().installed() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert stop.requested


def test_results_and_work_of_different_calls_are_not_mixed(work, packed, tmp_path, capsys):
    other = tmp_path / "other"
    Series.begun(other)
    call = ("collect", "device=simulated")
    assert "different series" in refused(capsys, *call, f"work={other}", f"results={packed}")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "thesis.tex").write_text("mine")
    assert "holds thesis.tex" in refused(capsys, *call, f"work={work}", f"results={tmp_path / 'new'}")
    assert "not a work folder" in refused(capsys, *call, f"work={tmp_path / 'new'}", f"results={packed}")
    old = tmp_path / "old"
    results.unpack(results.newest(packed), old)
    results.pack(work, packed, {})
    assert "is older than results=" in refused(capsys, *call, f"work={old}", f"results={packed}")
    (torn,) = results.newest(packed).slices
    torn.write_bytes(torn.read_bytes()[:-1])
    for path, words in ((other, "different series"), (old, "is older than")):
        with pytest.raises(UsageError, match=words):
            results.prepare(path, packed)
    assert torn.exists(), "torn results of others are theirs all the same"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "name the steps first, e.g. test,calibrate; known: test, calibrate,"),
        (["test,colect", "results=r"], "unknown name in steps: 'colect'"),
        (["collect"], "missing results=..."),
        (
            ["collect", "results=r", "minuts=8"],
            "unknown key 'minuts'; did you mean minutes? valid keys: steps, minutes, results",
        ),
        (["collect", "results=r", "minutes=-1"], "minutes must be a number > 0"),
        (["collect", "results=r", "device=tpu"], "unknown device 'tpu'; known: cpu, cuda, simulated"),
        (["collect", "results=r", "families=[cnm]"], "unknown name in families: 'cnm'"),
        (["collect", "results=work/r", "device=simulated"], "results=work/r lies in work="),
    ],
)
def test_a_wrong_call_is_one_line_and_nothing_is_done(tmp_path, monkeypatch, capsys, argv, line):
    monkeypatch.chdir(tmp_path)
    assert line in refused(capsys, *argv)
    assert not os.listdir(tmp_path)


def test_a_step_that_cannot_run_here_is_data_and_later_calls_know_of_it(tmp_path, capsys):
    folder = tmp_path / "results"
    call = ("calibrate,allocator", "minutes=1", f"results={folder}", "device=simulated", "families=[mlp]")
    assert steps.main([*call, f"work={tmp_path / 'work'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" s on device=simulated (4 GPUs)") and len(lines) <= 40
    assert lines[-1] == f"still to do: {', '.join(name for name in STEPS if name not in ('calibrate', 'allocator'))}"
    rows = json.loads((folder / "summary.json").read_text())["calls"]
    assert [(row["step"], row["outcome"]) for row in rows] == [("calibrate", "not here"), ("allocator", "not here")]
    assert steps.main(["bench", f"results={folder}", "device=simulated", f"work={tmp_path / 'w'}"]) == 0
    assert [row["step"] for row in calls_of(tmp_path / "w")] == ["calibrate", "allocator", "bench"]


def test_no_trial_begins_where_the_results_have_no_room_for_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(steps, "FULL_BYTES", 0)
    work = tmp_path / "work"
    assert steps.main(["collect", f"results={tmp_path / 'results'}", f"work={work}", "device=simulated"]) == 0
    assert "collect: full after 0 s: the results have no room for more" in capsys.readouterr().out
    assert not (work / "data").exists()


def program(monkeypatch, step, *lines, **fields):
    """Make a step run these lines of Python, each in a process, in place of its own programs."""
    programs = tuple(f"-c {shlex.quote(line)}" for line in lines)
    monkeypatch.setitem(steps.STEPS, step, dataclasses.replace(STEPS[step], programs=programs, needs="", **fields))


def run_step(tmp_path, step, code=0):
    """Run a step in the work folder of `tmp_path`; return its row."""
    work = tmp_path / "work"
    argv = [step, f"results={tmp_path / 'results'}", f"work={work}", "device=simulated", "minutes=1"]
    assert steps.main(argv) == code
    return calls_of(work)[-1]


@pytest.mark.parametrize(
    ("step", "line", "outcome", "reason"),
    [
        ("kernels", "raise SystemExit(7)", "failed", "exit code 7: no output"),
        ("test", "print('an internal error'); raise SystemExit(3)", "failed", "exit code 3: an internal error"),
        ("calibrate", "print('an internal error'); raise SystemExit(3)", "time is up", None),
    ],
)
def test_a_program_that_fails_says_why_and_only_a_probe_s_exit_code_that_time_is_up(
    tmp_path, monkeypatch, step, line, outcome, reason
):
    program(monkeypatch, step, line)
    row = run_step(tmp_path, step, code=int(outcome == "failed"))
    assert (row["outcome"], row["reason"]) == (outcome, reason)


def test_a_failed_packing_ends_nothing_and_a_second_one_does_and_runs_that_cannot_be_counted_are_packed(
    work, packed, monkeypatch
):
    call = steps.Call(place=steps.Place(work=work, device="simulated", gpus=1), results=packed, rows=[])
    (work / "noise").write_bytes(os.urandom(100_000))
    monkeypatch.setattr(results, "SLICE_BYTES", 2**10)
    for is_full in (False, True):
        call.pack()
        assert "more than 6 files" in call.problem and call.is_full == is_full
    monkeypatch.undo()
    monkeypatch.setattr(steps, "run_counts", mock.Mock(side_effect=duckdb.IOException("No magic bytes found")))
    call.pack()
    assert "No magic bytes" in call.problem and not call.is_full
    assert call.archive == results.newest(packed)


def test_a_damaged_queue_is_the_row_s_reason_and_not_the_end_of_the_call(work, tmp_path, capsys):
    (work / "data" / "queue.sqlite").write_bytes(b"not a database, but long enough to be read as one" * 100)
    argv = ["calibrate,collect", f"results={tmp_path / 'results'}", f"work={work}", "device=simulated"]
    assert steps.main(argv) == 1 and "file is not a database" in capsys.readouterr().out
    calibrate, collect = calls_of(work)
    assert (calibrate["step"], collect["step"]) == ("calibrate", "collect")
    assert "file is not a database" in collect["reason"]


RECORDS = [
    {"selected": ["c::n", "c::m", "c::o", "c::p"]},
    {"test": "c::n", "outcome": "passed", "reason": ""},
    {"test": "c::m", "outcome": "failed", "reason": "no samples"},
]


@pytest.mark.slow
def test_killed_told_to_stop_and_emptied_it_loses_nothing_and_runs_nothing_twice(tmp_path):
    folder = tmp_path / "results"

    def begin(steps_text, name, runs):
        """Start a call in its own empty work folder; return it when that holds this many runs, or when it has ended."""
        keys = (f"results={folder}", f"work={tmp_path / name}", "device=simulated", "families=[mlp,cnn]", "n=2")
        command = [sys.executable, "-m", "infra.offline.steps", steps_text, "minutes=4", *keys]
        call = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        while call.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                call.wait(0.2)  # the machine is the call's, not this loop's
            with contextlib.suppress(EnvironmentProblem, UsageError):
                data = DataFolder.resolve(tmp_path / name / "data").open()
                if ask(data, "SELECT count(*) FROM runs") >= [(runs,)]:
                    break
        return call

    killed = begin("collect", "first", 3)
    killed.kill()
    killed.communicate()
    stopped = begin("kernels", "second", 1)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=PATIENCE_S)
    assert stopped.returncode == 130 and output.splitlines()[-1].startswith("still to do: test, "), output
    kept = ask(tmp_path / "second" / "data", "SELECT run_id, job_id, started_at FROM runs")
    assert any(job.startswith("mlp") for _, job, _ in kept)

    last = begin("kernels,collect", "third", 1000)
    assert last.returncode == 0, last.communicate()
    results.unpack(results.newest(folder), tmp_path / "home")
    data = tmp_path / "home" / "data"
    counts = "count(*), count(DISTINCT (job_id, task_index)), count(*) FILTER (kernel_rows > 0)"
    assert ask(data, f"SELECT {counts} FROM runs") == [(14, 14, 4)]
    assert set(kept) <= set(ask(data, "SELECT run_id, job_id, started_at FROM runs"))
    assert [row["outcome"] for row in calls_of(tmp_path / "home")] == ["killed", "stopped", "done", "done"]
