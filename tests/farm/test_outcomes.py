"""A job of which every trial fails ends its command with 1 and the commonest reason; out of memory is no failure."""

import dataclasses

import pytest
from test_dispatch import Clock, ScriptedExecutor, submit

from conf.cli import command_line as cli
from farm import submit as submit_module
from farm.dispatch import working as work_module
from farm.dispatch.ray_cluster import ClusterSettings
from farm.dispatch.working import reason_of, work
from tests.warehouse.warehouse_rows import ask

TRACEBACK = """Traceback (most recent call last):
  File "/x/trial.py", line 3, in run
    raise conf.errors.UsageError(text)
    ^^^^^^^^^^^^^^
featurize.trace.tracer.TraceError: the model cannot be traced: it fails
  a second line of the message: with a colon
"""

NO_LUCK = ("ValueError: no luck with 3",)


class Executor(ScriptedExecutor):
    """`statuses`: job id -> the status of each of its trials in turn, the last one again and again; else invalid."""

    def __init__(self, statuses, errors):
        super().__init__(Clock())
        self._statuses = {job_id: list(those) for job_id, those in statuses.items()}
        self._errors = errors

    def wait(self, timeout_s):
        return [self._ended(completion) for completion in super().wait(timeout_s)]

    def _ended(self, completion):
        task, result = completion.task, completion.result
        those = self._statuses.get(task.job_id, ["invalid"])
        status = those.pop(0) if len(those) > 1 else those[0]
        error = None if status == "ok" else self._errors[task.task_index % len(self._errors)]
        run = dataclasses.replace(result.run, status=status, error=error)
        return dataclasses.replace(completion, result=dataclasses.replace(result, run=run))


@pytest.fixture
def run(folder, queue, monkeypatch):
    """`farm.work` of this folder with scripted trials; its exit code."""

    def run(statuses, errors=NO_LUCK, **options):
        monkeypatch.setattr(work_module, "make_executor", lambda *_: Executor(statuses, errors))
        return work(folder, queue, ClusterSettings(kind="inline"), **options)

    return run


def error_lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]


def test_a_job_of_which_every_trial_fails_is_one_line_with_the_commonest_reason_and_1(queue, run, capsys):
    submit(queue, 5, "mlp-00000001")
    errors = ("TypeError: rare", TRACEBACK, TRACEBACK)
    assert run({"mlp-00000001": ["crashed", "timeout", "invalid", "crashed"]}, errors) == 1
    assert error_lines(capsys) == [
        "error: mlp-00000001: every trial that ran failed (crashed 3, invalid 1, timeout 1); "
        "most common reason (3 of 5): TraceError: the model cannot be traced: it fails"
    ]


@pytest.mark.parametrize("status", ["ok", "oom"])
def test_one_trial_that_measured_something_is_enough(queue, run, capsys, status):
    submit(queue, 3)
    assert run({"mlp-00000001": ["crashed", status, "crashed"]}) == 0
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize(("asked_for", "code"), [(None, 1), ("mlp-00000001", 0)])
def test_a_failed_job_beside_another_is_reported_and_counts_unless_the_other_is_asked_for(
    queue, run, capsys, asked_for, code
):
    submit(queue, 2, "mlp-00000001")
    submit(queue, 1, "mlp-00000002")
    assert run({"mlp-00000001": ["ok"], "mlp-00000002": ["crashed"]}, job_id=asked_for) == code
    error = capsys.readouterr().err
    assert "mlp-00000002: every trial that ran failed" in error and "error: mlp-00000001" not in error


def test_a_job_that_has_measured_something_before_is_no_failed_one(queue, run, capsys):
    submit(queue, 2)
    assert run({"mlp-00000001": ["ok"]}, job_id="mlp-00000001") == 0
    submit(queue, 5)
    assert run({"mlp-00000001": ["crashed"]}, job_id="mlp-00000001") == 0
    assert "failed" not in capsys.readouterr().err


def test_a_job_that_had_failed_already_fails_again_where_it_is_the_one_asked_for(queue, run, capsys):
    submit(queue, 2)
    assert run({"mlp-00000001": ["crashed"]}, ("ValueError: size 3", "ValueError: size 4")) == 1
    first = capsys.readouterr().err.splitlines()[-1]
    assert "(2 of 2): ValueError: size" in first, "sizes do not make two reasons of one"
    assert run({}, job_id="mlp-00000001") == 1
    assert "every trial that ran failed (crashed 2); most common reason (2 of 2)" in capsys.readouterr().err
    assert run({}) == 0, "another job's failure was reported when it ran"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TRACEBACK, "TraceError: the model cannot be traced: it fails"),
        ('Traceback (most recent call last):\n  File "x", line 1, in y\n    z\nKeyError\n', "KeyError"),
        ("the trial died of SIGSEGV", "the trial died of SIGSEGV"),
        ("\x1b[31mred: alert", "\\x1b[31mred: alert"),
        (None, "no reason was given"),
        ("x" * 5000, "x" * 297 + "..."),
    ],
)
def test_the_reason_of_an_error_is_the_line_that_says_what_happened(error, reason):
    assert reason_of(error) == reason


def test_submitting_a_job_that_always_fails_exits_with_1_and_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(work_module, "make_executor", lambda *_: Executor({}, NO_LUCK))
    command = ["+arch=mlp", "n=2", "cluster=inline", "device=simulated", f"data={tmp_path / 'data'}"]
    assert cli.run("submit", submit_module.entry, command) == 1
    (line,) = error_lines(capsys)
    assert "every trial that ran failed (invalid 2)" in line and "no luck" in line
    assert ask(tmp_path / "data", "SELECT status, count(*) FROM runs GROUP BY ALL") == [("invalid", 2)]
