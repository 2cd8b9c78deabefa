"""GPUMemNet's estimators (arXiv 2602.17817): ensembles of small classifiers over memory or utilization bins.

Start reading at `GPUMemNetEstimator.fit`; the networks are at the end.

As published: classifiers over bins of 1 GB for MLPs and 8 GB else, and over low, medium, high utilization; one
ensemble a kind of network; counts of layers, batch size, parameters, activations (alone and times the batch), the
activation function as sine and cosine of its index; for the transformer also the sequence of (kind, activations,
parameters), in encoders 6 wide with 3 heads (wider ones were worse with a few hundred rows); members of different
depth; cross entropy; rows that ran out of the largest card as members of the top bin; the upper edge of the likeliest
bin as the estimate of memory.

Ours: true sizes in place of a summary tool's, as logarithms and standardised; fewer members, and wider perceptrons.
Each is trained without its own fold, whose rows decide when to stop and calibrate the bound. (The published perceptrons
are 4 to 8 wide, 6 to 16 of them, with batch norm and batches of 128 rows.) GB are 1024 MiB; the middle of the likeliest
bin is the estimate of utilization; the sequence is cut into at most 48 runs of layers, each with counts of its kinds
and sums of its sizes; its mean and maximum, not its sum, join the scalars; rows that ran out of a smaller card are
members of its bin or any above.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from conf.errors import CommandError
from featurize.configs.features import KINDS, feature_columns
from featurize.families import layers_of
from featurize.job.training_settings import ACTIVATIONS, TrialConfig
from learn.estimators.protocol import (
    FOLDS,
    LEAST_ROWS,
    LEVEL,
    Estimator,
    Prediction,
    class_masses,
    conformal_score,
    group_folds,
    require_rows,
    require_target,
    too_few_for,
)
from learn.estimators.trees import why_not
from learn.job.training_job import Case
from learn.peers.base import arrays_of, in_parts, quiet_torch, steady, train_best, with_arrays
from learn.rows.data import MIB_PER_GB, Rows, default_bin_gb, utilization_bins
from learn.rows.step_store import StepStore

MAX_TOKENS = 48

_COUNTS = (
    "layers",
    *(
        f"count_{kind}"
        for kind in (
            "linear",
            "conv2d",
            "batchnorm1d",
            "batchnorm2d",
            "layernorm",
            "dropout",
            "attention",
            "embedding",
            "add",
            "concat",
        )
    ),
)
_SIZES = ("batch_size", "parameters", "output_elements", "batch_output_elements")


@dataclass(frozen=True)
class NetTraining:
    """Settings of a training. `steps` is a budget; epochs and batch size follow from it and the number of rows."""

    steps: int
    most_epochs: int
    learning_rate: float

    def batch(self, rows: int) -> int:
        return int(np.clip(rows // 12, 16, 128))

    def epochs(self, rows: int) -> int:
        a_pass = math.ceil(rows / self.batch(rows))
        return int(np.clip(self.steps // a_pass, 15, min(self.most_epochs, 30 + rows // 10)))


@dataclass(frozen=True, eq=False)
class Ensemble:
    """An ensemble fitted to one family.

    edges    (k + 1,) of its bins; mean, scale (s,) of its scalars; weights: arrays by name, for each member
    scores   (m,) ascending: see `BinnedPrediction.scores`
    """

    edges: np.ndarray
    mean: np.ndarray
    scale: np.ndarray
    weights: tuple[dict[str, np.ndarray], ...]
    scores: np.ndarray


class GPUMemNetEstimator(Estimator):
    """Base of both estimators. Families that were not fitted, and jobs without a trial config, are refused by row.

    The rows that a member is trained without choose its epoch and calibrate the bound, so the bound is slightly low: no
    rows are kept from the fit entirely.
    """

    targets: ClassVar[tuple[str, ...] | None] = ("memory", "smact", "smocc", "drama")
    uses_out_of_memory: ClassVar[bool] = True
    members: ClassVar[int]
    reads_sequence: ClassVar[bool]
    training: ClassVar[NetTraining]

    @abstractmethod
    def _net(self, member: int, scalars: int, classes: int) -> nn.Module:
        """Return an untrained member."""

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Self:
        """Fit one ensemble a family to the rows with exact labels (at least 10, in 2 groups) and the out-of-memory
        rows. Raises `UsageError` where no family has enough rows."""
        require_target(type(self), rows.target.name)
        require_rows(rows, least=LEAST_ROWS)
        rows = rows.trusted
        rows = rows.subset(np.argsort(rows.run_ids.astype(str), kind="stable"))
        self._ensembles: dict[str, Ensemble] = {}
        problems = []
        for family in sorted(set(map(str, rows.family))):
            try:
                self._ensembles[family] = self._fit_family(family, rows.subset(rows.family == family))
            except CommandError as error:
                problems.append(error)
        if not self._ensembles:
            raise problems[-1]
        self.target = rows.target
        return self

    def _fit_family(self, family: str, rows: Rows) -> Ensemble:
        readable = np.array([why_not(case) is None for case in rows.cases], dtype=bool)
        rows = rows.subset(readable)
        require_rows(rows, least=LEAST_ROWS)
        edges = bin_edges(rows)
        classes, or_above = classes_of(rows, edges)

        configs = _configs(rows.cases)
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
                train_member(net, inputs, classes, or_above, held_out, self.training, self.seed * 1000 + member)
                weights.append(arrays_of(net))
            candidate = Ensemble(edges, mean, scale, (weights[-1],), np.empty(0))
            held_out_rows = rows.subset(held_out)
            mass = self._probabilities(candidate, _configs(held_out_rows.cases), first=member)
            bins = np.broadcast_to(edges, (len(held_out_rows), len(edges)))
            score[held_out] = cumulative(bins, mass, held_out_rows.label[:, None])[:, 0]
        scores = np.sort(score[~rows.censored & ~np.isnan(score)])
        return Ensemble(edges, mean, scale, tuple(weights), scores)

    def predict(self, cases: Sequence[Case], steps: StepStore | None = None) -> BinnedPrediction:
        target = self.require_fitted()
        families = list(self._ensembles)
        refusals: dict[int, str] = {}
        kind = np.full(len(cases), -1)
        for i, case in enumerate(cases):
            if (reason := why_not(case)) is not None:
                refusals[i] = reason
            elif case.family not in families:
                refusals[i] = f"it was fitted to {', '.join(families)}, and this is of the family {case.family}"
            else:
                kind[i] = families.index(case.family)
        most = max(len(ensemble.edges) for ensemble in self._ensembles.values())
        edges, mass = np.full((len(cases), most), np.nan), np.full((len(cases), most - 1), np.nan)
        warnings = list[str]()
        for k, (family, ensemble) in enumerate(self._ensembles.items()):
            index = np.flatnonzero(kind == k)
            if not index.size:
                continue
            shares = self._probabilities(ensemble, _configs([cases[i] for i in index.tolist()]))
            edges[index] = np.pad(ensemble.edges, (0, most - len(ensemble.edges)), mode="edge")
            mass[index] = np.pad(shares, ((0, 0), (0, most - 1 - shares.shape[1])))
            warnings += [f"{family}: {warning}" for warning in too_few_for(LEVEL, len(ensemble.scores))]
        share = 1.0 if target.is_memory else 0.5
        scores = [ensemble.scores for ensemble in self._ensembles.values()]
        return BinnedPrediction(edges, mass, share, scores, kind, warnings=tuple(warnings), refusals=refusals)

    def write_fit(self, folder: Path) -> dict[str, Any]:
        arrays: dict[str, Any] = {
            f"{family}/{member}/{name}": array
            for family, ensemble in self._ensembles.items()
            for member, weights in enumerate(ensemble.weights)
            for name, array in weights.items()
        }
        np.savez_compressed(folder / "weights.npz", **arrays)
        return {
            "families": {
                family: {
                    "members": len(ensemble.weights),
                    **{part: getattr(ensemble, part).tolist() for part in ("edges", "mean", "scale", "scores")},
                }
                for family, ensemble in self._ensembles.items()
            },
        }

    def read_fit(self, folder: Path, state: Mapping[str, Any]) -> None:
        with np.load(folder / "weights.npz", allow_pickle=False) as stored:
            arrays = dict(stored)
        self._ensembles = {}
        for family, parts in state["families"].items():
            prefixes = [f"{family}/{member}/" for member in range(parts.pop("members"))]
            weights = [
                {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
                for prefix in prefixes
            ]
            parts = {part: np.asarray(values, dtype=float) for part, values in parts.items()}
            self._ensembles[family] = Ensemble(weights=tuple(weights), **parts)

    def _probabilities(self, ensemble: Ensemble, configs: Sequence[TrialConfig], first: int = 0) -> np.ndarray:
        """Return (n, k) probabilities, the mean over the ensemble's members, numbered from `first`."""
        inputs = self._inputs(configs, ensemble.mean, ensemble.scale, torch.float64)
        with quiet_torch(0):  # a net draws random weights before it gets its own
            nets = [
                with_arrays(self._net(member, len(ensemble.mean), len(ensemble.edges) - 1), weights)
                for member, weights in enumerate(ensemble.weights, start=first)
            ]
            mass = steady(np.sum([probabilities(net, inputs) for net in nets], axis=0) / len(nets))
        return np.asarray(mass / mass.sum(axis=1, keepdims=True))

    def _inputs(
        self, configs: Sequence[TrialConfig], mean: np.ndarray, scale: np.ndarray, dtype: torch.dtype = torch.float32
    ) -> Inputs:
        scalars = torch.from_numpy((scalars_of(configs) - mean) / scale)
        sequences = [tokens_of(config) if self.reads_sequence else torch.empty(0, 0) for config in configs]
        tokens = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        return Inputs(scalars.to(dtype), tokens.to(dtype), torch.tensor([len(sequence) for sequence in sequences]))


