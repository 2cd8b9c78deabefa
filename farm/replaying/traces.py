"""Traces of a cluster: which jobs arrive when, how long each runs alone, on how many GPUs. Readers of public formats.

Start reading at `read_trace`; `generators` makes traces where there is no file.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conf.errors import UsageError, shown
from conf.plain_text import printable
from farm.replaying.catalogue import JobType, load_catalogue

_EPOCHS = re.compile(r"_(\d{1,6})e_(\d+)$")
_TASK_COLUMNS = (
    "job_name",
    "task_name",
    "inst_num",
    "status",
    "start_time",
    "end_time",
    "plan_cpu",
    "plan_mem",
    "plan_gpu",
    "gpu_type",
)
_TIME = "%Y-%m-%d %H:%M:%S"
_LARGEST = 1e12  # of a figure: seconds, or GPUs


@dataclass(frozen=True, kw_only=True)
class ClusterTrace:
    """Jobs in the order of their arrival; all sequences have one entry a job.

    types       what `kinds` index
    arrivals_s  from the first arrival on, ascending; durations_s: of the job alone on its GPUs, above 0
    left_out    jobs of the source that ran on no GPU or for no time
    """

    name: str
    types: tuple[JobType, ...]
    arrivals_s: Sequence[float]
    kinds: Sequence[int]
    durations_s: Sequence[float]
    gpus: Sequence[int]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.kinds)


def read_trace(path: str, n: int | None, seed: int) -> ClusterTrace:
    """Read a trace: Philly's `cluster_job_log` (JSON), Alibaba's `pai_task_table.csv`, CARMA's submission script (.sh).

    Philly's and Alibaba's files say nothing of memory and utilization, so each job gets a job type of the catalogue,
    drawn by the seed among those of one GPU.

    Args:
        path: the file.
        n: the first so many jobs; None: all.
        seed: draws the job types.

    Raises:
        UsageError: for a file that cannot be read, of another format, or without a job.
    """
    source = Path(path)
    reader = _READERS.get(source.suffix.lower())
    if reader is None:
        raise UsageError(f"trace={shown(path)} is neither a generator nor a file ending in {', '.join(_READERS)}")
    try:
        rows, left_out = reader(source)
    except OSError as error:
        raise UsageError(f"trace={shown(path)} cannot be read: {error.strerror or error}") from error
    except UsageError:
        raise
    except RecursionError as error:
        raise UsageError(f"trace={shown(path)} is not a trace: it is nested too deeply") from error
    except (ValueError, csv.Error) as error:
        raise UsageError(f"trace={shown(path)} is not a trace: {error}") from error
    if not rows:
        raise UsageError(f"trace={shown(path)} has no job that ran on a GPU")
    rows = sorted(rows, key=lambda row: row[0])[:n]
    return _trace(printable(source.name), rows, left_out, seed)


# arrival in s, duration in s, GPUs, index of the type or None
_TraceRow = tuple[float, float, int, int | None]


def _trace(name: str, rows: Sequence[_TraceRow], left_out: int, seed: int) -> ClusterTrace:
    types = load_catalogue()
    drawn, first = random.Random(seed), rows[0][0]
    singles = [index for index, job in enumerate(types) if job.gpus == 1]
    kinds = [drawn.choice(singles) if kind is None else kind for *_, kind in rows]
    return ClusterTrace(
        name=name,
        types=types,
        arrivals_s=[row[0] - first for row in rows],
        kinds=kinds,
        durations_s=[row[1] for row in rows],
        gpus=[row[2] for row in rows],
        left_out=left_out,
    )


def _read_carma(path: Path) -> tuple[list[_TraceRow], int]:
    """Read lines of `sleep SECONDS` and of submissions that name a task's .rad file."""
    types = {job.rad: index for index, job in enumerate(load_catalogue())}
    rows: list[_TraceRow] = []
    now = 0.0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if len(words) == 2 and words[0] == "sleep" and (pause_s := _positive(words[1])) is not None:
            now += pause_s
        elif words[-2:-1] == ["--task"] and words[-1].endswith(".rad"):
            task = words[-1].removesuffix(".rad").rpartition("/")[2]
            rad = _EPOCHS.sub(r"_20e_\2", task)
            if rad not in types:
                raise UsageError(f"{path.name}, line {number}: unknown task {shown(task)}.rad")
            job = load_catalogue()[types[rad]]
            epochs = int(named[1]) if (named := _EPOCHS.search(task)) else job.epochs[0]
            rows.append((now, 60.0 * job.minutes * epochs, job.gpus, types[rad]))
    return rows, 0


def _read_philly(path: Path) -> tuple[list[_TraceRow], int]:
    """Read a list of jobs with `submitted_time` and `attempts`; the last attempt with both times is the job."""
    jobs = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise UsageError(f"{path.name} is no list of jobs, as Philly's cluster_job_log is")
    rows = [row for job in jobs if (row := _philly_row(job)) is not None]
    return rows, len(jobs) - len(rows)


def _philly_row(job: dict[str, Any]) -> _TraceRow | None:
    submitted = _philly_time(job.get("submitted_time"))
    for attempt in reversed(_mappings(job.get("attempts"))):
        began, ended = _philly_time(attempt.get("start_time")), _philly_time(attempt.get("end_time"))
        nodes = [node.get("gpus") for node in _mappings(attempt.get("detail"))]
        gpus = sum(len(of_node) for of_node in nodes if isinstance(of_node, list))
        if submitted is not None and began is not None and ended is not None and ended > began and gpus:
            return submitted, ended - began, gpus, None
    return None


def _mappings(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _philly_time(text: object) -> float | None:
    try:
        return datetime.strptime(text, _TIME).replace(tzinfo=UTC).timestamp() if isinstance(text, str) else None
    except ValueError:  # "None" stands where a time was not logged
        return None


def _read_alibaba(path: Path) -> tuple[list[_TraceRow], int]:
    """Read the task table, with or without its header: a job arrives with its first task and ends with its last."""
    jobs: dict[str, list[float]] = {}
    left_out = 0
    with path.open(newline="", encoding="utf-8") as file:
        for number, cells in enumerate(csv.reader(file), 1):
            if len(cells) != len(_TASK_COLUMNS):
                raise UsageError(f"{path.name}, line {number}: {len(cells)} columns, {len(_TASK_COLUMNS)} are wanted")
            if cells[0] == _TASK_COLUMNS[0]:
                continue
            row = dict(zip(_TASK_COLUMNS, cells, strict=True))
            figures = [_positive(row[name]) for name in ("start_time", "end_time", "inst_num", "plan_gpu")]
            began, ended, instances, share = figures
            if began is None or ended is None or not instances or not share or ended <= began:
                left_out += 1
                continue
            job = jobs.setdefault(row["job_name"], [began, ended, 0.0])
            job[0], job[1] = min(job[0], began), max(job[1], ended)
            job[2] += instances * share / 100.0
    rows: list[_TraceRow] = [
        (began, ended - began, max(1, math.ceil(gpus - 1e-9)), None) for began, ended, gpus in jobs.values()
    ]
    return rows, left_out


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= _LARGEST else None


_READERS = {".json": _read_philly, ".csv": _read_alibaba, ".sh": _read_carma}
