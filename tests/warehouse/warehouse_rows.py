"""Rows for the warehouse's tests, and questions about them; start reading at `run_row`."""

from __future__ import annotations

import contextlib
import csv
import datetime
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

import warehouse
from warehouse.exchange.ingesting import IngestSettings, ingest
from warehouse.files import plain_file
from warehouse.files.compaction import CompactionSettings, compact
from warehouse.files.writer import RunWriter
from warehouse.reading.checks import check
from warehouse.tables.duckdb_access import existing_database

NOW_S = 4_000_000_000.0  # after the files were written, by whatever clock
HOUR_S = 3600.0
EAGER = CompactionSettings(min_files=2)
GPUMEMNET_HEADER = (
    "Filename",
    "Depth",
    "Total Parameters",
    "Batch Size",
    "Max GPU Memory (MiB)",
    "Avg GPUTL",
    "Avg SMACT",
    "Avg SMOCC",
    "Avg DRAMA",
    "Status",
)  # of a file of its MLPs
TRANSFORMER = (
    "num_classes:5_embedding_size:64_num_layers:2_num_heads:4_ff_hidden_size:90_dropout_rate:0.5_seq_length:16_"
    "input_size:1000_num_samples:77_batch_size:8.out"
)
TIMM_HEADER = ("model", "module", "batch_size", "max_gpu_memory_mib", "faketensor_peak_mib")


def mlp_name(batch: int = 32, switch: str = "True") -> str:
    """The file name of one of GPUMemNet's MLPs; `switch`: whether it has dropout."""
    return (
        f"input:20_output:4_depth:2_arch:bottleneck_batch:{batch}_act:leaky_relu_dropout:0.25_dropout:{switch}_"
        "batchnorm:True.out"
    )


def cnn_name(arch: str = "reverse_pyramid", depth: int = 3, side: int = 32) -> str:
    """The file name of one of GPUMemNet's CNNs."""
    return (
        f"input_channels:3_num_classes:7_depth:{depth}_arch:{arch}_base_filters:16_batch:4_input_size:{side}_act:swish_"
        "dropout:1e-1_dropout:False_batchnorm:False.out"
    )


