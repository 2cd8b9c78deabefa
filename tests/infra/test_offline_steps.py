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
from farm.queue.jobs import Job, Queue
from infra.offline import results, steps
from infra.offline.steps import STEPS, CallStop
from tests.surroundings import PATIENCE_S, run_command
from tests.warehouse.warehouse_rows import ask, run_row, samples
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from workers.probes.children import EXIT_LEFT

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "infra.offline.steps:StepsSettings"


@pytest.fixture
def work(tmp_path):
    """A work folder with a queue of three tasks, of which one has landed, and a line that is being written."""
    path = tmp_path / "a'; echo foo" / "work"
    folder = DataFolder.resolve(path / "data").create()
    about = {"space_json": "{}", "seed": 0, "policy": "uniform", "settings_json": "{}", "device": "{}"}
    with Queue.open(folder.queue) as queue:
        job = Job(job_id="J", family="mlp", n=3, submitted_at=0.0, **about)
        queue.submit(job, [(index, "{}") for index in range(3)])
        RunWriter(folder).write(run_row(0, family="mlp"), samples(2))
        queue.mark_done("J", {0: "ok"})
    (path / "data" / "bench-published.jsonl").write_text('{"k": 0}\n{"k":')
    (path / "log.txt").write_text("a line\n")
    return path


