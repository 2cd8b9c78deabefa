"""The default estimator: the trace's figure, corrected by measured rows, and the distribution of its errors.

Start reading at `HybridEstimator.fit`. `Familiarity.judge` finds cases unlike the fitted ones; `Evidence` holds the
share of the correction that applies to them, measured by leaving out one kind of rows after another.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from conf.files.identity import version_of
from featurize.device.device_spec import plain_device
from learn.estimators.protocol import (
    FOLDS,
    LEVEL,
    Estimator,
    HeldShare,
    ResidualPrediction,
    conformal_score,
    cross_fit,
    group_folds,
    group_score,
    held_of,
    records_of,
    to_space,
    too_few_for,
    traced_rows,
    within_space,
)
from learn.estimators.trees import MEMBERS, Boosters, Settings, Trees, boost
from learn.job.training_job import Case
from learn.rows.data import Rows, module_of
from learn.rows.step_store import COUNTS, StepRecord, StepStore, traced_column

# Features as a person reads them: feature -> its name in words, and the format of its value.
_RANGES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "job_log_batch": ("a batch of", lambda v: f"{2**v:,.0f}"),
    "net_log_parameters": ("parameters:", lambda v: f"{2**v - 1:,.0f}"),
    "net_log_flops": ("FLOPs a sample:", lambda v: f"{2**v - 1:.2g}"),
    "net_log_tokens": ("a sequence of", lambda v: f"{2**v - 1:,.0f}"),
    "net_operators": ("operators of the forward pass:", lambda v: f"{v:,.0f}"),
    "job_log_memory": ("MiB traced:", lambda v: f"{2**v - 1:,.0f}"),
}
_SLACK = 0.05  # share of a range's width by which a value may lie outside
_WORDS: Mapping[str, Mapping[float, str]] = {  # training settings by their features, as a person reads their values
    "net_math_bits": {32: "fp32", 19: "tf32", 16: "half precision"},
    "net_states": {0: "an optimizer without state (sgd)", 1: "momentum", 2: "adam"},
}
# Axes along which a case may be of a new kind: features of its settings, its device, its operators, its family.
# `RANGE`: beyond a feature's range.
AXES_OF_SETTINGS = ("net_math_bits", "net_states", "net_channels_last", "net_cudnn_benchmark")
DEVICE, OPERATORS, FAMILY, RANGE = "device", "operators", "family", "range"
MOST_LEFT_OUT = 3  # kinds of one axis to leave out, those with the most rows: each costs a fit
LEAST_LEFT_OUT = 10  # rows on either side; with fewer, their errors mean little
LEAST_KNOWN = 30  # held-out rows of a family that its share needs
_SHARES = np.linspace(0.0, 1.0, 21)
_WIDTH = 0.95  # quantile of the absolute error by which widths are compared
_WORST = 0.5  # cap of an error in the logarithm
_CERTAIN = 1e-3  # errors below it count as 0
_NO_ERROR = 1e-6
_WIDEST = 4.0


class Unfamiliar(NamedTuple):
    """Reasons why a case is unlike the fitted ones.

    reasons   texts for people
    axes      axes along which the case is of a new kind
    widening  axes that widen the bound, repeated for each reason; they belong to a subset of the reasons
    """

    reasons: tuple[str, ...]
    axes: frozenset[str]
    widening: tuple[str, ...]


@dataclass(frozen=True)
class Familiarity:
    """Ranges and kinds of the fitted rows.

    ranges   feature -> (least, most)
    kinds    operator classes of the forward passes; devices: names, without the vendor; settings: feature -> values
    torch    PyTorch's releases, as 2.4
    families the rows' families
    modules  modules of families with many; a library's modules are similar
    """

    ranges: Mapping[str, Sequence[float]]
    kinds: Sequence[str]
    devices: Sequence[str]
    settings: Mapping[str, Sequence[float]]
    torch: Sequence[str]
    families: Sequence[str]
    modules: Sequence[str]

    @classmethod
    def learn(cls, rows: Rows, records: Sequence[StepRecord]) -> Self:
        """Return the ranges and kinds of the fitted rows; `records` are the rows' records, in the same order."""
        columns = {name: np.array([record.values[name] for record in records]) for name in _RANGES}
        settings = list(AXES_OF_SETTINGS)
        if rows.target.space == "ratio":  # the input pipeline keeps a GPU waiting; memory hardly depends on it
            settings.append("net_training_loop")
        return cls(
            ranges={name: (float(values.min()), float(values.max())) for name, values in columns.items()},
            kinds=sorted(frozenset[str]().union(*(record.operator_kinds for record in records))),
            devices=sorted({plain_device(str(name)) for name in rows.device}),
            settings={name: sorted({float(record.values[name]) for record in records}) for name in settings},
            torch=sorted({torch_release(case.torch_version) for case in rows.cases}),
            families=sorted(set(map(str, rows.family))),
            modules=sorted({str(module) for module in rows.module if "/" in str(module)}),
        )

    @cached_property
    def _familiar(self) -> list[tuple[str, float, float]]:
        """Each feature with the least and the most familiar value."""
        limits = []
        for name in _RANGES:
            low, high = self.ranges[name]
            slack = _SLACK * max(high - low, 1.0)
            if name != "net_log_tokens" or high > 0:  # else no fitted network had attention, which is reported anyway
                limits.append((name, low - slack, high + slack))
        return limits

    @cached_property
    def _new_kinds(self) -> list[tuple[str, str]]:
        """Each operator class that no fitted network had, and the feature that counts it."""
        return [(kind, count) for kind, count in COUNTS if kind not in self.kinds]

    def judge(self, case: Case, record: StepRecord) -> Unfamiliar:
        """Return how the case is unlike the fitted ones, empty if it is not."""
        values = record.values
        reasons, ranges, kinds = list[str](), list[str](), list[str]()
        for name, least, most in self._familiar:
            if not least <= values[name] <= most:
                words, write = _RANGES[name]
                low, high = map(write, self.ranges[name])
                reasons.append(f"{words} {write(values[name])}, fitted on {low} to {high}")
                # A smaller batch must not have a higher bound than a larger one.
                if not (name.startswith("job_") and values[name] < least):
                    ranges.append(RANGE)
        if new := [kind for kind, count in self._new_kinds if values.get(count)]:
            reasons.append(f"operators that no fitted network had: {', '.join(new)}")
            kinds.append(OPERATORS)
        for axis in AXES_OF_SETTINGS:
            if values[axis] not in self.settings[axis]:
                reasons.append(_setting_unlike(axis, values[axis], self.settings[axis]))
                kinds.append(axis)
        if values["net_training_loop"] not in self.settings.get("net_training_loop", (0.0, 1.0)):
            without = "out" if values["net_training_loop"] == 0 else ""
            reasons.append(f"a loop with{without} an input pipeline: only the other kind was fitted on")
            ranges.append(RANGE)
        device = case.device if case.described is None else case.described.name
        if plain_device(device) not in self.devices:
            reasons.append(f"nothing was measured on {device}, only on {', '.join(self.devices)}")
            kinds.append(DEVICE)
        release = torch_release(case.torch_version)
        if release not in self.torch:  # widens nothing: how much memory changes by release is not known
            reasons.append(f"PyTorch {release}: measured under {', '.join(self.torch)}")
        # An unknown family is no reason to warn: a module never belongs to a family.
        family = () if case.family in self.families else (FAMILY,)
        return Unfamiliar(tuple(reasons), frozenset((*kinds, *family)), (*ranges, *kinds))

    def is_new_module(self, case: Case) -> bool:
        """Return whether the case's family was fitted, but its module was not."""
        if case.config is None or case.family not in self.families:
            return False
        fitted = any(module.startswith(f"{case.family}/") for module in self.modules)
        return fitted and module_of(case.config) not in self.modules


