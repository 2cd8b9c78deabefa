"""The processes under a Ray are watched: their end is noticed, a call that would wait for it is given up."""

import contextlib
import shutil
import socket
import subprocess
import threading

import psutil
import pytest

from farm.dispatch import ray_cluster
from farm.dispatch.ray_cluster import EXIT_CLUSTER_LOST, ClusterLost, ClusterSettings, HeadWatch, JoinedHead, OwnHead
from farm.dispatch.ray_executor import RayExecutor
from tests.surroundings import PATIENCE_S, await_
from workers.devices import DeviceChoice


class Scripted:
    """A head that runs until `reason` is given."""

    reason = None

    def lost(self):
        return self.reason


@pytest.fixture
def watch():
    watch = HeadWatch(Scripted(), leave=lambda code: None)
    yield watch
    watch.stop()


def test_a_head_that_ended_while_the_thread_could_not_look_is_lost(watch):
    watch.stop()
    watch._thread.join()
    watch.check_now()
    watch._head.reason = "the GCS has ended"
    with pytest.raises(ClusterLost, match="the GCS has ended"):
        watch.check_now()


def test_nothing_is_said_while_the_head_runs(watch):
    watch.check()
    assert watch.call(lambda: 7) == 7
    with pytest.raises(KeyError):  # an error of a call is its caller's
        watch.call(lambda: {}["x"])


def test_the_loss_is_told_with_its_reason(watch):
    watch._head.reason = "Ray's raylet (process 7) has ended"
    await_(lambda: watch.reason, "the end of the head")
    with pytest.raises(ClusterLost, match="raylet"):
        watch.check()


def test_a_call_that_waits_for_a_dead_head_is_given_up(watch):
    blocked = threading.Event()
    threading.Timer(0.2, setattr, (watch._head, "reason", "gone")).start()
    with pytest.raises(ClusterLost, match="gone"):
        watch.call(lambda: blocked.wait(PATIENCE_S))
    blocked.set()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(ray_cluster, "_PATIENCE_AT_START_S", 0.05)


def test_a_main_thread_that_waits_inside_of_ray_is_not_waited_for(impatient, capsys):
    left, cleaned = [], []
    head = Scripted()
    head.reason = "Ray's gcs_server (process 7) has ended"
    HeadWatch(head, lambda: cleaned.append(True), left.append)
    await_(lambda: left, "the way out")
    assert left == [EXIT_CLUSTER_LOST] and cleaned
    assert capsys.readouterr().err.count("\n") == 1


def test_a_head_that_ends_when_it_shall_ends_nothing(impatient):
    left = []
    head = Scripted()
    watch = HeadWatch(head, leave=left.append)
    watch.stop()
    watch._thread.join()
    head.reason = "gone"
    assert watch.reason is None and not left


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_our_own_rays_processes_are_known_by_their_names_among_our_children(tmp_path, name):
    program = shutil.copy(shutil.which("sleep"), tmp_path / name)
    with contextlib.ExitStack() as held:
        earlier = held.enter_context(subprocess.Popen([program, "600"]))
        held.callback(earlier.kill)
        head = OwnHead()
        assert head.lost() is None
        child = held.enter_context(subprocess.Popen([program, "600"]))
        held.callback(child.kill)
        await_(lambda: head.lost() is None and head._markers, "the head's processes")
        earlier.kill()
        earlier.wait()
        assert head.lost() is None, "it was there before"
        child.kill()
        await_(head.lost, "the end of one of them")  # also while nobody has waited for it
        assert f"{name} (process {child.pid}) has ended" in head.lost()


def test_a_joined_cluster_that_refuses_connections_is_lost_after_seconds():
    now = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        head = JoinedHead(host, port, clock=lambda: now[0])
        now[0] = 100.0
        assert head.lost() is None
    assert head.lost() is None, "it may be starting again"
    now[0] += ray_cluster._REFUSED_FOR_S
    assert f"{host}:{port} no longer answers" in head.lost()


def test_a_joined_cluster_is_asked_every_other_second(monkeypatch):
    now, asked = [0.0], []

    class Connection:
        def close(self):
            pass

    monkeypatch.setattr("socket.create_connection", lambda *_, **__: asked.append(now[0]) or Connection())
    head = JoinedHead("127.0.0.1", 1, clock=lambda: now[0])
    for tenth in range(60):
        now[0] = tenth / 10
        assert head.lost() is None
    assert asked == [0.0, 2.0, 4.0]


def test_what_this_process_starts_beside_ray_outlives_it(tmp_path):
    with contextlib.ExitStack() as held:

        def start():
            process = held.enter_context(subprocess.Popen(["sh", "-c", "sleep 600 & wait"]))
            held.callback(process.kill)
            return process

        executor = RayExecutor(DeviceChoice(backend="simulated"), ClusterSettings(kind="ray"), {})
        executor._before = {child.pid for child in psutil.Process().children(recursive=True)}
        executor._folder = tmp_path / "session"
        rays = start()
        executor._note_roots()
        others = start()
        await_(psutil.Process(rays.pid).children, "a child of Ray's")
        await_(psutil.Process(others.pid).children, "a child of the other")
        own = executor._own_processes()
        (grandchild,) = psutil.Process(others.pid).children()
        held.callback(grandchild.kill)
        assert own[0].pid == rays.pid and len(own) == 2
        executor.close()
        assert rays.poll() is not None and others.poll() is None and grandchild.is_running()
