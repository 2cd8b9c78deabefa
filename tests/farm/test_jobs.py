"""The durable queue: what is leased, retried, cancelled and finished, and what outlives a killed process."""

import contextlib
import itertools
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from conf.errors import EnvironmentProblem, UsageError
from farm.queue.jobs import Counts, Job, Queue, UnreadableTask, device_key, text_of_settings, text_of_task
from farm.queue.queue_file import QueueError
from tests.surroundings import execute_sql
from tests.trials import mlp
from workers.devices import DeviceChoice, TrialSettings, WindowSettings

LEASE_S = 60.0


_TIMES = itertools.count(1000.0)  # jobs are older, the earlier they are submitted


def a_job(job_id="cnn-1", n=5, **changes):
    return Job(
        **{
            "job_id": job_id,
            "family": "cnn",
            "space_json": "{}",
            "n": n,
            "seed": 0,
            "policy": "stratified",
            "settings_json": '{"window":"fixed"}',
            "submitted_at": next(_TIMES),
            **changes,
        }
    )


def configs(n, start=0):
    return ((i, f'{{"depth":{i}}}') for i in range(start, n))


def submit(queue, *args, **kwargs):
    job = a_job(*args, **kwargs)
    return queue.submit(job, configs(job.n))


def indices(tasks):
    return [(task.job_id, task.task_index) for task in tasks]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "a'; echo foo").mkdir()
    return tmp_path / "a'; echo foo" / "queue.sqlite"


@pytest.fixture
def queue(path):
    with Queue.open(path) as queue:
        yield queue


# Submitting


def test_submitting_again_adds_nothing_and_a_larger_n_the_difference(queue):
    assert submit(queue, n=5) == 5
    assert submit(queue, n=5) == 0
    assert queue.submit(a_job(n=8), configs(8, start=queue.next_index("cnn-1"))) == 3
    assert submit(queue, n=2, priority=4) == 0
    (job,) = queue.jobs()
    assert (queue.counts("cnn-1").queued, job) == (8, a_job(n=8, priority=4, submitted_at=job.submitted_at))
    with pytest.raises(UsageError, match="job cnn-1 exists with another space"):
        submit(queue, seed=1)
    assert queue.submit(a_job("cnn-2", n=10), list(configs(10))[1::3]) == 3
    assert queue.next_index("cnn-2") == 0, "a submission goes on at the first index that is missing"


def until(error, count, start=0):
    """Yield `count` configs, then raise the error."""
    yield from configs(start + count, start=start)
    raise error


def interrupted(queue, job, configs):
    """Submit until Ctrl-C, which the configs raise."""
    with pytest.raises(KeyboardInterrupt):
        queue.submit(job, configs)


def contents(queue):
    """All that the queue holds."""
    tables = ("tasks", "configs", "tallies WHERE count > 0")
    return [queue.jobs(), *(queue._file.all(f"SELECT * FROM {table} ORDER BY 1, 2") for table in tables)]


@pytest.mark.parametrize("cancelled", [False, True])
def test_ctrl_c_leaves_a_job_that_was_there_as_it_was(queue, cancelled):
    submit(queue, "cnn-2", n=3)
    submit(queue, n=3000, priority=1)
    if cancelled:
        queue.cancel("cnn-1", 1.0)
    before = contents(queue)
    interrupted(queue, a_job(n=9000, priority=7), until(KeyboardInterrupt(), 5000, start=3000))
    assert contents(queue) == before


def test_ctrl_c_leaves_what_another_command_added_since(queue, path):
    def joined_by_another():
        yield from itertools.islice(configs(9000), 4001)
        with Queue.open(path) as other:
            assert other.submit(a_job(n=9000), configs(9000)) == 5000
        raise KeyboardInterrupt

    interrupted(queue, a_job(n=9000), joined_by_another())
    assert (queue.counts("cnn-1").queued, queue.job("cnn-1").n) == (5000, 9000)


def test_a_job_cancelled_while_it_is_submitted_stays_cancelled(queue):
    def cancelled_in_the_middle():
        yield from configs(2000)
        queue.cancel("cnn-1", 1.0)
        yield from configs(3000, start=2000)

    queue.submit(a_job(n=3000), cancelled_in_the_middle())
    assert queue.counts() == Counts(cancelled=3000)


