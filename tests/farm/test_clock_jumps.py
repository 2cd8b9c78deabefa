"""The system's clock is set while a dispatcher works: no lease ends, no good trial is called stuck, nothing waits for
days."""

import pytest
from test_dispatch import DEVICE, Clock, Quiet, ScriptedExecutor, Stop, runs, submit

from farm.dispatch.dispatcher import LEASE_S, Dispatcher
from farm.dispatch.working import reconcile
from farm.queue.jobs import MAX_BACKOFF_S

JUMPS = (400 * 24 * 3600.0, -400 * 24 * 3600.0)


class Jumping(ScriptedExecutor):
    """Each wait takes a second by the steady clock; the wall clock jumps to and fro meanwhile."""

    def __init__(self, jump_s, outcomes=None):
        super().__init__(Clock(), outcomes)
        self.wall = Clock()
        self.jump_s = jump_s
        self.turns = 0

    def wait(self, timeout_s):
        self.turns += 1
        self.wall.now += self.jump_s if self.turns % 3 else -self.jump_s / 2
        return super().wait(timeout_s)


def work(folder, queue, executor):
    return Dispatcher(folder, queue, executor, DEVICE, Quiet(), clock=executor.wall, steady=executor.clock).run(Stop())


@pytest.mark.parametrize("jump_s", JUMPS)
def test_every_task_is_handed_out_once_and_lands_as_what_it_is(folder, queue, jump_s):
    submit(queue, 8, prepare_ahead="always")
    executor = Jumping(jump_s)
    assert work(folder, queue, executor)
    assert executor.handed_out == [("mlp-00000001", index, 1) for index in range(8)]
    assert runs(folder) == [(index, 1, "ok") for index in range(8)]
    assert not executor.restarted


@pytest.mark.parametrize("jump_s", JUMPS)
def test_a_retry_waits_for_its_backoff_and_no_longer(folder, queue, jump_s):
    submit(queue, 2)
    executor = Jumping(jump_s, {0: ["lost", "lost"]})
    assert work(folder, queue, executor)
    assert runs(folder) == [(0, 3, "ok"), (1, 1, "ok")]
    assert executor.turns < 60


@pytest.mark.parametrize("jump_s", JUMPS)
def test_a_worker_that_hangs_is_found_by_the_steady_clock(folder, queue, jump_s):
    submit(queue, 1)
    executor = Jumping(jump_s, {0: ["hangs"]})
    assert work(folder, queue, executor)
    assert executor.restarted == ["w"] and executor.turns > 200
    assert runs(folder) == [(0, 2, "ok")]


def test_a_lease_that_is_held_is_never_handed_out_again(queue):
    submit(queue, 3)
    (held,) = queue.lease("a", 1, 0.0, LEASE_S)
    late = 1e9
    (next_task,) = queue.lease("b", 1, late, LEASE_S, held=[held])
    assert next_task.task_index == 1
    assert queue.expired(late, held=[held, next_task]) == []
    assert queue.renew([held], late, LEASE_S) == 1, "it is still held by the first attempt"
    assert [task.task_index for task in queue.lease("b", 3, late, LEASE_S, held=[held, next_task])] == [2]


def test_the_last_attempt_that_is_held_is_not_called_expired(queue):
    submit(queue, 1)
    now = 0.0
    for _ in range(queue.max_attempts - 1):
        (task,) = queue.lease("a", 1, now, LEASE_S)
        queue.retry(task, now, "lost")
        now += MAX_BACKOFF_S
    (task,) = queue.lease("a", 1, now, LEASE_S)
    assert queue.expired(now + 1e6, held=[task]) == []
    assert queue.expired(now + 1e6) != [], "without its holder it is"


def test_what_waits_since_before_the_clock_was_put_back_is_tried_at_once(folder, queue):
    submit(queue, 1)
    (task,) = queue.lease("a", 1, 1e9, LEASE_S)
    queue.retry(task, 1e9, "lost")
    executor = Jumping(0.0)
    assert reconcile(folder, queue) == 0
    assert work(folder, queue, executor)
    assert executor.turns < 10
    assert runs(folder) == [(0, 2, "ok")]


def test_a_wait_that_a_backoff_can_explain_is_kept(queue):
    submit(queue, 1)
    (task,) = queue.lease("a", 1, 1000.0, LEASE_S)
    queue.retry(task, 1000.0, "lost")
    assert queue.cap_waits(1000.0) == 0
    assert queue.lease("a", 1, 1001.0, LEASE_S) == []
