"""Marks of labels that no longer hold: kept once, shown, part of snapshots, and left out where they count.

Start reading at `mark`.
"""

import contextlib
import datetime
import json
import shutil

import pytest
from warehouse_rows import ask, run_row, samples

import warehouse
from warehouse.files.snapshots import take_snapshot
from warehouse.files.writer import Mark, RunWriter, stale_now, write_marks
from warehouse.reading.pairing import diff
from warehouse.tables.schema import ENVIRONMENT

OLD = {"torch_version": "2.12", "cuda_version": "12.6", "cudnn_version": "9.1", "driver_version": "550"}
NEW = OLD | {"driver_version": "560"}
AT = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def mark(index, label="smact", **changes):
    mark_columns = {
        "run_id": f"J-{index:06d}",
        "label": label,
        "operators": ("convolution",),
        "device_name": "A100",
        "source": "measured",
        "environment": NEW | {"allocator_settings": None},
        "shift": 0.1,
        "said": "+0.100",
    }
    return Mark(**(mark_columns | changes))


def land(folder, index, environment, day, **changes):
    finished = datetime.datetime(2026, 1, day, tzinfo=datetime.UTC)
    values = {"device_name": "A100", "source": "measured", "finished_at": finished, **environment, **changes}
    RunWriter(folder).write(run_row(index, **values), samples(1))


def shown(data, snapshot=None):
    return ask(data, "SELECT * FROM stale ORDER BY ALL", snapshot=snapshot)


@pytest.fixture
def stale(folder):
    """Ask a connection that stays open which runs of a label are stale now."""
    with contextlib.closing(warehouse.connect(folder)) as connection:
        yield lambda label="smact": stale_now(connection, label)


def test_marks_are_shown_with_where_they_hold_and_by_which_cycle(folder):
    assert shown(folder) == []
    write_marks(folder, "2026-01-02", [mark(0, operators=("convolution", "batch_norm"))], marked_at=AT)
    row = (
        "J-000000",
        "smact",
        "convolution, batch_norm",
        "A100",
        "measured",
        "2.12",
        "12.6",
        "9.1",
        "560",
        None,
        0.1,
        "+0.100",
        AT.replace(tzinfo=None),
        "2026-01-02",
    )
    assert shown(folder) == [row]


def test_the_same_call_again_writes_the_same_file_and_another_replaces_it(folder):
    marks = [mark(1), mark(0), mark(0, "drama")]
    content = write_marks(folder, "c", marks, marked_at=AT).read_bytes()
    assert write_marks(folder, "c", marks[::-1], marked_at=AT).read_bytes() == content
    assert len(shown(folder)) == 3
    write_marks(folder, "c", marks[:1], marked_at=AT)
    assert [row[0] for row in shown(folder)] == ["J-000001"]


def test_a_mark_that_two_cycles_made_is_one(folder):
    write_marks(folder, "b", [mark(0), mark(1)], marked_at=AT + datetime.timedelta(days=1))
    write_marks(folder, "a", [mark(0)], marked_at=AT)
    assert [(row[0], row[-1]) for row in shown(folder)] == [("J-000000", "a"), ("J-000001", "b")]
    write_marks(folder, "c", [mark(0, environment=OLD)], marked_at=AT)  # another environment, another mark
    assert len(shown(folder)) == 3


def test_a_label_is_stale_only_while_its_device_is_in_that_environment(folder, stale):
    land(folder, 0, OLD, 1)
    land(folder, 1, NEW, 2)
    land(folder, 2, OLD, 9, device_name="H100")  # another device's environment is another matter
    write_marks(folder, "c", [mark(0)], marked_at=AT)
    assert stale() == {"J-000000"}
    assert stale("drama") == set()
    land(folder, 3, OLD | {"cudnn_version": None}, 3, status="crashed")  # it never came so far as to say
    assert stale() == {"J-000000"}
    land(folder, 4, OLD, 4)
    assert stale() == set()
    land(folder, 5, NEW, 5)
    assert stale() == {"J-000000"}


def test_a_snapshot_keeps_the_marks_of_its_day(folder):
    land(folder, 0, OLD, 1)
    write_marks(folder, "c", [mark(0)], marked_at=AT)
    before = shown(folder)
    assert take_snapshot(folder, "s").rows["stale"] == 1
    write_marks(folder, "c", [mark(0), mark(0, "drama")], marked_at=AT)
    write_marks(folder, "d", [mark(0, "smocc")], marked_at=AT)
    assert shown(folder, "s") == before and len(shown(folder)) == 3
    difference = diff(folder, "s")
    assert (difference.rows_before["stale"], difference.rows_after["stale"]) == (1, 3) and not difference.schema
    assert not difference.added and not difference.changed


def without_marks(folder):
    """As a folder, or a snapshot, is that was made before there were any."""
    shutil.rmtree(folder.stale)
    folder.warehouse.unlink(missing_ok=True)


def test_a_snapshot_from_before_is_read_and_compared(folder):
    land(folder, 0, OLD, 1)
    taken = take_snapshot(folder, "s").folder
    without_marks(taken)
    path = taken.root / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["rows"]["stale"], manifest["columns"]["stale"]
    manifest["files"] = [file for file in manifest["files"] if not file["path"].startswith("stale/")]
    path.write_text(json.dumps(manifest))
    assert shown(folder, "s") == []
    (change,) = diff(folder, "s").schema
    assert change.table == "stale" and set(ENVIRONMENT) < set(change.added)
