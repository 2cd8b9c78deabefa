"""The settings of a growth cycle, and its plan: candidates that continue the sequences, chosen by the policy.

Start reading at `GrowSettings` and `make_plan`; `choice_lines` is the text of its gains and costs that `dry_run=true`
prints. `machine_of` finds the devices that the night measures on, `submit_listed` queues a job of listed configurations
there.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from conf.cli.settings import Checked, key, section
from conf.errors import EnvironmentProblem, UsageError
from conf.files.outputs import read_json, write_file
from farm.dispatch.monitoring import LogSettings, MetricsSettings
from farm.dispatch.ray_cluster import ClusterSettings
from farm.dispatch.submitted_code import record_submitted
from farm.nights.journal import ChoicePayload, Cycle, PairsPayload, RunPayload
from farm.queue.jobs import MIXED_FAMILY, Job, Queue, device_key, text_of_settings, text_of_task
from farm.sampling.forecast import Forecaster
from farm.sampling.selection import (
    POLICIES,
    TAKES_FIRST,
    CandidatePool,
    Known,
    Selection,
    candidates,
    chance_to_fit,
    choose,
    known_runs,
    merge_pools,
    thin,
)
from farm.submission.submitting import TrialsSettings, spec_of
from featurize.configs.space import Space, default_space, parse_space, require_within_limits
from featurize.configs.trial import (
    TrialConfig,
    canonical_json,
    code_problem,
    config_from_mapping,
    config_hash,
    trusting,
)
from featurize.device.device_spec import DeviceSpec, same_device
from featurize.families import family_names, key_rules
from learn.estimators.protocol import ESTIMATORS
from learn.rows.data import TARGETS
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from warehouse.reading.connection import select
from warehouse.tables.schema import ENVIRONMENT
from workers.devices import DeviceChoice, TrialSettings, choose_device, make_device

CANARIES = ("compare", "accept", "skip")
NEED_LIBRARIES = ("timm", "zoo")  # families that are measured only if they are named
# Keys that decide a cycle and are recorded with it; the others belong to the command that works on it.
WRITTEN = (
    "n",
    "hours",
    "policy",
    "families",
    "space",
    "pool",
    "seed",
    "canaries",
    "limits",
    "learn",
    "device",
    "window",
    "trial",
    "telemetry",
    "kernels",
    "collocate",
)
_AHEAD = 1.5  # with a time only: planned runs for each that is expected to fit
_ROWS_AT_MOST = 5_000  # known rows that a choice reads: more cost minutes and add little
_TRIED = 200  # sample of candidates whose expected times show how many runs fit
_PAST_RUNS = 10  # runs of a family that make its median wall time the expected one
_STARTUP_S, _STEPS = 15.0, 100  # otherwise a guess: process start and context, and steps until a window is steady


@dataclass(frozen=True, kw_only=True)
class LearnSettings(Checked, section="learn"):
    """The `learn` key: the models that a cycle fits on its new rows."""

    targets: tuple[str, ...] = key(
        ("memory", "smact", "smocc", "drama"), "targets to fit; [] for none", "text | list of text", tuple(TARGETS)
    )
    estimator: str = key("hybrid", "estimator to fit", choices=tuple(ESTIMATORS))


@dataclass(frozen=True, kw_only=True)
class NotifySettings(Checked, section="notify"):
    """The `notify` key: where to report a cycle's outcome."""

    command: str | None = key(
        None, "run in a shell when the cycle ends, with the result as JSON on its standard input", "any text"
    )
    webhook: str | None = key(None, "a URL that gets the same JSON by POST")

    def problems(self) -> Iterator[str]:
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            yield f"notify.webhook must begin with http:// or https://, got {self.webhook!r}"


