"""Rows for the warehouse's tests, and questions about them; start reading at `run_row`."""

from __future__ import annotations

import contextlib
import datetime

import pyarrow as pa

import warehouse

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


def flip(path) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
