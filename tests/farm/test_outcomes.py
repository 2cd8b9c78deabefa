"""Outcomes of results: a hostile one is one run of its task, one that cannot be trusted is kept and run again.

A job of which every trial fails ends its command with 1 and the commonest reason.
"""

import dataclasses
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from test_dispatch import Clock, ScriptedExecutor, result_of, run_with, submit

from farm.dispatch import dispatcher
from farm.dispatch.dispatcher import reason_of, reconcile, work
from farm.dispatch.ray_cluster import ClusterSettings
from farm.queue.jobs import ERROR_CHARACTERS, Queue
from tests.warehouse.warehouse_rows import ask
from warehouse.files.writer import RunWriter
from warehouse.tables.schema import TELEMETRY_SCHEMA
from workers.task import RunResult

# Any result that a worker sends, however odd, ends as one run of its task, and the dispatcher goes on

NONE = TELEMETRY_SCHEMA.empty_table()
SURROGATE = "the device is gone \ud800 \udfff \x00 \x1b[31m"


def changed(**values):
    """A good run with these values instead; what is `...` is taken out."""

    def result(task):
        given = {name: None if value is ... else value for name, value in values.items()}
        return RunResult(run=dataclasses.replace(result_of(task, "ok").run, **given), telemetry=NONE)

    return result


def device_fault(error, status="crashed"):
    result = changed(error=error, status=status)
    return lambda task: dataclasses.replace(result(task), retryable=True)


def with_telemetry(table):
    return lambda task: RunResult(run=result_of(task, "ok").run, telemetry=table)


# name -> (what task 0 sends each time, the status of its run, its attempts)
ANSWERS = {
    "a lone surrogate with a device fault": (device_fault(SURROGATE), "crashed", 3),
    "a device fault without a word": (device_fault(None), "crashed", 3),
    "a device fault of a run that is fine": (device_fault("none", status="ok"), "ok", 1),
    "a device fault of 50 MiB": (device_fault("x" * (50 * 2**20)), "crashed", 3),
    "a lone surrogate in an error": (changed(status="crashed", error=SURROGATE), "crashed", 1),
    "an error of 50 MiB": (changed(status="crashed", error="y" * (50 * 2**20)), "crashed", 1),
    "an error that is bytes": (changed(status="crashed", error=b"\xff"), "crashed", 1),
    "an error that is a list": (changed(status="crashed", error=["\ud800"]), "crashed", 1),
    "a surrogate in a name": (changed(device_name="A\ud800"), "ok", 1),
    "a long name": (changed(device_name="A" * 10_000_000), "ok", 1),
    "NaN": (changed(peak_memory_mib=float("nan")), "crashed", 1),
    "infinite": (changed(energy_j=float("inf")), "crashed", 1),
    "a text where a number belongs": (changed(peak_memory_mib="much"), "crashed", 1),
    "a number beyond all columns": (changed(steps=10**30), "crashed", 1),
    "a mapping where a number belongs": (changed(steps={"a": 1}), "crashed", 1),
    "an unknown status": (changed(status="fine"), "crashed", 1),
    "a status that is a list": (changed(status=["ok"]), "crashed", 1),
    "no status": (changed(status=...), "crashed", 1),
    "no source": (changed(source=...), "crashed", 1),
    "no run_id": (changed(run_id=...), "crashed", 1),
    "another run's id": (changed(run_id="mlp-00000001-000001"), "crashed", 1),
    "another family": (changed(family="../../up"), "crashed", 1),
    "columns and no run": (lambda task: RunResult(run={"status": "ok"}, telemetry=NONE), "crashed", 1),
    "a column that is no text": (lambda task: RunResult(run={1: 2}, telemetry=None), "crashed", 1),
    "a run that is a list": (lambda task: RunResult(run=[], telemetry=None), "crashed", 1),
    "no run": (lambda task: RunResult(run=None, telemetry=None), "crashed", 1),
    "something else": (lambda task: {"run": 1}, "crashed", 1),
    "nothing": (lambda task: None, "crashed", 1),
    "reasons that are not JSON": (changed(quality="untrusted", quality_reasons="{"), "ok", 1),
    "reasons that are a list": (changed(quality="suspect", quality_reasons=[1]), "ok", 1),
    "reasons with surrogates": (changed(quality="suspect", quality_reasons={"\ud800": "\udfff"}), "ok", 1),
    "reasons of 50 MiB": (changed(quality="suspect", quality_reasons={"a": "x" * 50 * 2**20}), "ok", 1),
    "reasons that JSON cannot hold": (changed(quality="suspect", quality_reasons={"a": {1}}), "ok", 1),
    "an unknown quality": (changed(quality="divine"), "crashed", 1),
    "no telemetry": (with_telemetry(None), "crashed", 1),
    "telemetry of unknown columns": (with_telemetry(pa.table({"x": [1]})), "crashed", 1),
    "telemetry with NaN": (with_telemetry(pa.table({"t_ms": [1.0], "power_w": [np.nan]})), "crashed", 1),
    "telemetry of lists": (with_telemetry(pa.table({"t_ms": [[1.0]]})), "crashed", 1),
}


