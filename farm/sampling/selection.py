"""Chooses what to measure next: draws candidates from a search space, and selects those that are worth a run.

Start reading at `candidates` and `choose`; `worth` rates a run by the estimator's uncertainty. `known_runs` reads a
device's measured runs, `Map` counts them by bins of labels and regions of configs, and `fill` finds where rows are few.
`forecast` predicts the candidates' labels.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from conf.errors import CommandError, UsageError
from conf.plain_text import count_of
from farm.sampling.forecast import Forecaster, Outlook
from featurize.configs.space import NO_LIMITS, Limits, Space, sample_range
from featurize.configs.trial import TrialConfig, config_hash, config_of_row, problem_of
from featurize.device.device_spec import same_device
from featurize.families import get_family
from learn.estimators.protocol import from_space, to_space
from learn.rows.data import (
    LEVELS,
    MIB_PER_GB,
    TARGETS,
    UTILIZATION_EDGES,
    default_bin_gb,
    get_target,
    named,
    utilization_bins,
)
from warehouse.files.folder import DataFolder
from warehouse.tables.schema import ENVIRONMENT


@dataclass(frozen=True)
class Known:
    """Runs of one device and source.

    measured  hashes of the configs that ran there in this environment, with any outcome
    configs   (k,) of the runs with a label to learn from, in any environment
    labels    target -> (k,) in the target's unit, NaN if not measured
    out_of_memory  (k,) bool: the run did not fit, and has no figures
    seconds   (k,) wall time of each run, NaN if unknown
    left_out  sentences on runs with a label from which nothing can be learned
    """

    measured: frozenset[str]
    configs: tuple[TrialConfig, ...]
    labels: Mapping[str, np.ndarray]
    out_of_memory: np.ndarray
    seconds: np.ndarray
    left_out: tuple[str, ...] = ()

    @classmethod
    def nothing(cls) -> Known:
        return cls(frozenset(), (), {}, np.zeros(0, dtype=bool), np.zeros(0))


def known_runs(
    data: DataFolder | str | os.PathLike[str] | None,
    device_name: str,
    *,
    source: str = "measured",
    environment: Mapping[str, str | None] | None = None,
) -> Known:
    """Read the device's runs from the warehouse at `data` (None: the default folder), sorted by `run_id`.

    `environment`: columns of `ENVIRONMENT` -> tonight's values; runs of another environment may be measured again, but
    count as rows. None: any environment. Untrusted runs count as measured, but have no labels.
    """
    from warehouse.reading.connection import select

    environment = environment or {}
    labels = {name: target.column for name, target in TARGETS.items()}
    about = (
        "run_id",
        "family",
        "config_hash",
        "config",
        "device_name",
        "status",
        "oom_kind",
        "quality",
        "error_type",
        "wall_s",
    )
    columns = (*about, *ENVIRONMENT, *labels.values())
    query = f"SELECT {', '.join(columns)} FROM runs WHERE source = ? AND group_id IS NULL ORDER BY run_id"
    device_rows = select(data, query, [source])
    device_rows = [row for row in device_rows if row["device_name"] and same_device(row["device_name"], device_name)]
    measured = {row["config_hash"] for row in device_rows if all(row[name] == v for name, v in environment.items())}
    configs, labelled_rows = [], []
    left_out: dict[str, list[str]] = {}
    for row in device_rows:
        is_out_of_memory = row["status"] == "oom" and row["oom_kind"] == "device"
        doubtful = row["quality"] == "untrusted" or row["error_type"] == "doubt"
        if doubtful or not (is_out_of_memory or (row["status"] == "ok" and row["peak_memory_mib"])):
            continue
        try:
            config = config_of_row(row["config"])
            problem = problem_of(config)
        except UsageError as error:  # a family or field that this version lacks, or no config
            problem = str(error)
        if problem is not None:
            left_out.setdefault(problem, []).append(row["run_id"])
            continue
        configs.append(config)
        labelled_rows.append(row)
    values = {
        name: np.array([np.nan if row[column] is None else row[column] for row in labelled_rows], dtype=float)
        for name, column in labels.items()
    }
    return Known(
        frozenset(measured),
        tuple(configs),
        values,
        np.array([row["status"] == "oom" for row in labelled_rows], dtype=bool),
        np.array([np.nan if row["wall_s"] is None else row["wall_s"] for row in labelled_rows], dtype=float),
        tuple(f"{named(run_ids)} left out: {problem}" for problem, run_ids in sorted(left_out.items())),
    )


def thin(known: Known, at_most: int, seed: int = 0) -> Known:
    """Keep at most this many rows: all rows of rare kinds, and equally many of each common kind.

    A kind is a family, an octave of memory and a tenth of `smact`; out of memory is a separate kind. `measured` stays
    as it is.
    """
    if len(known.configs) <= at_most:
        return known
    memory = known.labels["memory"]
    octave = np.where(known.out_of_memory, -1, np.floor(np.log2(np.maximum(np.nan_to_num(memory, nan=1.0), 1.0))))
    tenth = np.floor(10 * np.nan_to_num(known.labels.get("smact", np.zeros(len(memory))), nan=-1.0))
    family = np.unique([config.family for config in known.configs], return_inverse=True)[1]
    kind = np.unique(np.stack([family, octave, tenth], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    # Each row's number within its kind, in any order: the lowest numbers of all kinds come first.
    order = np.random.default_rng(seed).permutation(len(kind))
    by_kind = order[np.argsort(kind[order], kind="stable")]
    first = np.searchsorted(kind[by_kind], kind[by_kind])
    number = np.arange(len(by_kind)) - first
    places = np.sort(by_kind[np.argsort(number, kind="stable")[:at_most]])
    return replace(
        known,
        configs=tuple(known.configs[place] for place in places),
        labels={name: values[places] for name, values in known.labels.items()},
        out_of_memory=known.out_of_memory[places],
        seconds=known.seconds[places],
    )


OUT_OF_MEMORY = "out of memory"
NO_FIGURE = "unknown"
DIMENSIONS = ("memory", *UTILIZATION_EDGES, "region")


@dataclass(frozen=True)
class Map:
    """The cells of n configs in each dimension: `memory`, `smact`, `smocc`, `drama` and `region`.

    codes  (n, dimensions) int, an index into that dimension's `names`; a cell belongs to one family
    """

    codes: np.ndarray
    names: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(
        cls,
        configs: Sequence[TrialConfig],
        figures: Mapping[str, np.ndarray],
        parameters: np.ndarray,
        capacity_mib: float,
    ) -> Map:
        """Return the cells of configs.

        `figures`: target -> (n,) in the target's unit, NaN if unknown; `parameters`: (n,) of the networks. Memory of
        `capacity_mib` or more is one cell: such runs show only that they do not fit.
        """
        families = [config.family for config in configs]
        cells = {"memory": memory_cells(families, figures["memory"].tolist(), capacity_mib)}
        for name in UTILIZATION_EDGES:
            values = np.asarray(figures.get(name, np.full(len(configs), np.nan)), dtype=float)
            # A run that does not fit has no utilization.
            cells[name] = _level_cells(families, np.where(figures["memory"] >= capacity_mib, np.nan, values), name)
        cells["region"] = [region_of(*both) for both in zip(configs, parameters.tolist(), strict=True)]
        codes, names = [], {}
        for dimension in DIMENSIONS:
            known, code = np.unique(np.array(cells[dimension], dtype=object).astype(str), return_inverse=True)
            names[dimension] = tuple(known.tolist())
            codes.append(code)
        return cls(np.stack(codes, axis=1), names)

    def counts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the number of rows in each cell, by dimension."""
        return [
            np.bincount(self.codes[rows, column], minlength=len(self.names[dimension])).astype(float)
            for column, dimension in enumerate(DIMENSIONS)
        ]

    def tally(self, rows: np.ndarray) -> dict[str, dict[str, int]]:
        """Return the rows of each non-empty cell, by dimension and name."""
        return {
            dimension: {name: int(n) for name, n in zip(self.names[dimension], counts, strict=True) if n}
            for dimension, counts in zip(DIMENSIONS, self.counts(rows), strict=True)
        }


