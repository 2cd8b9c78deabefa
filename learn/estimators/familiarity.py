"""Familiar and unfamiliar cases of a fit, and how much of a learned correction holds for the latter.

Start reading at `Familiarity.judge` and `Evidence`, which the hybrid measures by leaving out one kind of its rows after
the other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from conf.files.identity import version_of
from featurize.device.device_spec import plain_device
from featurize.operators.table import VOCABULARY
from learn.rows.cases import Case
from learn.rows.data import Rows, module_of
from learn.rows.step_record import StepRecord

# What a person can be told of: feature, in words, and how its value is written.
_RANGES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "job_log_batch": ("a batch of", lambda v: f"{2**v:,.0f}"),
    "net_log_parameters": ("parameters:", lambda v: f"{2**v - 1:,.0f}"),
    "net_log_flops": ("FLOPs a sample:", lambda v: f"{2**v - 1:.2g}"),
    "net_log_tokens": ("a sequence of", lambda v: f"{2**v - 1:,.0f}"),
    "net_operators": ("operators of the forward pass:", lambda v: f"{v:,.0f}"),
    "job_log_memory": ("MiB traced:", lambda v: f"{2**v - 1:,.0f}"),
}
_SLACK = 0.05  # of a range's width, beyond which a value is outside
_BITS: Mapping[float, str] = {32: "fp32", 19: "tf32", 16: "half precision"}
_STATES: Mapping[float, str] = {0: "an optimizer without state (sgd)", 1: "momentum", 2: "adam"}
# Along which a case may be of a kind that no fit has seen: features of its settings, its device, its operators, its
# family. Beyond a feature's range is `RANGE`.
AXES_OF_SETTINGS = ("net_math_bits", "net_states", "net_channels_last", "net_cudnn_benchmark")
DEVICE, OPERATORS, FAMILY, RANGE = "device", "operators", "family", "range"
MOST_LEFT_OUT = 3  # kinds of one axis, the ones with most rows: each costs a fit
LEAST_LEFT_OUT = 10  # rows on either side, for their errors to say anything
LEAST_KNOWN = 30  # held-out rows of a family, for them to say what its share is
_SHARES = np.linspace(0.0, 1.0, 21)
_WIDTH = 0.95  # quantile of the absolute error by which widths are compared
_WORST = 0.5  # a logarithm of an error beyond it counts as this much
_CERTAIN = 1e-3  # an error below a thousandth is none
_NO_ERROR = 1e-6
_WIDEST = 4.0


class Unfamiliar(NamedTuple):
    """Reasons why a case is unlike what was fitted on.

    reasons   for people
    axes      along which the case is of a new kind
    widening  axes that make the bound wider, an axis as often as there are reasons; a subset of the reasons
    """

    reasons: tuple[str, ...]
    axes: frozenset[str] = frozenset()
    widening: tuple[str, ...] = ()


@dataclass(frozen=True)
class Familiarity:
    """Ranges and kinds of what was fitted on.

    ranges   feature -> (least, most)
    kinds    operator classes of the forward passes; devices: names, without the vendor; settings: feature -> values
    torch    PyTorch's releases, as 2.4
    families of the rows
    modules  of families with many of them: a library's, which its authors keep together
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
        """Take the ranges and kinds of the rows fitted on, whose records come in the same order."""
        columns = {name: np.array([record.values[name] for record in records]) for name in _RANGES}
        settings = list(AXES_OF_SETTINGS)
        if rows.target.space == "ratio":  # the input pipeline keeps a GPU waiting; memory hardly knows it
            settings.append("net_training_loop")
        return cls(
            ranges={name: (float(values.min()), float(values.max())) for name, values in columns.items()},
            kinds=sorted(frozenset[str]().union(*(kinds_of(record.values) for record in records))),
            devices=sorted({plain_device(str(name)) for name in rows.device}),
            settings={name: sorted({float(record.values[name]) for record in records}) for name in settings},
            torch=sorted(set(map(torch_release, rows.cases))),
            families=sorted(set(map(str, rows.family))),
            modules=sorted({str(module) for module in rows.module if "/" in str(module)}),
        )

    def judge(self, case: Case, record: StepRecord) -> Unfamiliar | None:
        """Return why the case is unlike what was fitted on; None where it is not."""
        values, reasons = record.values, list[str]()
        axes, wider = set[str](), list[str]()
        for name, (words, write) in _RANGES.items():
            low, high = self.ranges[name]
            if name == "net_log_tokens" and high == 0:  # no fitted network had attention, which is said below
                continue
            slack = _SLACK * max(high - low, 1.0)
            if not low - slack <= values[name] <= high + slack:
                reasons.append(f"{words} {write(values[name])}, fitted on {write(low)} to {write(high)}")
                # A small batch must not have a higher bound than a larger one.
                if not (name.startswith("job_") and values[name] < low):
                    wider.append(RANGE)
        kinds = kinds_of(values).difference(self.kinds)
        if new := [kind for kind in VOCABULARY if kind in kinds]:
            reasons.append(f"operators that no fitted network had: {', '.join(new)}")
            axes.add(OPERATORS)
            wider.append(OPERATORS)
        reasons += self._settings_unlike(values)
        of_settings = [axis for axis in AXES_OF_SETTINGS if values[axis] not in self.settings[axis]]
        axes.update(of_settings)
        wider += of_settings
        if values["net_training_loop"] not in self.settings.get("net_training_loop", (0.0, 1.0)):
            without = "out" if values["net_training_loop"] == 0 else ""
            reasons.append(f"a loop with{without} an input pipeline: only the other kind was fitted on")
            wider.append(RANGE)
        device = case.device if case.described is None else case.described.name
        if plain_device(device) not in self.devices:
            reasons.append(f"nothing was measured on {device}, only on {', '.join(self.devices)}")
            axes.add(DEVICE)
            wider.append(DEVICE)
        if case.family not in self.families:
            axes.add(FAMILY)  # no reason to warn: every module is of no family
        if torch_release(case) not in self.torch:  # widens nothing: how much memory changes by release is not known
            reasons.append(f"PyTorch {torch_release(case)}: measured under {', '.join(self.torch)}")
        return Unfamiliar(tuple(reasons), frozenset(axes), tuple(wider)) if reasons or axes else None

    def is_new_module(self, case: Case) -> bool:
        """Return whether the case is of a fitted family, and of a module of it that no row is of."""
        if case.config is None or case.family not in self.families:
            return False
        fitted = any(module.startswith(f"{case.family}/") for module in self.modules)
        return fitted and module_of(case.config) not in self.modules

    def _settings_unlike(self, values: Mapping[str, float]) -> list[str]:
        """Return reasons: training settings, by the names of their features, that nothing was fitted on."""
        reasons = []
        for name, words in (("net_math_bits", _BITS), ("net_states", _STATES)):
            if values[name] not in self.settings[name]:
                known = " and ".join(words.get(value, str(value)) for value in self.settings[name])
                reasons.append(f"{words.get(values[name], str(values[name]))}: only {known} was fitted on")
        for name in ("net_channels_last", "net_cudnn_benchmark"):
            if values[name] not in self.settings[name]:
                reasons.append(f"{name.removeprefix('net_')}={bool(values[name])} was never fitted on".lower())
        return reasons


