"""The dimensions of a family's search space, and the mapping from a point of the unit cube to raw values.

Start reading at `Space`; `parse_space` makes one from YAML. `featurize.configs.draws` makes the points.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeGuard

from conf.errors import UsageError, collected, is_finite, refuse
from featurize import families
from featurize.configs.trial import canonical_json, code_fields

SCALES = ("auto", "uniform", "log")
RANGE_KEYS = ("low", "high", "scale", "step")
_LARGEST = 2**63 - 1  # the largest integer: the queue and the warehouse store 64 bits
AUTO_LOG_RATIO = 100  # least ratio high / low for which `scale: auto` is `log`

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Constant:
    """A dimension with the same value in every config."""

    name: str
    fixed: Scalar

    def value(self, u: float) -> Scalar:
        return self.fixed

    def spec(self) -> Any:
        return self.fixed


@dataclass(frozen=True)
class Choice:
    """One of `choices`, each equally likely; a value listed twice is twice as likely."""

    name: str
    choices: tuple[Scalar, ...]

    @cached_property
    def _distinct(self) -> tuple[Scalar, ...]:
        return tuple(dict.fromkeys(self.choices))

    @property
    def count(self) -> int:
        """Return the number of different values."""
        return len(self._distinct)

    def at(self, place: int) -> Scalar:
        """Return one of the `count` values."""
        return self._distinct[place]

    def value(self, u: float) -> Scalar:
        return self.choices[min(int(u * len(self.choices)), len(self.choices) - 1)]

    def spec(self) -> Any:
        return list(self.choices)


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; with a `step`, on the grid low, low + step, ...

    Integers (step 1 unless given) when both ends are integers, floats otherwise. `scale` is `uniform` or `log`.
    """

    name: str
    low: int | float
    high: int | float
    scale: str
    step: int | float | None = None

    @cached_property
    def _grid_step(self) -> int | float | None:
        integers = isinstance(self.low, int) and isinstance(self.high, int)
        return 1 if self.step is None and integers else self.step

    @property
    def count(self) -> int | None:
        """Return the number of values; None for a continuous range."""
        step = self._grid_step
        return None if step is None else int((self.high - self.low) / step + 1e-9) + 1

    def at(self, place: int) -> int | float:
        """Return the value at one of the `count` places of the grid."""
        assert self._grid_step is not None, "a continuous range has no grid"
        value = self.low + place * self._grid_step
        return value if isinstance(value, int) else round(value, 12)  # 0.15, not 0.15000000000000002

    def value(self, u: float) -> int | float:
        """Return the value at `u` in [0, 1)."""
        step, count = self._grid_step, self.count
        if step is None or count is None:
            if self.scale == "log":
                return min(max(self.low * math.pow(self.high / self.low, u), float(self.low)), float(self.high))
            return min(self.low + u * (self.high - self.low), float(self.high))
        if self.scale == "log":
            # One step past the top, so that the highest value has a cell that is rounded down to it.
            step_index = int((self.low * ((self.low + count * step) / self.low) ** u - self.low) / step)
        else:
            step_index = int(u * count)
        return self.at(min(max(step_index, 0), count - 1))

    def spec(self) -> Any:
        spec = {"low": self.low, "high": self.high, "scale": self.scale}
        return spec if self.step is None else {**spec, "step": self.step}


Dimension = Constant | Choice | Range


@dataclass(frozen=True)
class Space:
    """A family's dimensions in the order of its YAML file, with `scale: auto` resolved."""

    family: str
    dimensions: tuple[Dimension, ...]

    @cached_property
    def varied(self) -> tuple[Choice | Range, ...]:
        """Return the dimensions with more than one value, which are the coordinates of a point."""
        return tuple(d for d in self.dimensions if not isinstance(d, Constant))

    @cached_property
    def identity(self) -> str:
        """Return 64 hex digits, equal for the same family and the same dimensions in the same order."""
        return hashlib.sha256(canonical_json(self.to_mapping()).encode()).hexdigest()

    def values(self, point: Sequence[float]) -> dict[str, Scalar]:
        """Return the raw values at `point`, one number in [0, 1) for each dimension in `varied`."""
        coordinates = iter(point)
        return {d.name: d.fixed if isinstance(d, Constant) else d.value(next(coordinates)) for d in self.dimensions}

    def choices(self, name: str) -> tuple[Scalar, ...]:
        """Return the values of a choice or a constant; none for a range, or if the space lacks the dimension."""
        for dimension in self.dimensions:
            if dimension.name == name and not isinstance(dimension, Range):
                return dimension.choices if isinstance(dimension, Choice) else (dimension.fixed,)
        return ()

    def code_names(self) -> tuple[str, ...]:
        """Return every `MODULE:FACTORY` that the space names."""
        fields = code_fields(self.family)
        specs = [dimension.spec() for dimension in self.dimensions if dimension.name in fields]
        texts = [text for spec in specs for text in (spec if isinstance(spec, list) else [spec])]
        return tuple(dict.fromkeys(text.split(None, 1)[0] for text in texts if isinstance(text, str) and text.strip()))

    def to_mapping(self) -> dict[str, Any]:
        """Return `{"family": ..., "space": [[name, spec], ...]}`; a list keeps the order when keys are sorted."""
        return {"family": self.family, "space": [[d.name, d.spec()] for d in self.dimensions]}


