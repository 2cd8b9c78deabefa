"""Slowdowns of jobs that share a GPU: figures of a job alone (`JobProfile`), formulas, and fits to groups of jobs.

A slowdown is the time of a step beside partners over the time of a step alone: 1 or more. Its inverse is the normalised
speed (Hu et al., Lucid, ASPLOS 2023). A `SlowdownEstimator` returns slowdowns; `PointSlowdowns` are formulas to compare
fits with.

Start reading at `fitted_slowdowns`. `measured_groups` reads the rows of a data folder. `ContentionFormula` answers for
jobs whose utilization is known, `KnownJobs` for jobs that were measured beside others under the same name, and the
typical slowdown for all others. `find_slowdowns` finds the newest fit, `models/slowdown/VERSION/` of a data folder.

The formula: with u the share of time in which a job alone has a kernel on the GPU, and m the share in which it reads or
writes memory, a step takes the time alone times

    1 + softplus(own * u + others * sum(u of partners) - 1) + bandwidth * m * sum(m of partners)

The first term is time sharing: nothing is lost while both jobs fit into the time; `sharpness` softens the limit, as
kernels of two jobs collide earlier by chance. The second term is the cost of memory traffic. Both are sums over
partners: their order changes nothing, and groups of three and four are treated like pairs.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from conf.errors import EnvironmentProblem, UsageError
from learn.fitting.artifacts import DamagedArtifact, DataPlace, newest_whole, read_json, verify_files, version_folders
from learn.rows.data import SLOWDOWN
from warehouse.tables.schema import NOT_TOGETHER

if TYPE_CHECKING:
    import os


@dataclass(frozen=True, slots=True)
class JobProfile:
    """Figures of one job that has a GPU alone; None where a figure is not known. Shares lie between 0 and 1."""

    name: str
    memory_mib: float | None = None  # peak that a driver counts: reserved memory and the context
    memory_bound_mib: float | None = None  # bound of the memory that 99 of 100 such jobs stay below
    step_ms: float | None = None
    gpu_util: float | None = None  # nvidia-smi's share of time with a kernel on the GPU
    memory_util: float | None = None  # nvidia-smi's share of time with the memory being read or written
    smact: float | None = None
    smocc: float | None = None
    drama: float | None = None
    tensor: float | None = None  # share of cycles in which a tensor pipe is active
    launches_per_s: float | None = None
    power_w: float | None = None


def utilization(job: JobProfile) -> float | None:
    """Return the share of time with a kernel on the GPU: nvidia-smi's, else SMACT, else None."""
    return job.gpu_util if job.gpu_util is not None else job.smact


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Device memory of a group at the moment when all members are at their peaks.

    Args:
        expected_mib: Sum of the members' peaks alone, each with a context.
        bound_mib: Sum of the members' bounds; None if a bound is missing.
    """

    expected_mib: float
    bound_mib: float | None

    def fits(self, memory_mib: float) -> bool:
        """Return whether the bound, or without one the expected memory, is at most `memory_mib`."""
        return (self.expected_mib if self.bound_mib is None else self.bound_mib) <= memory_mib


def group_memory(group: Sequence[JobProfile]) -> GroupMemory:
    """Return the memory of jobs that share a GPU in separate processes.

    Peaks are those that a driver counts for each process, with its context. The bounds are added as well: if each holds
    for 99 of 100 jobs, their sum holds for at least 98 of 100 pairs, and in practice for more, as errors of two jobs
    rarely coincide. Nothing is subtracted for that, as no groups with bounds were measured.

    Raises:
        UsageError: The memory of a job is not known.
    """
    unknown = [job.name for job in group if job.memory_mib is None]
    if unknown:
        raise UsageError(f"the memory of {', '.join(unknown)} is not known; pass memory_mib")
    bounds = [job.memory_bound_mib for job in group]
    bound_mib = None if None in bounds else sum(bound or 0.0 for bound in bounds)
    return GroupMemory(sum(job.memory_mib or 0.0 for job in group), bound_mib)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One job's expected slowdown in a group: its median and its 90th percentile."""

    median: float
    p90: float


class SlowdownEstimator(Protocol):
    """Estimator of the slowdown of each job of a group on one GPU, in the group's order; partners may be permuted."""

    def slowdowns(self, group: Sequence[JobProfile]) -> list[Slowdown]: ...