@dataclass(frozen=True, kw_only=True)
class GrowSettings(TrialsSettings):
    """One cycle. Raises `UsageError` that names every bad key together.

    usage: python -m farm.grow n=N | hours=H [KEY=VALUE ...]      families: {arch}

      python -m farm.grow n=500                   measure 500 configurations of all families, chosen by policy=active
      python -m farm.grow hours=6                 measure for six hours
      python -m farm.grow n=500 dry_run=true      what would run, what it gains and costs; nothing is run or written
      python -m farm.grow n=500 collocate=0.2     100 of the 500 are pairs of trials that share a GPU
      python -m farm.grow n=200 families=[gpt,vit] policy=coverage "space={precision: [fp32,bf16]}"

    After a kill at any point, the same command continues where it was. Ctrl-C exits within seconds, with 130, and
    the same command continues. SIGTERM while trials run ends the night: running trials finish, land and are
    reported, without learning, exit code 130; twice: immediately. Exit code 1: the canaries found the machine sick,
    or a step failed. Every step is a line of growth/journal.jsonl in the data folder; the report is
    reports/latest.html there.
    """

    SPELLINGS: ClassVar = {"grow.collocate": "collocate"}

    n: int | None = key(None, "configurations to measure, in addition to canaries", "int 1 to 10000000")
    hours: float | None = key(
        None, "hours to measure, canaries included; with n=, whichever is reached first", "number > 0 to 100000"
    )
    policy: str = key("active", "policy that chooses (docs/growth.md)", choices=POLICIES)
    families: tuple[str, ...] | None = key(
        None,
        "as in [cnn,gpt]; default all but timm and zoo, which need extra libraries",
        "text | list of text | null",
        family_names(),
    )
    space: Mapping[str, Any] | None = key(
        None,
        'values of a key in the search space of every family that has it, as in "space={precision: [fp32,bf16]}"',
    )
    pool: int = key(
        10000,
        "candidates to choose from, drawn every night, continuing each family's sequence",
        "int 1 to 10000000",
    )
    collocate: float = key(
        0.0, "share of the night's n, or hours, for pairs of trials on one device", "number 0 to 0.9"
    )
    seed: int = key(0, "seed of the sequences and of ties", "int >= 0")
    canaries: str = key(
        "compare",
        "compare: stop if a canary fails, or labels moved in an unchanged environment; accept: make "
        "tonight's labels the reference",
        choices=CANARIES,
    )
    dry_run: bool = key(False, "true: print what would run")
    learn: LearnSettings = section(LearnSettings)
    notify: NotifySettings = section(NotifySettings)
    log: LogSettings = section(LogSettings)
    metrics: MetricsSettings = section(MetricsSettings)
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)  # all values of the command line
    spaces: tuple[Space, ...] = field(init=False)  # one a family

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "spaces", _spaces(self.families, self.space or {}))

    def problems(self) -> Iterator[str]:
        if self.n is None and self.hours is None:
            yield "give n=... (configurations) or hours=... (of measuring)"
        if self.families is not None and (not self.families or len(set(self.families)) < len(self.families)):
            yield f"families must name some of these, each once: {', '.join(family_names())}"

    @property
    def pairs(self) -> int | None:
        """Return the number of pairs to measure; None: as many as their share of the hours allows."""
        if not self.collocate:
            return 0
        return None if self.n is None else round(self.collocate * self.n)

    @property
    def singles(self) -> int | None:
        """Return the number of configurations to measure singly; None: as many as the hours allow."""
        return None if self.n is None else self.n - (self.pairs or 0)

    @property
    def written(self) -> dict[str, Any]:
        """Return the keys that decide the cycle, as given, for the journal."""
        return {name: self.given[name] for name in WRITTEN}


def _spaces(families: Sequence[str] | None, common: Mapping[str, Any]) -> tuple[Space, ...]:
    """Return the families' search spaces, with the values of `common` where a family has the key."""
    names = families or [name for name in family_names() if name not in NEED_LIBRARIES]
    specs_of = {name: {key: spec for key, spec in common.items() if key in key_rules(name)} for name in names}
    if unused := [str(key) for key in common if not any(key in specs for specs in specs_of.values())]:
        keys = sorted(set().union(*map(key_rules, names)))
        raise UsageError(f"space: no family here has {', '.join(unused)}; keys: {', '.join(keys)}")
    spaces = tuple(parse_space(name, {**(default_space(name) or {}), **specs}) for name, specs in specs_of.items())
    for space in spaces if common else ():
        require_within_limits(space)
    return spaces