@pytest.mark.spread(4)
@pytest.mark.parametrize(("answer", "status", "attempts"), ANSWERS.values(), ids=ANSWERS)
def test_one_hostile_answer_is_one_run_and_the_other_jobs_are_done(folder, queue, answer, status, attempts):
    submit(queue, 3)

    def sent(task, how):
        return result_of(task, how) if task.task_index else answer(task)

    assert run_with(folder, queue, ScriptedExecutor(Clock(), answer=sent))
    rows = ask(folder, "SELECT task_index, status, attempt, length(error), length(device_name) FROM runs ORDER BY 1")
    assert [row[:3] for row in rows] == [(0, status, attempts), (1, "ok", 1), (2, "ok", 1)]
    assert (rows[0][3] or 0) < 50_000 and (rows[0][4] or 0) < 5_000 and queue.counts().pending == 0
    errors = queue.errors("mlp-00000001")
    assert all(len(error["error"]) <= ERROR_CHARACTERS for error in errors)
    assert status == "ok" or errors, "whoever asks is told why"


def test_an_answer_that_nobody_asked_for_is_dropped(folder, queue):
    submit(queue, 2)

    class Twice(ScriptedExecutor):
        """Each answer comes twice."""

        def wait(self, timeout_s):
            return [again for done in super().wait(timeout_s) for again in (done, done)]

    assert run_with(folder, queue, Twice(Clock()))
    assert queue.counts().by_status == {"ok": 2}


# Runs whose labels cannot be trusted


REASONS = {"other_process": "up to 1 with 900 MiB, in 4 of 9 readings"}


def judged(task, how):
    result, quality = result_of(task, "ok"), "trusted" if how == "ok" else how
    reasons = REASONS if quality != "trusted" else None
    telemetry = pa.table({"run_id": [task.run_id] * 2, "t_ms": [0.0, 100.0], "power_w": [200.0, 210.0]})
    run = dataclasses.replace(result.run, quality=quality, quality_reasons=reasons, power_w=205.0 + task.attempt)
    return RunResult(run=run, telemetry=telemetry, repeat=quality == "untrusted")


def judge(folder, queue, outcomes):
    """Work off the queue. outcomes: task index -> the quality of each attempt's run, or "lost"; trusted after that."""
    executor = ScriptedExecutor(Clock(), outcomes, judged)
    assert run_with(folder, queue, executor)
    return executor


def landed(folder, view):
    return ask(folder, f"SELECT run_id, attempt, quality, final FROM {view} ORDER BY ALL")


def test_an_untrusted_run_is_kept_and_its_task_repeated_and_readers_see_it_once(folder, queue):
    submit(queue, 2)
    executor = judge(folder, queue, {1: ["untrusted"]})
    assert [(index, attempt) for _, index, attempt in executor.handed_out] == [(0, 1), (1, 1), (1, 2)]
    kept = [("mlp-00000001-000000", 1, "trusted", True), ("mlp-00000001-000001", 2, "trusted", True)]
    assert landed(folder, "runs") == kept
    assert landed(folder, "attempts") == [*kept, ("mlp-00000001-000001-a1", 1, "untrusted", False)]
    assert queue.counts().by_status == {"ok": 2} and "other_process" in queue.errors("mlp-00000001")[0]["error"]
    samples = ask(folder, "SELECT run_id, count(*) FROM telemetry GROUP BY ALL ORDER BY ALL")
    assert samples == [(f"mlp-00000001-{index}", 2) for index in ("000000", "000001", "000001-a1")]


@pytest.mark.parametrize(
    ("settings", "repeats"),
    [({}, 1), ({"quality_repeats": 0}, 0), ({"quality_repeats": 2}, 2)],
)
def test_what_stays_untrusted_is_repeated_as_often_as_its_job_says_and_lands_as_it_is(folder, queue, settings, repeats):
    submit(queue, 1, **settings)
    executor = judge(folder, queue, {0: ["untrusted"] * 9})
    assert len(executor.handed_out) == len(landed(folder, "attempts")) == 1 + repeats
    assert landed(folder, "runs") == [("mlp-00000001-000000", 1 + repeats, "untrusted", True)]