class NoUtilization(ValueError):
    """A job's utilization is not known, so a formula has no answer."""


@dataclass(frozen=True, slots=True)
class PointSlowdowns:
    """Slowdowns by a formula without a spread.

    Args:
        slowdowns_of: The formula: maps a group to the slowdown of each of its jobs.
    """

    slowdowns_of: Callable[[Sequence[JobProfile]], Sequence[float]]

    def slowdowns(self, group: Sequence[JobProfile]) -> list[Slowdown]:
        return [Slowdown(slowdown, slowdown) for slowdown in self.slowdowns_of(group)]


def constant_slowdown(slowdown: float) -> PointSlowdowns:
    """Return the same slowdown for every job that has a partner."""
    return PointSlowdowns(lambda group: [slowdown if len(group) > 1 else 1.0] * len(group))


def shared_time() -> PointSlowdowns:
    """Return slowdowns by shared time: max(1, u1 + u2 + ...), where u is nvidia-smi's utilization, else SMACT."""
    return PointSlowdowns(
        lambda group: [max(1.0, sum(utilizations(group, 0))) if len(group) > 1 else 1.0] * len(group),
    )


def utilizations(group: Sequence[JobProfile], place: int) -> tuple[float, float]:
    """Return the utilization of one job, and the sum of its partners'. Raises `NoUtilization`."""
    busy = [utilization(job) for job in group]
    if unknown := [job.name for job, share in zip(group, busy, strict=True) if share is None]:
        raise NoUtilization(f"{', '.join(unknown)}: neither GPU utilization nor SMACT is known")
    return busy[place] or 0.0, sum(share or 0.0 for other, share in enumerate(busy) if other != place)


_PROFILE = {  # JobProfile's field: column of collocations
    "memory_mib": "solo_memory_mib",
    "step_ms": "solo_step_ms",
    "gpu_util": "solo_gpu_util",
    "memory_util": "solo_memory_util",
    "smact": "solo_smact",
    "smocc": "solo_smocc",
    "drama": "solo_drama",
    "tensor": "solo_tensor_active",
    "launches_per_s": "solo_launches_per_s",
    "power_w": "solo_power_w",
}


@dataclass(frozen=True, kw_only=True)
class MeasuredGroup:
    """Jobs that trained on one GPU at the same time.

    Args:
        group_id: Id in `collocations`.
        title: Source of the rows, for tables: imported files by their name, else measured or simulated.
        series: Table or campaign of that source; empty if it has only one.
        device: GPU model.
        jobs: Members alone, in the order of their numbers.
        models: Network of each member; models are held out by it.
        slowdowns: Each member's measured slowdown: noise may take it below 1.
        joint_memory_mib: Memory of the whole group; None where it was not measured.
        doubt: Why a figure may be wrong; empty: no reason is known.
    """

    group_id: str
    title: str
    series: str
    device: str
    jobs: tuple[JobProfile, ...]
    models: tuple[str, ...]
    slowdowns: tuple[float, ...]
    joint_memory_mib: float | None = None
    doubt: str = ""

    @property
    def is_apart(self) -> bool:
        """True where its members did not train at the same time, so that its figures are those of jobs alone."""
        return self.doubt == NOT_TOGETHER


