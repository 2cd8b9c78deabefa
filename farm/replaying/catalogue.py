"""Job types of a replay: what is true of each, and what each estimator says of it, in columns of their own.

Start reading at `load_catalogue`. `carma_published.csv` holds what CARMA's authors published of their jobs;
`carma_jobs.csv`, which `infra/build_replay_jobs.py` writes, what this project computes of the same jobs without a GPU.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from learn.sharing.admitting import MemoryNeed
from learn.sharing.profile import JobProfile

PUBLISHED_FILE = Path(__file__).with_name("carma_published.csv")
JOBS_FILE = Path(__file__).with_name("carma_jobs.csv")
# estimator -> column of its memory; `none` has no figure of any job, `oracle` the true one
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
    gpus         that it takes
    minutes      of one epoch; epochs: the numbers of epochs that jobs of this type train
    memory_mib   true peak of each of its GPUs, as published
    busy         true share of time with a kernel of its on the GPU; smact, smocc, drama: of the GPU over all time.
                 Simulated: the traced step's, scaled by how much of the published time the traced steps fill
    estimates    estimator -> MiB; an estimator without a figure is left out
    need         what the default estimator says of its memory, as a distribution; None where it has no figure
    estimated    what the default estimator says of the job alone; utilizations are None where it has no figure
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
        """The true figures as a profile, which nobody but an oracle has."""
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
    """Return the job types that come along, in the order of the published table."""
    computed = {row["name"]: row for row in _rows(JOBS_FILE)}
    published = _rows(PUBLISHED_FILE)
    usual = _usual_shares(published, computed)
    return tuple(_job_type(row, computed[row["name"]], usual[row["class"]]) for row in published)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _number(text: str) -> float | None:
    return float(text) if text else None


def _usual_shares(
    published: Sequence[Mapping[str, str]], computed: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, float]]:
    """Return the median utilizations of each class, for jobs of it that this project cannot trace."""
    classes = {row["class"] for row in published}
    rows = {name: [computed[row["name"]] for row in published if row["class"] == name] for name in classes}
    return {
        name: {share: statistics.median(float(row[share]) for row in of_class if row[share]) for share in _SHARES}
        for name, of_class in rows.items()
    }


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
    """Return what an estimator says that a job takes, in MiB; infinity where it has no figure, 0 for `none`."""
    if estimator == "none":
        return 0.0
    return job.memory_mib if estimator == "oracle" else job.estimates.get(estimator, math.inf)
