"""Chooses what to measure next: candidates from a search space, and those of them that are worth a run.

Start reading at `candidates` and `choose`. Beside it, `coverage` counts what is there, `active` asks where the
estimator is unsure, `forecast` says what candidates will come to, and `known_runs` reads what was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from conf.errors import CommandError, UsageError
from farm.sampling.dimensions import Space
from farm.sampling.draws import NO_LIMITS, Limits, sample_range
from farm.sampling.known_runs import Known
from farm.sampling.networks import Networks
from featurize.configs.trial import TrialConfig, config_hash

if TYPE_CHECKING:
    from farm.sampling.forecast import Outlook

POLICIES = ("uniform", "stratified", "coverage", "active")
_LOOKING = ("coverage", "active")  # those that look at every candidate
TAKES_FIRST = ("uniform", "stratified")  # those that take the first ones
_UNSURE_OF = ("memory", "smact", "smocc", "drama")  # targets that `active` is unsure of, as far as they are measured


class CandidateForecaster(Protocol):
    """Forecasts that `choose` needs of candidates. `forecast.Forecaster` implements it."""

    def look(self, configs: Sequence[TrialConfig], progress: Callable[[int, int], None] = ...) -> Outlook: ...

    @property
    def capacity_mib(self) -> float: ...


@dataclass(frozen=True)
class CandidatePool:
    """Candidates of one or more spaces: config, its hash, and its index in its family's sequence, in one order.

    next_index  family -> where its sequence goes on after all of these
    """

    configs: tuple[TrialConfig, ...]
    hashes: tuple[str, ...]
    indices: tuple[int, ...]
    next_index: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.configs)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """One candidate to run, with the reasons.

    index         in its family's sequence
    bins          dimension -> the cell that it probably falls into (`farm.sampling.coverage.DIMENSIONS`)
    rows          dimension -> rows that were known of that cell before this choice
    uncertainty   of `active`: 1 is the candidates' mean; disagreement: of it, in the logarithm of memory
    distance      of `active`: to the nearest row known or chosen before, in standard deviations of features
    figures       target -> what is expected, in the target's unit
    """

    index: int
    config: TrialConfig
    config_hash: str
    bins: Mapping[str, str]
    rows: Mapping[str, int]
    figures: Mapping[str, float]
    uncertainty: float | None = None
    disagreement: float | None = None
    distance: float | None = None

    @property
    def why(self) -> str:
        """Return the reason in words: the cell with the fewest rows, the region, and the doubt if asked for."""
        emptiest = min((name for name in self.rows if name != "region"), key=lambda name: self.rows[name])
        reason = f"{self.bins[emptiest]}: {self.rows[emptiest]} rows; {self.bins['region']}: {self.rows['region']} rows"
        return reason if self.uncertainty is None else f"{reason}; {self.uncertainty:.1f} x as uncertain as the mean"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The candidates that `choose` took, in the order in which they will run.

    pool, measured, repeated  candidates; of them left out as measured already, and as copies of one another
    next_index  family -> where its sequence goes on: what a policy has not looked at comes again, what it has does not
    gained      dimension -> cell -> (rows known, rows chosen), the cells that gain
    ways        how the figures were found (`farm.sampling.forecast.WAYS`) -> candidates chosen
    """

    policy: str
    chosen: tuple[Chosen, ...]
    pool: int
    measured: int
    repeated: int
    next_index: Mapping[str, int]
    gained: Mapping[str, Mapping[str, tuple[int, int]]]
    ways: Mapping[str, int]
    notes: tuple[str, ...] = field(default_factory=tuple)


def candidates(
    space: Space,
    policy: str,
    seed: int,
    start: int,
    count: int,
    limits: Limits = NO_LIMITS,
    rejections: Counter[str] | None = None,
) -> CandidatePool:
    """Return `count` configs of the space's sequence from index `start` on, where the last night ended.

    `uniform` draws independent points; every other policy goes on with the low-discrepancy sequence. Errors as in
    `farm.sampling.draws.sample_range`.
    """
    points = "uniform" if policy == "uniform" else "stratified"
    configs = tuple(sample_range(space, seed, start, start + count, points, limits, rejections))
    hashes = tuple(map(config_hash, configs))
    return CandidatePool(configs, hashes, tuple(range(start, start + count)), {space.family: start + count})