def measured_groups(
    data: str | os.PathLike[str] | None, source: str | Sequence[str] | None = None, device_name: str | None = None
) -> tuple[list[MeasuredGroup], dict[str, int]]:
    """Return the groups in which every member has a slowdown, and the number of groups left out by reason.

    Args:
        data: Data folder; None: the default one.
        source: measured, simulated or imported, or several of them; None: the only one of the table.
        device_name: GPU model; None: all.

    Raises:
        UsageError: There are no such groups, or groups of several sources and `source` is None.
    """
    import warehouse

    columns = (
        "group_id",
        "member",
        "group_size",
        "source",
        "series",
        "device_name",
        "devices",
        "model",
        "name",
        "status",
        "slowdown",
        "doubt",
        "joint_memory_mib",
        "member_row",
        *_PROFILE.values(),
    )
    with warehouse.connect(data) as connection:
        rows = connection.sql(f"SELECT {', '.join(columns)} FROM collocations ORDER BY group_id, member")
        members = rows.to_arrow_table().to_pylist()
    members = [row for row in members if device_name in (None, row["device_name"])]
    sources = sorted({row["source"] for row in members})
    if source is None and len(sources) > 1:
        raise UsageError(f"source=... is needed: collocations holds {', '.join(sources)}")
    wanted = sources if source is None else [source] if isinstance(source, str) else source
    by_group: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in members:
        if row["source"] in wanted:
            by_group[row["group_id"]].append(row)
    if not by_group:
        chosen = "".join(
            f" of {name}={value}"
            for name, value in (("source", source), ("device_name", device_name))
            if value is not None
        )
        raise UsageError(f"the table collocations holds no groups{chosen}; `warehouse.ingest source=lucid` brings some")
    groups, left_out = [], Counter[str]()
    for group_rows in by_group.values():
        problem = _problem(group_rows)
        if problem is not None:
            left_out[problem] += 1
        else:
            groups.append(_group(group_rows))
    return groups, dict(left_out)


def _problem(rows: list[dict[str, Any]]) -> str | None:
    if len(rows) != rows[0]["group_size"]:
        return "a member is missing"
    if any(row["devices"] not in (None, 1) for row in rows):
        return "of jobs on several GPUs"
    if any(row["status"] != "ok" or not row["slowdown"] for row in rows):
        return "a member has no slowdown"
    return None


def _group(rows: list[dict[str, Any]]) -> MeasuredGroup:
    first = rows[0]
    title = first["member_row"].partition("-")[0] if first["source"] == "imported" else first["source"]
    return MeasuredGroup(
        group_id=first["group_id"],
        title=title,
        series=first["series"] or "",
        device=first["device_name"] or "",
        jobs=tuple(
            JobProfile(
                name=row["name"] or row["model"] or "?",
                **{field: row[column] for field, column in _PROFILE.items()},
            )
            for row in rows
        ),
        models=tuple(row["model"] or row["name"] or "?" for row in rows),
        slowdowns=tuple(row["slowdown"] for row in rows),
        joint_memory_mib=first["joint_memory_mib"],
        doubt=max((row["doubt"] or "" for row in rows), key=lambda text: (text == NOT_TOGETHER, text)),
    )


FORMAT = 1
_FILE = "slowdown.json"
FORMS = ("time", "time_and_bandwidth")


@dataclass(frozen=True, slots=True)
class ContentionFormula:
    """Constants of the formula, without units; `sharpness` is that of the softened limit."""

    own: float
    others: float
    sharpness: float
    bandwidth: float

    def slowdown(self, loads: np.ndarray) -> np.ndarray:
        """Return the expected slowdown of each job, (n,), at least 1, from its loads, (n, 4)."""
        own_load, others, own_memory, others_memory = loads.T
        beyond = self.own * own_load + self.others * others - 1.0
        waits = np.logaddexp(0.0, self.sharpness * beyond) / self.sharpness
        slowdown: np.ndarray = 1.0 + waits + self.bandwidth * own_memory * others_memory
        return slowdown


def loads_of(groups: Iterable[Sequence[JobProfile]]) -> np.ndarray:
    """Return the loads of every job of each group; all of them need a `utilization`.

    Returns:
        (n, 4): the job's share of time on the GPU, the sum of its partners', and the same of memory traffic.
    """
    rows: list[tuple[float, ...]] = []
    for group in groups:
        busy, memory = [utilization(job) or 0.0 for job in group], [_traffic(job) for job in group]
        rows += [(used, sum(busy) - used, read, sum(memory) - read) for used, read in zip(busy, memory, strict=True)]
    return np.array(rows, dtype=float).reshape(-1, 4)


def _traffic(job: JobProfile) -> float:
    known = job.memory_util if job.memory_util is not None else job.drama
    return 0.0 if known is None else known


Part = tuple[Sequence[MeasuredGroup], Sequence[MeasuredGroup]]  # groups to fit on, and groups that are left out
LEAST_GROUPS = 10
PERCENTILE = 0.90
_BASE = 0.1  # constant part of the spread of slowdowns, which grows with the slowdown beyond 1
_START = (0.0, 0.0, 2.0, -1.5)  # logarithms of the formula's constants at the start of the fit, also its prior
_FIRMNESS = 3e-3
_TOLERANCE = 0.02  # in normalised speed; larger deviations count in proportion, not squared
_STEPS = 200
_ROW_FIRMNESS = 1.0  # strength of the ridge, in rows, that pulls a job's figure towards 0