def test_a_removed_job_keeps_its_number_for_those_who_have_the_queue_open(queue, path):
    def watched():
        yield from configs(4000)
        assert other.pending("cnn-2")
        raise KeyboardInterrupt

    with Queue.open(path) as other:
        interrupted(queue, a_job("cnn-2", n=9000), watched())
        submit(queue, "cnn-3", n=2)
        submit(queue, "cnn-2", n=1)
        assert (other.pending("cnn-3"), other.pending("cnn-2")) == (2, 1)


# Leasing


def test_leases_go_by_priority_then_age_then_index(queue):
    submit(queue, "cnn-new", n=2, submitted_at=30.0)
    submit(queue, "cnn-old", n=2, submitted_at=20.0)
    submit(queue, "cnn-urgent", n=1, submitted_at=40.0, priority=1)
    assert indices(queue.lease("w", 4, 100.0, LEASE_S)) == [
        ("cnn-urgent", 0),
        ("cnn-old", 0),
        ("cnn-old", 1),
        ("cnn-new", 0),
    ]
    assert indices(queue.lease("w", 4, 100.0, LEASE_S)) == [("cnn-new", 1)]
    assert queue.lease("w", 4, 100.0, LEASE_S) == []


def test_leases_can_be_kept_to_one_job_or_one_device(queue):
    submit(queue, "cnn-a", n=1, device="A100")
    submit(queue, "cnn-b", n=1, device="H200")
    submit(queue, "cnn-c", n=1, device="H200")
    assert queue.next_device() == "A100" and queue.next_device("cnn-b") == "H200"
    assert indices(queue.lease("w", 9, 0.0, LEASE_S, job_id="cnn-c")) == [("cnn-c", 0)]
    assert indices(queue.lease("w", 9, 0.0, LEASE_S, device="H200")) == [("cnn-b", 0)]


@pytest.mark.parametrize("broken", ["config", "settings", "device"])
@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"family": 3}'])
def test_a_row_that_nobody_understands_is_leased_as_such_and_says_why(queue, broken, text):
    config = text_of_task(mlp())
    settings = text_of_settings(TrialSettings(window=WindowSettings(kind="fixed", seconds=1.0)))
    texts = {"config": config, "settings": settings, "device": device_key(DeviceChoice(backend="cpu")), broken: text}
    job = a_job(settings_json=texts["settings"], device=texts["device"])
    queue.submit(job, [(0, texts["config"])])
    (task,) = queue.lease("w", 1, 0.0, LEASE_S)
    assert isinstance(task, UnreadableTask) and task.problem and len(task.problem) < 5000
    assert queue.finish(task, "invalid", 1.0) and queue.pending() == 0


def test_a_renewed_lease_lasts_and_an_expired_one_counts_as_an_attempt_until_they_are_exhausted(queue):
    submit(queue, n=1)
    for attempt in (1, 2, 3):
        (task,) = queue.lease("w", 1, attempt * 100.0, LEASE_S)
        assert task.attempt == attempt and queue.renew([task], attempt * 100.0 + 10, LEASE_S) == 1
        assert queue.lease("w", 1, attempt * 100.0 + 69, LEASE_S) == [] == queue.expired(attempt * 100.0 + 69)
    assert queue.lease("w", 1, 400.0, LEASE_S) == [] and queue.expired(400.0) == queue.expired(500.0) == [task]
    assert "lease of attempt 3 ran out" in queue.errors("cnn-1")[0]["error"]
    assert queue.finish(task, "crashed", 500.0) and queue.expired(600.0) == [] and queue.pending() == 0


# Finishing


def test_a_late_holder_finishes_and_the_second_drops_its_result(queue):
    submit(queue, n=1)
    (late,), (second,) = (queue.lease("w", 1, now, LEASE_S) for now in (0.0, 100.0))
    assert queue.retry(late, 105.0, "lost") and queue.release([late]) == 0, "the present holder is not disturbed"
    assert not queue.repeat(late, 105.0, "labels not trusted")
    assert queue.counts().leased == 1 and queue.finish(late, "ok", 110.0)
    assert not queue.finish(second, "ok", 120.0)
    assert queue.retry(second, 120.0, "lost"), "nothing left to do: the task is done"
    assert queue.counts() == Counts(done=1, by_status={"ok": 1})