def _setting_unlike(axis: str, value: float, fitted: Sequence[float]) -> str:
    """Return the reason for a training setting, by the name of its feature, that nothing was fitted on."""
    words = _WORDS.get(axis)
    if words is None:
        return f"{axis.removeprefix('net_')}={bool(value)} was never fitted on".lower()
    known = " and ".join(words.get(setting, str(setting)) for setting in fitted)
    return f"{words.get(value, str(value))}: only {known} was fitted on"


@cache
def torch_release(version: str | None) -> str:
    """Return the release of torch of a case's environment, as 2.4; None: of the installed one."""
    release = re.match(r"(\d+)\.(\d+)", version or version_of("torch") or "")
    return f"{release[1]}.{release[2]}" if release else "0.0"


@dataclass(frozen=True)
class Evidence:
    """Results of leaving out one kind after another, by axis: a setting's feature, `device`, `operators`, `family`.

    shares    axis -> share of the correction, 0 to 1, with the smallest error on left-out kinds; none where no kind
              could be left out
    widening  axis -> ratio of the error on left-out kinds to that on held-out rows of known kinds
    families  known family -> share of the correction with the smallest error on its held-out rows
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    widening: Mapping[str, float] = field(default_factory=dict)
    families: Mapping[str, float] = field(default_factory=dict)

    def share(self, axes: Collection[str]) -> float:
        """Return the share of the correction for a case that is new along these axes. Without evidence that the
        correction helps along an axis, as no fit could leave out a kind of it, the share is 0; for the family it is
        1."""
        return min((self.shares.get(axis, 1.0 if axis == FAMILY else 0.0) for axis in axes), default=1.0)


def _errors_by_share(residual: np.ndarray, correction: np.ndarray) -> np.ndarray:
    """Return the capped errors with each share of a fit's correction of the trace, (shares, rows), from the rows' label
    minus the trace's figure and the correction, both in the target's space."""
    return np.asarray(np.minimum(np.abs(residual - _SHARES[:, None] * correction), _WORST))


def _share_of_known(residual: np.ndarray, correction: np.ndarray) -> float:
    """Return the share of the correction for a fitted family, from its held-out rows: the share with the least sum of
    median, mean and 90th percentile of the error, as multiples of the trace's own."""
    errors = _errors_by_share(residual, correction)
    figures = np.median(errors, axis=1), errors.mean(axis=1), np.quantile(errors, 0.9, axis=1)
    loss = np.sum([of_share / max(of_share[0], _NO_ERROR) for of_share in figures], axis=0)
    return float(_SHARES[int(np.argmin(loss))])