@dataclass(frozen=True)
class KnownJobs:
    """Slowdown that each job suffers, and that it causes, as logarithms that add up, and groups that were measured.

    Args:
        middle: Logarithm of the typical slowdown.
        suffers, costs: Job name -> logarithm added to `middle`, for its own slowdown and for the slowdown it causes.
        groups: (name, sorted names of partners) -> logarithm of the slowdown.
    """

    middle: float
    suffers: Mapping[str, float]
    costs: Mapping[str, float]
    groups: Mapping[tuple[str, tuple[str, ...]], float]

    @classmethod
    def fitted(cls, groups: Sequence[MeasuredGroup]) -> KnownJobs:
        """Fit to measured groups, all figures together by ridge regression."""
        from sklearn.feature_extraction import DictVectorizer
        from sklearn.linear_model import Ridge

        logs_by_group: dict[tuple[str, tuple[str, ...]], list[float]] = defaultdict(list)
        for group in groups:
            for place, slowdown in enumerate(group.slowdowns):
                logs_by_group[_key(group.jobs, place)].append(float(np.log(max(1.0, slowdown))))
        medians = {key: float(np.median(values)) for key, values in sorted(logs_by_group.items())}
        middle = float(np.mean(list(medians.values())))
        terms_of_rows = []
        for name, partners in medians:
            terms = Counter(("costs", partner) for partner in partners)
            terms["suffers", name] = 1
            terms_of_rows.append(terms)
        vectorizer = DictVectorizer()
        ridge = Ridge(alpha=_ROW_FIRMNESS, fit_intercept=False, solver="lsqr", tol=1e-9)
        ridge.fit(vectorizer.fit_transform(terms_of_rows), np.array(list(medians.values())) - middle)
        figures = dict(zip(vectorizer.feature_names_, ridge.coef_.tolist(), strict=True))
        suffers = {name: figure for (kind, name), figure in figures.items() if kind == "suffers"}
        costs = {name: figure for (kind, name), figure in figures.items() if kind == "costs"}
        return cls(middle, suffers, costs, medians)

    def knows(self, group: Sequence[JobProfile]) -> bool:
        """Return whether every job of the group was measured beside others."""
        return all(job.name in self.suffers and job.name in self.costs for job in group)

    def slowdown(self, group: Sequence[JobProfile], place: int) -> float:
        """Return the expected slowdown of one job of a group that it `knows`."""
        key = _key(group, place)
        added = self.middle + self.suffers[key[0]] + sum(self.costs[partner] for partner in key[1])
        return float(np.exp(max(0.0, self.groups.get(key, added))))


def _key(jobs: Sequence[JobProfile], place: int) -> tuple[str, tuple[str, ...]]:
    return jobs[place].name, tuple(sorted(job.name for other, job in enumerate(jobs) if other != place))


@dataclass(frozen=True)
class LearnedSlowdowns:
    """The fitted estimator.

    Args:
        contention: None if no fitted group had the utilization of its jobs alone.
        known: Jobs that were measured in groups.
        typical: Median slowdown of the fitted groups.
        spread, spread_known: 90th percentile of (measured - expected) / (`_BASE` + expected - 1): of groups whose model
            was left out; of known jobs in groups that were left out.
    """

    contention: ContentionFormula | None
    known: KnownJobs
    typical: float
    spread: float
    spread_known: float
    name: str = "learned"

    def save(self, folder: Path) -> None:
        """Write the fit, for `load_slowdowns` to read."""
        groups = [[name, list(partners), value] for (name, partners), value in sorted(self.known.groups.items())]
        stored = {"format": FORMAT, **asdict(self), "known": {**vars(self.known), "groups": groups}}
        (folder / _FILE).write_text(json.dumps(stored, indent=1, sort_keys=True))

    def unknown(self, group: Sequence[JobProfile]) -> list[str]:
        """Return the names of jobs without a utilization, unless the group is known by its names.

        A group with such jobs gets the typical slowdown.
        """
        if self.known.knows(group):
            return []
        return [job.name for job in group if self.contention is None or utilization(job) is None]

    def slowdowns(self, group: Sequence[JobProfile]) -> list[Slowdown]:
        """Return the slowdown of each of one to four jobs, in the group's order; 1 for a job that is alone."""
        if len(group) < 2:
            return [Slowdown(1.0, 1.0) for _ in group]
        if self.contention is not None and all(utilization(job) is not None for job in group):
            expected = self.contention.slowdown(loads_of([group])).tolist()
            return [_with_p90(value, self.spread) for value in _within_all_sms(group, expected)]
        spread = max(self.spread, self.spread_known)
        if self.known.knows(group):
            return [_with_p90(self.known.slowdown(group, place), self.spread_known) for place in range(len(group))]
        return [_with_p90(1.0 + (self.typical - 1.0) * (len(group) - 1), spread) for _ in group]