def test_retries_back_off_exponentially_and_then_leave_the_task_to_its_holder(queue):
    submit(queue, n=1)
    now = 0.0
    for delay_s in (5.0, 10.0):
        (task,) = queue.lease("w", 1, now, LEASE_S)
        assert queue.retry(task, now, "Traceback ...\nRayActorError")
        assert queue.lease("w", 1, now + delay_s - 0.001, LEASE_S) == []
        now += delay_s
    (task,) = queue.lease("w", 1, now, LEASE_S)
    assert not queue.retry(task, now, "third time")
    assert queue.lease("w", 1, now + 1, LEASE_S) == [] and queue.expired(now + 1) == []
    assert queue.expired(now + LEASE_S + 1) == [task], "unless that one has died too"
    assert queue.finish(task, "crashed", now + 2)
    (error,) = queue.errors("cnn-1")
    assert (error["error"], error["status"], error["attempt"]) == ("third time", "crashed", 3)


def test_progress_gives_rate_and_time_left_of_the_last_minutes(queue):
    submit(queue, n=31)
    for now in (500.0, *range(1000, 1020, 2)):
        queue.finish(*queue.lease("w", 1, now, LEASE_S), "ok", now)
    (progress,) = queue.progress(1020.0)
    assert (progress.rate_per_s, progress.eta_s) == pytest.approx((9 / 20, 20 / (9 / 20)))


# Cancelling


def test_cancel_takes_waiting_tasks_and_a_later_submission_revives_them(queue):
    submit(queue, n=5)
    running, failed, released, _ = queue.lease("w", 4, 0.0, LEASE_S)
    assert queue.cancel("cnn-1", 1.0) == 1
    assert queue.lease("w", 9, 1.0, LEASE_S) == []
    assert queue.progress(1.0)[0].state == "cancelling"
    assert queue.retry(failed, 2.0, "lost"), "not tried again, nothing to land"
    queue.release([released])
    assert not queue.may_repeat(running) and queue.finish(running, "ok", 2.0)
    assert queue.lease("w", 9, 100.0, LEASE_S) == [] == queue.expired(100.0), "nor is an expired lease"
    assert queue.counts() == Counts(done=1, cancelled=4, by_status={"ok": 1})
    assert queue.progress(2.0)[0].state == "cancelled"
    assert submit(queue, n=5) == 0
    assert [task.attempt for task in queue.lease("w", 9, 3.0, LEASE_S)] == [1, 1, 1, 1]


@pytest.mark.parametrize("method", ["counts", "job", "errors", "pending"])
def test_an_unknown_job_lists_the_known_ones(queue, method):
    submit(queue)
    with pytest.raises(UsageError, match="unknown job 'cnn-9'; known: cnn-1"):
        getattr(queue, method)("cnn-9")


# Files


def newer(path):
    Queue.open(path).close()
    execute_sql(path, "PRAGMA user_version = 99")


NO_QUEUES = {
    "of a newer version": (newer, EnvironmentProblem, r"newer version .*99"),
    "no database": (lambda path: path.write_text("no database" * 200), EnvironmentProblem, "not a queue"),
    "another's": (lambda path: execute_sql(path, "CREATE TABLE x (y)"), UsageError, "not a queue of this project"),
    "in no folder": (lambda path: path.parent.rmdir(), UsageError, "does not exist"),
}


@pytest.mark.parametrize(("make", "error", "words"), NO_QUEUES.values(), ids=NO_QUEUES)
def test_what_is_no_queue_is_refused(path, make, error, words):
    make(path)
    with pytest.raises(error, match=words):
        Queue.open(path)


def test_a_queue_held_for_too_long_says_so(path):
    with Queue.open(path), Queue.open(path, busy_timeout_s=0.0) as second:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            with pytest.raises(EnvironmentProblem, match="held by another process"):
                submit(second)
        assert submit(second) == 5