def joined(pools: Sequence[CandidatePool]) -> CandidatePool:
    """Merge pools of different families in turns, so that a prefix has its share of each."""
    if len({name for pool in pools for name in pool.next_index}) < sum(len(pool.next_index) for pool in pools):
        raise UsageError("two pools are of the same family; make one of them, with a larger count")
    order = sorted(((i + 0.5) / len(pool), k, i) for k, pool in enumerate(pools) for i in range(len(pool)))
    return CandidatePool(
        tuple(pools[k].configs[i] for _, k, i in order),
        tuple(pools[k].hashes[i] for _, k, i in order),
        tuple(pools[k].indices[i] for _, k, i in order),
        {name: index for pool in pools for name, index in pool.next_index.items()},
    )


def choose(
    policy: str,
    pool: CandidatePool,
    known: Known,
    n: int,
    estimator: CandidateForecaster,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Selection:
    """Choose the `n` candidates to measure next (fewer if the pool has no more), in order, with reasons.

    uniform, stratified  the first of the sequence
    coverage  those whose label bins and feature regions have the fewest rows (`farm.sampling.coverage.fill`)
    active    drawn at random, the likelier the less the known rows tell of them and the rarer their bins
              (`farm.sampling.active.worth`); while fewer than 20 rows are known, as `coverage`

    Candidates whose `config_hash` is in `known.measured` are left out, copies within the pool, and those whose network
    cannot be built; a note counts the last. The same arguments give the same choice. Raises `UsageError` where
    nothing new is left.
    """
    at_most = None if policy in _LOOKING else n
    fresh = _fresh(pool, known, at_most)
    try:
        outlook = _look(estimator, fresh, pool, known, progress)
    except CommandError:
        fresh = _fresh(pool, known, at_most, Networks())  # only now: trying each costs time
        if not fresh.unbuildable:
            raise
        outlook = _look(estimator, fresh, pool, known, progress)
    next_index = dict(pool.next_index) if policy in _LOOKING else _after(pool, fresh.looked)
    asked = [pool.configs[i] for i in fresh.places]
    new, old = np.arange(len(asked)), len(asked) + np.arange(len(known.configs))
    figures = _with_labels(outlook, known, old)
    notes = [f"left out: {fresh.cannot_be_built()}"] if fresh.unbuildable else []
    doubts: dict = {}
    if policy == "active":
        doubts = _doubts(outlook, known, new, old, seed)
        if not doubts:
            notes.append("too few rows are known to tell where the estimator is unsure: chosen by coverage")
        for target, doubt in doubts.items():
            figures[target][new] = _shifted(outlook.figures[target][new], doubt.shift, target)
    from farm.sampling.coverage import Map, fill

    cells = Map.of([*asked, *known.configs], figures, outlook.parameters, estimator.capacity_mib)
    distances: np.ndarray | None = None
    if doubts:
        places, distances = _drawn(cells, outlook, doubts, figures["memory"], new, old, n, estimator.capacity_mib, seed)
    elif policy in _LOOKING:
        places = fill(cells, old, new, n, seed)
    else:
        places = new[:n]
    chosen = _chosen(pool, fresh.places, places, cells, old, figures, doubts, distances)
    return Selection(
        policy=policy,
        chosen=chosen,
        pool=len(pool),
        measured=fresh.measured,
        repeated=fresh.repeated,
        next_index=next_index,
        gained=_gained(cells, old, places),
        ways=dict(sorted(Counter(outlook.ways[places].tolist()).items())),
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Fresh:
    """Places of the new candidates, and counts of the others that were looked at.

    measured, repeated, unbuildable  measured already; copies; candidates whose network cannot be built, by the reason
    """

    places: list[int]
    measured: int
    repeated: int
    unbuildable: Counter[str]
    looked: int

    def cannot_be_built(self) -> str:
        """Return how many candidates cannot be built, with the commonest reason, in one line."""
        ((reason, _),) = self.unbuildable.most_common(1)
        count, others = self.unbuildable.total(), len(self.unbuildable) - 1
        more = f"; and {others:,} other reason{'s' if others > 1 else ''}" if others else ""
        return f"{count:,} candidate{'s' if count > 1 else ''} whose model cannot be built: {reason}{more}"


def _fresh(pool: CandidatePool, known: Known, at_most: int | None, networks: Networks | None = None) -> _Fresh:
    """Return at most `at_most` candidates not measured yet. `networks`: leave out those that cannot be built."""
    seen: set[str] = set()
    places: list[int] = []
    unbuildable: Counter[str] = Counter()
    measured = repeated = looked = 0
    for place, name in enumerate(pool.hashes):
        if at_most is not None and len(places) == at_most:
            break
        looked += 1
        if name in known.measured:
            measured += 1
        elif name in seen:
            repeated += 1
        else:
            seen.add(name)
            problem = None if networks is None else networks.problem(pool.configs[place])
            if problem is None:
                places.append(place)
            else:
                unbuildable[problem] += 1
    return _Fresh(places, measured, repeated, unbuildable, looked)


def _look(estimator: CandidateForecaster, fresh: _Fresh, pool: CandidatePool, known: Known, progress) -> Outlook:
    """Return the outlook on the fresh candidates, then the known rows. Raises `UsageError` if none is fresh."""
    if fresh.places:
        return estimator.look([*(pool.configs[i] for i in fresh.places), *known.configs], progress)
    if fresh.unbuildable:
        raise UsageError(f"nothing is left of {len(pool):,} candidates: {fresh.cannot_be_built()}")
    raise UsageError(f"all {len(pool):,} candidates are measured already; take more of them, or widen the search space")


def _after(pool: CandidatePool, looked: int) -> dict[str, int]:
    """Return where each family's sequence continues when only the first `looked` candidates are used up."""
    following = dict(pool.next_index)
    for config, index in zip(reversed(pool.configs[looked:]), reversed(pool.indices[looked:]), strict=True):
        following[config.family] = index
    return following


def _with_labels(outlook: Outlook, known: Known, old: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rough figures, with labels for measured rows; out of memory counts as more than any device has."""
    figures = {name: column.copy() for name, column in outlook.figures.items()}
    for name, labels in known.labels.items():
        if name in figures:
            figures[name][old] = np.where(np.isfinite(labels), labels, figures[name][old])
    figures["memory"][old[known.out_of_memory]] = np.inf
    return figures


def _doubts(outlook: Outlook, known: Known, new, old, seed: int) -> dict:
    from farm.sampling.active import doubts

    by_target = {}
    for target in _UNSURE_OF:
        labels = known.labels.get(target)
        if labels is None:
            continue
        exact = np.where(known.out_of_memory, np.nan, labels)
        figures = outlook.figures[target]
        of_target = doubts(target, outlook.table[new], figures[new], outlook.table[old], figures[old], exact, seed=seed)
        if of_target is not None:
            by_target[target] = of_target
    return by_target


def _shifted(figures: np.ndarray, shift: np.ndarray, target: str) -> np.ndarray:
    from learn.estimators.protocol import from_space, to_space
    from learn.rows.targets import get_target

    space = get_target(target).space
    return from_space(to_space(figures, space) + shift, space)


def _drawn(cells, outlook: Outlook, doubts: dict, memory, new, old, n, capacity, seed) -> tuple[np.ndarray, np.ndarray]:
    from farm.sampling.active import chance_to_fit, distances, drawn, worth
    from farm.sampling.coverage import DIMENSIONS

    scores = {target: doubt.score for target, doubt in doubts.items()}
    of_target = {target: cells.codes[new, DIMENSIONS.index(target)] for target in doubts}
    fits = np.ones(len(new))
    if "memory" in doubts:
        fits = chance_to_fit(memory[new], doubts["memory"].disagreement, capacity)
    places = drawn(worth(scores, of_target, fits), n, seed)
    return places, distances(outlook.table[places], outlook.table[old])


def _chosen(pool: CandidatePool, fresh, places, cells, old, figures, doubts: dict, distances) -> tuple[Chosen, ...]:
    from farm.sampling.coverage import DIMENSIONS

    before = cells.counts(old)
    score = np.mean([doubt.score for doubt in doubts.values()], axis=0) if doubts else None
    memory = doubts.get("memory")
    chosen = []
    for rank, place in enumerate(places.tolist()):
        at = fresh[place]
        chosen.append(
            Chosen(
                index=pool.indices[at],
                config=pool.configs[at],
                config_hash=pool.hashes[at],
                bins={name: cells.cell(place, name) for name in DIMENSIONS},
                rows={name: int(before[k][cells.codes[place, k]]) for k, name in enumerate(DIMENSIONS)},
                figures={name: float(column[place]) for name, column in figures.items()},
                uncertainty=None if score is None else float(score[place]),
                disagreement=None if memory is None else float(memory.disagreement[place]),
                distance=None if distances is None else float(distances[rank]),
            )
        )
    return tuple(chosen)


def _gained(cells, old: np.ndarray, places: np.ndarray) -> dict[str, dict[str, tuple[int, int]]]:
    before, added = cells.tally(old), cells.tally(places)
    return {
        name: {cell: (before[name].get(cell, 0), n) for cell, n in sorted(of_cell.items())}
        for name, of_cell in added.items()
    }