@cache
def own_space(family: str) -> Space:
    """Return the space of `conf/arch/FAMILY.yaml`, values unchecked; empty if there is no such file."""
    return parse_space(family, default_space(family) or {})


def parse_space(family: str, specs: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Space:
    """Return the space of a mapping name -> spec, or of such pairs. Raises `UsageError` with all problems, such as an
    unknown family or key; `featurize.configs.space.require_within_limits` checks the values.

    A spec is a scalar (constant), a list of scalars (choice), or `{low, high, scale: auto|uniform|log, step}` with
    `scale` and `step` optional.
    """
    known = sorted(families.key_rules(family))
    pairs = list(specs.items() if isinstance(specs, Mapping) else specs)
    dimensions: list[Dimension] = []
    problems: list[str] = []
    for name, spec in pairs:
        with collected(problems):
            dimensions.append(_dimension(name, spec))
    if unknown := sorted(str(name) for name, _ in pairs if name not in known):
        problems.append(f"unknown {', '.join(unknown)}; valid keys are {', '.join(known)}")
    refuse(problems, f"search space of {family}: ")
    return Space(family, tuple(dimensions))


@cache  # reading one takes 10 ms, and settings of a mixed job ask for each a dozen times
def default_space(family: str) -> Mapping[str, Any] | None:
    """Return the `space` of `conf/arch/FAMILY.yaml`; None if there is no such file."""
    file = importlib.resources.files("conf") / "arch" / f"{family}.yaml"
    if not file.is_file():
        return None
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.create(file.read_text()))
    assert isinstance(values, dict), file
    space: dict[str, Any] | None = values["space"]
    return space


def _dimension(name: str, spec: Any) -> Dimension:
    """Return the dimension that `spec` describes. Raises `UsageError` with its problems."""
    if isinstance(spec, Mapping):
        return _range(name, spec)
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        if wrong := [repr(value) for value in spec if not _is_scalar(value)]:
            raise UsageError(f"{name}: choices must be numbers, strings or booleans, got {', '.join(wrong)}")
        if not spec:
            raise UsageError(f"{name}: the list of choices is empty")
        return Choice(name, tuple(spec))
    if not _is_scalar(spec):
        raise UsageError(f"{name}: must be a value, a list or {{low, high}}, got {spec!r}")
    return Constant(name, spec)


def _range(name: str, spec: Mapping[str, Any]) -> Range:
    problems = []
    if unknown := sorted(str(key) for key in spec if key not in RANGE_KEYS):
        problems.append(f"unknown {', '.join(unknown)}; valid keys of a range are {', '.join(RANGE_KEYS)}")
    low, high, step, scale = spec.get("low"), spec.get("high"), spec.get("step"), spec.get("scale", "auto")
    for key, value in (("low", low), ("high", high), ("step", step)):
        if key not in spec and key != "step":
            problems.append(f"{key} is missing")
        elif not is_number(value) and (key != "step" or value is not None):
            problems.append(f"{key} must be a finite number, got {value!r}")
    if scale not in SCALES:
        problems.append(f"unknown scale {scale!r}; known: {', '.join(SCALES)}")
    if is_number(low) and is_number(high):
        if low > high:
            problems.append(f"low {low} > high {high}")
        if scale == "log" and low <= 0:
            problems.append(f"a log scale needs low > 0, got {low}")
        if isinstance(low, int) and isinstance(high, int) and isinstance(step, float):
            problems.append(f"step of an integer range must be an integer, got {step}")
    if is_number(step) and step <= 0:
        problems.append(f"step must be > 0, got {step}")
    if problems or not (is_number(low) and is_number(high)):
        raise UsageError("; ".join(f"{name}: {problem}" for problem in problems))
    if scale == "auto":
        scale = "log" if low > 0 and high / low >= AUTO_LOG_RATIO else "uniform"
    return Range(name, low, high, scale, step)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | str) or is_number(value)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is a finite number that the queue and the warehouse can store."""
    return is_finite(value) and (isinstance(value, float) or abs(value) <= _LARGEST)