def kinds_of(values: Mapping[str, float]) -> frozenset[str]:
    """Return the operator classes of a case's forward pass."""
    return frozenset(kind for kind in VOCABULARY if values.get(f"net_count_{kind}"))


@functools.cache
def _installed_torch() -> str | None:
    return version_of("torch")  # reads a file, and is asked once for each row


def torch_release(case: Case) -> str:
    """Return the release of torch, as 2.4, of the environment that the case runs in, or of the installed one."""
    release = re.match(r"(\d+)\.(\d+)", case.torch_version or _installed_torch() or "")
    return f"{release[1]}.{release[2]}" if release else "0.0"


class LeftOut(NamedTuple):
    """One kind of rows that a fit has not seen. In the target's space, one entry a row.

    residual    label less the trace's own figure
    correction  what the fit adds to the trace's figure
    """

    residual: np.ndarray
    correction: np.ndarray


@dataclass(frozen=True)
class Evidence:
    """Results of leaving out one kind after the other, by axis: a setting's feature, `device`, `operators`, `family`.

    shares    axis -> share of the correction that makes the error on left-out kinds smallest, 0 to 1
    widening  axis -> how many times wider the error on them is than on held-out rows of known kinds
    families  known family -> share of the correction that makes the error on its held-out rows smallest
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    widening: Mapping[str, float] = field(default_factory=dict)
    families: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, left_out: Mapping[str, Sequence[LeftOut]], known_width: float, families: Mapping[str, float] | None = None
    ) -> Self:
        """Return the evidence of axes, each with the kinds that were left out.

        Args:
            left_out: Axis -> its kinds.
            known_width: The 95 % quantile of the absolute error on held-out rows of known kinds.
            families: Known family -> its share, of `share_of_known`.
        """
        shares, widening = {}, {}
        for axis, kinds in left_out.items():
            if not kinds:
                continue
            loss = np.mean([[_loss(kind, share) for share in _SHARES] for kind in kinds], axis=0)
            share = float(_SHARES[int(np.argmin(loss))])
            widths = [float(np.quantile(np.abs(k.residual - share * k.correction), _WIDTH)) for k in kinds]
            shares[axis] = share
            widening[axis] = float(np.clip(np.median(widths) / max(known_width, _CERTAIN), 1.0, _WIDEST))
        return cls(shares, widening, dict(families or {}))

    def share(self, axes: Collection[str]) -> float:
        """Return the share of the correction for a case that is new along these axes. Where no fit could leave out a
        kind of an axis, nothing shows that the correction helps: the share is 0, but for the family, where it is 1."""
        return min((self.shares.get(axis, 1.0 if axis == FAMILY else 0.0) for axis in axes), default=1.0)

    def share_of_family(self, family: str) -> float:
        """Return the share of the correction for a family, known or not."""
        return self.families.get(family, 1.0)


def share_of_known(kind: LeftOut) -> float:
    """Return the share of the correction for a family that was fitted on, from its held-out rows: the one with the
    smallest error, where its median, its mean and its 90th percentile count, as multiples of the trace's own."""
    errors = np.minimum(np.abs(kind.residual - _SHARES[:, None] * kind.correction), _WORST)
    figures = np.median(errors, axis=1), errors.mean(axis=1), np.quantile(errors, 0.9, axis=1)
    loss = np.sum([of_share / max(of_share[0], _NO_ERROR) for of_share in figures], axis=0)
    return float(_SHARES[int(np.argmin(loss))])


