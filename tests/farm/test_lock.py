"""The dispatcher's lock in a hostile or copied data folder: no process is ended, no other file is written."""

import fcntl
import json
import os
import subprocess

import pytest

import farm.grow
import farm.work
from conf.cli.command_line import run
from conf.errors import EnvironmentProblem
from conf.files.identity import alive, identity
from farm import status
from farm.queue.leftovers import (
    SESSION_VARIABLE,
    DispatcherBusy,
    dispatcher_of,
    hold_dispatcher_lock,
    make_folder,
    record_processes,
    sweep_orphans,
)
from tests.surroundings import waiting_process
from warehouse.exchange import ingesting
from warehouse.files.compaction import compaction_lock
from warehouse.files.folder import DataFolder


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """A folder for the user's temporary folders, for this test alone."""
    path = tmp_path / "runtime"
    path.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


def record_of(runtime, dispatcher, processes):
    folder = runtime / "gpufarm-ray-1"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "owner").write_text(dispatcher)
    (folder / "processes").write_text(json.dumps(processes))
    return folder


def test_processes_that_a_hostile_lock_names_are_left_alone(folder, runtime, dead):
    with waiting_process() as innocent:
        named = [identity(innocent.pid)]
        folder.dispatcher_lock.write_text(json.dumps({"dispatcher": dead, "processes": named}))
        with hold_dispatcher_lock(folder.dispatcher_lock):
            assert innocent.poll() is None
    assert innocent.returncode == 0, "it ended by itself"


def test_what_the_users_own_record_names_is_ended_and_the_record_goes(folder, runtime, dead):
    with waiting_process() as left:
        records = record_of(runtime, dead, [identity(left.pid), "1@1@00000000.1", "junk", 7, None])
        marker = identity(left.pid)
        with hold_dispatcher_lock(folder.dispatcher_lock):
            assert not alive(marker)
    assert not records.exists()


def test_the_record_of_a_dispatcher_that_runs_is_left_alone(runtime):
    with waiting_process() as other, waiting_process() as worker:
        records = record_of(runtime, identity(other.pid), [identity(worker.pid)])
        assert worker.pid not in sweep_orphans()
        assert list(records.iterdir())


def test_a_record_in_a_folder_that_others_may_write_to_proves_nothing(runtime, dead):
    with waiting_process() as innocent:
        records = record_of(runtime, dead, [identity(innocent.pid)])
        records.chmod(0o770)
        assert innocent.pid not in sweep_orphans()


def test_a_record_behind_a_link_proves_nothing(runtime, dead, tmp_path):
    with waiting_process() as innocent:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "record").write_text(json.dumps([identity(innocent.pid)]))
        record = record_of(runtime, dead, []) / "processes"
        record.unlink()
        record.symlink_to(elsewhere / "record")
        assert innocent.pid not in sweep_orphans()


def test_a_process_that_began_before_its_dispatcher_is_not_its_own(runtime):
    with waiting_process() as innocent:
        with waiting_process() as dispatcher:
            marker = identity(dispatcher.pid)
            earlier = identity(innocent.pid)
        pid, start, where = marker.split("@")
        later = f"{pid}@{int(start) + 10_000_000}@{where}"
        record_of(runtime, later, [earlier])
        assert innocent.pid not in sweep_orphans()


@pytest.mark.parametrize("content", ["", "junk", '{"processes": 7}', "[" * 100_000, "null"])
def test_a_damaged_record_is_taken_away_without_a_word(folder, runtime, dead, content):
    record = record_of(runtime, dead, [])
    (record / "processes").write_text(content)
    with hold_dispatcher_lock(folder.dispatcher_lock):
        assert not record.exists()


def test_a_marked_process_is_ended_once_its_dispatcher_is_dead(runtime, dead):
    with waiting_process(**{SESSION_VARIABLE: dead}) as orphan:
        marker = identity(orphan.pid)
        sweep_orphans()  # or another dispatcher's sweep, which may come first
        orphan.wait(timeout=30)
        assert not alive(marker)


@pytest.mark.parametrize(
    "marker", ["", "7", "@", "{where}", "@{where}", "0@1@{where}", "x@1@{where}", "1@1@00000000.1"]
)
def test_a_marker_that_is_none_ends_nothing(runtime, dead, marker):
    where = dead.rpartition("@")[2]
    with waiting_process(**{SESSION_VARIABLE: marker.format(where=where)}) as innocent:
        assert innocent.pid not in sweep_orphans()
        assert innocent.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_a_process_of_another_user_is_left_alone(runtime, dead):
    with subprocess.Popen(["sleep", "60"], user=65534, env={SESSION_VARIABLE: dead}) as other:
        try:
            assert other.pid not in sweep_orphans()
            assert other.poll() is None
        finally:
            other.kill()


