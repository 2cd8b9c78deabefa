"""Traces drawn from what was published of real ones, where there is no file. Simulated; a seed gives the same trace.

Start reading at `generate_trace`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from farm.replaying.catalogue import JobType, load_catalogue
from farm.replaying.traces import ClusterTrace

# Shares of light, medium and heavy jobs in the first of CARMA's published traces (60 jobs), and the pauses between its
# submissions, which are cut at ten minutes.
_WEIGHTS = {"light": 32 / 60, "medium": 22 / 60, "heavy": 6 / 60}
_CARMA_PAUSE_S, _LONGEST_PAUSE_S = 250.0, 600.0
# Philly: GPUs a job and minutes as Narayanan et al. draw them after that trace (Gavel, OSDI 2020, section 7.1).
_PHILLY_GPUS = {1: 0.70, 2: 0.10, 4: 0.15, 8: 0.05}
_PHILLY_LONG, _PHILLY_SHORT_LOG, _PHILLY_LONG_LOG = 0.2, (1.5, 3.0), (3.0, 4.0)
# Alibaba: median 23 minutes, nine tenths below 4.5 hours (Weng et al., NSDI 2022); one GPU a job is assumed.
_ALIBABA_MEDIAN_MIN, _ALIBABA_P90_MIN = 23.0, 270.0
_P90 = 1.2816  # of the standard normal distribution

GENERATORS = ("carma", "philly", "alibaba")
CARMA_JOBS, OTHER_JOBS = 90, 1000


def generate_trace(name: str, *, n: int | None, gpus: int, load: float, seed: int) -> ClusterTrace:
    """Draw a trace.

    Args:
        name: one of `GENERATORS`.
        n: jobs; None: 90 of CARMA's, 1,000 of the others.
        gpus: GPUs of the cluster; with `load` it sets how fast Philly's and Alibaba's jobs arrive.
        load: GPU time that arrives, over what the cluster has. CARMA's arrivals are those published, `load` times
            as fast.
        seed: of all that is drawn.
    """
    drawn = random.Random(f"{name} {seed}")
    types = load_catalogue()
    draw = {"carma": _carma_job, "philly": _philly_job, "alibaba": _alibaba_job}[name]
    jobs = _drawn_jobs(draw, types, drawn, n or (CARMA_JOBS if name == "carma" else OTHER_JOBS), gpus)
    if name == "carma":
        pauses = [min(_LONGEST_PAUSE_S, drawn.expovariate(1 / _CARMA_PAUSE_S)) / load for _ in jobs]
    else:
        busy_s = sum(duration * count for _, duration, count in jobs) / len(jobs)
        pauses = [drawn.expovariate(load * gpus / busy_s) for _ in jobs]
    arrivals, now = [], -pauses[0]
    for pause in pauses:
        now += pause
        arrivals.append(now)
    kinds, durations, counts = zip(*jobs, strict=True)
    return ClusterTrace(name=name, types=types, arrivals_s=arrivals, kinds=kinds, durations_s=durations, gpus=counts)


_DrawnJob = tuple[int, float, int]  # type, duration in s, GPUs
_Draw = Callable[[tuple[JobType, ...], random.Random], _DrawnJob]


def _drawn_jobs(draw: _Draw, types: tuple[JobType, ...], drawn: random.Random, n: int, gpus: int) -> list[_DrawnJob]:
    jobs: list[_DrawnJob] = []
    while len(jobs) < n:
        job = draw(types, drawn)
        if job[2] <= gpus:  # a job that is larger than the cluster would not have been sent there
            jobs.append(job)
    return jobs


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