def _within_all_sms(group: Sequence[JobProfile], expected: Sequence[float]) -> list[float]:
    """Return the slowdowns, raised where SMs would be active for more than the whole time.

    Jobs that take turns on a GPU share its SMs' time. nvidia-smi's utilization does not show it, since it counts a
    kernel that leaves most SMs idle like any other.
    """
    if any(job.smact is None for job in group):
        return list(expected)
    active = sum((job.smact or 0.0) / slowdown for job, slowdown in zip(group, expected, strict=True))
    return [max(1.0, active) * slowdown for slowdown in expected]


def _with_p90(expected: float, spread: float) -> Slowdown:
    median = max(1.0, expected)
    return Slowdown(median, max(median, median + spread * (_BASE + median - 1.0)))


@cache
def packaged_slowdowns() -> LearnedSlowdowns:
    """Return the estimator for data folders without a fitted one: it is fitted to Lucid's pairs of jobs on an RTX
    3090."""
    return LearnedSlowdowns(
        contention=ContentionFormula(own=0.878, others=0.748, sharpness=8.16, bandwidth=0.237),
        known=KnownJobs(0.0, {}, {}, {}),
        typical=1.034,
        spread=0.671,
        spread_known=0.671,
    )


def fitted_slowdowns(groups: Sequence[MeasuredGroup]) -> LearnedSlowdowns:
    """Fit to measured groups; groups whose members did not train at the same time are left out.

    The form of the formula and the 90th percentile follow from leaving each model out in turn. The fit is
    deterministic. Raises `UsageError` for too few groups.
    """
    groups = sorted((group for group in groups if not group.is_apart), key=lambda group: group.group_id)
    if len(groups) < LEAST_GROUPS:
        raise UsageError(f"{len(groups)} groups are too few to learn from; {LEAST_GROUPS} are needed")
    typical = float(np.median(_measured_slowdowns(groups)))
    known = KnownJobs.fitted(groups)
    spread_known = _known_spread(groups)
    profiled = [group for group in groups if all(utilization(job) is not None for job in group.jobs)]
    if len(profiled) < LEAST_GROUPS:
        return LearnedSlowdowns(None, known, typical, spread_known, spread_known)
    outside = {form: _left_out(profiled, form) for form in FORMS}
    form = min(FORMS, key=lambda name: _mean_error(*outside[name]))
    return LearnedSlowdowns(_fit_contention(profiled, form), known, typical, _spread(*outside[form]), spread_known)


def _measured_slowdowns(groups: Sequence[MeasuredGroup]) -> np.ndarray:
    """Return the slowdown of every job of each group, (n,), at least 1."""
    return np.array([max(1.0, slowdown) for group in groups for slowdown in group.slowdowns])