def test_lost_workers_and_repeats_share_a_tasks_attempts(folder, queue):
    submit(queue, 2, quality_repeats=2)
    judge(folder, queue, {0: ["lost", "untrusted", "untrusted"], 1: ["untrusted", "lost", "lost"]})
    assert ask(folder, "SELECT task_index, attempt, status, quality FROM runs ORDER BY ALL") == [
        (0, 3, "ok", "untrusted"),
        (1, 3, "crashed", None),
    ]
    assert [row[0][-2:] for row in landed(folder, "attempts") if row[3] is False] == ["a2", "a1"]


OUTCOMES = ("trusted", "suspect", "untrusted", "untrusted", "lost")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_whatever_happens_each_task_has_one_run_and_no_attempt_is_lost(folder, queue, monkeypatch, seed):
    """Random outcomes, and a dispatcher that is killed at a random step of landing, again and again."""
    random = Random(seed)
    limit = random.randrange(3)
    submit(queue, 4, quality_repeats=limit)
    outcomes = {index: random.choices(OUTCOMES, k=9) for index in range(4)}
    steps = [(RunWriter, "write"), (Queue, "repeat"), (Queue, "finish"), (Queue, "retry")]
    executor, done = ScriptedExecutor(Clock(), outcomes, judged), False
    while not done:
        with monkeypatch.context() as patch:
            owner, name = random.choice(steps)
            real, left, before = getattr(owner, name), [random.randrange(1, 4)], random.random() < 0.5

            def killed(*arguments, real=real, left=left, before=before, **named):
                left[0] -= 1
                if left[0] == 0 and before:
                    raise KeyboardInterrupt
                answer = real(*arguments, **named)
                if left[0] == 0:
                    raise KeyboardInterrupt
                return answer

            patch.setattr(owner, name, killed)
            patch.setattr(Queue, "release", lambda *_: 0)
            try:
                executor._task = None
                done = run_with(folder, queue, executor)
            except KeyboardInterrupt:
                pass
        reconcile(folder, queue)
    assert [index for (index,) in ask(folder, "SELECT task_index FROM runs ORDER BY 1")] == [0, 1, 2, 3]
    assert ask(folder, "SELECT count(*) - count(DISTINCT run_id) FROM attempts") == [(0,)]
    assert queue.counts().done == 4 and queue.pending() == 0
    repeated = ask(folder, "SELECT task_index, count(*) FROM attempts WHERE final = false GROUP BY ALL")
    assert all(count <= limit for _, count in repeated)


# Jobs of which every trial fails; out of memory is no failure


TRACEBACK = """Traceback (most recent call last):
  File "/x/trial.py", line 3, in run
    raise conf.errors.UsageError(text)
    ^^^^^^^^^^^^^^
featurize.trace.tracer.TraceError: the model cannot be traced: it fails
  a second line of the message: with a colon
"""

NO_LUCK = ("ValueError: no luck with 3",)


def ending(statuses, errors):
    """Return how tasks end. statuses: job id -> the status of each of its trials in turn, the last one again and again;
    those of other jobs are invalid."""
    left = {job_id: list(those) for job_id, those in statuses.items()}

    def answer(task, _how):
        those = left.get(task.job_id, ["invalid"])
        status = those.pop(0) if len(those) > 1 else those[0]
        result = result_of(task, status)
        error = None if status == "ok" else errors[task.task_index % len(errors)]
        return dataclasses.replace(result, run=dataclasses.replace(result.run, error=error))

    return answer


@pytest.fixture
def run(folder, queue, monkeypatch):
    """`farm.work` of this folder with scripted trials; its exit code."""

    def run(statuses, errors=NO_LUCK, **options):
        answer = ending(statuses, errors)
        monkeypatch.setattr(dispatcher, "make_executor", lambda *_: ScriptedExecutor(Clock(), answer=answer))
        return work(folder, queue, ClusterSettings(kind="inline"), **options)

    return run


def test_a_job_of_which_every_trial_fails_is_one_line_with_the_commonest_reason_and_1(queue, run, capsys):
    submit(queue, 5, "mlp-00000001")
    errors = ("TypeError: rare", TRACEBACK, TRACEBACK)
    assert run({"mlp-00000001": ["crashed", "timeout", "invalid", "crashed"]}, errors) == 1
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")] == [
        "error: mlp-00000001: every trial that ran failed (crashed 3, invalid 1, timeout 1); "
        "most common reason (3 of 5): TraceError: the model cannot be traced: it fails"
    ]
    assert run({}, job_id="mlp-00000001") == 1, "the one asked for has failed, also where nothing is left to run"


def test_a_submission_of_which_every_trial_fails_ends_with_1(run, folder, queue, outcome):
    assert run({}) == 0, "nothing is queued"
    code, _, err = outcome("submit", "+arch=mlp", "n=2", "cluster=inline", f'data="{folder.root}"')
    assert code == 1 and "every trial that ran failed (invalid 2)" in err


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