def _loss(kind: LeftOut, share: float) -> float:
    """Return the mean error with a share of the correction, as a multiple of the trace's own."""
    corrected = np.minimum(np.abs(kind.residual - share * kind.correction), _WORST).mean()
    return float((corrected + _CERTAIN) / (np.minimum(np.abs(kind.residual), _WORST).mean() + _CERTAIN))


def kinds_to_leave_out(
    records: Sequence[StepRecord], devices: Sequence[str], families: Sequence[str], exact: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each axis with the mask of rows of one of its kinds, where both sides have rows enough to fit and judge.

    Args:
        records: Of the rows fitted on; devices, families: theirs, in the same order.
        exact: (n,) bool: the row has a label, and no bound only.
    """
    masks: dict[str, dict[object, np.ndarray]] = {
        axis: _by_value([record.values[axis] for record in records]) for axis in AXES_OF_SETTINGS
    }
    masks[DEVICE] = _by_value([plain_device(device) for device in devices])
    masks[FAMILY] = _by_value(list(families))
    kinds = [kinds_of(record.values) for record in records]
    present = {kind: np.array([kind in one for one in kinds]) for kind in sorted(frozenset().union(*kinds))}
    masks[OPERATORS] = {mask.tobytes(): mask for mask in present.values()}  # kinds that only come together count once
    for axis, of_axis in masks.items():
        usable = [m for m in of_axis.values() if min((exact & m).sum(), (exact & ~m).sum()) >= LEAST_LEFT_OUT]
        for mask in sorted(usable, key=lambda m: -int(m.sum()))[:MOST_LEFT_OUT]:
            yield axis, mask


def _by_value(values: Sequence[object]) -> dict[object, np.ndarray]:
    array = np.array(values, dtype=object)
    return {value: array == value for value in sorted(set(values), key=str)}