def run_row(index: int, **changes) -> dict:
    """A run of job J as the dispatcher lands it, on its first attempt."""
    return {
        "run_id": f"J-{index:06d}",
        "job_id": "J",
        "task_index": index,
        "attempt": 1,
        "family": "cnn",
        "config": '{"family":"cnn"}',
        "status": "ok",
        "source": "simulated",
        "peak_memory_mib": float(index),
        "started_at": datetime.datetime(2025, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        **changes,
    }


def kernels(rows: int = 2, **columns) -> pa.Table:
    """`rows` kernels, as a worker reports them."""
    return pa.table(
        {
            "operator": [f"aten::mm{index}" for index in range(rows)],
            "duration_us": [10.0 + index for index in range(rows)],
            "count": [2] * rows,
            "timing": ["cupti"] * rows,
            **columns,
        }
    )


def ranks(rows: int = 2, **columns) -> pa.Table:
    """`rows` ranks of a run, as a worker reports them."""
    return pa.table(
        {
            "rank": list(range(rows)),
            "status": ["ok"] * rows,
            "peak_memory_mib": [100.0 + index for index in range(rows)],
            **columns,
        }
    )


def collocations(rows: int = 1, **columns) -> pa.Table:
    """A run's row as a member of a group of two."""
    return pa.table(
        {
            "group_id": ["G"] * rows,
            "member": list(range(rows)),
            "group_size": [2] * rows,
            "sharing": ["time_slicing"] * rows,
            "status": ["ok"] * rows,
            **columns,
        }
    )


def samples(rows: int = 3, **columns) -> pa.Table:
    """`rows` telemetry samples."""
    return pa.table({"t_ms": [100.0 * i for i in range(rows)], "smact": [0.5] * rows, **columns})


def ask(data, sql: str, **how) -> list[tuple]:
    """Rows of a query on a data folder. how: as `warehouse.connect` takes it."""
    with contextlib.closing(warehouse.connect(data, **how)) as connection:
        return connection.execute(sql).fetchall()


def ask_plainly(folder, sql: str) -> list[tuple]:
    """Rows of a query, as any client of DuckDB reads them from the folder's file of views."""
    with existing_database(folder.warehouse) as connection:
        connection.execute("SET enable_external_file_cache = false")  # as in a process that starts now
        return connection.execute(sql).fetchall()


def findings_of(folder, **how):
    """The checks' findings in a folder's rows. how: as `warehouse.connect` takes it."""
    with contextlib.closing(warehouse.connect(folder, **how)) as connection:
        return check(connection)


def flip(path) -> None:
    """Change one bit of a file, in a file of its own: others may be linked to it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.unlink()
    path.write_bytes(content)


def fill(folder, indices, rows: int = 3, has_details: bool = False, **changes) -> RunWriter:
    """Land runs with `rows` samples each, and with rows in every table if `has_details`."""
    writer = RunWriter(folder)
    for index in indices:
        details = (kernels(), ranks(), collocations()) if has_details else ()
        writer.write(run_row(index, **changes), samples(rows), *details)
    return writer


def copy_into(folder, source):
    """Copy all of the data folder `source` into a new one, but for the file of views, which names the folder's path.

    Return the new one."""
    shutil.copytree(source.root, folder.root, ignore=shutil.ignore_patterns(source.warehouse.name), dirs_exist_ok=True)
    return folder


def compact_at(folder, *hours: float, settings: CompactionSettings = EAGER):
    """Compact so many hours after the files were written, each time; two hours later, what was replaced may go.

    Return the last report.
    """
    return [compact(folder, now_s=NOW_S + after * HOUR_S, settings=settings) for after in hours][-1]


@contextlib.contextmanager
def unreadable(monkeypatch, is_chosen: Callable[[Path], bool], code: int = errno.EIO) -> Iterator[None]:
    """Fail each opening of a chosen file within, with this `errno`."""

    def fail(opened, really_open=plain_file.open_plain):
        if is_chosen(opened):
            raise OSError(code, os.strerror(code), str(opened))
        return really_open(opened)

    with monkeypatch.context() as refusing:
        refusing.setattr(plain_file, "open_plain", fail)
        yield


def only_merged(folder, kind: str = "runs"):
    """The path of the one merged file of a kind."""
    (path,) = folder.partition(kind, "cnn").glob("merged-*.parquet")
    return path


def failing(code: int) -> Callable:
    """A function that fails with this `errno` whenever it is called."""

    def fail(*_arguments, **_options):
        raise OSError(code, os.strerror(code))

    return fail


def take_no_files(monkeypatch) -> None:
    """Fail each writing of the file of views, as on a disk that may only be read."""
    monkeypatch.setattr("warehouse.files.views.write_file", failing(errno.EROFS))


KILL_CHILDREN = """
import json, os, signal, sys
def dying(call):
    def wrapped(*arguments, **keywords):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **keywords)
    return wrapped
for line in sys.stdin:
    names, left, arguments = json.loads(line)
    if (child := os.fork()) == 0:
        for name in names:
            setattr(os, name, dying(getattr(os, name)))
        act(*arguments)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextlib.contextmanager
def killed_children(source: str) -> Iterator[Callable]:
    """A process that forks those that are killed, as importing what they call takes longer than all else.

    Yields `kill(names, step, *arguments)`: a child calls `act`, which `source` defines, with these arguments, and kills
    itself before its `step`-th call of one of the functions of `os` with these names.
    """
    command = [sys.executable, "-c", source + KILL_CHILDREN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def kill(names, step, *arguments):
            print(json.dumps([names, step, arguments]), file=process.stdin, flush=True)
            assert int(process.stdout.readline()) == -signal.SIGKILL

        yield kill
        process.stdin.close()


class Steps:
    """Calls `act` after every `os.replace` and `os.unlink`: each change that another process can see."""

    def __init__(self, monkeypatch, act):
        self.count = 0
        for name in ("replace", "unlink"):
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name), act))

    def _wrapped(self, call, act):
        def wrapped(*arguments, **keywords):
            result = call(*arguments, **keywords)
            self.count += 1
            act()
            return result

        return wrapped


def take_in(data, source: str, path, **settings):
    """Ingest a file, or a folder of files, into a data folder; return the report."""
    return ingest(IngestSettings(source=source, path=str(path), data=str(data), **settings))


def csv_file(path, *lines: dict):
    """Write a CSV file of these rows, and return its path."""
    return csv_table(path, lines[0], [line.values() for line in lines])


def csv_table(path, header, rows):
    """Write a CSV file of a header and rows, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path
