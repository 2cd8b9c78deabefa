"""The base of estimators, the distribution that every estimator predicts, its bounds, and the table of estimators.

Start reading at `Estimator`; `tests/contracts/test_estimator_contract.py` runs over every entry of `ESTIMATORS`. A
bound follows from scores of held-out rows (`conformal_score`): a score is a row's distance above its estimate, as
a multiple of its margin. The bound of a traced step follows from its causes (`learn.estimation.job_estimate`);
`learn.fit_bound` fits the share of each (`BoundShares`).
"""

from __future__ import annotations

import functools
import json
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from conf.errors import UsageError, require_one_of
from learn.job.training_job import Case
from learn.rows.data import Rows, Target, get_target
from learn.rows.step_store import StepRecord, StepStore

LEAST_ROWS = 10  # that an estimator is fitted to
FOLDS = 5  # groups of rows that are held out in turn, for a bound
LEVEL = 0.99  # level of the bounds that are reported and judged
PACKAGED_SHARES = Path(__file__).parents[1] / "estimation" / "bound_by_causes.json"


def conformal_score(scores: np.ndarray, level: float) -> float:
    """Return the bound of new scores at `level`, from ascending scores of held-out rows; never below 0."""
    rank = min(conformal_rank(len(scores), level), len(scores))
    return max(float(scores[rank - 1]), 0.0) if scores.size else 0.0


def conformal_rank(m: int, level: float) -> int:
    """Return the 1-based rank of the calibration residual that bounds a new one with probability `level`; may exceed
    m."""
    return math.ceil((m + 1) * level - 1e-9)


def too_few_for(level: float, m: int) -> tuple[str, ...]:
    """Return the warnings that a bound from m residuals needs at `level`: one, or none."""
    if conformal_rank(m, level) <= m:
        return ()
    needed = math.ceil(level / (1 - level) - 1e-9)
    return (
        f"{m} calibration rows are too few for a {level:.0%} bound (it takes {needed}): the bound is the largest "
        f"error seen, which holds for about {m / (m + 1):.1%}",
    )


@dataclass(frozen=True, kw_only=True)
class HeldShare:
    """Share of left-out rows that a bound held.

    Args:
        share: Share of the rows, each judged by a bound that had seen none of its group.
        rows: Their number.
        groups: The number of groups; each was left out once.
        kind: The kind of group, in the plural.
    """

    share: float
    rows: int
    groups: int
    kind: str


def group_score(score: np.ndarray, group: np.ndarray, level: float) -> float:
    """Return the quantile `level` of the scores, with equal weight for each group, however many rows it has.

    It holds for a new group on average, if the group is like the given ones (pooled distributions of groups: Dunn,
    Wasserman and Ramdas 2022, arXiv 1809.07441). A single wrong label moves it little.

    Args:
        score: (n,) of rows whose group was not used for the estimate and the margin.
        group: (n,) names.
        level: A share of rows.
    """
    _, member, sizes = np.unique(group.astype(str), return_inverse=True, return_counts=True)
    order = np.argsort(score)
    below = np.cumsum((1 / (sizes[member] * len(sizes)))[order])
    return float(score[order][min(int(np.searchsorted(below, level - 1e-9)), len(score) - 1)])


def held_of(
    score: np.ndarray, group: np.ndarray, bound_of: Callable[[np.ndarray], float], kind: str
) -> HeldShare | None:
    """Return the share of rows below the bound that the other groups' rows make; None with a single group.

    Args:
        score, group: (n,) as above.
        bound_of: Takes an (n,) bool mask of rows, and returns their bound of the other rows' scores.
        kind: The kind of group, in the plural.
    """
    names, member = np.unique(group.astype(str), return_inverse=True)
    if len(names) < 2:
        return None
    bounds = np.array([bound_of(member != index) for index in range(len(names))])
    return HeldShare(share=float((score <= bounds[member]).mean()), rows=len(score), groups=len(names), kind=kind)


@dataclass(frozen=True, kw_only=True)
class BoundShares:
    """The content of the file `bound_by_causes.json`.

    Args:
        of_causes: Cause -> factor by which its figure enters the 99 % margin.
        scores: Coverage -> share of that margin.
        held: Share of left-out rows for which the 99 % bound held, by kind of group.
        rows: Source -> number of its rows.
    """

    of_causes: Mapping[str, float]
    scores: Mapping[float, float]
    held: tuple[HeldShare, ...] = ()
    rows: Mapping[str, int]


@functools.cache
def bound_shares() -> BoundShares:
    """Return the packaged shares."""
    stored = json.loads(PACKAGED_SHARES.read_text())
    return BoundShares(
        of_causes=stored["of_causes"],
        scores={float(coverage): score for coverage, score in stored["scores"].items()},
        held=tuple(HeldShare(**held) for held in stored["held"]),
        rows=stored["rows"],
    )


