"""The dispatcher's lock in a hostile or copied data folder: no process is ended, no other file is written. Folders that
dead processes leave are deleted."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.errors import EnvironmentProblem
from conf.files.identity import alive, identity
from conf.files.own_folders import OWNER_FILE, make_folder
from farm.queue.leftovers import SESSION_VARIABLE, dispatcher_of, hold_dispatcher_lock, sweep_folders, sweep_orphans
from tests.surroundings import run_command, waiting_process


@pytest.fixture
def runtime(tmp_path_factory, monkeypatch):
    """A folder for the user's temporary folders, for this test alone."""
    path = tmp_path_factory.mktemp("runtime")
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


def test_processes_that_a_hostile_lock_names_are_left_alone(folder, runtime, dead):
    with waiting_process() as innocent:
        named = [identity(innocent.pid)]
        folder.dispatcher_lock.write_text(json.dumps({"dispatcher": dead, "processes": named}))
        with hold_dispatcher_lock(folder.dispatcher_lock):
            assert innocent.poll() is None
    assert innocent.returncode == 0, "it ended by itself"


@pytest.fixture
def orphan(dead):
    """Start a process that a dead dispatcher has left; return its identity."""
    with contextlib.ExitStack() as stack:
        yield lambda: identity(stack.enter_context(waiting_process(**{SESSION_VARIABLE: dead})).pid)


def test_what_a_dead_dispatcher_left_goes_where_the_lock_is_taken_and_where_it_is_given_back(
    folder, runtime, dead, orphan
):
    first, its_folder = orphan(), folder_of(runtime, dead)
    with hold_dispatcher_lock(folder.dispatcher_lock):
        assert not alive(first) and not its_folder.exists()
        second, its_folder = orphan(), folder_of(runtime, dead)
    assert not alive(second) and not its_folder.exists()


def test_a_marked_process_of_a_dispatcher_that_runs_is_left_alone(runtime):
    with waiting_process(**{SESSION_VARIABLE: identity(os.getpid())}) as worker:
        assert worker.pid not in sweep_orphans() and worker.poll() is None


def test_a_process_that_began_before_its_dispatcher_is_not_its_own(runtime, dead):
    pid, start, where = dead.split("@")
    later = f"{pid}@{int(start) + 10_000_000}@{where}"
    with waiting_process(**{SESSION_VARIABLE: later}) as innocent:
        assert innocent.pid not in sweep_orphans() and innocent.poll() is None


@pytest.mark.parametrize("marker", ["", "@{where}", "x@1@{where}", "1@1@00000000.1"])
def test_a_marker_that_is_none_ends_nothing(runtime, dead, marker):
    where = dead.rpartition("@")[2]
    with waiting_process(**{SESSION_VARIABLE: marker.format(where=where)}) as innocent:
        assert innocent.pid not in sweep_orphans() and innocent.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_a_process_of_another_user_is_left_alone(runtime, dead):
    with subprocess.Popen(["sleep", "60"], user=65534, env={SESSION_VARIABLE: dead}) as other:
        swept = sweep_orphans()
        ended = other.poll()
        other.kill()
    assert other.pid not in swept and ended is None


# The locks' files


