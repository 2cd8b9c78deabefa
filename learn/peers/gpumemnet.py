"""GPUMemNet's estimators (arXiv 2602.17817): ensembles of small classifiers over memory or utilization bins.

Start reading at `GPUMemNetEstimator.fit`; the networks are in `learn/peers/gpumemnet_nets.py`.

As published: classifiers over bins of 1 GB for MLPs and 8 GB else, and over low, medium, high utilization; one
ensemble a kind of network; counts of layers, batch size, parameters, activations (alone and times the batch), the
activation function as sine and cosine of its index; for the transformer also the sequence of (kind, activations,
parameters), in encoders 6 wide with 3 heads (wider ones told less of a few hundred rows); members of different depth;
cross entropy; rows that ran out of the largest card as members of the top bin; the upper edge of the likeliest bin as
the estimate of memory.

Ours: true sizes in place of a summary tool's, as logarithms and standardised; fewer members, and wider perceptrons,
each trained without a fold of its own, whose rows tell when to stop and calibrate the bound (their perceptrons are 4
to 8 wide and 6 to 16 of them, with batch norm and batches of 128 rows); GB are 1024 MiB; the middle of the likeliest
bin as the estimate of utilization; the sequence cut into at most 48 runs of layers, each with counts of its kinds and
sums of its sizes; its mean and maximum, not its sum, joined to the scalars; rows that ran out of a smaller card as
members of its bin or any above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from conf.errors import CommandError, UsageError
from featurize.families import get_family
from featurize.features import KINDS
from featurize.trial import ACTIVATIONS, TrialConfig
from learn.bounds import conformal_rank, too_few_for
from learn.cases import Case
from learn.data import Rows
from learn.estimators import LEVEL, Estimator, open_state, require_rows, require_target, write_state
from learn.learned.tabular import config_features, group_folds
from learn.step_store import StepStore
from learn.targets import MIB_PER_GB, Target, default_bin_gb, utilization_bins

if TYPE_CHECKING:
    from learn.peers.gpumemnet_nets import Inputs

FOLDS = 5
LEAST_ROWS = 10  # of a family, for an ensemble of its own
MAX_TOKENS = 48

_COUNTS = ("layers", *(f"count_{kind}" for kind in ("linear", "conv2d", "batchnorm1d", "batchnorm2d", "layernorm",
           "dropout", "attention", "embedding", "add", "concat")))  # fmt: skip
_SIZES = ("batch_size", "parameters", "output_elements", "batch_output_elements")


@dataclass(frozen=True, eq=False)
class Ensemble:
    """An ensemble fitted to one family.

    edges    (k + 1,) of its bins; mean, scale (s,) of its scalars; weights: arrays by name, of each member
    scores   (m,) ascending: see `BinnedPrediction.scores`
    """

    edges: np.ndarray
    mean: np.ndarray
    scale: np.ndarray
    weights: tuple[dict[str, np.ndarray], ...]
    scores: np.ndarray


class GPUMemNetEstimator(Estimator):
    """Base of both estimators. A family that was not fitted, and what is no trial config, is refused by row.

    Since the rows that a member is trained without choose its epoch and calibrate the bound, the bound leans a little
    low: it is no bound from rows that fitting never looked at.
    """

    targets: ClassVar[tuple[str, ...] | None] = ("memory", "smact", "smocc", "drama")
    uses_out_of_memory: ClassVar[bool] = True
    target: Target  # once it is fitted or loaded
    members: ClassVar[int]
    reads_sequence: ClassVar[bool]

    def __init__(self, seed: int = 0) -> None:
        self.seed = int(seed)
        self._ensembles: dict[str, Ensemble] = {}
        self._nets: dict[str, list] = {}

    def _net(self, member: int, scalars: int, classes: int) -> Any:
        """An untrained member."""
        raise NotImplementedError

    def _training(self) -> Any:
        raise NotImplementedError

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Self:
        """One ensemble a family, of the rows with exact labels (10 at least, in 2 groups) and the out-of-memory ones.
        `UsageError` where no family has as many."""
        require_target(type(self), rows.target.name)
        require_rows(rows, least=LEAST_ROWS)
        rows = rows.trusted
        rows = rows.subset(np.argsort(rows.run_ids.astype(str), kind="stable"))
        self.target, self._ensembles, self._nets = rows.target, {}, {}
        problem: CommandError = UsageError(f"target={rows.target.name}: there are no rows to fit on")
        for family in sorted(set(map(str, rows.family))):
            try:
                self._ensembles[family] = self._fit_family(family, rows.subset(rows.family == family))
            except CommandError as error:
                problem = error
        if not self._ensembles:
            raise problem
        return self

    def _fit_family(self, family: str, rows: Rows) -> Ensemble:
        from learn.peers.gpumemnet_nets import train_member
        from learn.peers.torch_fit import arrays_of, quiet_torch

        readable = np.array([why_not(case) is None for case in rows.cases], dtype=bool)
        rows = rows.subset(readable)
        require_rows(rows, least=LEAST_ROWS)
        edges = bin_edges(rows)
        classes, or_above = classes_of(rows, edges)

        configs = _configs(rows)
        raw = scalars_of(configs)
        mean, scale = raw.mean(axis=0), raw.std(axis=0)
        scale = np.where(scale > 1e-9, scale, 1.0)
        inputs = self._inputs(configs, mean, scale)
        fold = group_folds(rows.group, FOLDS, self.seed)
        weights, score = [], np.full(len(rows), np.nan)
        for member in range(min(self.members, fold.max() + 1)):
            held_out = fold == member
            with quiet_torch(self.seed * 1000 + member):
                net = self._net(member, raw.shape[1], len(edges) - 1)
                train_member(net, inputs, classes, or_above, held_out, self._training(), self.seed * 1000 + member)
                weights.append(arrays_of(net))
            own = Ensemble(edges, mean, scale, (weights[-1],), np.empty(0))
            held = rows.subset(held_out)
            mass = self._probabilities(own, [self._ready(own, member, weights[-1])], _configs(held))
            bins = np.broadcast_to(edges, (len(held), len(edges)))
            score[held_out] = cumulative(bins, mass, held.label[:, None])[:, 0]
        scores = np.sort(score[~rows.censored & ~np.isnan(score)])
        return Ensemble(edges, mean, scale, tuple(weights), scores)

    def predict(self, cases: Sequence[Case], steps: StepStore | None = None) -> BinnedPrediction:
        if not self._ensembles:
            raise RuntimeError("fit or load the estimator before predicting")
        families = list(self._ensembles)
        refusals: dict[int, str] = {}
        kind = np.full(len(cases), -1)
        for i, case in enumerate(cases):
            reason = why_not(case)
            if reason is None and case.family not in self._ensembles:
                reason = f"it was fitted to {', '.join(families)}, and this is of the family {case.family}"
            if reason is None:
                kind[i] = families.index(case.family)
            else:
                refusals[i] = reason
        most = max(len(one.edges) for one in self._ensembles.values())
        edges, mass = np.full((len(cases), most), np.nan), np.full((len(cases), most - 1), np.nan)
        warnings = []
        for k, (family, one) in enumerate(self._ensembles.items()):
            index = np.flatnonzero(kind == k)
            if not index.size:
                continue
            configs = [config for i in index.tolist() if (config := cases[i].config) is not None]
            shares = self._probabilities(one, self._nets_of(family), configs)
            edges[index] = np.pad(one.edges, (0, most - len(one.edges)), mode="edge")
            mass[index] = np.pad(shares, ((0, 0), (0, most - 1 - shares.shape[1])))
            if warning := too_few_for(LEVEL, len(one.scores)):
                warnings.append(f"{family}: {warning}")
        share = 1.0 if self.target.is_memory else 0.5
        scores = [one.scores for one in self._ensembles.values()]
        return BinnedPrediction(edges, mass, share, scores, kind, tuple(warnings), refusals)

    def save(self, folder: Path) -> None:
        folder = Path(folder)
        arrays: dict[str, Any] = {
            f"{family}/{member}/{name}": array
            for family, one in self._ensembles.items()
            for member, weights in enumerate(one.weights)
            for name, array in weights.items()
        }
        np.savez_compressed(folder / "weights.npz", **arrays)
        state = {
            "families": {
                family: {
                    "members": len(one.weights),
                    **{part: getattr(one, part).tolist() for part in ("edges", "mean", "scale", "scores")},
                }
                for family, one in self._ensembles.items()
            },
        }
        write_state(folder, self, state)

    @classmethod
    def load(cls, folder: Path) -> Self:
        folder = Path(folder)
        loaded, state = open_state(cls, folder)
        with np.load(folder / "weights.npz", allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        for family, family_state in state["families"].items():
            weights = []
            for member in range(family_state.pop("members")):
                prefix = f"{family}/{member}/"
                weights.append({n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)})
            parts = {part: np.asarray(values, dtype=float) for part, values in family_state.items()}
            loaded._ensembles[family] = Ensemble(weights=tuple(weights), **parts)
        return loaded

    def _nets_of(self, family: str) -> list:
        if family not in self._nets:
            one = self._ensembles[family]
            self._nets[family] = [self._ready(one, i, weights) for i, weights in enumerate(one.weights)]
        return self._nets[family]

    def _ready(self, one: Ensemble, member: int, weights: dict[str, np.ndarray]) -> Any:
        from learn.peers.torch_fit import quiet_torch, with_arrays

        with quiet_torch(0):  # a net draws weights before it is given its own
            return with_arrays(self._net(member, len(one.mean), len(one.edges) - 1), weights)

    def _probabilities(self, one: Ensemble, nets: list, configs: Sequence[TrialConfig]) -> np.ndarray:
        """(n, k), the mean over the nets."""
        from learn.peers.gpumemnet_nets import probabilities
        from learn.peers.torch_fit import quiet_torch, steady

        inputs = self._inputs(configs, one.mean, one.scale, np.float64)
        with quiet_torch(0):
            mass = steady(np.sum([probabilities(net, inputs) for net in nets], axis=0) / len(nets))
        return mass / mass.sum(axis=1, keepdims=True)

    def _inputs(self, configs, mean: np.ndarray, scale: np.ndarray, dtype=np.float32) -> Inputs:
        from learn.peers.gpumemnet_nets import Inputs

        scalars = ((scalars_of(configs) - mean) / scale).astype(dtype)
        if not self.reads_sequence:
            return Inputs(scalars, np.zeros((len(configs), 0, 0), dtype), np.zeros(len(configs), dtype=np.int64))
        sequences = [tokens_of(config) for config in configs]
        length = np.array([len(one) for one in sequences], dtype=np.int64)
        tokens = np.zeros((len(configs), length.max(initial=0), sequences[0].shape[1]), dtype)
        for i, one in enumerate(sequences):
            tokens[i, : len(one)] = one
        return Inputs(scalars, tokens, length)


class GPUMemNetMLP(GPUMemNetEstimator):
    """Five perceptrons of 1 to 5 hidden layers over counts and totals."""

    name: ClassVar[str] = "gpumemnet_mlp"
    members: ClassVar[int] = 5
    reads_sequence: ClassVar[bool] = False

    def _net(self, member: int, scalars: int, classes: int) -> Any:
        from learn.peers.gpumemnet_nets import CountsNet

        return CountsNet(scalars, classes, hidden_layers=1 + member, width=64)

    def _training(self) -> Any:
        from learn.peers.gpumemnet_nets import NetTraining

        return NetTraining(steps=3000, most_epochs=60, learning_rate=5e-3)


class GPUMemNetTransformer(GPUMemNetEstimator):
    """Three transformer encoders of 1 to 3 layers over the layer sequence, with the same counts and totals."""

    name: ClassVar[str] = "gpumemnet_transformer"
    members: ClassVar[int] = 3
    reads_sequence: ClassVar[bool] = True

    def _net(self, member: int, scalars: int, classes: int) -> Any:
        from learn.peers.gpumemnet_nets import SequenceNet

        return SequenceNet(scalars, len(KINDS) + 3, classes, encoders=1 + member, width=6, heads=3)

    def _training(self) -> Any:
        from learn.peers.gpumemnet_nets import NetTraining

        return NetTraining(steps=600, most_epochs=70, learning_rate=8e-3)


@dataclass(frozen=True, eq=False)
class BinnedPrediction:
    """Probabilities of bins by row, mass spread evenly inside a bin. Rows in `refusals` are NaN throughout.

    edges          (n, k + 1), ascending, in the target's unit; rows with fewer bins repeat their last edge
    probabilities  (n, k), each row sums to 1
    point_share    where in the likeliest bin the point lies: 0 its lower edge, 1 its upper
    scores         ascending, in [0, 1]: where in their predicted distribution held-out labels lay, by kind of row
    kind           (n,) int, whose scores bound the row; -1 in refused rows
    """

    edges: np.ndarray
    probabilities: np.ndarray
    point_share: float
    scores: Sequence[np.ndarray]
    kind: np.ndarray
    warnings: tuple[str, ...] = ()
    refusals: Mapping[int, str] = field(default_factory=dict)
    unfamiliar: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    outside: frozenset[int] = frozenset()

    def held_of(self, row: int) -> None:
        """None was left out: see `GPUMemNetEstimator`."""

    @property
    def point(self) -> np.ndarray:
        likeliest = self.probabilities.argmax(axis=1)
        row = np.arange(len(likeliest))
        low, high = self.edges[row, likeliest], self.edges[row, likeliest + 1]
        return low + self.point_share * (high - low)

    def quantile(self, q: float) -> np.ndarray:
        if not 0 < q < 1:
            raise ValueError(f"a quantile lies between 0 and 1, got {q}")
        return self._quantile(np.full(len(self.kind), q))

    def bin_probabilities(self, edges: np.ndarray) -> np.ndarray:
        edges = np.asarray(edges, dtype=float)
        n = len(self.kind)
        if edges.ndim == 1:
            edges = np.broadcast_to(edges, (n, len(edges)))
        below = cumulative(self.edges, self.probabilities, edges)
        mass = np.diff(np.hstack([np.zeros((n, 1)), below, np.ones((n, 1))]), axis=1)
        mass[np.isnan(self.edges[:, 0])] = np.nan
        return mass

    def upper(self, level: float = LEVEL) -> np.ndarray | None:
        """Distributional conformal prediction (Chernozhukov et al. 2021): the quantile of each row's own distribution
        at the ceil((m + 1) * level)-th smallest of the m held-out scores; the largest where there are too few."""
        if not any(scores.size for scores in self.scores):
            return None
        q = np.full(len(self.kind), np.nan)
        for kind, scores in enumerate(self.scores):
            if scores.size:
                rank = min(conformal_rank(len(scores), level), len(scores))
                q[self.kind == kind] = scores[rank - 1]
            else:
                q[self.kind == kind] = 1.0
        return np.maximum(self._quantile(q), self.point)

    def _quantile(self, q: np.ndarray) -> np.ndarray:
        """(n,) where each row's distribution reaches q, by linear interpolation inside the bin."""
        row = np.arange(len(q))
        reached = np.cumsum(self.probabilities, axis=1)
        reached[:, -1] = np.where(np.isnan(reached[:, -1]), np.nan, 1.0)
        bin_index = (reached >= q[:, None]).argmax(axis=1)
        before = np.where(bin_index > 0, reached[row, np.maximum(bin_index - 1, 0)], 0.0)
        mass = np.maximum(reached[row, bin_index] - before, 1e-300)
        low, high = self.edges[row, bin_index], self.edges[row, bin_index + 1]
        return low + np.clip((q - before) / mass, 0.0, 1.0) * (high - low)


