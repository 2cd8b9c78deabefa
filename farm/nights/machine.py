"""The devices that a cycle measures on, and its jobs of listed configurations.

Start reading at `machine_of` and `submit_listed`.
"""

from __future__ import annotations

import datetime
import itertools
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError
from farm.dispatch.ray_cluster import ClusterSettings
from farm.dispatch.submitted_code import record_code_of
from farm.nights.journal import Cycle, PairsPayload, RunPayload
from farm.queue.jobs import Queue
from farm.queue.queue_values import MIXED_FAMILY, Job, device_key, text_of_settings, text_of_task
from farm.submission.settings import spec_of
from featurize.configs.trial import TrialConfig, canonical_json, code_problem
from featurize.device.device_spec import same_device
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from warehouse.reading.connection import select
from warehouse.tables.schema import ENVIRONMENT
from workers.devices import DeviceChoice, choose_device, make_device
from workers.settings import TrialSettings

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec


@dataclass(frozen=True)
class Machine:
    """The devices of a cycle, all of one model. `workers`: their number; `source`: that of their runs."""

    choice: DeviceChoice
    device_name: str
    source: str
    workers: int
    spec: DeviceSpec

    @property
    def capacity_mib(self) -> float:
        """Return the device memory in MiB that a trial may take."""
        return self.spec.memory_mib * (self.choice.memory_fraction or 1.0)


def machine_of(device: DeviceChoice, cluster: ClusterSettings, before: Sequence[Cycle] = ()) -> tuple[Machine, str]:
    """Return the machine that `device` names, and a line that describes it.

    Raises `UsageError` where the device is missing, for GPUs of several models, and where `auto` finds no GPU although
    the cycles `before` measured on one: a broken driver must not turn a measured data set into a simulated one.
    """
    choice, device_line = choose_device(device)
    used = next(filter(None, ((c.settings.get("device") or {}).get("backend") for c in reversed(before))), None)
    if device.backend == "auto" and choice.backend == "simulated" and used == "cuda":
        raise UsageError(
            f"{device_line}; but the last cycle here measured on GPUs: fix the driver, or pass device=simulated"
        )
    slots = make_device(choice).slots()
    names = sorted({slot.device_name for slot in slots})
    if len(names) > 1:
        raise UsageError(f"a cycle measures on GPUs of one model, here are {', '.join(names)}; hide some from it")
    workers = 1 if cluster.kind == "inline" else len(slots)
    source = "simulated" if choice.backend == "simulated" else "measured"
    return Machine(choice, names[0], source, workers, spec_of(choice, slots[0])), device_line


def submit_listed(
    folder: DataFolder,
    queue: Queue,
    job_id: str,
    tasks: Sequence[tuple[int, Sequence[TrialConfig]]],
    machine: Machine,
    trial: TrialSettings,
    policy: str,
    seed: int,
) -> None:
    """Queue these tasks under their indices, as one job: a config each, or those of a group that starts together.

    The same call again adds nothing.

    A task may import the code that it names. So a config from the folder's data raises `UsageError` if data may not
    name its code."""
    configs = [config for _, members in tasks for config in members]
    for config in configs:
        if (problem := code_problem(config)) is not None:
            raise UsageError(f"job {job_id}: {problem}")
    families = sorted({config.family for config in configs})
    job = Job(
        job_id=job_id,
        family=families[0] if len(families) == 1 else MIXED_FAMILY,
        space_json=canonical_json({"listed": families}),
        n=len(tasks),
        seed=seed,
        policy=policy,
        device=device_key(machine.choice),
        settings_json=text_of_settings(trial),
        submitted_at=time.time(),
    )
    record_code_of(configs)
    texts = ((index, text_of_task(members)) for index, members in tasks)
    queue.submit(job, texts, time.time())
    recorded = {"device": machine.choice.to_mapping(), "trial": trial.to_mapping(), "data": str(folder.root)}
    RunWriter(folder).write_job(
        {
            "job_id": job_id,
            "family": job.family,
            "n": job.n,
            "seed": seed,
            "policy": policy,
            "priority": job.priority,
            "space": job.space_json,
            "config": json.dumps(recorded, sort_keys=True),
            "submitted_at": queue.job(job_id).submitted_at,
        }
    )