def group_folds(groups: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """Return the fold of each row, (n,) int in 0..folds-1: whole groups, dealt at random, with even numbers of rows."""
    names, member, sizes = np.unique(np.asarray(groups).astype(str), return_inverse=True, return_counts=True)
    folds = min(folds, len(names))
    if folds < 2:
        raise UsageError("all rows are near-copies of one configuration: nothing can be held out to judge by")
    shuffled = np.random.default_rng(seed).permutation(len(names))
    order = shuffled[np.argsort(-sizes[shuffled], kind="stable")]  # largest first, each to the emptiest fold
    load = np.zeros(folds, dtype=int)
    fold_of = np.empty(len(names), dtype=int)
    for group in order:
        fold_of[group] = np.argmin(load)
        load[fold_of[group]] += sizes[group]
    return fold_of[member]


def cross_fit(fold: np.ndarray, answers: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return (n,) figures, each from a fit without the row's fold: `answers` fits inside a mask and answers outside."""
    figures = np.empty(len(fold))
    for k in range(fold.max() + 1):
        figures[fold == k] = answers(fold != k)
    return figures


ESTIMATORS: dict[str, str] = {
    "deepspeed": "learn.peers.formulas:DeepSpeed",
    "dnnmem": "learn.peers.dnnmem:DNNMem",
    "faketensor": "learn.peers.faketensor:FakeTensor",
    "forest": "learn.estimators.trees:SchedTune",
    "gnn": "learn.peers.gnn:GNNEstimator",
    "gpumemnet_mlp": "learn.peers.gpumemnet:GPUMemNetMLP",
    "gpumemnet_transformer": "learn.peers.gpumemnet:GPUMemNetTransformer",
    "horus": "learn.peers.formulas:Horus",
    "hybrid": "learn.estimators.hybrid:HybridEstimator",
    "lightgbm": "learn.estimators.trees:LightGBMEstimator",
    "llmem": "learn.peers.formulas:LLMem",
    "trace": "learn.peers.base:Trace",
    "xmem": "learn.peers.xmem:XMem",
}
TRAINING_FREE = ("deepspeed", "dnnmem", "faketensor", "horus", "llmem", "trace", "xmem")
PREFERRED = "hybrid"  # preferred among several fitted models
OF_CONFIGS = "lightgbm"  # reads configurations only


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction(ABC):
    """A distribution of the label for each of n cases, in the target's unit.

    warnings    for the reader of the figures
    refusals    row -> why it has no answer; every figure of that row is NaN
    unfamiliar  row -> how it is unlike the fitted rows; its bound is wider
    outside     rows that no held-out rows represent: of a family or module that was not fitted on, or of a wider scale
    """

    warnings: tuple[str, ...] = ()
    refusals: Mapping[int, str] = field(default_factory=dict)
    unfamiliar: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    outside: frozenset[int] = frozenset()

    @property
    @abstractmethod
    def point(self) -> np.ndarray:
        """(n,) the single best guess; NaN in the rows of `refusals`."""

    @abstractmethod
    def quantile(self, q: float) -> np.ndarray:
        """Return the (n,) q-quantiles, 0 < q < 1; grows with q."""

    @abstractmethod
    def bin_probabilities(self, edges: np.ndarray) -> np.ndarray:
        """Return (n, k + 1), the mass of each class `edges[i-1] <= value < edges[i]`; `edges` is (k,), or (n, k) by
        row."""

    @abstractmethod
    def upper(self, level: float = LEVEL) -> np.ndarray | None:
        """Return (n,) bounds, never below the point, that `level` of new labels stay under; None if not calibrated."""

    def held_of(self, row: int) -> HeldShare | None:
        """Return the share of left-out rows for which the row's bound at `LEVEL` held; None if not measured."""
        return None


class Estimator(ABC):
    """An estimator of one target. Randomness is drawn from `seed`; predicting has no side effects.

    targets             the targets that it can be fitted to; None: any
    needs_trace         whether it reads records of a `StepStore`, which `StepStore.prepare` computes in parallel
    uses_out_of_memory  whether rows that ran out of memory are fitted on, as lower bounds
    """

    name: ClassVar[str]
    targets: ClassVar[tuple[str, ...] | None] = None
    needs_trace: ClassVar[bool] = False
    uses_out_of_memory: ClassVar[bool] = False

    target: Target  # set by `fit` and `load`

    def __init__(self, seed: int = 0) -> None:
        self.seed = int(seed)

    def require_fitted(self) -> Target:
        """Return the fitted target. Raises `RuntimeError` before a fit or a load."""
        if not hasattr(self, "target"):
            raise RuntimeError("fit or load the estimator first: it is not fitted")
        return self.target

    @abstractmethod
    def fit(self, rows: Rows, steps: StepStore | None = None) -> Self:
        """Fit to the rows, whose records are read from `steps` (None: a new store). Returns the estimator. Raises
        `UsageError` for too few rows, or a target not among `targets`."""

    @abstractmethod
    def predict(self, cases: Sequence[Case], steps: StepStore | None = None) -> Prediction:
        """Return one distribution a case, in order, independent of the other cases. `steps` as in `fit`. A case
        without an answer is among the prediction's `refusals`, and raises nothing."""

    def save(self, folder: Path) -> None:
        """Write the fitted state into an existing folder, as text that any version can read; no pickle."""
        about = {"estimator": self.name, "target": self.require_fitted().name, "seed": self.seed}
        (folder / "estimator.json").write_text(json.dumps({**about, **self.write_fit(folder)}, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return the estimator that `save` wrote; it predicts the same figures."""
        state = json.loads((folder / "estimator.json").read_text())
        loaded = cls(state["seed"])
        loaded.target = get_target(state["target"])
        loaded.read_fit(folder, state)
        return loaded

    def write_fit(self, folder: Path) -> Mapping[str, Any]:
        """Write the arrays of the fit into the folder, and return what else belongs to it, as JSON has it."""
        return {}

    def read_fit(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take over the fit whose arrays are in the folder, and whose other state `write_fit` returned."""
        return None


def get_estimator(name: str) -> type[Estimator]:
    """Return the estimator's class, imported on use. Raises `UsageError`, with the known names, for an unknown one."""
    require_one_of("estimator", name, ESTIMATORS)
    estimator: type[Estimator] = pkgutil.resolve_name(ESTIMATORS[name])
    return estimator


def require_target(estimator: type[Estimator], target: str) -> None:
    """Raise `UsageError` where the estimator cannot be fitted to that target."""
    if estimator.targets is not None and target not in estimator.targets:
        known = ", ".join(estimator.targets)
        raise UsageError(f"estimator={estimator.name} estimates target={known} only, got target={target}")


def make_estimator(name: str, seed: int = 0) -> Estimator:
    """Return a new, unfitted estimator."""
    return get_estimator(name)(seed=seed)


# Label <-> the space of errors. Labels near 0 are lifted to 1e-9, so that a logarithm exists.
def to_space(values: np.ndarray, space: str) -> np.ndarray:
    """Return the values in the space: `log` takes the natural logarithm, `ratio` changes nothing."""
    values = np.asarray(values, dtype=float)
    return np.log(np.maximum(values, 1e-9)) if space == "log" else values


def within_space(values: np.ndarray, space: str) -> np.ndarray:
    """Return values of the space, ratios clipped to [0, 1]."""
    return np.clip(values, 0.0, 1.0) if space == "ratio" else values


def from_space(values: np.ndarray, space: str) -> np.ndarray:
    """Inverse of `to_space`; ratios are clipped to [0, 1]."""
    values = np.asarray(values, dtype=float)
    return np.asarray(np.exp(values) if space == "log" else within_space(values, space))


@dataclass(frozen=True, eq=False)
class ResidualPrediction(Prediction):
    """`centre + scale * residual` in the target's space, with the residuals of held-out rows as the distribution.

    centre      (n,) the point in that space; NaN in the rows of `refusals`
    residuals   ascending: (label - centre) / scale of rows that no fit had seen; one array, or one for each kind of
                case. An empty one stands for a bare point, without a bound
    scale       returns (n,), and is called on first use, since points need none; None: 1 in every row
    kind        (n,) int: index of the row's `residuals`; least (n,) in the target's unit: lower limit of the row's
                figures
    held        index in `residuals` -> the share of left-out rows for which the bound at `LEVEL` held
    times       (n,) factors of the figures, where these were learned as multiples
    """

    centre: np.ndarray
    residuals: np.ndarray | Sequence[np.ndarray]
    space: str
    scale: Callable[[], np.ndarray] | None = None
    kind: np.ndarray | int = 0
    least: np.ndarray | float = 0.0
    held: Mapping[int, HeldShare] = field(default_factory=dict)
    times: np.ndarray | float = 1.0

    @property
    def point(self) -> np.ndarray:
        return self._figure(self.centre)

    def quantile(self, q: float) -> np.ndarray:
        if not 0 < q < 1:
            raise ValueError(f"a quantile lies between 0 and 1, got {q}")
        return self._at(lambda residuals: _quantile(residuals, q) if residuals.size else 0.0)

    def bin_probabilities(self, edges: np.ndarray) -> np.ndarray:
        n = len(self.centre)
        edges = np.asarray(edges, dtype=float)
        edges = np.broadcast_to(edges, (n, edges.shape[-1]))
        multiples = edges / np.broadcast_to(self.times, n)[:, None]
        kind, least = np.broadcast_to(self.kind, n), np.broadcast_to(self.least, n)
        gap = (to_space(multiples, self.space) - self.centre[:, None]) / self._scales[:, None]
        below = np.zeros(edges.shape)
        for index, residuals in enumerate(self._by_kind):
            known = residuals if residuals.size else np.zeros(1)
            below[kind == index] = np.searchsorted(known, gap[kind == index], side="left") / len(known)
        below = np.where(edges <= least[:, None], 0.0, below)  # no figure lies below `least`
        if self.space == "ratio":  # and no ratio above 1
            below = np.where(edges > 1, 1.0, below)
        return class_masses(below, edges, self.centre)

    def upper(self, level: float = LEVEL) -> np.ndarray | None:
        """Split-conformal, by kind of case: the ceil((m + 1) * level)-th smallest of m residuals (Vovk; Lei et al.
        2018, eq. 8; scaled ones: section 5.2). With fewer than level / (1 - level) residuals no such rank exists and
        the largest residual stands in."""
        if not any(residuals.size for residuals in self._by_kind):
            return None
        return self._at(lambda residuals: conformal_score(residuals, level))

    def held_of(self, row: int) -> HeldShare | None:
        kind = self.kind[row] if isinstance(self.kind, np.ndarray) else self.kind
        return None if row in self.outside else self.held.get(int(kind))

    @functools.cached_property
    def _scales(self) -> np.ndarray:
        return np.ones(len(self.centre)) if self.scale is None else self.scale()

    @property
    def _by_kind(self) -> Sequence[np.ndarray]:
        return (self.residuals,) if isinstance(self.residuals, np.ndarray) else self.residuals

    def _at(self, score_of: Callable[[np.ndarray], float]) -> np.ndarray:
        kinds = set(np.ravel(self.kind).tolist())
        scores = [score_of(residuals) if index in kinds else 0.0 for index, residuals in enumerate(self._by_kind)]
        return self._figure(self.centre + self._scales * np.asarray(scores, dtype=float)[self.kind])

    def _figure(self, values: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(values), np.nan, np.maximum(from_space(values, self.space) * self.times, self.least))


def _quantile(ascending: np.ndarray, q: float) -> float:
    """Return `np.quantile` of numbers that are sorted already: numpy sorts them first, and takes 20 times as long."""
    place = (len(ascending) - 1) * q
    low = math.floor(place)
    part, below, above = place - low, ascending[low], ascending[min(low + 1, len(ascending) - 1)]
    return float(above - (above - below) * (1 - part) if part >= 0.5 else below + (above - below) * part)


def class_masses(below: np.ndarray, edges: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return each class's mass, (n, k + 1), from the mass `below` its upper edge; NaN where `known` (n,) is."""
    below = np.where(edges <= 0, 0.0, below)  # no figure lies below 0
    n = len(known)
    mass = np.diff(np.hstack([np.zeros((n, 1)), below, np.ones((n, 1))]), axis=1)
    mass[np.isnan(known)] = np.nan
    return mass


def require_rows(rows: Rows, least: int = 1) -> Rows:
    """Return the rows with an exact label and no doubt. Raises `UsageError` for fewer than `least`."""
    exact = rows.trusted.exact
    if len(exact) < least:
        raise UsageError(
            f"target={rows.target.name}: {len(exact)} rows with an exact label to fit on, {least} are needed"
        )
    return exact


def records_of(cases: Sequence[Case], steps: StepStore | None) -> tuple[dict[int, StepRecord], dict[int, str]]:
    """Return place -> the record of each case whose step can be traced, and place -> why another's cannot. `steps` as
    in `Estimator.predict`."""
    steps = StepStore() if steps is None else steps
    records, refusals = {}, {}
    for place, case in enumerate(cases):
        record = steps.record(case)
        if record.error is None:
            records[place] = record
        else:
            refusals[place] = record.error
    return records, refusals


def traced_rows(rows: Rows, steps: StepStore | None) -> tuple[Rows, list[StepRecord]]:
    """Return the rows whose step can be traced, sorted by run id, and their records. Raises `UsageError` where fewer
    than `LEAST_ROWS` of them have an exact label."""
    rows = rows.subset(np.argsort(rows.run_ids.astype(str), kind="stable"))
    records, refusals = records_of(rows.cases, steps)
    traced = rows.subset(list(records))
    if (exact := len(traced.exact)) < LEAST_ROWS:
        raise UsageError(
            f"target={rows.target.name}: {exact} traced rows with an exact label to fit on, {LEAST_ROWS} are needed"
            + "".join(f"; not traced: {reason}" for reason in sorted({*refusals.values()})[:1])
        )
    return traced, list(records.values())