def cumulative(edges: np.ndarray, probabilities: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(n, v) mass below each of the values (n, v), under bins (n, k + 1) of the probabilities (n, k)."""
    below = np.zeros(values.shape)
    for k in range(probabilities.shape[1]):
        low, width = edges[:, k, None], edges[:, k + 1, None] - edges[:, k, None]
        share = np.clip((values - low) / np.maximum(width, 1e-300), 0.0, 1.0)
        below = below + probabilities[:, k, None] * share
    # Above the last edge there is nothing, whatever the sum was rounded to.
    return np.where(values >= edges[:, -1:], 1.0, np.minimum(below, 1.0))


def why_not(case: Case) -> str | None:
    """Return why there is no layer plan of a case, or None."""
    if case.config is None:
        return "it reads the layer plans of trial configs, and this is a module"
    try:
        config_features(case.config)
    except CommandError as error:
        return str(error)
    return None


def bin_edges(rows: Rows) -> np.ndarray:
    """(k + 1,) edges of one family's bins. Memory: from 0 to above the largest need, and a bin above the memory of the
    largest device that jobs ran out of, unless others need more than it has. Utilization: the published three."""
    family = str(rows.family[0])
    if not rows.target.is_memory:
        return np.array([0.0, *utilization_bins(rows.target).edges_of([family])[0], 1.0])
    width = default_bin_gb([family]) * MIB_PER_GB
    edges = [width * i for i in range(int(rows.exact.label.max() // width) + 2)]
    largest = rows.label[rows.censored].max(initial=0.0)
    if rows.censored.any() and largest >= edges[-2]:
        if largest > edges[-1]:
            edges.append(float(largest))
        edges.append(edges[-1] + width)
    return np.array(edges)


def classes_of(rows: Rows, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) int bin of each of a family's rows, and (n,) bool: it is that one or any above.

    As published, what ran out of the largest device is in the bin above it, the top one. Of what ran out of a smaller
    device no more is known than that: it is in that device's bin or above."""
    top = len(edges) - 2
    classes = np.clip(np.searchsorted(edges, rows.label, side="right") - 1, 0, top)
    if rows.censored.any() and edges[top] > rows.exact.label.max():
        classes[rows.censored & (rows.label >= rows.label[rows.censored].max())] = top
    return classes, rows.censored & (classes < top)


def _configs(rows: Rows) -> list[TrialConfig]:
    """Return the trial configs of rows that have one each."""
    return [config for config in rows.configs if config is not None]


def scalars_of(configs: Sequence[TrialConfig]) -> np.ndarray:
    """(n, s) logarithms of counts and sizes, and the activation function's sine and cosine."""
    table = np.empty((len(configs), len(_COUNTS) + len(_SIZES) + 2))
    for i, config in enumerate(configs):
        features = config_features(config)
        counts = np.array([features[name] for name in (*_COUNTS, *_SIZES)], dtype=float)
        table[i, :-2] = [math.log1p(count) for count in counts.tolist()]
        activation = getattr(config, "activation", None)
        angle = ACTIVATIONS.index(activation) * math.pi / len(ACTIVATIONS) if activation in ACTIVATIONS else None
        table[i, -2:] = (0.0, 0.0) if angle is None else (math.sin(angle), math.cos(angle))
    return table


@lru_cache(maxsize=20_000)
def tokens_of(config: TrialConfig) -> np.ndarray:
    """(l, t) the layer sequence, l at most `MAX_TOKENS`: log counts of `KINDS` in a run of layers, and logarithms of
    its activations, of these times the batch size, and of its parameters. Short plans have a token a layer."""
    place = {**{kind: i for i, kind in enumerate(KINDS)}, **dict.fromkeys(ACTIVATIONS, KINDS.index("activation"))}
    plan = get_family(config.family).layers(config)
    count = max(1, min(len(plan), MAX_TOKENS))
    tokens = np.zeros((count, len(KINDS) + 3))
    for i, layer in enumerate(plan):
        token = tokens[i * count // len(plan)]
        token[place.get(layer.kind, KINDS.index("other"))] += 1
        token[-3:] += layer.output_elements, config.batch_size * layer.output_elements, layer.parameters
    tokens = np.log1p(tokens)
    tokens[:, -3:] /= 10.0
    return tokens.astype(np.float32)
