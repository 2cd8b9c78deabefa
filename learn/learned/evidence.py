"""How much of a learned correction holds, for known families and for kinds of cases that a fit left out, and how wide
errors are there.

Start reading at `Evidence`; `learn.learned.hybrid` measures it by leaving out one kind of its rows after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from featurize.device_spec import plain_device
from learn.learned.familiarity import AXES_OF_SETTINGS, DEVICE, FAMILY, OPERATORS, kinds_of
from learn.step_record import StepRecord

MOST_LEFT_OUT = 3  # kinds of one axis, the ones with most rows: each costs a fit
LEAST_LEFT_OUT = 10  # rows on either side, for their errors to say anything
LEAST_KNOWN = 30  # held-out rows of a family, for them to say what its share is
_SHARES = np.linspace(0.0, 1.0, 21)
_WIDTH = 0.95  # quantile of the absolute error by which widths are compared
_WORST = 0.5  # a logarithm of an error beyond it counts as this much
_CERTAIN = 1e-3  # an error below a thousandth is none
_NO_ERROR = 1e-6
_WIDEST = 4.0


class LeftOut(NamedTuple):
    """One kind of rows that a fit has not seen. In the target's space, one entry a row.

    residual    label less the trace's own figure
    correction  what the fit adds to the trace's figure
    """

    residual: np.ndarray
    correction: np.ndarray


@dataclass(frozen=True)
class Evidence:
    """What leaving out one kind after the other showed, by axis: a setting's feature, `device`, `operators`, `family`.

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

    def to_mapping(self) -> dict[str, dict[str, float]]:
        return {"shares": dict(self.shares), "widening": dict(self.widening), "families": dict(self.families)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Mapping[str, float]]) -> Self:
        """Models fitted before families were judged take the whole correction for each of them."""
        return cls(dict(mapping["shares"]), dict(mapping["widening"]), dict(mapping.get("families", {})))


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