class GPUMemNetMLP(GPUMemNetEstimator):
    """Five perceptrons of 1 to 5 hidden layers over counts and totals."""

    name: ClassVar[str] = "gpumemnet_mlp"
    members: ClassVar[int] = 5
    reads_sequence: ClassVar[bool] = False
    training: ClassVar[NetTraining] = NetTraining(steps=3000, most_epochs=60, learning_rate=5e-3)

    def _net(self, member: int, scalars: int, classes: int) -> nn.Module:
        return CountsNet(scalars, classes, hidden_layers=1 + member, width=64)


class GPUMemNetTransformer(GPUMemNetEstimator):
    """Three transformer encoders of 1 to 3 layers over the layer sequence, with the same counts and totals."""

    name: ClassVar[str] = "gpumemnet_transformer"
    members: ClassVar[int] = 3
    reads_sequence: ClassVar[bool] = True
    training: ClassVar[NetTraining] = NetTraining(steps=600, most_epochs=70, learning_rate=8e-3)

    def _net(self, member: int, scalars: int, classes: int) -> nn.Module:
        return SequenceNet(scalars, len(KINDS) + 3, classes, encoders=1 + member, width=6, heads=3)


@dataclass(frozen=True, eq=False)
class BinnedPrediction(Prediction):
    """Probabilities of bins by row, mass spread evenly inside a bin. Rows in `refusals` are NaN throughout.

    edges          (n, k + 1), ascending, in the target's unit; rows with fewer bins repeat their last edge
    probabilities  (n, k), each row sums to 1
    point_share    place of the point in the likeliest bin: 0 its lower edge, 1 its upper
    scores         ascending, in [0, 1]: quantiles of held-out labels in their predicted distribution, by kind of row
    kind           (n,) int, index of the scores that bound the row; -1 in refused rows
    """

    edges: np.ndarray
    probabilities: np.ndarray
    point_share: float
    scores: Sequence[np.ndarray]
    kind: np.ndarray

    @property
    def point(self) -> np.ndarray:
        likeliest = self.probabilities.argmax(axis=1)
        row = np.arange(len(likeliest))
        low, high = self.edges[row, likeliest], self.edges[row, likeliest + 1]
        return np.asarray(low + self.point_share * (high - low))

    def quantile(self, q: float) -> np.ndarray:
        if not 0 < q < 1:
            raise ValueError(f"a quantile lies between 0 and 1, got {q}")
        return self._quantile(np.full(len(self.kind), q))

    def bin_probabilities(self, edges: np.ndarray) -> np.ndarray:
        edges = np.asarray(edges, dtype=float)
        edges = np.broadcast_to(edges, (len(self.kind), edges.shape[-1]))
        below = cumulative(self.edges, self.probabilities, edges)
        return class_masses(below, edges, self.edges[:, 0])

    def upper(self, level: float = LEVEL) -> np.ndarray | None:
        """Return bounds by distributional conformal prediction (Chernozhukov et al. 2021): the quantile of each row's
        own distribution at the ceil((m + 1) * level)-th smallest of the m held-out scores; the largest where they are
        too few."""
        if not any(scores.size for scores in self.scores):
            return None
        q = np.full(len(self.kind), np.nan)
        for kind, scores in enumerate(self.scores):
            q[self.kind == kind] = conformal_score(scores, level) if scores.size else 1.0
        return np.asarray(np.maximum(self._quantile(q), self.point))

    def _quantile(self, q: np.ndarray) -> np.ndarray:
        """Return (n,) the value at which each row's distribution reaches q, by linear interpolation inside the bin."""
        row = np.arange(len(q))
        reached = np.cumsum(self.probabilities, axis=1)
        reached[:, -1] = np.where(np.isnan(reached[:, -1]), np.nan, 1.0)
        bin_index = (reached >= q[:, None]).argmax(axis=1)
        before = np.where(bin_index > 0, reached[row, np.maximum(bin_index - 1, 0)], 0.0)
        mass = np.maximum(reached[row, bin_index] - before, 1e-300)
        low, high = self.edges[row, bin_index], self.edges[row, bin_index + 1]
        return np.asarray(low + np.clip((q - before) / mass, 0.0, 1.0) * (high - low))