@pytest.fixture
def folder(tmp_path_factory):
    """An empty folder for results."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture
def packed(work, folder):
    results.pack(work, folder, {})
    return folder


def summary_of(folder):
    """The summary of a folder of results."""
    return json.loads((folder / "summary.json").read_text())


def run_steps(folder, names, *keys, code=0):
    """Run steps whose results go to `folder`; return the row of the last one."""
    assert run_command(COMMAND, f"steps=[{names}]", f"results={folder}", "device=simulated", *keys) == code
    return summary_of(folder)["calls"][-1]


def test_an_emptied_machine_gets_back_rows_queue_and_whole_lines(packed):
    work = results.begin(packed)
    rows = ask(work / "data", "SELECT run_id, status, t_ms FROM runs JOIN telemetry USING (run_id) ORDER BY ALL")
    assert rows == [("J-000000", "ok", 0.0), ("J-000000", "ok", 100.0)]
    with Queue.open(DataFolder.resolve(work / "data").queue) as queue:
        assert queue.pending() == 2
    assert (work / "data" / "bench-published.jsonl").read_text() == '{"k": 0}\n'
    assert results.pack(work, packed, {}) == results.slices_of(packed)


def test_never_more_than_eight_files_within_the_limit_come_back(work, folder, monkeypatch):
    monkeypatch.setattr(results, "SLICE_BYTES", 2**14)
    for size in (20_000, 30_000, 40_000, 10_000):
        (work / "noise").write_bytes(os.urandom(size))
        slices = results.pack(work, folder, {"size": size})
        kept = [*(path.name for path in slices), "summary.json"]
        assert sorted(os.listdir(folder)) == sorted(kept) and len(kept) <= 4, "a kill may leave both archives"
        assert max(path.stat().st_size for path in slices) <= 2**14
    (work / "noise").write_bytes(os.urandom(100_000))
    with pytest.raises(EnvironmentProblem, match="more than 3 files of"):
        results.pack(work, folder, {})
    assert results.slices_of(folder) == slices, "the older results are kept"


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
    results.unpack(results.slices_of(packed), tmp_path / "again")
    assert int((tmp_path / "again" / "number").read_text()) >= numbers[-1]
    results.pack(work, packed, {})
    assert len(os.listdir(packed)) <= 2, "what a kill left is cleared away"


@pytest.mark.parametrize(("damaged", "line"), [("slice", "is torn"), ("summary.json", "summary.json is missing")])
def test_a_torn_or_missing_file_is_one_line_and_nothing_is_done(work, folder, monkeypatch, refused, damaged, line):
    monkeypatch.setattr(results, "SLICE_BYTES", 2**12)
    first, *_ = results.pack(work, folder, {})
    path = first if damaged == "slice" else folder / damaged
    path.write_bytes(path.read_bytes()[:-1])
    if damaged != "slice":
        path.unlink()
    error = refused(COMMAND, "steps=[collect]", f"results={folder}", "device=simulated")
    assert path.name in error and line in error
    assert results.pack(work, folder, {}) == results.slices_of(folder), "who has the work folder packs it again"


def test_outcomes_of_tests_are_read_off_what_pytest_prints(tmp_path):
    program = tmp_path / "tests"
    program.mkdir()
    skip = "import pytest\n\n@pytest.mark.skip(reason='one GPU')\ndef test_it(): pass\n"
    (program / "test_a.py").write_text(
        skip + "@pytest.mark.parametrize('way', ['a b'])\ndef test_b(way): pass\ndef test_c(): assert False\n"
    )
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "tests"]
    with open(tmp_path / "log.txt", "w") as log:
        subprocess.run(command, cwd=tmp_path, stdout=log, stderr=log)
    outcomes = results.outcomes_of(tmp_path / "log.txt")
    assert {test.partition("::")[2]: outcome for test, (outcome, _) in outcomes.items()} == {
        "test_it": "SKIPPED",
        "test_b[a b]": "PASSED",
        "test_c": "FAILED",
    }
    assert outcomes["tests/test_a.py::test_it"][1] == "(one GPU)"
    assert outcomes["tests/test_a.py::test_c"][1] == "assert False"


def test_only_programs_that_do_not_know_their_time_are_stopped_a_trial_s_time_earlier(work, packed):
    settings = steps.StepsSettings(steps=("collect",), results=str(packed), device="simulated")
    call = steps.Call(settings=settings, gpus=1, work=work, rows=[], counts=[{"longest_s": 60.0}])
    assert call.finish_s(STEPS["collect"], 480.0) == 65.0
    assert {call.finish_s(STEPS[name], 480.0) for name in ("calibrate", "allocator", "bench")} == {5.0}


def test_a_second_signal_does_not_keep_a_call_from_packing():
    with CallStop().installed() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert stop.requested


def test_a_folder_with_other_files_is_not_taken_for_results(folder, refused):
    (folder / "thesis.tex").write_text("mine")
    assert "holds thesis.tex" in refused(COMMAND, "steps=[collect]", "device=simulated", f"results={folder}")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["results=r"], "missing steps=..."),
        (["steps=[test,colect]", "results=r"], "unknown name in steps: 'colect'"),
        (["steps=[collect]"], "missing results=..."),
        (
            ["steps=[collect]", "results=r", "minuts=8"],
            "unknown key 'minuts'; did you mean minutes? valid keys: steps, minutes, results",
        ),
        (["steps=[collect]", "results=r", "minutes=-1"], "minutes must be a number > 0"),
        (["steps=[collect]", "results=r", "device=tpu"], "unknown device 'tpu'; known: cpu, cuda, simulated"),
        (["steps=[collect]", "results=r", "families=[cnm]"], "unknown name in families: 'cnm'"),
    ],
)
def test_a_wrong_call_is_one_line_and_nothing_is_done(tmp_path, monkeypatch, refused, argv, line):
    monkeypatch.chdir(tmp_path)
    assert line in refused(COMMAND, *argv)
    assert not os.listdir(tmp_path)


def test_a_step_that_cannot_run_here_is_data_and_later_calls_know_of_it(folder, capsys):
    run_steps(folder, "calibrate,allocator", "minutes=1", "families=[mlp]")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" s on device=simulated (4 GPUs)") and len(lines) <= 40
    assert lines[-1] == f"still to do: {', '.join(name for name in STEPS if name not in ('calibrate', 'allocator'))}"
    outcomes = [(row["step"], row["outcome"]) for row in summary_of(folder)["calls"]]
    assert outcomes == [("calibrate", "not here"), ("allocator", "not here")]
    run_steps(folder, "bench")
    assert [row["step"] for row in summary_of(folder)["calls"]] == ["calibrate", "allocator", "bench"]


def test_no_trial_begins_where_the_results_have_no_room_for_it(folder, monkeypatch, capsys):
    monkeypatch.setattr(steps, "FULL_BYTES", 0)
    run_steps(folder, "collect")
    assert "collect: full after 0 s: the results have no room for more" in capsys.readouterr().out
    assert not (results.begin(folder) / "data").exists()


def program(monkeypatch, step, *lines, **fields):
    """Make a step run these lines of Python, each in a process, in place of its own programs."""
    programs = tuple(f"-c {shlex.quote(line)}" for line in lines)
    monkeypatch.setitem(steps.STEPS, step, dataclasses.replace(STEPS[step], programs=programs, needs="", **fields))


@pytest.mark.parametrize(
    ("step", "line", "outcome", "reason"),
    [
        ("kernels", "raise SystemExit(7)", "failed", "exit code 7: no output"),
        ("test", "print('an internal error'); raise SystemExit(3)", "failed", "exit code 3: an internal error"),
        ("calibrate", f"print('later'); raise SystemExit({EXIT_LEFT})", "time is up", None),
    ],
)
def test_a_program_that_fails_says_why_and_one_that_goes_on_later_that_time_is_up(
    folder, monkeypatch, step, line, outcome, reason
):
    program(monkeypatch, step, line)
    row = run_steps(folder, step, "minutes=1", code=int(outcome == "failed"))
    assert (row["outcome"], row["reason"]) == (outcome, reason)


def test_a_failed_packing_ends_nothing_and_a_second_one_does_and_runs_that_cannot_be_counted_are_packed(
    work, packed, monkeypatch
):
    settings = steps.StepsSettings(steps=("collect",), results=str(packed), device="simulated")
    call = steps.Call(settings=settings, gpus=1, work=work, rows=[])
    (work / "noise").write_bytes(os.urandom(100_000))
    monkeypatch.setattr(results, "SLICE_BYTES", 2**10)
    for is_full in (False, True):
        call.pack()
        assert "more than 3 files" in call.problem and str(work) in call.problem and call.is_full == is_full
    monkeypatch.undo()
    monkeypatch.setattr(steps, "run_counts", mock.Mock(side_effect=duckdb.IOException("No magic bytes found")))
    call.pack()
    assert "No magic bytes" in call.problem and not call.is_full
    assert call.slices == results.slices_of(packed)


def test_a_damaged_queue_is_the_row_s_reason_and_not_the_end_of_the_call(work, folder, capsys):
    damaged = b"not a database, but long enough to be read as one" * 100
    results.pack(work, folder, {})
    unpack = results.unpack

    def unpack_damaged(slices, unpacked):
        unpack(slices, unpacked)
        (unpacked / "data" / "queue.sqlite").write_bytes(damaged)

    with mock.patch.object(results, "unpack", unpack_damaged):
        assert run_command(COMMAND, "steps=[calibrate,collect]", f"results={folder}", "device=simulated") == 1
    output = capsys.readouterr().out
    assert "collect: full" in output and "file is not a database" in output


@pytest.mark.slow
def test_killed_told_to_stop_and_emptied_it_loses_nothing_and_runs_nothing_twice(tmp_path):
    folder = tmp_path / "results"

    def begin(planned, name, runs):
        """Start a call on an emptied machine; return it when it has measured so many runs, or when it has ended."""
        (tmp_path / name).mkdir()
        keys = (f"results={folder}", "device=simulated", "families=[mlp,cnn]", "n=2")
        command = [sys.executable, "-m", "infra.offline.steps", f"steps=[{planned}]", "minutes=4", *keys]
        environment = {**os.environ, "TMPDIR": str(tmp_path / name)}
        call = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
        while call.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                call.wait(0.2)  # the machine is the call's, not this loop's
            with contextlib.suppress(EnvironmentProblem, UsageError, ValueError):
                (data,) = (tmp_path / name).glob("gpufarm-work-*/data")
                if ask(DataFolder.resolve(data).open(), "SELECT count(*) FROM runs") >= [(runs,)]:
                    break
        return call

    killed = begin("collect", "first", 3)
    killed.kill()
    killed.communicate()
    stopped = begin("kernels", "second", 1)
    stopped.send_signal(signal.SIGTERM)
    output, _ = stopped.communicate(timeout=PATIENCE_S)
    assert stopped.returncode == 130 and output.splitlines()[-1].startswith("still to do: test, "), output
    kept = ask(results.begin(folder) / "data", "SELECT run_id, job_id, started_at FROM runs")
    assert any(job.startswith("mlp") for _, job, _ in kept)

    last = begin("kernels,collect", "third", 1000)
    assert last.returncode == 0, last.communicate()
    assert not list(tmp_path.glob("third/gpufarm-work-*")), "what is packed is deleted"
    data = results.begin(folder) / "data"
    counts = "count(*), count(DISTINCT (job_id, task_index)), count(*) FILTER (kernel_rows > 0)"
    assert ask(data, f"SELECT {counts} FROM runs") == [(14, 14, 4)]
    assert set(kept) <= set(ask(data, "SELECT run_id, job_id, started_at FROM runs"))
    assert [row["outcome"] for row in summary_of(folder)["calls"]] == ["killed", "stopped", "done", "done"]
