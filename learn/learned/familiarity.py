"""Whether a case is like what an estimator was fitted on, and if not, why.

Start reading at `Familiarity.judge`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from conf.identity import version_of
from featurize.device_spec import plain_device
from featurize.opgraph import VOCABULARY
from learn.cases import Case
from learn.data import Rows, module_of
from learn.step_record import StepRecord

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


class Unfamiliar(NamedTuple):
    """Why a case is unlike what was fitted on.

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
    families of the rows; empty where a stored model does not say
    modules  of families with many of them: a library's, which its authors keep together; empty likewise
    """

    ranges: Mapping[str, tuple[float, float]]
    kinds: frozenset[str]
    devices: frozenset[str]
    settings: Mapping[str, tuple[float, ...]]
    torch: frozenset[str]
    families: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()

    @classmethod
    def learn(cls, rows: Rows, records: Sequence[StepRecord]) -> Self:
        """Of the rows fitted on, and their records in the same order."""
        columns = {name: np.array([record.values[name] for record in records]) for name in _RANGES}
        kinds = frozenset[str]().union(*(kinds_of(record.values) for record in records))
        settings = list(AXES_OF_SETTINGS)
        if rows.target.space == "ratio":  # the input pipeline keeps a GPU waiting; memory hardly knows it
            settings.append("net_training_loop")
        return cls(
            ranges={name: (float(values.min()), float(values.max())) for name, values in columns.items()},
            kinds=kinds,
            devices=frozenset(plain_device(str(name)) for name in rows.device),
            settings={name: tuple(sorted({float(r.values[name]) for r in records})) for name in settings},
            torch=frozenset(map(torch_release, rows.cases)),
            families=frozenset(map(str, rows.family)),
            modules=frozenset(str(module) for module in rows.module if "/" in str(module)),
        )

    def judge(self, case: Case, record: StepRecord) -> Unfamiliar | None:
        """Why the case is unlike what was fitted on; None where it is not."""
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
        kinds = kinds_of(values) - self.kinds
        new = [kind for kind in VOCABULARY if kind in kinds]
        if new:
            reasons.append(f"operators that no fitted network had: {', '.join(new)}")
            axes.add(OPERATORS)
            wider.append(OPERATORS)
        reasons += self.settings_said(values)
        of_settings = [axis for axis in AXES_OF_SETTINGS if values[axis] not in self.settings[axis]]
        axes.update(of_settings)
        wider += of_settings
        if values["net_training_loop"] not in self.settings.get("net_training_loop", (0.0, 1.0)):
            without = "out" if values["net_training_loop"] == 0 else ""
            reasons.append(f"a loop with{without} an input pipeline: only the other kind was fitted on")
            wider.append(RANGE)
        if plain_device(case.device if case.described is None else case.described.name) not in self.devices:
            reasons.append(self.device_said(case.described.name if case.described is not None else case.device))
            axes.add(DEVICE)
            wider.append(DEVICE)
        if self.families and case.family not in self.families:
            axes.add(FAMILY)  # no reason to warn: every module is of no family
        if torch_release(case) not in self.torch:  # widens nothing: how much memory changes by release is not known
            reasons.append(f"PyTorch {torch_release(case)}: measured under {', '.join(sorted(self.torch))}")
        return Unfamiliar(tuple(reasons), frozenset(axes), tuple(wider)) if reasons or axes else None

    def is_new_module(self, case: Case) -> bool:
        """Return whether the case is of a fitted family, and of a module of it that no row is of."""
        if case.config is None or case.family not in self.families:
            return False
        fitted = any(module.startswith(f"{case.family}/") for module in self.modules)
        return fitted and module_of(case.config) not in self.modules

    def settings_said(self, values: Mapping[str, float]) -> list[str]:
        """What of the training settings, by the names of their features, nothing was fitted on."""
        reasons = []
        for name, words in (("net_math_bits", _BITS), ("net_states", _STATES)):
            if values[name] not in self.settings[name]:
                known = " and ".join(words.get(value, str(value)) for value in self.settings[name])
                reasons.append(f"{words.get(values[name], str(values[name]))}: only {known} was fitted on")
        for name in ("net_channels_last", "net_cudnn_benchmark"):
            if values[name] not in self.settings[name]:
                reasons.append(f"{name.removeprefix('net_')}={bool(values[name])} was never fitted on".lower())
        return reasons

    def device_said(self, device: str) -> str:
        return f"nothing was measured on {device}, only on {', '.join(sorted(self.devices))}"

    def to_mapping(self) -> dict:
        return {
            "ranges": {name: list(pair) for name, pair in self.ranges.items()},
            "kinds": sorted(self.kinds),
            "devices": sorted(self.devices),
            "settings": {name: list(values) for name, values in self.settings.items()},
            "torch": sorted(self.torch),
            "families": sorted(self.families),
            "modules": sorted(self.modules),
        }

    @classmethod
    def from_mapping(cls, mapping: Mapping) -> Self:
        return cls(
            ranges={name: tuple(pair) for name, pair in mapping["ranges"].items()},
            kinds=frozenset(mapping["kinds"]),
            devices=frozenset(mapping["devices"]),
            settings={name: tuple(values) for name, values in mapping["settings"].items()},
            torch=frozenset(mapping["torch"]),
            families=frozenset(mapping.get("families", ())),
            modules=frozenset(mapping.get("modules", ())),
        )


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
