"""`farm.status` and `farm.cancel` as a user calls them."""

import json
import unicodedata

import pytest

from conf.files.identity import canonical_json
from farm import status
from farm.queue.jobs import Job
from farm.queue.leftovers import hold_dispatcher_lock
from featurize.configs.space import parse_space
from tests.surroundings import execute_sql

BOOM = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n[red]boom[/red]'


@pytest.fixture
def call(folder, outcome):
    """Run a command on the folder: (exit code, standard output, standard error)."""
    return lambda name, *arguments: outcome(name, f'data="{folder.root}"', *arguments)


@pytest.fixture
def dispatcher(queue, folder):
    """Somebody works on the folder: this process."""
    with hold_dispatcher_lock(folder.dispatcher_lock):
        yield


def submit(queue, job_id="mlp-00c0ffee", n=10, given=None):
    space = parse_space("mlp", {"depth": {"low": 1, "high": 3}, "batch_size": 8})
    job = Job(
        job_id=job_id,
        family="mlp",
        space_json=canonical_json(space.to_mapping()),
        n=n,
        seed=0,
        policy="stratified",
        settings_json='{"timeout_s":300}',
        submitted_at=1_000_000_000.0 + len(queue.jobs()),
    )
    queue.submit(job, ((i, "{}") for i in range(n if given is None else given)))


def work(queue, statuses, now=1_000_000_000.0):
    for outcome in statuses:
        (task,) = queue.lease("w", 1, now, 60.0)
        queue.finish(task, outcome, now, error=BOOM if outcome == "crashed" else None)


def test_an_empty_folder_says_how_to_submit(call, folder):
    code, out, err = call("status")
    assert (code, err) == (0, "") and "no jobs" in out and "python -m farm.submit +arch=" in out
    code, _, err = call("cancel", "job=cnn-1")
    assert code == 2 and "unknown job 'cnn-1'; there are no jobs in" in err and folder.root.name in err
    assert not folder.queue.exists(), "asking leaves nothing behind"


def test_the_table_shows_every_job_in_full_without_a_terminal(call, queue, dispatcher):
    submit(queue)
    submit(queue, "mlp-0badcafe", n=3000, given=2000)
    work(queue, ["ok"] * 3 + ["oom"])
    queue.lease("w", 2, 1_000_000_000.0, 60.0)
    _, out, _ = call("status")
    rows = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert "mlp-00c0ffee mlp stratified 10 4 2 4 ok 3, oom 1 0 running" in rows
    assert any(row.startswith("mlp-0badcafe") and row.endswith("submitting") for row in rows)


def test_json_is_complete_and_stable(call, queue, folder, dispatcher):
    submit(queue)
    work(queue, ["ok", "crashed"])
    code, out, _ = call("status", "format=json", "job=mlp-00c0ffee")
    report = json.loads(out)
    assert code == 0 and report["data"] == str(folder.root)
    assert report["jobs"] == [
        {
            "job_id": "mlp-00c0ffee",
            "family": "mlp",
            "policy": "stratified",
            "seed": 0,
            "n": 10,
            "priority": 0,
            "state": "queued",
            "submitted_at": "2001-09-09T01:46:40+00:00",
            "queued": 8,
            "waiting": 0,
            "running": 0,
            "done": 2,
            "cancelled": 0,
            "by_status": {"crashed": 1, "ok": 1},
            "rate_per_min": None,
            "eta_s": None,
            "space": {
                "family": "mlp",
                "space": [["depth", {"low": 1, "high": 3, "scale": "uniform"}], ["batch_size", 8]],
            },
            "settings": {"timeout_s": 300},
            "errors": [
                {
                    "task_index": 1,
                    "attempt": 1,
                    "state": "done",
                    "status": "crashed",
                    "error": BOOM,
                    "error_at": "2001-09-09T01:46:40+00:00",
                }
            ],
        }
    ]


def test_without_a_dispatcher_nothing_runs_and_nothing_has_a_time_left(call, queue, folder):
    submit(queue)
    work(queue, ["ok"] * 3)
    queue.lease("w", 1, 1_000_000_000.0, 60.0)  # its dispatcher was killed
    report = status.read(folder, None, 1_000_000_010.0)
    states = [(job["state"], job["eta_s"]) for job in report["jobs"]]
    assert (report["dispatcher"], states) == (None, [("stopped", None)])
    assert "`python -m farm.work` continues" in call("status")[1]


def test_cancel_says_what_it_did_and_again_that_nothing_was_left(call, queue):
    submit(queue)
    work(queue, ["ok"] * 3)
    (running,) = queue.lease("w", 1, 1_000_000_000.0, 60.0)
    code, out, _ = call("cancel", "job=mlp-00c0ffee")
    assert code == 0 and "6 waiting tasks cancelled; 1 running ones will finish, 3 are done and stay" in out
    queue.finish(running, "ok", 1_000_000_001.0)
    code, out, _ = call("cancel", "job=mlp-00c0ffee")
    assert code == 0 and "0 waiting tasks cancelled; 0 running ones will finish, 4 are done and stay" in out
    assert [line.split("│")[-2].strip() for line in call("status")[1].splitlines() if "mlp-0" in line] == ["cancelled"]


@pytest.mark.parametrize("time_s", ["'soon'", "1e300"])
def test_a_queue_with_times_that_are_none_and_names_with_escape_sequences_is_shown(call, folder, queue, time_s):
    submit(queue)
    work(queue, ["crashed", "ok"])
    hostile = "'first' || char(10) || 'a' || char(27) || '[2J' || char(155, 8238) || 'c' || char(7)"
    execute_sql(
        folder.queue,
        f"UPDATE tasks SET finished_at = {time_s}, error_at = {time_s} WHERE state = 'done'",
        f"UPDATE jobs SET submitted_at = {time_s}",
        f"UPDATE tasks SET error = {hostile} WHERE status = 'crashed'",
        f"UPDATE jobs SET family = {hostile}, settings_json = json_object('x', {hostile})",
    )
    code, out, _ = call("status", "job=mlp-00c0ffee")
    assert code == 0 and "\\x1b[2J" in out
    assert not [c for c in out if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")]
    execute_sql(folder.queue, "UPDATE jobs SET job_id = 'mlp-00c0ffee' || char(10, 27) || '[31m'")
    for arguments in ([], ["format=json"]):
        code, out, err = call("status", *arguments)
        assert code == 0 and "\x1b" not in out + err and "mlp-00c0ffee\\" in out
