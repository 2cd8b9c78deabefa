"""A disk with little space left: every command that writes says so in one line, leaves nothing half-done, and works
again when there is space. On a small tmpfs, so only where one can be mounted."""

import datetime
import os
import tempfile

import pytest
from warehouse_rows import fill

from tests.surroundings import small_disk
from warehouse.files.folder import DataFolder

DISK_KIB = 4096
LEFT_KIB = (0, 8, 40, 160)
ENDED = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A small disk that holds the data folder and the temporary files, with 12 runs."""
    with small_disk(tmp_path / "a'; echo foo", f"{DISK_KIB}k") as root:
        (root / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(root / "tmp"))
        monkeypatch.setenv("GPUFARM_DATA", str(root / "data"))
        fill(DataFolder.resolve(), range(12), 20, device_name="A100", finished_at=ENDED)
        yield root


def leave(disk, kib):
    """Fill the disk until so much is left; None empties it again."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    if kib is not None:
        status = os.statvfs(disk)
        filler.write_bytes(bytes(max(0, status.f_bavail * status.f_bsize - kib * 1024)))


def places(disk):
    """Every path but locks, and the folder of snapshots, which is one of the data folder's own."""
    return {
        path
        for path in disk.rglob("*")
        if path.parent.name != "locks" and path.name not in ("snapshots", "filler", "warehouse.duckdb")
    }


COMMANDS = {
    "publish": ["out='{disk}/set'", "licence=CC-BY-4.0", "pages=2"],
    "export": ["out='{disk}/set'", "source=simulated"],
    "snapshot": ["name=s"],
    "compact": [],
    "ingest": [
        "source=csv",
        "path='{disk}/rows.csv'",
        "family=cnn",
        "device_name=A100",
        "columns='{{peak_memory_mib: memory, batch_size: batch}}'",
    ],
}


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_without_space_says_so_and_works_again_with_space(disk, outcome, shown, name):
    (disk / "rows.csv").write_text("memory,batch\n" + "".join(f"{1000 + i},{i + 1}\n" for i in range(50)))
    arguments = [text.format(disk=str(disk).replace("'", "\\'")) for text in COMMANDS[name]]
    refused = 0
    for kib in LEFT_KIB:
        before = places(disk)
        leave(disk, kib)
        code, out, err = outcome(name, *arguments)
        leave(disk, None)
        if code == 0:
            break
        refused += 1
        assert code == 2 and len(err.splitlines()) == 1 and "No space left" in err, (kib, out, err)
        assert str(disk) in err, (kib, "which disk")
        new = places(disk) - before
        whole = {path for path in new if name == "compact" and path.name.startswith("merged-")}  # with its listing
        assert new == whole and len(whole) % 2 == 0, (kib, new)
    else:
        shown(name, *arguments)
    assert refused > 0
    assert not [path for path in disk.rglob("*") if path.name.endswith(".tmp")]