def fill(cells: Map, known: np.ndarray, pool: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Choose n rows of `pool`, each time one whose cells have the fewest rows so far; return their places in order.

    A cell is worth 1 / (1 + its rows), summed over the dimensions; unknown bins are worth 0. Rows of the same cells are
    interchangeable and taken in a random order of `seed`, so the cost is the number of distinct cells times n.
    """
    counts = cells.counts(known)
    worth = [
        np.array([0.0 if name.endswith(NO_FIGURE) else 1.0 for name in cells.names[dimension]])
        for dimension in DIMENSIONS
    ]
    order = np.random.default_rng(seed).permutation(len(pool))
    kinds, member = np.unique(cells.codes[pool[order]], axis=0, return_inverse=True)
    waiting: list[list[int]] = [[] for _ in kinds]
    for place, kind in zip(order[::-1], member.ravel()[::-1], strict=True):  # popped from the end
        waiting[kind].append(place)
    open_kind = np.ones(len(kinds), dtype=bool)
    chosen = []
    for _ in range(min(n, len(pool))):
        value = sum(
            worth[column][kinds[:, column]] / (1 + counts[column][kinds[:, column]])
            for column in range(len(DIMENSIONS))
        )
        best = int(np.argmax(np.where(open_kind, value, -1.0)))
        chosen.append(pool[waiting[best].pop()])
        open_kind[best] = bool(waiting[best])
        for column in range(len(DIMENSIONS)):
            counts[column][kinds[best, column]] += 1
    return np.array(chosen, dtype=int)


def region_of(config: TrialConfig, parameters: float) -> str:
    """Return the cell of the main features: parameters by decade, batch size by 4, depth by 2, topology."""
    parts = [config.family]
    if topology := getattr(config, "topology", None) or getattr(config, "model", None):
        parts.append(str(topology))
    depth = getattr(config, "depth", None) or getattr(config, "layers", None)
    if isinstance(depth, int) and depth > 0:
        parts.append(f"depth {_range(depth, 2)}")
    parts += [f"batch {_range(config.batch_size, 4)}", f"parameters 1e{int(math.log10(max(parameters, 1)))}"]
    return ", ".join(parts)


def _range(value: int, factor: int) -> str:
    low = factor ** int(math.log(value, factor) + 1e-9)
    return f"{low}-{low * factor - 1}"


def memory_cells(families: Sequence[str], memory_mib: Sequence[float], capacity_mib: float) -> list[str]:
    """Return the bin of each config's memory, such as `cnn 8-16 GB`; NaN: unknown."""
    cells = []
    for family, mib in zip(families, memory_mib, strict=True):
        if mib != mib:
            cells.append(f"{family} {NO_FIGURE}")
        elif mib >= capacity_mib:
            cells.append(f"{family} {OUT_OF_MEMORY}")
        else:
            width = default_bin_gb([family])
            low = int(mib // (width * MIB_PER_GB)) * width
            cells.append(f"{family} {low}-{low + width} GB")
    return cells


def _level_cells(families: Sequence[str], values: np.ndarray, target: str) -> list[str]:
    level = utilization_bins(get_target(target)).classify(values, families)
    return [
        f"{family} {target} {LEVELS[bin_index] if value == value else NO_FIGURE}"
        for family, bin_index, value in zip(families, level.tolist(), values.tolist(), strict=True)
    ]


POLICIES = ("uniform", "stratified", "coverage", "active")
_LOOKING = ("coverage", "active")  # policies that look at every candidate
TAKES_FIRST = ("uniform", "stratified")  # policies that take the first candidates
_UNSURE_OF = ("memory", "smact", "smocc", "drama")  # targets whose uncertainty `active` uses, if measured


@dataclass(frozen=True)
class CandidatePool:
    """Candidates of one or more spaces: parallel tuples of configs, their hashes, and indices in their sequences.

    next_index  family -> where its sequence continues after all of these
    """

    configs: tuple[TrialConfig, ...]
    hashes: tuple[str, ...]
    indices: tuple[int, ...]
    next_index: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.configs)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """One candidate to run.

    index         index in its family's sequence
    disagreement  for `active`: of the committee on its memory, as a standard deviation of the logarithm
    figures       target -> expected value, in the target's unit
    """

    index: int
    config: TrialConfig
    figures: Mapping[str, float]
    disagreement: float | None = None


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The candidates that `choose` took, in the order in which they will run.

    pool        number of candidates; measured, repeated: those left out as measured already, and as copies
    next_index  family -> where its sequence continues: candidates that the policy has not looked at come again
    gained      dimension -> cell -> (rows known, rows chosen), of cells that gain
    ways        method that produced the figures (`farm.sampling.forecast.WAYS`) -> candidates chosen
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
) -> CandidatePool:
    """Return `count` configs of the space's sequence from index `start` on, where the last night ended.

    `uniform` draws independent points; every other policy continues with the low-discrepancy sequence. Errors as in
    `featurize.configs.space.sample_range`.
    """
    points = "uniform" if policy == "uniform" else "stratified"
    configs = tuple(sample_range(space, seed, start, start + count, points, limits))
    hashes = tuple(map(config_hash, configs))
    return CandidatePool(configs, hashes, tuple(range(start, start + count)), {space.family: start + count})


