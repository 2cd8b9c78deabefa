"""Readers beside compaction, at no grace and forced; GPUFARM_READER_LOOP_S=600 loops for ten minutes."""

import contextlib
import os
import subprocess
import sys

import pytest

import warehouse
from tests.warehouse.warehouse_rows import collocations, kernels, ranks, run_row, samples
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter

SECONDS = float(os.environ.get("GPUFARM_READER_LOOP_S", "15"))
LOOP = """
import sys, time
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from tests.warehouse.warehouse_rows import collocations, kernels, ranks, run_row, samples
folder, seconds = DataFolder.resolve(sys.argv[1]), float(sys.argv[2])
writer, index, until_s = RunWriter(folder), 100, time.monotonic() + seconds
now_s = time.time()
while time.monotonic() < until_s:
    for _ in range(5):
        writer.write(run_row(index), samples(2), kernels(), ranks(), collocations())
        index += 1
    now_s += 1e6
    compact(folder, now_s=now_s, settings=CompactionSettings(grace_s=0, force_after_s=0, min_files=2))
print(index)
"""


def read_beside_compaction(folder, seconds):
    """Readers of every kind while runs land and are merged, and what was merged is deleted at once; queries made."""
    writer = RunWriter(folder)
    for index in range(100):
        writer.write(run_row(index), samples(2), kernels(), ranks(), collocations())
    program = [sys.executable, "-c", LOOP, str(folder.root), str(seconds)]
    busy = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    queries, least = 0, 100
    checked = "SELECT count(*), count(DISTINCT run_id), count(DISTINCT task_index), max(task_index) + 1 FROM runs"
    try:
        with contextlib.closing(warehouse.connect(folder)) as connection:
            while busy.poll() is None:
                relation = connection.sql("SELECT run_id FROM runs")
                answers = [
                    connection.execute(checked).fetchall()[0],
                    connection.sql(checked).fetchall()[0],
                    connection.cursor().execute(checked).fetchall()[0],
                ]
                for rows, ids, indices, most in answers:
                    assert rows == ids == indices == most >= least, answers
                    least = rows
                samples_of = connection.sql("SELECT count(*), count(DISTINCT run_id) FROM telemetry").fetchall()[0]
                assert samples_of[0] == 2 * samples_of[1] >= 2 * least
                for ids in (
                    [run_id for (run_id,) in relation.fetchall()],
                    relation.to_arrow_table().column(0).to_pylist(),
                    [run_id for batch in relation.to_arrow_reader(7) for run_id in batch.column(0).to_pylist()],
                    [row[0] for row in iter(connection.execute("SELECT run_id FROM runs").fetchone, None)],
                ):
                    assert len(ids) == len(set(ids)) >= least
                queries += 8
    finally:
        busy.kill()
        busy.wait()
    assert busy.returncode in (0, -9)
    return queries


@pytest.mark.slow
@pytest.mark.parametrize("kept_open", [256, 2])
def test_no_reader_sees_an_error_a_double_or_a_missing_run(tmp_path, monkeypatch, kept_open):
    monkeypatch.setattr("warehouse.files.folder_files._PINNED", kept_open)
    folder = DataFolder.resolve(tmp_path / "a'; echo foo [b]*?" / "data").create()
    queries = read_beside_compaction(folder, SECONDS)
    assert queries > 0
