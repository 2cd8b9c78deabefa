"""Jobs of a replay: their types, and traces of arrival times, durations and GPU counts.

Start reading at `read_trace` for files of public formats, `generate_trace` for traces drawn from published statistics,
and `load_catalogue` for the true figures of each job type and the estimators' figures. `carma_published.csv` has the
figures that CARMA's authors published; `carma_jobs.csv`, which `infra/build_replay_jobs.py` writes, has this project's
figures of the same jobs, computed without a GPU.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from conf.errors import UsageError, printable, shown
from learn.sharing.admitting import MemoryNeed
from learn.sharing.slowdowns import JobProfile

PUBLISHED_FILE = Path(__file__).with_name("carma_published.csv")
JOBS_FILE = Path(__file__).with_name("carma_jobs.csv")
# estimator -> column of its memory; `none` has no figures, `oracle` the true ones
MEMORY_COLUMNS = {
    "horus": "horus_mib",
    "faketensor": "faketensor_mib",
    "gpumemnet": "gpumemnet_mib",
    "ours": "ours_mib",
    "ours_bound": "ours_bound_mib",
}
ESTIMATORS = ("none", "oracle", *MEMORY_COLUMNS)
_SHARES = ("busy", "smact", "smocc", "drama")


@dataclass(frozen=True, kw_only=True)
class JobType:
    """One kind of job, alone on a GPU.

    weight       light, medium or heavy, as CARMA's authors group their jobs
    gpus         GPUs that it takes
    minutes      minutes of one epoch; epochs: the numbers of epochs that jobs of this type train
    memory_mib   true peak of each of its GPUs, as published
    busy         true share of time with a kernel of its on the GPU; smact, smocc, drama: the GPU's, over all time.
                 Simulated: the traced step's, scaled by how much of the published time the traced steps fill
    estimates    estimator -> MiB; an estimator without a figure is left out
    need         the default estimator's distribution of its memory; None without a figure
    estimated    the default estimator's figures of the job alone; utilizations are None without a figure
    """

    name: str
    weight: str
    gpus: int
    minutes: float
    epochs: tuple[int, ...]
    memory_mib: float
    busy: float
    smact: float
    smocc: float
    drama: float
    estimates: Mapping[str, float]
    need: MemoryNeed | None
    estimated: JobProfile
    rad: str = ""

    @property
    def truth(self) -> JobProfile:
        """Return the true figures as a profile, which only an oracle has."""
        return JobProfile(
            self.name,
            memory_mib=self.memory_mib,
            memory_bound_mib=self.memory_mib,
            gpu_util=self.busy,
            smact=self.smact,
            smocc=self.smocc,
            drama=self.drama,
        )


@cache
def load_catalogue() -> tuple[JobType, ...]:
    """Return the packaged job types, in the order of the published table."""
    computed = {row["name"]: row for row in _rows(JOBS_FILE)}
    published = _rows(PUBLISHED_FILE)
    by_class: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in published:
        by_class[row["class"]].append(computed[row["name"]])
    # The median utilizations of each class, for its jobs that this project cannot trace.
    usual = {
        name: {share: statistics.median(float(row[share]) for row in rows if row[share]) for share in _SHARES}
        for name, rows in by_class.items()
    }
    return tuple(_job_type(row, computed[row["name"]], usual[row["class"]]) for row in published)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _number(text: str) -> float | None:
    return float(text) if text else None


def _job_type(published: Mapping[str, str], computed: Mapping[str, str], usual: Mapping[str, float]) -> JobType:
    figures = {**published, **computed}
    estimates = {name: value for name, column in MEMORY_COLUMNS.items() if (value := _number(figures[column]))}
    shares = {name: usual[name] if (share := _number(figures[name])) is None else share for name in _SHARES}
    quantiles = ((0.5, "ours_p50_mib"), (0.9, "ours_p90_mib"), (0.99, "ours_bound_mib"))
    known = [(p, mib) for p, column in quantiles if (mib := _number(figures[column])) is not None]
    return JobType(
        name=published["name"],
        rad=published["rad"],
        weight=published["class"],
        gpus=int(published["gpus"]),
        minutes=float(published["minutes"]) / float(published["epochs_of_minutes"]),
        epochs=(20, 50) if published["class"] == "light" else (int(published["epochs"]),),
        memory_mib=float(published["memory_mib"]),
        estimates=estimates,
        need=MemoryNeed(tuple(known)) if known else None,
        estimated=JobProfile(
            published["name"],
            memory_mib=_number(figures["ours_mib"]),
            memory_bound_mib=_number(figures["ours_bound_mib"]),
            smact=_number(figures["ours_smact"]),
            smocc=_number(figures["ours_smocc"]),
            drama=_number(figures["ours_drama"]),
        ),
        **shares,
    )


def estimated_mib(job: JobType, estimator: str) -> float:
    """Return an estimator's memory for a job, in MiB; infinity if it has no figure, 0 for `none`."""
    if estimator == "none":
        return 0.0
    return job.memory_mib if estimator == "oracle" else job.estimates.get(estimator, math.inf)


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
_LARGEST = 1e12  # the largest figure: seconds, or GPUs


