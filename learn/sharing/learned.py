"""The learned slowdown of each job of a group, with a calibrated 90th percentile.

Start reading at `fitted_slowdowns`. `ContentionFormula` answers for jobs whose utilization alone is known, `KnownJobs`
for jobs that were measured beside others under the same name, the typical slowdown for all others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from conf.errors import UsageError
from learn.sharing.contention import FORMS, ContentionFormula, loads_of
from learn.sharing.profile import JobProfile, utilization
from learn.sharing.rows import MeasuredGroup
from learn.sharing.slowdown import Slowdown

LEAST_GROUPS = 10
_PERCENTILE = 0.90
_BASE = 0.1  # of the spread of slowdowns: it grows with the slowdown beyond 1, from here
_START = (0.0, 0.0, 2.0, -1.5)  # logarithms of the formula's figures, where the fit begins and what it is held to
_FIRMNESS = 3e-3
_TOLERANCE = 0.02  # of normalised speed; what is further off counts in proportion, not squared
_STEPS = 200
_ROW_FIRMNESS = 1.0  # rows that a job's figure is held to 0 by
_ROUNDS = 30


@dataclass(frozen=True)
class KnownJobs:
    """How much each job suffers and how much it costs others, as logarithms that add up, and groups seen before.

    Args:
        middle: Logarithm of the typical slowdown.
        suffers, costs: Name -> beyond that.
        groups: (name, names of partners, sorted) -> logarithm of the slowdown.
    """

    middle: float
    suffers: Mapping[str, float]
    costs: Mapping[str, float]
    groups: Mapping[tuple[str, tuple[str, ...]], float]

    @classmethod
    def fitted(cls, groups: Sequence[MeasuredGroup]) -> KnownJobs:
        """Fit to measured groups, each figure by ridge regression in turns."""
        seen: dict[tuple[str, tuple[str, ...]], list[float]] = defaultdict(list)
        for group in groups:
            for place, slowdown in enumerate(group.slowdowns):
                seen[_key(group.jobs, place)].append(float(np.log(max(1.0, slowdown))))
        medians = {key: float(np.median(values)) for key, values in sorted(seen.items())}
        middle = float(np.mean(list(medians.values())))
        suffers: dict[str, float] = {}
        costs: dict[str, float] = {}
        for _ in range(_ROUNDS):
            for own in (True, False):
                left: dict[str, list[float]] = defaultdict(list)
                for (name, partners), value in medians.items():
                    both = middle + suffers.get(name, 0.0) + sum(costs.get(partner, 0.0) for partner in partners)
                    table = suffers if own else costs
                    for job in (name,) if own else partners:
                        left[job].append(value - both + table.get(job, 0.0))
                fresh = {job: sum(values) / (len(values) + _ROW_FIRMNESS) for job, values in left.items()}
                suffers, costs = (fresh, costs) if own else (suffers, fresh)
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
    return jobs[place].name, tuple(sorted(job.name for at, job in enumerate(jobs) if at != place))


@dataclass(frozen=True)
class LearnedSlowdowns:
    """The fitted estimator.

    Args:
        contention: None: no fitted group had the utilization of its jobs alone.
        known: Jobs that were measured in groups.
        typical: Median slowdown of what it was fitted on.
        spread, spread_known: 90th percentile of (measured - expected) / (`_BASE` + expected - 1), of groups without
            the model in question; of known jobs in groups that were left out.
    """

    contention: ContentionFormula | None
    known: KnownJobs
    typical: float
    spread: float
    spread_known: float
    name: str = "learned"

    def unknown(self, group: Sequence[JobProfile]) -> list[str]:
        """Return the names of jobs without a utilization, where the group is not known by its names either.

        Such a group is answered by the typical slowdown.
        """
        if self.known.knows(group):
            return []
        return [job.name for job in group if self.contention is None or utilization(job) is None]

    def slowdowns(self, group: Sequence[JobProfile]) -> list[Slowdown]:
        """Return the slowdown of each job of one to four, in the group's order; 1 for a job that is alone."""
        if len(group) < 2:
            return [Slowdown(1.0, 1.0) for _ in group]
        if self.contention is not None and all(utilization(job) is not None for job in group):
            expected = self.contention.slowdown(loads_of([group] * len(group), range(len(group)))).tolist()
            return [_with_p90(value, self.spread) for value in _within_all_sms(group, expected)]
        spread = max(self.spread, self.spread_known)
        if self.known.knows(group):
            return [_with_p90(self.known.slowdown(group, place), self.spread_known) for place in range(len(group))]
        return [_with_p90(1.0 + (self.typical - 1.0) * (len(group) - 1), spread) for _ in group]


def _within_all_sms(group: Sequence[JobProfile], expected: Sequence[float]) -> list[float]:
    """Return the slowdowns, longer where SMs would be active for more than all of the time.

    Jobs that take turns on a GPU share its SMs' time; nvidia-smi's utilization cannot tell, since a kernel that leaves
    most SMs idle counts as much as any.
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
    """Return the estimator for data folders without a fitted one: fitted to Lucid's pairs of jobs on an RTX 3090."""
    return LearnedSlowdowns(
        contention=ContentionFormula(own=0.878, others=0.748, sharpness=8.16, bandwidth=0.237),
        known=KnownJobs(0.0, {}, {}, {}),
        typical=1.034,
        spread=0.671,
        spread_known=0.671,
    )