def make_device(path):
    try:
        os.mknod(path, 0o020666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root can make a device")


NO_LOCKS = {
    "link": (lambda path: path.symlink_to("precious"), "is not a plain file"),
    "fifo": (os.mkfifo, "is not a plain file"),
    "folder": (os.mkdir, "is not a plain file"),
    "device": (make_device, "is not a plain file"),
    "hard link": (lambda path: os.link(path.parent / "precious", path), "is a hard link"),
}


@pytest.mark.parametrize(("make", "words"), NO_LOCKS.values(), ids=NO_LOCKS)
def test_a_lock_that_is_no_plain_file_of_its_own_is_refused_without_waiting(folder, runtime, make, words):
    path, precious = folder.dispatcher_lock, folder.locks / "precious"
    precious.write_text("mine")
    make(path)
    with pytest.raises(EnvironmentProblem, match=words), hold_dispatcher_lock(path):
        pass
    assert precious.read_text() == "mine", "what it leads to is left as it was"


GARBAGE = {
    "bytes that are not UTF-8": b"\xff\xfe\x00\x80" * 50,
    "deep": b"[" * 50_000,
    "another shape": b'{"dispatcher": {"a": 1}, "processes": 3}',
    "a number of 9,000 digits": b'{"dispatcher": "' + b"9" * 9000 + b'@1@00000000.1"}',
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_garbage_lock_names_nobody_and_can_be_taken(folder, runtime, content):
    folder.dispatcher_lock.write_bytes(content)
    assert dispatcher_of(folder.dispatcher_lock) is None
    assert run_command("status", f'data="{folder.root}"') == 0
    with hold_dispatcher_lock(folder.dispatcher_lock):
        assert dispatcher_of(folder.dispatcher_lock) == os.getpid()


# Temporary folders of dead processes go; those of the living, of others, and what links lead to stay

DAY_S = 86_400.0
LATER = 4e9  # seconds since the epoch: long after any folder of this test was made


def folder_of(place, owner, name="gpufarm-trial-1"):
    path = place / name
    path.mkdir(mode=0o700)
    (path / "server.log").write_text("x")
    if owner is not None:
        (path / OWNER_FILE).write_text(owner)
    return path


def test_folders_of_living_processes_and_other_folders_and_files_stay_whatever_their_age(place, dead):
    folder_of(place, dead, "gpufarm-data")
    folder_of(place, dead, "mine")
    (place / "gpufarm-trial-file").write_text("x")
    pid, start, where = dead.split("@")
    folder_of(place, f"{pid}@{start}@{where.partition('.')[0]}.1", "gpufarm-trial-namespace")
    path = make_folder("gpufarm-ray-", place)
    assert sweep_folders([place], now=LATER) == []
    assert path.exists() and path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("owner", [None, "", "junk", "1@1@00000000.1"])
def test_a_folder_without_an_owner_or_of_an_earlier_boot_stays_for_a_day(place, owner):
    path = folder_of(place, owner)
    made = path.stat().st_mtime
    assert [sweep_folders([place], now=made + DAY_S + seconds) for seconds in (-60, 60)] == [[], [path]]


def test_a_folder_that_a_process_still_writes_into_goes_with_the_next_sweep(place, dead, monkeypatch):
    path = folder_of(place, dead, "gpufarm-ray-1")
    (path / "session").mkdir()
    rmdir = os.rmdir

    def late(folder):
        (Path(folder) / "agent.log").write_text("ending")
        rmdir(folder)

    with monkeypatch.context() as patch:
        patch.setattr("os.rmdir", late)
        assert sweep_folders([place], now=0.0) == []
    assert sweep_folders([place], now=0.0) == [path] and not path.exists()


def test_a_folder_that_nests_more_deeply_than_python_recurses_and_paths_reach_goes_like_others(
    place, dead, monkeypatch
):
    path = folder_of(place, dead, "gpufarm-child-1")
    monkeypatch.chdir(path)
    for _ in range(sys.getrecursionlimit() + 200):
        os.mkdir(9 * "a")  # in all, some 12,000 bytes; the kernel takes paths of 4096
        os.chdir(9 * "a")
    assert sweep_folders([place], now=0.0) == [path] and not path.exists()


def test_no_link_is_followed(place, dead, tmp_path_factory):
    precious = tmp_path_factory.mktemp("precious")
    (precious / "file").write_text("mine")
    (precious / OWNER_FILE).write_text(dead)
    path = folder_of(place, dead)
    (place / "gpufarm-trial-link").symlink_to(precious)
    (path / "link").symlink_to(precious)
    (path / "file-link").symlink_to(precious / "file")
    assert sweep_folders([place], now=LATER) == [path]
    assert (precious / "file").read_text() == "mine" and (place / "gpufarm-trial-link").is_symlink()