@dataclass(frozen=True)
class Machine:
    """The devices of a cycle, all of one model. `workers`: their number; `source`: the source of their runs."""

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

    The same call again adds nothing. A task imports the code that it names. So a config from the folder's data raises
    `UsageError` if data may not name its code.
    """
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
    list(record_submitted(configs))
    texts = ((index, text_of_task(*members)) for index, members in tasks)
    queue.submit(job, texts)
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
    """Return the environment of this device's newest run; None without one."""
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
            total += max(0.0, (ended - began).total_seconds())  # negative if the clock was set back
    return total


def job_figures(folder: DataFolder, job_id: str) -> RunPayload:
    """Return a job's runs by status, their workers' seconds, and the energy of their windows."""
    rows = select(
        folder,
        "SELECT status, count(*) AS runs, sum(wall_s) AS wall_s, sum(energy_j) AS energy_j FROM runs WHERE job_id = ? "
        "GROUP BY status ORDER BY status",
        [job_id],
    )
    by_status = {row["status"]: row["runs"] for row in rows}
    energies = [row["energy_j"] for row in rows if row["energy_j"] is not None]
    return RunPayload(
        job_id=job_id,
        runs=sum(by_status.values()),
        by_status=by_status,
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


@dataclass(frozen=True)
class Planned:
    """One configuration of a plan. `place`: its (sequence, index); None if measured again."""

    config: TrialConfig
    place: tuple[str, int] | None


@dataclass(frozen=True)
class Plan:
    """Tonight's configurations in the order in which they run; `choice`: as the journal stores it, except its file;
    `left_out`: as `Known.left_out`."""

    planned: tuple[Planned, ...]
    choice: ChoicePayload
    left_out: tuple[str, ...]

    def write(self, folder: DataFolder, cycle: str) -> str:
        """Write `growth/plans/CYCLE.json` and return its path in the folder."""
        entries = [{**vars(entry), "config": entry.config.to_mapping()} for entry in self.planned]
        path = folder.growth / "plans" / f"{cycle}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, (json.dumps(entries, indent=1) + "\n").encode())
        return str(path.relative_to(folder.root))


def read_plan(folder: DataFolder, path: str | None, spaces: Sequence[Space] = ()) -> list[Planned]:
    """Read a plan that `Plan.write` wrote. As data of the folder, it may name only code that `spaces` name."""
    if path is None:
        raise EnvironmentProblem(f"the journal of {folder.root} names no plan for this cycle")
    try:
        entries = read_json(folder.root / path)
    except ValueError as error:
        raise EnvironmentProblem(f"{folder.root / path} is damaged: {error}") from error
    names = code_names(spaces)
    return [
        Planned(
            trusting(config_from_mapping(entry["config"]), names),
            tuple(entry["place"]) if entry["place"] else None,
        )
        for entry in entries
    ]


def code_names(spaces: Sequence[Space]) -> tuple[str, ...]:
    """Return every `MODULE:FACTORY` that the user's spaces name."""
    return tuple(dict.fromkeys(name for space in spaces for name in space.code_names()))


def skipped(planned: Sequence[Planned], ran: Collection[int], policy: str) -> dict[str, int]:
    """Return where sequences continue after a night that was cut short: at the first index that did not run.

    Empty for policies that look at all candidates: those left over are not offered again.
    """
    first_left: dict[str, int] = {}
    if policy in TAKES_FIRST:
        for index, entry in enumerate(planned):
            if index not in ran and entry.place is not None:
                sequence, place = entry.place
                first_left[sequence] = min(place, first_left.get(sequence, place))
    return first_left


def make_plan(
    folder: DataFolder,
    queue: Queue | None,
    cycles: Sequence[Cycle],
    settings: GrowSettings,
    machine: Machine,
    environment: Mapping[str, Any] | None,
    progress: Callable[[int, int], None] = lambda completed, total: None,
) -> Plan:
    """Plan tonight's measurements: first those that are stale in this `environment`, by any night's marks, then the
    policy's choice of candidates that are new.

    A candidate is new if it is neither queued nor measured in the environment. `queue` is None before the first
    submission. Nothing is written. If no candidate is new, the next night looks at the following ones.
    """
    from farm.nights.watch import remeasure

    known = _known(folder, queue, settings, machine, environment)
    where, at_most = (folder, machine.device_name, machine.source), settings.singles
    stale_configs = () if environment is None else remeasure(*where, environment, at_most=at_most)
    stale = tuple(Planned(config, None) for config in stale_configs)
    known = dataclasses.replace(known, measured=known.measured | {config_hash(entry.config) for entry in stale})
    remaining = None if settings.singles is None else settings.singles - len(stale)
    only_stale = ChoicePayload(runs=len(stale), remeasured=len(stale))
    if remaining == 0:
        return Plan(stale, dataclasses.replace(only_stale, next_index=_positions(cycles)), known.left_out)
    pool = _pool(settings, cycles)
    if known.measured.issuperset(pool.hashes):
        only_stale = dataclasses.replace(only_stale, next_index=_positions_after(settings, cycles, pool.next_index))
        return Plan(stale, only_stale, known.left_out)
    forecaster = Forecaster(device=machine.spec, data=folder)
    if remaining is None:
        assert settings.hours is not None, "a night has a number of configurations or a time"
        n = _affordable(settings, settings.hours * (1.0 - settings.collocate), machine, pool, known, forecaster)
    else:
        n = min(remaining, len(pool))
    keys = {space.family: _key(settings, space) for space in settings.spaces}
    choice = choose(settings.policy, pool, known, n, forecaster, settings.seed, progress)
    chosen = [Planned(new.config, (keys[new.config.family], new.index)) for new in choice.chosen]
    return Plan(
        (*stale, *chosen),
        dataclasses.replace(
            summary(choice, known, machine.capacity_mib),
            runs=len(stale) + len(chosen),
            remeasured=len(stale),
            next_index=_positions_after(settings, cycles, choice.next_index),
        ),
        known.left_out,
    )


def _known(
    folder: DataFolder,
    queue: Queue | None,
    settings: GrowSettings,
    machine: Machine,
    environment: Mapping[str, str | None] | None,
) -> Known:
    """Return the runs of these devices; configs that wait in the queue count as measured."""
    if not folder.format_marker.exists():  # a dry run before the first submission
        return Known.nothing()
    known = known_runs(folder, machine.device_name, source=machine.source, environment=environment)
    hashes = frozenset() if queue is None else queue.waiting_hashes(device_key(machine.choice))
    known = thin(known, _ROWS_AT_MOST, settings.seed)
    return dataclasses.replace(known, measured=known.measured | hashes)


def _pool(settings: GrowSettings, cycles: Sequence[Cycle]) -> CandidatePool:
    positions = _positions(cycles)
    count = math.ceil(settings.pool / len(settings.spaces))
    return merge_pools(
        [
            candidates(
                space, settings.policy, settings.seed, positions.get(_key(settings, space), 0), count, settings.limits
            )
            for space in settings.spaces
        ]
    )


def _affordable(
    settings: GrowSettings, hours: float, machine: Machine, pool: CandidatePool, known: Known, forecaster: Forecaster
) -> int:
    """Return how many runs to plan for these hours: 1.5 times the number that probably fits."""
    sample = choose("stratified", pool, known, min(_TRIED, len(pool)), forecaster, settings.seed)
    seconds, _ = expected_seconds(sample, known)
    fitting = hours * 3600 * machine.workers / max(float(np.mean(seconds)), 1e-3)
    return max(1, min(len(pool), math.ceil(_AHEAD * fitting)))


def _key(settings: GrowSettings, space: Space) -> str:
    """Return the name of a space's sequence; uniform and low-discrepancy points are different sequences."""
    points = "uniform" if settings.policy == "uniform" else "stratified"
    return f"{space.family}/{points}/{settings.seed}/{space.identity[:16]}"


def _positions(cycles: Sequence[Cycle]) -> dict[str, int]:
    """Return where each sequence continues, by all cycles that have chosen."""
    positions: dict[str, int] = {}
    for cycle in cycles:
        # A night that was cut short corrects its choice.
        for payload in (cycle.payload(ChoicePayload), cycle.payload(RunPayload)):
            positions.update({} if payload is None else payload.next_index)
    return positions


def _positions_after(settings: GrowSettings, cycles: Sequence[Cycle], next_index: Mapping[str, int]) -> dict[str, int]:
    """Return `next_index`: where each family's sequence continues."""
    positions = {_key(settings, space): next_index[space.family] for space in settings.spaces}
    return {**_positions(cycles), **positions}


def choice_lines(choice: ChoicePayload, source: str = "measured") -> list[str]:
    """Return the policy's choice, one fact a line; no lines if it chose nothing.

    `source` of the runs: `measured` or `simulated`.
    """
    if choice.policy is None:
        return []
    families = ", ".join(f"{name}: {n}" for name, n in choice.families.items())
    new = ", ".join(f"{name}: {n}" for name, n in choice.bins_gained.items() if n) or "none"
    past = f"{choice.from_past:.0%} of it from past runs of the family" if choice.from_past else "a guess: no past runs"
    hours = "hours of simulated runs" if source == "simulated" else "GPU-hours"
    chosen, lost = choice.runs - choice.remeasured, choice.out_of_memory or 0.0
    return [
        f"policy {choice.policy}: {chosen:,} of {choice.pool:,} candidates ({families})",
        f"left out: {choice.measured:,} {source} already, {choice.repeated:,} copies of one another",
        f"bins and regions that had no row: {new}",
        f"expected: {choice.gpu_hours or 0.0:.2f} {hours} ({past}), {lost:.0f} runs out of memory",
        f"figures from: {', '.join(f'{way}: {n}' for way, n in choice.ways.items())}",
        *choice.notes,
    ]


def summary(choice: Selection, known: Known, capacity_mib: float) -> ChoicePayload:
    """Return the choice's gains and costs on a device of `capacity_mib`, from `known` runs if possible."""
    seconds, past = expected_seconds(choice, known)
    memory_mib = np.array([candidate.figures["memory"] for candidate in choice.chosen])
    disagreement = np.array([candidate.disagreement or 0.0 for candidate in choice.chosen])
    return ChoicePayload(
        policy=choice.policy,
        runs=len(choice.chosen),
        families=dict(sorted(Counter(candidate.config.family for candidate in choice.chosen).items())),
        pool=choice.pool,
        measured=choice.measured,
        repeated=choice.repeated,
        bins_gained={name: sum(not before for before, _ in of.values()) for name, of in choice.gained.items()},
        gained=choice.gained,
        gpu_hours=float(sum(seconds)) / 3600,
        from_past=past / max(len(choice.chosen), 1),
        out_of_memory=float(np.sum(1 - chance_to_fit(memory_mib, disagreement, capacity_mib))),
        ways=choice.ways,
        notes=choice.notes,
    )


def expected_seconds(choice: Selection, known: Known) -> tuple[list[float], int]:
    """Return the expected wall time of each chosen run in s, and for how many it is the family's median so far.

    Without past runs it is start-up plus a hundred steps of the kernel model's step time."""
    family = np.array([config.family for config in known.configs], dtype=object)
    medians: dict[str, float] = {}
    for name in {candidate.config.family for candidate in choice.chosen}:
        of_family = known.seconds[(family == name) & np.isfinite(known.seconds)] if len(family) else np.zeros(0)
        if len(of_family) >= _PAST_RUNS:
            medians[name] = float(np.median(of_family))
    seconds = []
    for candidate in choice.chosen:
        guess = _STARTUP_S + _STEPS * candidate.figures["step_time"] / 1e3
        seconds.append(medians.get(candidate.config.family, guess))
    return seconds, sum(candidate.config.family in medians for candidate in choice.chosen)