def fitted_slowdowns(groups: Sequence[MeasuredGroup]) -> LearnedSlowdowns:
    """Fit to measured groups; groups whose members did not train at the same time are left out.

    Which form of the formula is taken, and how wide the 90th percentile lies, follow from leaving each model out in
    turn. Same groups, same figures. Raises `UsageError` for too few groups.
    """
    groups = sorted((group for group in groups if not group.is_apart), key=lambda group: group.group_id)
    if len(groups) < LEAST_GROUPS:
        raise UsageError(f"{len(groups)} groups are too few to learn from; {LEAST_GROUPS} are needed")
    typical = float(np.median([max(1.0, slowdown) for group in groups for slowdown in group.slowdowns]))
    known = KnownJobs.fitted(groups)
    spread_known = _known_spread(groups)
    profiled = [group for group in groups if all(utilization(job) is not None for job in group.jobs)]
    if len(profiled) < LEAST_GROUPS:
        return LearnedSlowdowns(None, known, typical, spread_known, spread_known)
    outside = {form: _left_out(profiled, form) for form in FORMS}
    form = min(FORMS, key=lambda name: _mean_error(outside[name]))
    return LearnedSlowdowns(_fit_contention(profiled, form), known, typical, _spread(outside[form]), spread_known)


def _rows(groups: Sequence[MeasuredGroup]) -> tuple[list[Sequence[JobProfile]], list[int], np.ndarray, list[str]]:
    places = [(group, place) for group in groups for place in range(len(group.jobs))]
    measured = np.array([max(1.0, group.slowdowns[place]) for group, place in places])
    return (
        [group.jobs for group, _ in places],
        [place for _, place in places],
        measured,
        [group.models[place] for group, place in places],
    )


def _fit_contention(groups: Sequence[MeasuredGroup], form: str) -> ContentionFormula:
    """Fit the formula to normalised speeds; every model counts the same, however many groups it is in."""
    import torch

    jobs, places, measured, models = _rows(groups)
    counts = Counter(models)
    weights = torch.tensor([1.0 / counts[model] for model in models], dtype=torch.float64)
    weights = weights / weights.sum()
    own, others, own_memory, others_memory = torch.tensor(loads_of(jobs, places)).unbind(1)
    speed = torch.tensor(1.0 / measured)
    start = torch.tensor(_START, dtype=torch.float64)
    values = start.clone().requires_grad_()
    has_bandwidth = 1.0 if form == "time_and_bandwidth" else 0.0
    search = torch.optim.LBFGS([values], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        own_share, others_share, sharpness, bandwidth = values.exp()
        waits = torch.nn.functional.softplus(sharpness * (own_share * own + others_share * others - 1.0)) / sharpness
        slowdown = 1.0 + waits + has_bandwidth * bandwidth * own_memory * others_memory
        off = 1.0 / slowdown - speed
        total = (weights * (torch.sqrt(off**2 + _TOLERANCE**2) - _TOLERANCE)).sum()
        total = total + _FIRMNESS * ((values - start) ** 2).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(loss)  # type: ignore[no-untyped-call]
    own_share, others_share, sharpness, bandwidth = values.detach().exp().tolist()
    return ContentionFormula(own_share, others_share, sharpness, bandwidth * has_bandwidth)


def _left_out(groups: Sequence[MeasuredGroup], form: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (expected, measured) slowdowns of groups whose models were left out, each model in turn."""
    expected, measured = [], []
    for model in sorted({model for group in groups for model in group.models}):
        inside = [group for group in groups if model not in group.models]
        outside = [group for group in groups if model in group.models]
        if len(inside) < LEAST_GROUPS:
            continue
        jobs, places, truth, _ = _rows(outside)
        expected.append(_fit_contention(inside, form).slowdown(loads_of(jobs, places)))
        measured.append(truth)
    if not expected:  # every group has the same model
        jobs, places, truth, _ = _rows(groups)
        return _fit_contention(groups, form).slowdown(loads_of(jobs, places)), truth
    return np.concatenate(expected), np.concatenate(measured)


def _mean_error(pair: tuple[np.ndarray, np.ndarray]) -> float:
    expected, measured = pair
    return float(np.abs(1.0 / expected - 1.0 / measured).mean())


def _spread(pair: tuple[np.ndarray, np.ndarray]) -> float:
    expected, measured = pair
    off = (measured - expected) / (_BASE + expected - 1.0)
    return float(max(0.0, np.quantile(off, _PERCENTILE, method="higher")))


def _known_spread(groups: Sequence[MeasuredGroup]) -> float:
    """Return the spread of known jobs in groups that were left out: each device in turn, of one device every second
    group."""
    parts = [group.device for group in groups]
    if len(set(parts)) < 2:
        parts = [str(at % 2) for at in range(len(groups))]
    expected, measured = [], []
    for part in sorted(set(parts)):
        known = KnownJobs.fitted([group for group, own in zip(groups, parts, strict=True) if own != part])
        for group, own in zip(groups, parts, strict=True):
            if own == part and known.knows(group.jobs):
                expected += [known.slowdown(group.jobs, place) for place in range(len(group.jobs))]
                measured += [max(1.0, slowdown) for slowdown in group.slowdowns]
    return _spread((np.array(expected), np.array(measured))) if expected else 1.0