def test_a_full_disk_is_an_os_error_with_its_errno_and_undoes_the_whole_chunk(queue):
    submit(queue, n=10)
    pages = queue._file.one("PRAGMA page_count")[0]
    queue._file.all(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(QueueError, match="full") as caught:
        submit(queue, n=2000)
    assert caught.value.errno == 28
    assert queue.counts().queued == 10


# Several processes, and killed ones


def start(code, path, processes=1):
    """Run the code in so many processes with the queue open, forks of one, as imports take longer than all else."""
    preamble = (
        "import os, sys\n"
        "from farm.queue.jobs import Job, Queue\n"
        "def say(word): os.write(1, f'{word}\\n'.encode())\n"
        f"all(os.fork() for _ in range({processes - 1}))\n"
        "queue = Queue.open(sys.argv[1])\n"
    )
    command = [sys.executable, "-c", preamble + code, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_two_processes_at_once_never_get_the_same_task(queue, path):
    submit(queue, n=300)
    code = (
        "sys.stdin.read()\n"  # until both are there
        "while tasks := queue.lease('w', 3, 0.0, 60.0):\n"
        "    for task in tasks: say(task.task_index); queue.finish(task, 'ok', 1.0)\n"
    )
    taken, _ = start(code, path, processes=2).communicate()
    assert sorted(map(int, taken.split())) == list(range(300))
    assert queue.counts().by_status == {"ok": 300}


def test_processes_that_create_the_same_queue_at_once_all_succeed(path):
    assert start("say(queue.next_index('x'))", path, processes=3).communicate()[0].split() == ["0"] * 3


def test_a_killed_submission_is_completed_by_the_same_one(path):
    code = (
        "def configs():\n"
        "    for i in range(5000): yield i, '{}'\n"
        "    say('half'); sys.stdin.readline()\n"
        "queue.submit(Job(job_id='cnn-1', family='cnn', space_json='{}', n=9000, seed=0, policy='stratified',\n"
        '    settings_json=\'{"window":"fixed"}\', submitted_at=1000.0), configs())\n'
    )
    with start(code, path) as process:
        assert process.stdout.readline() == "half\n"
        process.kill()
    with Queue.open(path) as queue:
        assert queue.progress(0.0)[0].state == "submitting" and queue.counts().queued == 4000
        assert submit(queue, n=9000) == 5000 and queue.progress(0.0)[0].state == "queued"


# Any order of operations


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), max_size=60), st.integers(1, 3))
def test_any_order_of_operations_keeps_every_task_and_ends(tmp_path_factory, steps, max_attempts):
    path = tmp_path_factory.mktemp("any") / "queue.sqlite"
    with Queue.open(path, max_attempts=max_attempts) as queue:
        now, n, held, finished = 0.0, 4, [], set()
        submit(queue, n=n)
        for operation, which in steps:
            now += which * 15.0
            task = held[which % len(held)] if held else None
            if operation == 0:
                n += 1
                submit(queue, n=n)
            elif operation in (1, 2):
                held += queue.lease("w", which, now, LEASE_S)
            elif operation == 3 and task and queue.finish(task, "ok", now):
                assert task.task_index not in finished
                finished.add(task.task_index)
            elif operation == 4 and task and not queue.retry(task, now, "lost"):
                assert task.attempt == max_attempts
            elif operation == 5:
                queue.release(held)
                held = []
            elif operation == 6:
                for task in queue.expired(now):
                    assert queue.finish(task, "crashed", now)
                    finished.add(task.task_index)
            elif operation == 7 and which == 0:
                queue.cancel("cnn-1", now)
            elif operation == 8:
                queue.renew(held, now, LEASE_S)
            counts = queue.counts()
            assert counts.total == n and counts.done == len(finished)
            counted = queue._file.all("SELECT state, coalesce(status, ''), count(*) FROM tasks GROUP BY 1, 2")
            kept = queue._file.all("SELECT state, status, count FROM tallies WHERE count != 0")
            assert sorted(counted) == sorted(kept)
        submit(queue, n=n)  # revives what was cancelled
        for _ in range(n * (max_attempts + 1) + 1):
            now += 10_000.0  # every lease and every backoff is over
            assert all(queue.finish(task, "ok", now) for task in queue.lease("w", 100, now, LEASE_S))
            assert all(queue.finish(task, "crashed", now) for task in queue.expired(now))
        assert queue.counts().done == n and queue.pending() == 0