def environment_now(folder: DataFolder, machine: Machine) -> dict[str, Any] | None:
    """Return the environment of the newest run of this device; None where there is none."""
    rows = select(
        folder,
        f"SELECT device_name, {', '.join(ENVIRONMENT)} FROM attempts WHERE source = ? AND torch_version IS NOT NULL "
        "ORDER BY finished_at DESC",
        [machine.source],
    )
    ours = (row for row in rows if same_device(row["device_name"], machine.device_name))
    return next(({name: row[name] for name in ENVIRONMENT} for row in ours), None)


def measured_s(folder: DataFolder, cycle: Cycle, jobs: Sequence[str]) -> float:
    """Return the seconds that a cycle has measured, over all attempts; a killed one counts up to its last run."""
    finished = [
        row["finished_at"].replace(tzinfo=datetime.UTC)
        for row in select(
            folder,
            "SELECT finished_at FROM attempts WHERE list_contains(?::VARCHAR[], job_id) AND finished_at IS NOT NULL",
            [list(jobs)],
        )
    ]
    total = 0.0
    for name in ("canaries", "run"):
        step = cycle.steps.get(name)
        attempts = step.attempts if step else ()
        for began, until in itertools.zip_longest(attempts, attempts[1:]):
            ended = max((at for at in finished if began <= at and (until is None or at < until)), default=began)
            if until is None and step is not None and step.ended_at is not None:
                ended = step.ended_at
            total += max(0.0, (ended - began).total_seconds())  # less where the clock was put back
    return total


def job_figures(folder: DataFolder, job_id: str) -> RunPayload:
    """Return a job's runs by status and family, their workers' seconds, and the energy of their windows."""
    rows = select(
        folder,
        "SELECT family, status, count(*) AS runs, sum(wall_s) AS wall_s, sum(energy_j) AS energy_j FROM runs "
        "WHERE job_id = ? GROUP BY ALL ORDER BY ALL",
        [job_id],
    )
    by_status: Counter[str] = Counter()
    by_family: Counter[str] = Counter()
    for row in rows:
        by_status[row["status"]] += row["runs"]
        by_family[row["family"]] += row["runs"]
    energies = [row["energy_j"] for row in rows if row["energy_j"] is not None]
    return RunPayload(
        job_id=job_id,
        runs=by_status.total(),
        by_status=dict(by_status),
        by_family=dict(by_family),
        gpu_seconds=sum(row["wall_s"] or 0.0 for row in rows),
        energy_j=sum(energies) if energies else None,
    )


def pair_figures(folder: DataFolder, job_id: str) -> PairsPayload:
    """Return the figures of a job's groups."""
    of_job = "FROM collocations WHERE starts_with(group_id, ? || '-')"
    (counts,) = select(
        folder,
        "SELECT count(DISTINCT group_id) AS pairs, "
        f"count(DISTINCT CASE WHEN status = 'oom' THEN group_id END) AS out_of_memory {of_job}",
        [job_id],
    )
    (slowdowns,) = select(
        folder,
        "SELECT median(slowdown) AS slowdown_median, quantile_cont(slowdown, 0.9) AS slowdown_p90 "
        f"{of_job} AND doubt IS NULL",
        [job_id],
    )
    return PairsPayload(**counts, **slowdowns)


def tasks_run(folder: DataFolder, job_id: str) -> set[int]:
    """Return the indices of a job's tasks that have a run."""
    query = "SELECT task_index FROM runs WHERE job_id = ? AND task_index IS NOT NULL"
    return {row["task_index"] for row in select(folder, query, [job_id])}
