"""Commands that only look, on folders that cannot be written to; and a disk without room."""

import json
import os
import shutil
import subprocess

import pytest
from test_dispatch import submit, work

from farm.nights.journal import Journal
from farm.queue.jobs import Queue
from farm.queue.queue_file import QueueError
from tests.surroundings import run_command, small_disk
from warehouse.files.folder import DataFolder


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "a'; echo foo", "32m") as path:
        yield path


def made(root):
    """A data folder with a job."""
    folder = DataFolder.resolve(root).create()
    with Queue.open(folder.queue) as queue:
        submit(queue, 5)
        (task,) = queue.lease("w", 1, 0.0, 60.0)
        queue.finish(task, "ok", 1.0)
    return folder


def read_only(path):
    subprocess.run(["mount", "-o", "remount,ro", path], check=True)


def files_of(root):
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


def test_status_answers_on_a_read_only_disk_with_the_last_changes(disk, capfd):
    folder, copy = (DataFolder.resolve(disk / name).create() for name in ("data", "copy"))
    with Queue.open(folder.queue) as queue:
        submit(queue, 6)
        work(folder, queue)
        submit(queue, 10)
        for suffix in ("", "-wal"):  # as after a kill: the log of changes is there, the shared memory is not
            shutil.copyfile(f"{folder.queue}{suffix}", f"{copy.queue}{suffix}")
    shutil.copytree(folder.runs, copy.runs, dirs_exist_ok=True)
    read_only(disk)
    before = files_of(disk)
    assert run_command("status", f'data="{copy.root}"', "format=json") == 0
    out, err = capfd.readouterr()
    report = json.loads(out)
    (job,) = report["jobs"]
    assert (job["queued"], job["done"], report["runs_gone"], report["runs_unknown"]) == (4, 6, {}, {})
    assert err.count("\n") == 1 and "reading a copy of the queue" in err and files_of(disk) == before


def test_a_dry_run_of_growth_answers_on_a_read_only_disk(disk, capfd):
    folder = made(disk / "data")
    read_only(disk)
    arguments = ["dry_run=true", "n=1", "families=[mlp]", "pool=20", "policy=uniform", "device=simulated"]
    assert run_command("grow", f'data="{folder.root}"', *arguments) == 0
    out, err = capfd.readouterr()
    assert "nothing was run or written" in out and "reading a copy of the queue" in err


def fill(disk, left):
    """Leave `left` bytes on the disk."""
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - left))


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 40 << 10])
def test_growth_without_room_says_so_in_a_line_and_goes_on_when_there_is_room(disk, capfd, left):
    folder = DataFolder.resolve(disk / "data").create()
    journal = Journal(folder)
    journal.begin({}, "0badcafe")
    journal.end("".join(cycle.name for cycle in journal.cycles()), "done", "for the test")
    night = [
        "grow",
        f'data="{folder.root}"',
        "n=1",
        "families=[mlp]",
        "policy=uniform",
        "device=simulated",
        "device.count=1",
        "cluster=inline",
        "canaries=skip",
        "learn.targets=[]",
        "window=fixed",
        "window.seconds=0.1",
    ]
    fill(disk, left)
    code = run_command(*night)
    err = capfd.readouterr().err
    assert code == 2, err
    assert "Traceback" not in err and "No space left on device" in err.strip().splitlines()[-1]
    assert journal.cycles()[0].outcome == "done", "what was written before is still there"
    os.unlink(disk / "filler")
    assert run_command(*night) == 0, capfd.readouterr().err
    assert [cycle.outcome for cycle in journal.cycles()] in (["done"] * 2, ["done", "failed", "done"])


def test_a_full_disk_is_called_full_whatever_sqlite_says(disk):
    folder = made(disk / "data")
    fill(disk, 0)
    with pytest.raises(QueueError, match="No space left on device"), Queue.open(folder.queue) as queue:
        submit(queue, 2000, "mlp-00000002")