def cumulative(edges: np.ndarray, probabilities: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return (n, v) mass below each of the values (n, v), given bins (n, k + 1) and probabilities (n, k)."""
    below = np.zeros(values.shape)
    for k in range(probabilities.shape[1]):
        low, width = edges[:, k, None], edges[:, k + 1, None] - edges[:, k, None]
        share = np.clip((values - low) / np.maximum(width, 1e-300), 0.0, 1.0)
        below = below + probabilities[:, k, None] * share
    # No mass lies above the last edge, whatever the sum was rounded to.
    return np.where(values >= edges[:, -1:], 1.0, np.minimum(below, 1.0))


def bin_edges(rows: Rows) -> np.ndarray:
    """Return (k + 1,) edges of one family's bins. For memory, they go from 0 to above the largest need; a bin above the
    memory of the largest device that jobs ran out of is added, unless other jobs need more. For utilization, they are
    the published three."""
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
    """Return (n,) int bin of each of a family's rows, and (n,) bool: whether it is that bin or any above.

    As published, rows that ran out of the largest device are in the bin above it, the top one. Rows that ran out of a
    smaller device are in that device's bin or above."""
    top = len(edges) - 2
    classes = np.clip(np.searchsorted(edges, rows.label, side="right") - 1, 0, top)
    if rows.censored.any() and edges[top] > rows.exact.label.max():
        classes[rows.censored & (rows.label >= rows.label[rows.censored].max())] = top
    return classes, rows.censored & (classes < top)


def _configs(cases: Sequence[Case]) -> list[TrialConfig]:
    """Return the trial configs of the cases; each has one."""
    return [case.config for case in cases if case.config is not None]


def scalars_of(configs: Sequence[TrialConfig]) -> np.ndarray:
    """Return (n, s) logarithms of counts and sizes, and the activation function's sine and cosine."""
    columns = feature_columns(configs)
    counts = np.stack([columns[name] for name in (*_COUNTS, *_SIZES)], axis=1)
    angles = []
    for config in configs:
        activation = getattr(config, "activation", None)
        known = activation in ACTIVATIONS
        angle = ACTIVATIONS.index(activation) * math.pi / len(ACTIVATIONS) if known else None
        angles.append((0.0, 0.0) if angle is None else (math.sin(angle), math.cos(angle)))
    logarithms = [[math.log1p(count) for count in row] for row in counts.tolist()]
    return np.hstack([np.array(logarithms), np.array(angles)])


def tokens_of(config: TrialConfig) -> Tensor:
    """Return (l, t), the layer sequence, l at most `MAX_TOKENS`: log counts of `KINDS` in a run of layers, and
    logarithms of its activations, of its activations times the batch size, and of its parameters. Short plans have a
    token a layer."""
    place = {**{kind: i for i, kind in enumerate(KINDS)}, **dict.fromkeys(ACTIVATIONS, KINDS.index("activation"))}
    plan = layers_of(config)
    count = max(1, min(len(plan), MAX_TOKENS))
    tokens = np.zeros((count, len(KINDS) + 3))
    for i, layer in enumerate(plan):
        token = tokens[i * count // len(plan)]
        token[place.get(layer.kind, KINDS.index("other"))] += 1
        token[-3:] += layer.output_elements, config.batch_size * layer.output_elements, layer.parameters
    tokens = np.log1p(tokens)
    tokens[:, -3:] /= 10.0
    return torch.from_numpy(tokens).float()


# Suffixes: N rows, L tokens, T features of a token, S scalars, C classes, D width, H heads.


@dataclass(frozen=True)
class Inputs:
    """scalars_NS; tokens_NLT, zero beyond each row's length_N. Networks on counts alone have sequences of length 0."""

    scalars_NS: Tensor
    tokens_NLT: Tensor
    length_N: Tensor

    def at(self, index: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows `index`, with tokens cut to the longest of them."""
        length_N = self.length_N[index]
        return self.scalars_NS[index], self.tokens_NLT[index, : length_N.max()], length_N


class CountsNet(nn.Module):
    """A multi-layer perceptron whose hidden layers narrow from `width` to half of it."""

    def __init__(self, scalars: int, classes: int, *, hidden_layers: int, width: int) -> None:
        super().__init__()
        sizes = [scalars, *np.linspace(width, width / 2, hidden_layers).astype(int).tolist()]
        hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(sizes[-1], classes))

    def forward(self, scalars_NS: Tensor, tokens_NLT: Tensor, length_N: Tensor) -> Tensor:
        return self.layers(scalars_NS)


class SequenceNet(nn.Module):
    """A transformer encoder over the layers, whose mean and maximum join the scalars before the classifier."""

    def __init__(self, scalars: int, tokens: int, classes: int, *, encoders: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Linear(tokens, width)
        self.encoders = nn.ModuleList(_Encoder(width, heads) for _ in range(encoders))
        self.norm = nn.LayerNorm(width)
        self.head = CountsNet(2 * width + scalars, classes, hidden_layers=2, width=64)

    def forward(self, scalars_NS: Tensor, tokens_NLT: Tensor, length_N: Tensor) -> Tensor:
        x_NLD = self.embed(tokens_NLT)
        x_NLD = x_NLD + _positions(x_NLD.shape[1], x_NLD.shape[2]).to(x_NLD.dtype)
        there_NL = torch.arange(x_NLD.shape[1]) < length_N[:, None]
        for encoder in self.encoders:
            x_NLD = encoder(x_NLD, there_NL)
        x_NLD = self.norm(x_NLD)
        mean_ND = (x_NLD * there_NL[..., None]).sum(1) / length_N[:, None]
        most_ND = x_NLD.masked_fill(~there_NL[..., None], -math.inf).amax(1)
        return self.head(torch.cat([mean_ND, most_ND, scalars_NS], dim=1), tokens_NLT, length_N)


class _Encoder(nn.Module):
    """Attention and a feed-forward part, each with layer normalisation before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forward_part = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x_NLD: Tensor, there_NL: Tensor) -> Tensor:
        n, length, width = x_NLD.shape
        parts = self.into(self.norms[0](x_NLD)).view(n, length, 3, self.heads, width // self.heads)
        q_NHLd, k_NHLd, v_NHLd = parts.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(
            q_NHLd, k_NHLd, v_NHLd, attn_mask=there_NL[:, None, None, :]
        )
        x_NLD = x_NLD + self.out(attended.transpose(1, 2).reshape(n, length, width))
        return x_NLD + self.forward_part(self.norms[1](x_NLD))


def _positions(length: int, width: int) -> Tensor:
    """Return sines and cosines of positions, (L, D) (Vaswani et al. 2017)."""
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angle = torch.arange(length)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)


def train_member(
    net: nn.Module,
    inputs: Inputs,
    classes: np.ndarray,
    or_above: np.ndarray,
    held_out: np.ndarray,
    how: NetTraining,
    seed: int,
) -> nn.Module:
    """Return the net trained on the rows outside `held_out` (n,) bool, of the epoch that estimates those best.

    classes (n,) int; `or_above` (n,) bool: whether the row's class is that one or any above."""
    inside, outside = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    target = torch.from_numpy(classes), torch.from_numpy(or_above)
    epochs = how.epochs(len(inside))
    optimizer = torch.optim.AdamW(net.parameters(), lr=how.learning_rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    rng = np.random.default_rng(seed)
    return train_best(
        net,
        optimizer,
        schedule,
        lambda: _batches(inside, inputs.length_N.numpy(), how.batch(len(inside)), rng),
        lambda rows: _losses(net, inputs, target, rows).mean(),
        lambda: _loss(net, inputs, target, outside),
        epochs=epochs,
        patience=max(8, epochs // 4),
    )


def probabilities(net: nn.Module, inputs: Inputs) -> np.ndarray:
    """Return (n, classes) of a net from `learn.peers.base.with_arrays`."""
    with torch.inference_mode():
        batches = [net(*inputs.at(rows)).softmax(1) for rows in in_parts(np.arange(len(inputs.length_N)), 512)]
    return torch.cat(batches).numpy()


def _batches(rows: np.ndarray, length: np.ndarray, size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return the rows in batches of about equal lengths, in random order, so that short rows need little padding."""
    shuffled = rng.permutation(rows)
    batches = in_parts(shuffled[np.argsort(length[shuffled], kind="stable")], size)
    return [batches[i] for i in rng.permutation(len(batches))]


def _losses(net: nn.Module, inputs: Inputs, target: tuple[Tensor, Tensor], rows: np.ndarray) -> Tensor:
    """Return (n,) minus the logarithm of the net's probability of the row's class, or of it and all above."""
    logits_NC, class_N, or_above_N = net(*inputs.at(rows)), target[0][rows], target[1][rows]
    loss_N = nn.functional.cross_entropy(logits_NC, class_N, reduction="none")
    if not or_above_N.any():
        return loss_N
    below_NC = torch.arange(logits_NC.shape[1]) < class_N[:, None]
    least_N = logits_NC.logsumexp(1) - logits_NC.masked_fill(below_NC, -math.inf).logsumexp(1)
    return torch.where(or_above_N, least_N, loss_N)


def _loss(net: nn.Module, inputs: Inputs, target: tuple[Tensor, Tensor], rows: np.ndarray) -> float:
    with torch.no_grad():
        total = sum(_losses(net, inputs, target, part).sum().item() for part in in_parts(rows, 512))
    return total / max(len(rows), 1)