def test_the_record_of_a_living_dispatcher_stands_in_its_own_folder(runtime):
    with waiting_process() as worker:
        record = make_folder("gpufarm-ray-", runtime)
        record_processes(record, [identity(worker.pid)])
        assert worker.pid not in sweep_orphans() and record.exists()


# The locks' files

LOCKS = {
    "dispatcher": hold_dispatcher_lock,
    "compaction": lambda path: compaction_lock(DataFolder(path.parent.parent)),
    "growth": lambda path: farm.grow._cycle_lock(DataFolder(path.parent.parent)),
    "ingest": lambda path: ingesting._lock(DataFolder(path.parent.parent)),
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_that_is_a_link_is_refused_and_what_it_leads_to_is_left_as_it_was(folder, runtime, tmp_path, name):
    target = tmp_path / "precious"
    target.write_text("mine")
    path = folder.locks / f"{name}.lock"
    path.symlink_to(target)
    with pytest.raises(EnvironmentProblem, match=f"{name}.lock is a symbolic link"), LOCKS[name](path):
        pass
    assert target.read_text() == "mine"


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_a_lock_that_is_no_plain_file_is_refused_without_waiting(folder, runtime, kind):
    path = folder.dispatcher_lock
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        try:
            os.mknod(path, 0o020666, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root can make a device")
    with pytest.raises(EnvironmentProblem, match="is not a plain file"), hold_dispatcher_lock(path):
        pass


def test_a_lock_with_a_second_name_is_refused_and_the_other_file_left_as_it_was(folder, runtime, tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine")
    os.link(target, folder.dispatcher_lock)
    with pytest.raises(EnvironmentProblem, match="is a hard link"), hold_dispatcher_lock(folder.dispatcher_lock):
        pass
    assert target.read_text() == "mine"


GARBAGE = {
    "bytes that are not UTF-8": b"\xff\xfe\x00\x80" * 50,
    "a list": b"[1, 2]",
    "a number": b"7",
    "deep": b"[" * 50_000,
    "another shape": b'{"dispatcher": {"a": 1}, "processes": 3}',
    "no process": b'{"dispatcher": "x@y@z"}',
    "a number of 9,000 digits": b'{"dispatcher": "' + b"9" * 9000 + b'@1@00000000.1"}',
    "half a line": b'{"dispatcher": "12',
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_garbage_lock_names_nobody_and_can_be_taken(folder, runtime, capsys, content):
    folder.dispatcher_lock.write_bytes(content)
    assert dispatcher_of(folder.dispatcher_lock) is None
    assert run("status", status.entry, [f'data="{folder.root}"']) == 0
    with hold_dispatcher_lock(folder.dispatcher_lock):
        assert dispatcher_of(folder.dispatcher_lock) == os.getpid()


def test_a_garbage_lock_that_is_held_still_says_that_somebody_works_here(folder, runtime):
    with hold_dispatcher_lock(folder.dispatcher_lock):
        folder.dispatcher_lock.write_bytes(b"\xff" * 20)
        with pytest.raises(DispatcherBusy, match="its process is not known"):
            hold_dispatcher_lock(folder.dispatcher_lock).__enter__()


def test_the_lock_is_given_back_although_sweeping_fails(folder, runtime, monkeypatch):
    def fails():
        raise OSError("for the test")

    with pytest.raises(OSError, match="for the test"), hold_dispatcher_lock(folder.dispatcher_lock):
        monkeypatch.setattr("farm.queue.leftovers.sweep_leftovers", fails)
    monkeypatch.undo()
    with hold_dispatcher_lock(folder.dispatcher_lock):
        pass


def test_a_dispatcher_of_another_machine_counts_while_the_lock_is_held(folder, runtime):
    folder.dispatcher_lock.write_text(json.dumps({"dispatcher": "7@1@00000000.1"}))
    assert dispatcher_of(folder.dispatcher_lock) is None
    with open(folder.dispatcher_lock, "rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert dispatcher_of(folder.dispatcher_lock) == 7
    assert dispatcher_of(folder.dispatcher_lock) is None