def _fit_contention(groups: Sequence[MeasuredGroup], form: str) -> ContentionFormula:
    """Fit the formula to normalised speeds; every model has equal weight, whatever its number of groups."""
    from scipy.optimize import minimize

    models = [model for group in groups for model in group.models]
    counts = Counter(models)
    weights = np.array([1.0 / counts[model] for model in models])
    loads, speed = loads_of(group.jobs for group in groups), 1.0 / _measured_slowdowns(groups)

    def formula(logs: np.ndarray) -> ContentionFormula:
        own, others, sharpness, bandwidth = np.exp(logs).tolist()
        return ContentionFormula(own, others, sharpness, bandwidth if form == "time_and_bandwidth" else 0.0)

    def error(logs: np.ndarray) -> float:
        off = np.sqrt((1.0 / formula(logs).slowdown(loads) - speed) ** 2 + _TOLERANCE**2) - _TOLERANCE
        return float(np.average(off, weights=weights) + _FIRMNESS * ((logs - _START) ** 2).sum())

    return formula(minimize(error, np.array(_START), options={"maxiter": _STEPS}).x)


def left_out_parts(groups: Sequence[MeasuredGroup], by: str) -> list[Part]:
    """Return the groups to fit on and the groups left out: each model (`by` model) or GPU model (`by` device) in turn.

    Groups whose members did not train at the same time are never fitted on; parts with too few groups to fit on are
    skipped.
    """

    def names(group: MeasuredGroup) -> tuple[str, ...]:
        return group.models if by == "model" else (group.device,)

    parts: list[Part] = []
    for name in sorted({name for group in groups for name in names(group)}):
        inside = [group for group in groups if name not in names(group) and not group.is_apart]
        if len(inside) >= LEAST_GROUPS:
            parts.append((inside, [group for group in groups if name in names(group)]))
    return parts


def _left_out(groups: Sequence[MeasuredGroup], form: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (expected, measured) slowdowns of groups whose models were left out, each model in turn."""
    expected, measured = [], []
    for inside, outside in left_out_parts(groups, "model") or [(groups, groups)]:  # if all have the same model
        expected.append(_fit_contention(inside, form).slowdown(loads_of(group.jobs for group in outside)))
        measured.append(_measured_slowdowns(outside))
    return np.concatenate(expected), np.concatenate(measured)


def _mean_error(expected: np.ndarray, measured: np.ndarray) -> float:
    return float(np.abs(1.0 / expected - 1.0 / measured).mean())


def _spread(expected: np.ndarray, measured: np.ndarray) -> float:
    off = (measured - expected) / (_BASE + expected - 1.0)
    return float(max(0.0, np.quantile(off, PERCENTILE, method="higher")))


def _known_spread(groups: Sequence[MeasuredGroup]) -> float:
    """Return the spread of known jobs in left-out groups: of each device in turn, or of each half in turn where no
    device leaves enough groups to fit on."""
    even, odd = groups[::2], groups[1::2]
    expected, measured = [], []
    for inside, outside in left_out_parts(groups, "device") or [(even, odd), (odd, even)]:
        known = KnownJobs.fitted(inside)
        for group in [group for group in outside if known.knows(group.jobs)]:
            expected += [known.slowdown(group.jobs, place) for place in range(len(group.jobs))]
            measured += [max(1.0, slowdown) for slowdown in group.slowdowns]
    return _spread(np.array(expected), np.array(measured)) if expected else 1.0


def default_slowdowns(data: DataPlace) -> LearnedSlowdowns:
    """Return the newest fit of a data folder, else the packaged one."""
    return find_slowdowns(data) or packaged_slowdowns()


def find_slowdowns(data: DataPlace) -> LearnedSlowdowns | None:
    """Return the newest version of a data folder; None where nothing was fitted.

    A damaged version is reported on standard error, and the next older one takes its place.
    """
    return newest_whole(version_folders(data, SLOWDOWN), load_slowdowns, "the packaged figures answer")


def load_slowdowns(path: Path) -> LearnedSlowdowns:
    """Return one version, with its files verified first. Raises `DamagedArtifact`."""
    verify_files(path, read_json(path / "meta.json"))
    try:
        stored = json.loads((path / "model" / _FILE).read_text())
        if (version := stored.pop("format")) != FORMAT:
            raise EnvironmentProblem(f"slowdown models of format {version}, this code knows {FORMAT}")
        known, contention = stored["known"], stored["contention"]
        known["groups"] = {(name, tuple(partners)): value for name, partners, value in known["groups"]}
        stored["contention"] = None if contention is None else ContentionFormula(**contention)
        return LearnedSlowdowns(**{**stored, "known": KnownJobs(**known)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedArtifact(f"{path} is damaged: {type(error).__name__} in {_FILE}") from error