def merge_pools(pools: Sequence[CandidatePool]) -> CandidatePool:
    """Interleave pools of different families, so each prefix has a proportional share of every family."""
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
    estimator: Forecaster,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda completed, total: None,
) -> Selection:
    """Choose the `n` candidates to measure next (fewer if the pool has no more), in order.

    uniform, stratified  the first candidates of the sequence
    coverage  those whose label bins and feature regions have the fewest rows (`farm.sampling.selection.fill`)
    active    drawn at random, more likely where the known rows cover less and bins are rarer
              (`worth`); as `coverage` while fewer than 20 rows are known

    Candidates whose `config_hash` is in `known.measured` are left out, copies within the pool, and those whose network
    cannot be built; a note counts the last. The same arguments give the same choice. Raises `UsageError` if no new
    candidate is left.
    """
    at_most = None if policy in _LOOKING else n
    fresh = _fresh(pool, known, at_most)
    try:
        outlook = _look(estimator, fresh, pool, known, progress)
    except CommandError:
        fresh = _fresh(pool, known, at_most, builds=True)  # only after a failure: trying each costs time
        if not fresh.unbuildable:
            raise
        outlook = _look(estimator, fresh, pool, known, progress)
    next_index = dict(pool.next_index) if policy in _LOOKING else _next_indices(pool, fresh.looked)
    fresh_configs = [pool.configs[i] for i in fresh.places]
    candidate_rows, known_rows = np.arange(len(fresh_configs)), len(fresh_configs) + np.arange(len(known.configs))
    figures = _with_labels(outlook, known, known_rows)
    notes = [f"left out: {fresh.cannot_be_built()}"] if fresh.unbuildable else []
    doubts: dict[str, Doubts] = {}
    if policy == "active":
        doubts = _doubts(outlook, known, candidate_rows, known_rows, seed)
        if not doubts:
            notes.append("too few rows are known to tell where the estimator is unsure: chosen by coverage")
        for target, doubt in doubts.items():
            space = get_target(target).space
            shifted = to_space(outlook.figures[target][candidate_rows], space) + doubt.shift
            figures[target][candidate_rows] = from_space(shifted, space)
    cells = Map.of([*fresh_configs, *known.configs], figures, outlook.parameters, estimator.device.memory_mib)
    if doubts:
        places = _draw_places(cells, doubts, figures["memory"], candidate_rows, n, estimator.device.memory_mib, seed)
    elif policy in _LOOKING:
        places = fill(cells, known_rows, candidate_rows, n, seed)
    else:
        places = candidate_rows[:n]
    before, added = cells.tally(known_rows), cells.tally(places)
    gained = {
        name: {cell: (before[name].get(cell, 0), count) for cell, count in sorted(of_cell.items())}
        for name, of_cell in added.items()
    }
    return Selection(
        policy=policy,
        chosen=_list_chosen(pool, fresh.places, places, figures, doubts),
        pool=len(pool),
        measured=fresh.measured,
        repeated=fresh.repeated,
        next_index=next_index,
        gained=gained,
        ways=dict(sorted(Counter(outlook.ways[places].tolist()).items())),
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Fresh:
    """Places of the new candidates, and counts of the others examined.

    measured, repeated, unbuildable  already measured; copies; candidates whose network cannot be built, by reason
    """

    places: list[int]
    measured: int
    repeated: int
    unbuildable: Counter[str]
    looked: int

    def cannot_be_built(self) -> str:
        """Return the number of unbuildable candidates and the most common reason, in one line."""
        ((reason, _),) = self.unbuildable.most_common(1)
        return f"{count_of(self.unbuildable.total(), 'candidate')} whose model cannot be built: {reason}"


def _fresh(pool: CandidatePool, known: Known, at_most: int | None, builds: bool = False) -> _Fresh:
    """Return at most `at_most` candidates not measured yet. `builds`: leave out those that cannot be built."""
    network_problems: dict[NetworkKey, str | None] = {}
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
            problem = _network_problem(pool.configs[place], network_problems) if builds else None
            if problem is None:
                places.append(place)
            else:
                unbuildable[problem] += 1
    return _Fresh(places, measured, repeated, unbuildable, looked)


def _look(
    estimator: Forecaster,
    fresh: _Fresh,
    pool: CandidatePool,
    known: Known,
    progress: Callable[[int, int], None],
) -> Outlook:
    """Return the outlook on the fresh candidates, then the known rows. Raises `UsageError` if none is fresh."""
    if fresh.places:
        return estimator.look([*(pool.configs[i] for i in fresh.places), *known.configs], progress)
    if fresh.unbuildable:
        raise UsageError(f"nothing is left of {len(pool):,} candidates: {fresh.cannot_be_built()}")
    raise UsageError(f"all {len(pool):,} candidates are measured already; take more of them, or widen the search space")


def _next_indices(pool: CandidatePool, looked: int) -> dict[str, int]:
    """Return where each family's sequence continues when only the first `looked` candidates are used up."""
    following = dict(pool.next_index)
    for config, index in zip(reversed(pool.configs[looked:]), reversed(pool.indices[looked:]), strict=True):
        following[config.family] = index
    return following


def _with_labels(outlook: Outlook, known: Known, old: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rough figures, with labels for measured rows; out of memory is infinite memory."""
    figures = {name: column.copy() for name, column in outlook.figures.items()}
    for name, labels in known.labels.items():
        if name in figures:
            figures[name][old] = np.where(np.isfinite(labels), labels, figures[name][old])
    figures["memory"][old[known.out_of_memory]] = np.inf
    return figures


def _doubts(outlook: Outlook, known: Known, new: np.ndarray, old: np.ndarray, seed: int) -> dict[str, Doubts]:
    by_target = {}
    for target in _UNSURE_OF:
        labels = known.labels.get(target)
        if labels is None:
            continue
        exact = np.where(known.out_of_memory, np.nan, labels)
        figures = outlook.figures[target]
        of_target = estimate_doubts(
            target, outlook.table[new], figures[new], outlook.table[old], figures[old], exact, seed=seed
        )
        if of_target is not None:
            by_target[target] = of_target
    return by_target


def _draw_places(
    cells: Map,
    doubts: Mapping[str, Doubts],
    memory: np.ndarray,
    new: np.ndarray,
    n: int,
    capacity: float,
    seed: int,
) -> np.ndarray:
    scores = {target: doubt.score for target, doubt in doubts.items()}
    of_target = {target: cells.codes[new, DIMENSIONS.index(target)] for target in doubts}
    fits = np.ones(len(new))
    if "memory" in doubts:
        fits = chance_to_fit(memory[new], doubts["memory"].disagreement, capacity)
    return draw(worth(scores, of_target, fits), n, seed)


def _list_chosen(
    pool: CandidatePool,
    fresh: Sequence[int],
    places: np.ndarray,
    figures: Mapping[str, np.ndarray],
    doubts: Mapping[str, Doubts],
) -> tuple[Chosen, ...]:
    memory = doubts.get("memory")
    return tuple(
        Chosen(
            index=pool.indices[fresh[place]],
            config=pool.configs[fresh[place]],
            figures={name: float(column[place]) for name, column in figures.items()},
            disagreement=None if memory is None else float(memory.disagreement[place]),
        )
        for place in places.tolist()
    )


NetworkKey = tuple[str, str, str | None]  # family, network, target


def _network_problem(config: TrialConfig, known: dict[NetworkKey, str | None]) -> str | None:
    """Return why the config's network cannot be built, or None. Imports the code that it names.

    Each network is built once: that takes up to tenths of a second, and many candidates share one.
    """
    identity = getattr(get_family(config.family), "identity", None)
    if identity is None:  # its layers follow from fields that the config has checked
        return None
    # The target decides whether the network's output has a loss.
    key = (config.family, identity(config), getattr(config, "target", None))
    if key not in known:
        known[key] = problem_of(config)
    return known[key]


LEAST_ROWS = 20  # rows with a label that an estimate of uncertainty needs
MEMBERS, TREES = 8, 8  # forests, each grown on a different sample of the rows, and trees of each
_POWER = 1.5  # exponent of the uncertainty
_LOG_ERROR = 0.15  # least standard deviation of the logarithm of a memory figure
_FITTING_AT_LEAST = 0.1  # so wrong figures for candidates that seem not to fit are discovered


@dataclass(frozen=True)
class Doubts:
    """Uncertainty of n candidates for one target, in its space (memory and times: natural logarithm).

    shift         (n,) correction of the rough figures that the known rows teach: label - figure
    disagreement  (n,) standard deviation of the shift among forests grown on different samples of the rows
    of_label      (n,) standard deviation among forests that learn the label itself
    """

    shift: np.ndarray
    disagreement: np.ndarray
    of_label: np.ndarray

    @property
    def score(self) -> np.ndarray:
        """Return (n,) around 1: the mean of both disagreements, each divided by its own mean."""
        both = (self.disagreement, self.of_label)
        shares = [disagreement / max(float(disagreement.mean()), 1e-12) for disagreement in both]
        return np.asarray(np.mean(shares, axis=0))


def estimate_doubts(
    target: str,
    table: np.ndarray,
    figures: np.ndarray,
    known_table: np.ndarray,
    known_figures: np.ndarray,
    labels: np.ndarray,
    *,
    seed: int = 0,
) -> Doubts | None:
    """Estimate the uncertainty of candidates from known rows; None for fewer than 20 rows with a label.

    table, known_table  (n, columns), (k, columns) of one outlook; figures, known_figures (n,), (k,): rough figures
    labels  (k,) in the target's unit, NaN if missing

    Query by committee (Seung, Opper, Sompolinsky 1992), of forests on bootstrap samples: unlike single trees, their
    disagreement contains little noise that more rows would not reduce. One committee learns how labels differ from
    the rough figures, as `hybrid` does. The other learns labels from features and figures, as untraced estimators do.
    """
    space = get_target(target).space
    new, old = to_space(figures, space), to_space(known_figures, space)
    label = to_space(labels, space)
    labelled = np.flatnonzero(np.isfinite(label) & np.isfinite(old))
    if len(labelled) < LEAST_ROWS:
        return None
    label, old = label[labelled], old[labelled]
    shift, disagreement = _committee(known_table[labelled], label - old, table, seed)
    beside = [np.column_stack([rows, np.nan_to_num(of)]) for rows, of in ((known_table[labelled], old), (table, new))]
    _, of_label = _committee(beside[0], label, beside[1], seed)
    return Doubts(shift, disagreement, of_label)


def _committee(known: np.ndarray, taught: np.ndarray, asked: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation over the committee's members for the rows asked."""
    from sklearn.ensemble import ExtraTreesRegressor

    random = np.random.default_rng(seed)
    predictions = np.empty((MEMBERS, len(asked)))
    for member in range(MEMBERS):
        rows = random.integers(len(known), size=len(known))
        forest = ExtraTreesRegressor(TREES, max_features=0.5, n_jobs=1, random_state=seed * MEMBERS + member)
        predictions[member] = forest.fit(known[rows], taught[rows]).predict(asked)
    return predictions.mean(0), predictions.std(0)


def worth(
    scores: Mapping[str, np.ndarray], cells: Mapping[str, np.ndarray], fits: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return (n,) > 0, the worth of a run of each candidate.

    It is uncertainty ** 1.5 / sqrt(candidates in the same bin), times the chance that the run fits (`fits`): a run out
    of memory has no figure to learn from.

    scores  target -> (n,) uncertainty
    cells   target -> (n,) int, the expected bin

    Memory counts as much as all other targets together. The root is a compromise: without it, rows go where most
    candidates are, which is best for the mean row's error; with the count itself, all bins get equally many. The power
    exceeds 1 because the uncertainty understates differences between errors.
    """
    total = np.zeros(len(fits))
    others = max(sum(target != "memory" for target in scores), 1)
    for target, score in scores.items():
        share = np.maximum(score, 1e-9) ** _POWER / np.sqrt(np.bincount(cells[target])[cells[target]])
        total += share / share.sum() / (1 if target == "memory" else others)
    return total * np.maximum(fits, _FITTING_AT_LEAST)


def chance_to_fit(memory_mib: np.ndarray, disagreement: np.ndarray, capacity_mib: float) -> np.ndarray:
    """Return (n,) chances to fit: log memory is normal around the figure, as wide as the disagreement, or 15 %."""
    from scipy.special import ndtr

    error = np.maximum(disagreement, _LOG_ERROR)
    return np.asarray(ndtr((np.log(capacity_mib) - np.log(np.maximum(memory_mib, 1.0))) / error))


def draw(worth: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Draw n candidates without replacement, with probabilities proportional to their worth; return their places.

    The method is that of Efraimidis and Spirakis (2006), in the form with Gumbel noise. Taking the greatest first
    would choose only candidates of one unusual kind; those in between would never be measured.
    """
    noise = np.random.default_rng(seed).gumbel(size=len(worth))
    return np.argsort(-(np.log(worth) + noise), kind="stable")[:n]