@dataclass(frozen=True, kw_only=True)
class ClusterTrace:
    """Jobs in order of arrival; all sequences have one entry a job.

    types       job types, into which `kinds` index
    arrivals_s  since the first arrival, ascending; durations_s: alone on its GPUs, above 0
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

    Philly's and Alibaba's files have no memory and utilization, so each job gets a job type of the catalogue, drawn by
    the seed among those of one GPU.

    Args:
        path: the file.
        n: number of jobs to take, the first ones; None: all.
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
    except (ValueError, RecursionError, csv.Error) as error:
        raise UsageError(f"trace={shown(path)} is not a trace: {error}") from error
    if not rows:
        raise UsageError(f"trace={shown(path)} has no job that ran on a GPU")
    rows = sorted(rows, key=lambda row: row[0])[:n]
    return _trace(printable(source.name), rows, left_out, seed)


# arrival in s, duration in s, GPUs, index of the type or None
_TraceRow = tuple[float, float, int, int | None]


def _trace(name: str, rows: Sequence[_TraceRow], left_out: int, seed: int) -> ClusterTrace:
    types = load_catalogue()
    generator, first = random.Random(seed), rows[0][0]
    singles = [index for index, job in enumerate(types) if job.gpus == 1]
    kinds = [generator.choice(singles) if kind is None else kind for *_, kind in rows]
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
        raise UsageError(f"{path.name} is not a list of jobs, as Philly's cluster_job_log is")
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
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _philly_time(text: object) -> float | None:
    try:
        return datetime.strptime(text, _TIME).replace(tzinfo=UTC).timestamp() if isinstance(text, str) else None
    except ValueError:  # "None": the time was not logged
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


# Shares of light, medium and heavy jobs in the first of CARMA's published traces (60 jobs), and the mean pause between
# submissions; pauses are cut at ten minutes.
_WEIGHTS = {"light": 32 / 60, "medium": 22 / 60, "heavy": 6 / 60}
_CARMA_PAUSE_S, _LONGEST_PAUSE_S = 250.0, 600.0
# Philly: GPUs a job and minutes as Narayanan et al. draw them after that trace (Gavel, OSDI 2020, section 7.1).
_PHILLY_GPUS = {1: 0.70, 2: 0.10, 4: 0.15, 8: 0.05}
_PHILLY_LONG, _PHILLY_SHORT_LOG, _PHILLY_LONG_LOG = 0.2, (1.5, 3.0), (3.0, 4.0)
# Alibaba: median 23 minutes, nine tenths below 4.5 hours (Weng et al., NSDI 2022); one GPU a job is assumed.
_ALIBABA_MEDIAN_MIN, _ALIBABA_P90_MIN = 23.0, 270.0
_P90 = 1.2816  # quantile of the standard normal distribution

GENERATORS = ("carma", "philly", "alibaba")
CARMA_JOBS, OTHER_JOBS = 90, 1000


def generate_trace(name: str, *, n: int | None, gpus: int, load: float, seed: int) -> ClusterTrace:
    """Draw a trace.

    Args:
        name: one of `GENERATORS`.
        n: jobs; None: 90 of CARMA's, 1,000 of the others.
        gpus: GPUs of the cluster; with `load` it sets the arrival rate of Philly's and Alibaba's jobs.
        load: arriving GPU time over available GPU time. CARMA's arrivals are the published ones, `load` times as fast.
        seed: seed of all draws.
    """
    drawn = random.Random(f"{name} {seed}")
    types = load_catalogue()
    draw = {"carma": _carma_job, "philly": _philly_job, "alibaba": _alibaba_job}[name]
    n = n or (CARMA_JOBS if name == "carma" else OTHER_JOBS)
    jobs: list[_DrawnJob] = []
    while len(jobs) < n:
        job = draw(types, drawn)
        if job[2] <= gpus:  # users would not submit a job larger than the cluster
            jobs.append(job)
    if name == "carma":
        pauses = [min(_LONGEST_PAUSE_S, drawn.expovariate(1 / _CARMA_PAUSE_S)) / load for _ in jobs]
    else:
        busy_s = sum(duration * count for _, duration, count in jobs) / len(jobs)
        pauses = [drawn.expovariate(load * gpus / busy_s) for _ in jobs]
    arrivals = list(itertools.accumulate(pauses[1:], initial=0.0))
    kinds, durations, counts = zip(*jobs, strict=True)
    return ClusterTrace(name=name, types=types, arrivals_s=arrivals, kinds=kinds, durations_s=durations, gpus=counts)


_DrawnJob = tuple[int, float, int]  # type, duration in s, GPUs


def _carma_job(types: tuple[JobType, ...], drawn: random.Random) -> _DrawnJob:
    (weight,) = drawn.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    kind = drawn.choice([index for index, job in enumerate(types) if job.weight == weight])
    return kind, 60.0 * types[kind].minutes * drawn.choice(types[kind].epochs), types[kind].gpus


def _philly_job(types: tuple[JobType, ...], drawn: random.Random) -> _DrawnJob:
    limits = _PHILLY_LONG_LOG if drawn.random() < _PHILLY_LONG else _PHILLY_SHORT_LOG
    (gpus,) = drawn.choices(list(_PHILLY_GPUS), list(_PHILLY_GPUS.values()))
    return _single(types, drawn), 60.0 * 10 ** drawn.uniform(*limits), gpus


def _alibaba_job(types: tuple[JobType, ...], drawn: random.Random) -> _DrawnJob:
    spread = math.log(_ALIBABA_P90_MIN / _ALIBABA_MEDIAN_MIN) / _P90
    return _single(types, drawn), 60.0 * drawn.lognormvariate(math.log(_ALIBABA_MEDIAN_MIN), spread), 1


def _single(types: tuple[JobType, ...], drawn: random.Random) -> int:
    return drawn.choice([index for index, job in enumerate(types) if job.gpus == 1])