def kinds_to_leave_out(
    records: Sequence[StepRecord], devices: Sequence[str], families: Sequence[str], exact: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each axis with the mask of rows of one of its kinds, if both sides have enough rows to fit and judge.

    Args:
        records: Records of the fitted rows; `devices` and `families` are theirs, in the same order.
        exact: (n,) bool: the row has a label, not only a bound.
    """
    masks: dict[str, dict[object, np.ndarray]] = {
        axis: _by_value([record.values[axis] for record in records]) for axis in AXES_OF_SETTINGS
    }
    masks[DEVICE] = _by_value([plain_device(device) for device in devices])
    masks[FAMILY] = _by_value(list(families))
    kinds = [record.operator_kinds for record in records]
    present = {kind: np.array([kind in row_kinds for row_kinds in kinds]) for kind in sorted(frozenset().union(*kinds))}
    masks[OPERATORS] = {mask.tobytes(): mask for mask in present.values()}  # operators that always come together: once
    for axis, of_axis in masks.items():
        usable = [m for m in of_axis.values() if min((exact & m).sum(), (exact & ~m).sum()) >= LEAST_LEFT_OUT]
        for mask in sorted(usable, key=lambda m: -int(m.sum()))[:MOST_LEFT_OUT]:
            yield axis, mask


def _by_value(values: Sequence[object]) -> dict[object, np.ndarray]:
    array = np.array(values, dtype=object)
    return {value: array == value for value in sorted(set(values), key=str)}


OWN_SCORES = 300  # held-out rows that a family needs for its own bound
MANY_MODULES = 10  # a family with this many is held out by module: it will be asked about new ones
KNOTS_PER_DOUBLING = 4
# Least scale of an error, as a share of the 90th percentile of all scales: one network that only looks certain must not
# stretch every bound.
_SCALE_SHARE = 0.1
_MEMORY = Settings(rounds=160, leaves=15, least=15, l2=5.0, share=0.3)
_OTHERS = Settings(rounds=400, leaves=15, least=8, l2=1.0, share=0.5)
_SCALE = Settings(rounds=60, leaves=6, least=25, l2=1.0, share=0.3, quantile=0.95)  # learns the error's upper quantile
_LOG_MEMORY = "job_log_memory"
_OF_MEMORY = ("net_", "gpu_", "job_scenario_")  # prefixes of the columns of memory's factor; PyTorch's release is added
_TORCH = "env_torch"  # read from a case, not from its record
# Widening of the bound for each reason, and for a new device, where no fit could leave out a kind of that axis: chosen.
# `learn.estimation.job_estimate` has measured factors, which `learn.estimate` applies to a traced step.
_WIDER, _WIDER_DEVICE, _MOST_REASONS = 1.5, 2.0, 3
# Limit of the widening, as a multiple of the point: a wider bound would tell nothing.
_STRETCHED_AT_MOST = 4.0


class HybridEstimator(Estimator):
    """The trace's figure times a learned factor (ratios: plus a learned term); gradient-boosted trees learn it.

    The factor of memory is learned from the network's features without the batch size, from how assumptions about
    workspaces move the trace, and from the trace's memory. For each network, and for given ratios of these assumptions,
    the curve from traced to estimated memory is made monotone. It never falls below weights and context. Rows that ran
    out of memory count as "at least the device's memory".

    The scale of the errors is learned from errors on rows held out by group (by module, where a family has many). A
    conformal bound is taken over the scaled errors, by family and device where these have enough rows. Other families
    get the bound of a family drawn at random. A case unlike the fitted ones gets a wider bound and a warning with the
    reason.
    """

    name: ClassVar[str] = "hybrid"
    needs_trace: ClassVar[bool] = True
    uses_out_of_memory: ClassVar[bool] = True
    _knots = np.empty(0)  # for memory only
    _evidence = Evidence()

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Self:
        """Fit on the trusted rows whose step can be traced. Raises `UsageError` for fewer than 10 rows or a single
        group.

        Rows that ran out of memory are used for memory only."""
        rows = rows.trusted if rows.target.is_memory else rows.trusted.exact
        rows, records = traced_rows(rows, steps)
        self.target = rows.target
        self._columns = self._choose(records)
        table, base = self._table(rows.cases, records), self._base(records)
        label = within_space(to_space(rows.label, self.target.space), self.target.space)
        weight = _balance(rows.module)
        if self.target.is_memory:
            traced_memory = table[:, self._columns.index(_LOG_MEMORY)]
            low, high = math.floor(traced_memory.min()), math.ceil(traced_memory.max())
            self._knots = np.linspace(low, high, (high - low) * KNOTS_PER_DOUBLING + 1)
        settings = _MEMORY if self.target.is_memory else _OTHERS

        correction = label - base

        def answers(inside: np.ndarray, wanted: np.ndarray, members: int = MEMBERS) -> np.ndarray:
            """Return the points of the rows of mask `wanted`, fitted on the rows of mask `inside`."""
            boosters = boost(
                settings, self.seed, table[inside], correction[inside], rows.censored[inside], weight[inside], members
            )
            return self._centre(boosters, table[wanted], base[wanted])

        held_out = cross_fit(group_folds(_units(rows), FOLDS, self.seed), lambda inside: answers(inside, ~inside))
        self._correction = boost(settings, self.seed, table, correction, rows.censored, weight).trees()

        exact = ~rows.censored
        if self.target.is_memory:
            self._evidence = _weigh(
                rows,
                records,
                correction,
                held_out - base,
                lambda inside, wanted: answers(inside, wanted, members=1) - base[wanted],
            )
            shares = np.array([self._evidence.families.get(str(family), 1.0) for family in rows.family])
            held_out = base + shares * (held_out - base)
        gap = label - held_out
        residual = gap[exact]
        self._floor = max(_SCALE_SHARE * float(np.quantile(np.abs(residual), 0.9)), 1e-6)
        network = self._of_network(table)[exact]
        self._scale = boost(_SCALE, self.seed, network, np.abs(residual), None, weight[exact]).trees()
        self._kinds, self._scores = self._calibrate(rows, table, gap)
        self._familiarity = Familiarity.learn(rows, records)
        return self

    def predict(self, cases: Sequence[Case], steps: StepStore | None = None) -> ResidualPrediction:
        target = self.require_fitted()
        records, refusals = records_of(cases, steps)
        known, n = list(records), len(cases)
        centre, least = np.full(n, np.nan), np.zeros(n)
        unfamiliar: dict[int, tuple[str, ...]] = {}
        widening: dict[int, tuple[str, ...]] = {}
        kind = np.array([self._kind(case) for case in cases], dtype=int)
        outside = {i for i in known if kind[i] == 0 or self._familiarity.is_new_module(cases[i])}
        known_records = list(records.values())
        table, base = self._table([cases[i] for i in known], known_records), self._base(known_records)
        if target.is_memory:
            least[known] = [r.values["job_weights_mib"] + r.values["job_outside_mib"] for r in known_records]
        shares = np.ones(len(known))
        for place, (i, record) in enumerate(records.items()):
            unlike = self._familiarity.judge(cases[i], record)
            share = self._evidence.share(unlike.axes) if target.is_memory else 1.0
            shares[place] = min(share, self._evidence.families.get(cases[i].family, 1.0))
            if reasons := _reasons(unlike, share):
                unfamiliar[i] = reasons
            if unlike.widening:
                outside.add(i)
                widening[i] = unlike.widening
        corrected = base.copy()
        if (learned := shares > 0).any():
            corrected[learned] = self._centre(self._correction, table[learned], base[learned])
        centre[known] = np.where(shares < 1, base + shares * (corrected - base), corrected)

        def scales() -> np.ndarray:
            scale = np.full(n, np.nan)
            scale[known] = np.maximum(self._scale.predict(self._of_network(table)), self._floor)
            for i, axes in widening.items():
                scale[i] *= self._widening(axes, scale[i], kind[i])
            return scale

        return ResidualPrediction(
            centre,
            self._scores,
            target.space,
            warnings=too_few_for(LEVEL, self._held_out_rows),
            refusals=refusals,
            unfamiliar=unfamiliar,
            scale=scales,
            kind=kind,
            least=least,
            outside=frozenset(outside),
            held=self._held,
        )

    def _widening(self, axes: Sequence[str], scale: float, kind: int) -> float:
        """Return the factor that widens the bound for reasons of these axes: of left-out kinds where these were judged,
        else as chosen.

        A bound above a logarithm widens to `_STRETCHED_AT_MOST` times the point at most.
        """
        shown = [self._evidence.widening[axis] for axis in axes if axis in self._evidence.widening]
        chosen = [axis for axis in axes if axis not in self._evidence.widening]
        device = DEVICE in chosen
        wanted = math.prod(shown) * _WIDER ** min(len(chosen) - device, _MOST_REASONS)
        wanted *= _WIDER_DEVICE if device else 1
        if self.target.space != "log":
            return wanted
        margin = scale * conformal_score(self._scores[kind], LEVEL)
        return min(wanted, max(math.log(_STRETCHED_AT_MOST) / max(margin, 1e-9), 1.0))

    def _kind(self, case: Case) -> int:
        family, device = _place(case)
        return self._kinds.get(f"{family} on {device}", self._kinds.get(family, 0))

    # ---- parts of fit and predict

    def _choose(self, records: Sequence[StepRecord]) -> tuple[str, ...]:
        names = sorted(records[0].values)
        if self.target.is_memory:
            return (*(name for name in names if name.startswith(_OF_MEMORY)), _TORCH, _LOG_MEMORY)
        return (*names, _TORCH)

    def _table(self, cases: Sequence[Case], records: Sequence[StepRecord]) -> np.ndarray:
        place = self._columns.index(_TORCH)
        features_of = itemgetter(*self._columns[:place], *self._columns[place + 1 :])
        rows = [list(features_of(record.values)) for record in records]
        for row, case in zip(rows, cases, strict=True):
            row.insert(place, _torch(case.torch_version))
        return np.array(rows, dtype=float).reshape(len(rows), len(self._columns))

    def _of_network(self, table: np.ndarray) -> np.ndarray:
        """Return the features that the scale is learned from. For memory, features that depend on the batch are left
        out, so that bounds grow with it."""
        return table[:, :-1] if self.target.is_memory else table

    def _base(self, records: Sequence[StepRecord]) -> np.ndarray:
        name = traced_column(self.target)
        return to_space(np.array([record.values[name] for record in records]), self.target.space)

    def _centre(self, trees: Trees | Boosters, table: np.ndarray, base: np.ndarray) -> np.ndarray:
        if not self.target.is_memory:
            return within_space(base + trees.predict(table), self.target.space)
        # From traced to estimated memory, for each network: a curve through knots that never falls.
        log_traced = np.log2(np.exp(base))
        place = np.clip(log_traced, self._knots[0], self._knots[-1])
        lower = np.clip(np.searchsorted(self._knots, place, side="right") - 1, 0, len(self._knots) - 2)
        rows, knots = np.arange(len(table)), self._knots[: lower.max() + 2]
        wide = np.repeat(table, len(knots), axis=0)
        wide[:, -1] = np.tile(knots, len(table))
        curve = knots * math.log(2) + trees.predict(wide).reshape(len(table), -1)
        curve = np.maximum.accumulate(curve, axis=1)
        part = (place - knots[lower]) / (knots[lower + 1] - knots[lower])
        inside = curve[rows, lower] + part * (curve[rows, lower + 1] - curve[rows, lower])
        return np.asarray(inside + (log_traced - place) * math.log(2))  # beyond the knots: the factor of the nearest

    def _calibrate(self, rows: Rows, table: np.ndarray, gap: np.ndarray) -> tuple[dict[str, int], list[np.ndarray]]:
        """Return the kinds of bound and their scaled residuals: of all rows, with families weighted evenly, and of each
        family, and each family on one device, that has enough rows. A row's scale comes from a model that has not seen
        the row, which would underestimate its error. Rows that ran out of memory count only where the estimate fits the
        device: the error is then at least the difference.

        Scores above the estimate are stretched until the bound holds for left-out groups: modules where a family has
        many, else configurations."""
        informative = ~rows.censored | (gap > 0)
        rows, gap, network = rows.subset(informative), gap[informative], self._of_network(table)[informative]
        units = _units(rows)
        weight = _balance(rows.module)

        def without(inside: np.ndarray) -> np.ndarray:
            exact = inside & ~rows.censored
            boosters = boost(_SCALE, self.seed, network[exact], np.abs(gap[exact]), None, weight[exact])
            return np.asarray(np.maximum(boosters.predict(network[~inside]), self._floor))

        scale = cross_fit(group_folds(units, FOLDS, self.seed + 1), without)
        score = gap / scale
        self._held_out_rows = len(rows)
        self._held = {}
        kinds, scores = {}, [_even_out(score, rows.family)]
        places = list(map(_place, rows.cases))
        for names in ([family for family, _ in places], [f"{family} on {device}" for family, device in places]):
            for name in sorted(set(names)):
                mine = np.array([entry == name for entry in names])
                if mine.sum() >= OWN_SCORES:
                    own_scores, unit = score[mine], units[mine]
                    kind = "families" if _of_many_modules(rows, str(rows.family[mine][0])) else "configurations"
                    held = held_of(own_scores, unit, partial(_bound, own_scores, unit), kind)
                    if held is not None:
                        self._held[len(scores)] = held
                    kinds[name] = len(scores)
                    scores.append(
                        _stretch(np.sort(own_scores), _bound(own_scores, unit, np.ones(len(own_scores), dtype=bool)))
                    )
        # A new case is never more certain than a known one.
        scores[0] = _stretch(scores[0], max(conformal_score(kind_scores, LEVEL) for kind_scores in scores))
        return kinds, scores

    # ---- on disk

    def write_fit(self, folder: Path) -> dict[str, Any]:
        self._correction.save(folder, "correction")
        self._scale.save(folder, "scale")
        return {
            "columns": list(self._columns),
            "knots": self._knots.tolist(),
            "floor": self._floor,
            "kinds": self._kinds,
            "held": {str(kind): asdict(held) for kind, held in self._held.items()},
            "held_out_rows": self._held_out_rows,
            "scores": [scores.tolist() for scores in self._scores],
            "familiarity": asdict(self._familiarity),
            "evidence": asdict(self._evidence),
        }

    def read_fit(self, folder: Path, state: Mapping[str, Any]) -> None:
        self._columns = tuple(state["columns"])
        self._knots = np.asarray(state["knots"], dtype=float)
        self._floor = float(state["floor"])
        self._kinds = dict(state["kinds"])
        self._held = {int(kind): HeldShare(**held) for kind, held in state["held"].items()}
        self._held_out_rows = int(state["held_out_rows"])
        self._scores = [np.asarray(scores, dtype=float) for scores in state["scores"]]
        self._familiarity = Familiarity(**state["familiarity"])
        self._evidence = Evidence(**state["evidence"])
        self._correction = Trees.load(folder, "correction")
        self._scale = Trees.load(folder, "scale")


def _weigh(
    rows: Rows,
    records: Sequence[StepRecord],
    residual: np.ndarray,
    correction: np.ndarray,
    correction_of: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Evidence:
    """Return the evidence from leaving out one kind of rows after the other.

    Args:
        rows: The rows fitted on.
        records: Records of their steps.
        residual: Label less trace, (n,).
        correction: Correction of the trace by fits without each row's group, (n,).
        correction_of: Mask of the rows to fit on, and mask of the rows to correct -> the fit's correction of the
            latter.
    """
    exact = ~rows.censored
    families = rows.family.astype(str)
    known_width = float(np.quantile(np.abs(residual - correction)[exact], _WIDTH))
    left_out = defaultdict(list)
    for axis, mask in kinds_to_leave_out(records, rows.device.astype(str).tolist(), families.tolist(), exact):
        judged = mask & exact
        if axis == FAMILY and _of_many_modules(rows, families[judged][0]):  # its modules were each held out already
            added = correction[judged]
        else:
            added = correction_of(~mask, judged)
        left_out[axis].append((residual[judged], added))
    shares, widening = {}, {}
    for axis, kinds in left_out.items():
        # Each kind's mean error with each share, as multiples of the trace's own.
        means = np.array([_errors_by_share(*kind).mean(axis=1) + _CERTAIN for kind in kinds])
        shares[axis] = float(_SHARES[int(np.argmin((means / means[:, :1]).mean(axis=0)))])
        widths = [float(np.quantile(np.abs(own - shares[axis] * added), _WIDTH)) for own, added in kinds]
        widening[axis] = float(np.clip(np.median(widths) / max(known_width, _CERTAIN), 1.0, _WIDEST))
    of_known = {}
    for family in np.unique(families).tolist():
        mine = exact & (families == family)
        if mine.sum() >= LEAST_KNOWN:
            of_known[family] = _share_of_known(residual[mine], correction[mine])
    return Evidence(shares, widening, of_known)


def _even_out(score: np.ndarray, family: np.ndarray) -> np.ndarray:
    """Return the scores of all rows, ascending, with those of small families repeated: each family counts about as much
    as the largest one, so that one easy family does not decide the bound of unknown ones."""
    _, member, sizes = np.unique(family.astype(str), return_inverse=True, return_counts=True)
    return np.sort(np.repeat(score, np.round(sizes.max() / sizes).astype(int)[member]))


def _bound(score: np.ndarray, unit: np.ndarray, inside: np.ndarray) -> float:
    return max(conformal_score(np.sort(score[inside]), LEVEL), group_score(score[inside], unit[inside], LEVEL))


def _stretch(score: np.ndarray, wanted: float) -> np.ndarray:
    """Return the scores, ascending; those above the estimate are multiplied so that the bound is at least `wanted`."""
    bound = conformal_score(score, LEVEL)
    return np.where(score > 0, score * max(wanted / bound, 1.0), score) if bound > 0 else score


@cache
def _torch(version: str | None) -> float:
    """Return the release of torch of a case's environment as a number, 2.04 for 2.4.1; None: of the installed one."""
    major, minor = torch_release(version).split(".")
    return int(major) + int(minor) / 100


def _place(case: Case) -> tuple[str, str]:
    """Return family and device, the key of a bound."""
    return case.family, plain_device(case.device if case.described is None else case.described.name)


def _units(rows: Rows) -> np.ndarray:
    """Return the groups that are held out together: near-copies, or modules in a family of many modules."""
    units = rows.group.astype(object).copy()
    for family in set(map(str, rows.family)):
        if _of_many_modules(rows, family):
            mine = rows.family == family
            units[mine] = rows.module[mine]
    return units


def _of_many_modules(rows: Rows, family: str) -> bool:
    return len(set(map(str, rows.module[rows.family == family]))) >= MANY_MODULES


def _reasons(unlike: Unfamiliar, share: float) -> tuple[str, ...]:
    """Return the reasons, with their effect on the point; empty where the case is only of an unknown family."""
    if not unlike.reasons or share == 1.0:
        return unlike.reasons
    if share == 0.0:
        return (*unlike.reasons, "the trace's own figure stands, without the learned correction")
    return (*unlike.reasons, f"only {share:.0%} of the learned correction is applied to the trace's figure")


def _balance(module: np.ndarray) -> np.ndarray:
    """Return a weight for each row: a module of 100 rows counts as much as four modules of six rows."""
    _, member, sizes = np.unique(module.astype(str), return_inverse=True, return_counts=True)
    weight = 1 / np.sqrt(sizes[member])
    return np.asarray(weight / weight.mean())
