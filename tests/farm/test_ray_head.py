"""The processes under a Ray are watched: their end is noticed, a call that would wait for it is given up."""

import contextlib
import shutil
import subprocess
import threading
from unittest import mock

import psutil
import pytest

from farm.dispatch import ray_cluster
from farm.dispatch.ray_cluster import EXIT_CLUSTER_LOST, ClusterLost, ClusterSettings, HeadWatch, OwnHead
from farm.dispatch.ray_executor import RayExecutor
from tests.surroundings import PATIENCE_S, await_
from workers.devices import DeviceChoice


def test_a_call_that_waits_for_a_dead_head_is_given_up():
    blocked, head = threading.Event(), mock.Mock(**{"lost.return_value": None})
    watch = HeadWatch(head, leave=lambda code: None)
    threading.Timer(0.2, setattr, (head.lost, "return_value", "gone")).start()
    with pytest.raises(ClusterLost, match="gone"):
        watch.call(lambda: blocked.wait(PATIENCE_S))
    blocked.set()
    with pytest.raises(ClusterLost, match="gone"):
        watch.check()
    watch.stop()


def test_a_main_thread_that_waits_inside_of_ray_is_not_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(ray_cluster, "_PATIENCE_AT_START_S", 0.05)
    left, cleaned = [], []
    head = mock.Mock(**{"lost.return_value": "Ray's gcs_server (process 7) has ended"})
    HeadWatch(head, lambda: cleaned.append(True), left.append)
    await_(lambda: left, "the way out")
    assert left == [EXIT_CLUSTER_LOST] and cleaned and capsys.readouterr().err.count("\n") == 1


def started(held, *command):
    """A process that ends with the block, at the latest."""
    process = held.enter_context(subprocess.Popen(command))
    held.callback(process.kill)
    return process


def test_our_own_rays_processes_are_known_by_their_names_among_our_children(tmp_path):
    program = shutil.copy(shutil.which("sleep"), tmp_path / "gcs_server")
    with contextlib.ExitStack() as held:
        earlier = started(held, program, "600")
        head = OwnHead()
        assert head.lost() is None
        child = started(held, program, "600")
        await_(lambda: head.lost() is None and head._markers, "the head's processes")
        earlier.kill()
        earlier.wait()
        assert head.lost() is None, "it was there before"
        child.kill()
        await_(head.lost, "the end of one of them")  # also while nobody has waited for it
        assert f"gcs_server (process {child.pid}) has ended" in head.lost()


def test_what_this_process_starts_beside_ray_outlives_it(tmp_path):
    with contextlib.ExitStack() as held:
        executor = RayExecutor(DeviceChoice(backend="simulated"), ClusterSettings(kind="ray"), {})
        executor._before = {child.pid for child in psutil.Process().children(recursive=True)}
        executor._folder = tmp_path / "session"
        rays = started(held, "sh", "-c", "sleep 600 & wait")
        executor._note_roots()
        others = started(held, "sh", "-c", "sleep 600 & wait")
        await_(psutil.Process(rays.pid).children, "a child of Ray's")
        await_(psutil.Process(others.pid).children, "a child of the other")
        own = executor._own_processes()
        (grandchild,) = psutil.Process(others.pid).children()
        held.callback(grandchild.kill)
        assert own[0].pid == rays.pid and len(own) == 2
        executor.close()
        assert rays.poll() is not None and others.poll() is None and grandchild.is_running()
