"""The search space of one family, as `conf/arch/NAME.yaml` defines it, checked in full and made canonical.

Start reading at `space_of_mapping`; `featurize.configs.dimensions` has `parse_space` and the types.
`require_within_limits` finds values that the family never uses: beyond its limits, or changed by its `repair`. Each
value is tried on configs of the family's own space, so that families state their limits once, in `Config.problems`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any, TypeGuard

from conf.errors import CommandError, UsageError, refuse
from featurize import families
from featurize.configs.dimensions import Constant, Dimension, Range, Scalar, Space, own_space
from featurize.configs.dimensions import parse_space as parse_space
from featurize.configs.draws import POLICIES, key_of, sample_range
from featurize.configs.trial import TrialConfig, missing_fields


def space_of_mapping(mapping: Mapping[str, Any]) -> Space:
    """Return the space that `Space.to_mapping` wrote, or that a file of `conf/arch` holds: `{family: ..., space: ...}`.

    Raises `UsageError` as `parse_space` does.
    """
    if set(mapping) != {"family", "space"}:
        keys = ", ".join(sorted(map(str, mapping))) or "nothing"
        raise UsageError(f"a search space has the keys family and space, got {keys}")
    if not isinstance(mapping["space"], Mapping | list):
        raise UsageError(f"space must be a mapping name -> values, got {mapping['space']!r}")
    return parse_space(mapping["family"], mapping["space"])


_TRIED_ON = 16  # configs that a value is tried on


def require_within_limits(space: Space) -> None:
    """Raise `UsageError` that names each value of the space beyond its family's limits, with the limit.

    For a user's new spaces. Recorded spaces of older jobs are read without it: `repair` adjusts their values.
    """
    problems = [
        f"arch.space.{dimension.name}: {'' if end is None else f'{end}: '}{problem}"
        for dimension in space.dimensions
        for value, end in _values(dimension)
        if (problem := _problem(space.family, dimension.name, value, end))
    ]
    refuse(problems or _changed_constants(space), f"search space of {space.family}: ")


def _problem(family: str, name: str, value: Scalar, end: str | None) -> str | None:
    """Return why no config of the family has this value unchanged; None if one has.

    `repair` would turn -3 into the least depth. It may adjust the end of a range (to a multiple of 32, say), but not
    raise a low end. Values other than numbers are not checked where it changes them or fills them in.
    """
    if not _is_field(family, name):
        return _problem_of_sampled_only(family, name, value)
    configs = _valid_configs(family)
    repaired = ((config, _repair(config, name, value)) for config in configs)
    if not _is_number(value):
        return _common_problem(name, ((config, value) for config, result in repaired if result == value))
    refused = _common_problem(name, ((config, value) for config in configs))
    if refused is None or end is None:
        return refused
    tries = [pair for pair in repaired if end == "high" or not _is_number(pair[1]) or pair[1] <= value]
    return refused if not tries or _common_problem(name, tries) else None


def _is_field(family: str, name: str) -> bool:
    """Return whether the config has the key as a field; `repair` consumes other keys."""
    return name in {field.name for field in dataclasses.fields(families.get_family(family).Config)}


def _values(dimension: Dimension) -> Iterable[tuple[Scalar, str | None]]:
    """Return the distinct values, each with the end of its range, low or high; 1 and True are distinct."""
    if isinstance(dimension, Range):
        return ((dimension.low, "low"), (dimension.high, "high"))
    values = (dimension.fixed,) if isinstance(dimension, Constant) else dimension.choices
    return [(value, None) for value in {(type(value), value): value for value in values}.values()]


# ---- fields of the config


def _repair(config: TrialConfig, name: str, value: Scalar) -> Any:
    """Return the field's value after the family's `repair`."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return families.get_family(config.family).repair({**fields, name: value}, _middle).get(name, value)


def _common_problem(name: str, tries: Iterable[tuple[TrialConfig, Any]]) -> str | None:
    """Return the problem of the field `name` that all of these configs have, each with its value."""
    common: set[str] | None = None
    for config, value in tries:
        problems = {problem for problem in _problems(config, name, value) if problem.startswith(f"{name} ")}
        common = problems if common is None else common & problems
        if not common:
            return None
    return "; ".join(sorted(common or ())) or None


def _problems(config: TrialConfig, name: str, value: Any) -> list[str]:
    """Return the problems of a valid config after its field `name` is set to `value`."""
    try:
        dataclasses.replace(config, **{name: value})
    except CommandError as error:
        return str(error).removeprefix(f"{config.family}: ").split("; ")
    return []


# ---- keys that only `repair` consumes: `linear_layers`, `tables`, `use_dropout`


def _problem_of_sampled_only(family: str, name: str, value: Scalar) -> str | None:
    """Return why the value leads to no config of the family's own space."""
    known = next((dimension for dimension in own_space(family).dimensions if dimension.name == name), None)
    if known is None:
        return None
    samples = [known_value for known_value, _ in _values(known)]
    if _is_switch(known):
        return None if isinstance(value, bool) else f"{name} must be true or false, got {value!r}"
    if all(map(_is_number, samples)) and not _is_number(value):
        return f"{name} must be a number, got {value!r}"
    refusal = _refusal(family, name, value)
    if refusal is None:
        return None
    if isinstance(known, Range) and _is_number(value) and value < known.low and _refusal(family, name, known.low - 1):
        return f"{name} must be >= {known.low}, got {value!r}"
    return f"{value!r} gives no config: {refusal}"


def _refusal(family: str, name: str, value: Scalar) -> str | None:
    """Return why no point of the family's own space gives a config with this value; None if one does."""
    built = [_build(families.get_family(family), {**point, name: value}) for point in _own_points(family)]
    refusals = [result for result in built if isinstance(result, str)]
    return refusals[0] if len(refusals) == len(built) else None


def _is_switch(dimension: Dimension) -> bool:
    return all(isinstance(value, bool) for value, _ in _values(dimension))


def _build(module: ModuleType, values: dict[str, Any]) -> TrialConfig | str:
    """Return the config, or the reasons why it is invalid."""
    values = module.repair(values, _middle)
    if missing := sorted(missing_fields(module.Config, values)):
        return f"it leaves {', '.join(missing)} without a value"
    try:
        config: TrialConfig = module.Config(**values)
    except CommandError as error:
        return str(error).removeprefix(f"{module.Config.family}: ")
    return config


# ---- constants that conflict with other dimensions of the same space


def _changed_constants(space: Space) -> Iterator[str]:
    """Yield a problem for each given number that no config of this space has, because `repair` changes it."""
    given = [d for d in space.dimensions if isinstance(d, Constant) and _is_field(space.family, d.name)]
    constants = [d for d in given if isinstance(d.fixed, bool | int | float)]
    # Without the bools that only `repair` consumes: `use_dropout: false` sets the rate to 0 on purpose.
    dimensions = tuple(d for d in space.dimensions if _is_field(space.family, d.name) or not _is_switch(d))
    try:
        configs = list(sample_range(Space(space.family, dimensions), 0, 0, _TRIED_ON))
    except CommandError:  # the space has no config at all; sampling reports why
        return
    for constant in constants:
        name, value = constant.name, constant.fixed
        if any(getattr(config, name) == value for config in configs):
            continue
        reasons = [_reason_of_change(config, name, value) for config in configs]
        if all(reasons):
            became = list(dict.fromkeys(str(getattr(config, name)) for config in configs))
            yield f"arch.space.{name}: {value!r} would become {' or '.join(became[:3])}: {reasons[0]}"


def _reason_of_change(config: TrialConfig, name: str, value: Any) -> str | None:
    """Return why `repair` changed the value to the config's; None if the network is the same with either."""
    if problems := _problems(config, name, value):
        return "; ".join(problems)
    if families.layers_of(config) == families.layers_of(dataclasses.replace(config, **{name: value})):
        return None
    return "sizes have to fit each other"


# ---- configs that values are tried on


@cache
def _own_points(family: str) -> tuple[dict[str, Scalar], ...]:
    """Return raw values of the family's own space, spread over every dimension."""
    space = own_space(family)
    return tuple(map(space.values, POLICIES["stratified"](space, key_of(space, 0), range(_TRIED_ON))))


@cache
def _valid_configs(family: str) -> tuple[TrialConfig, ...]:
    """Return configs of the family's own space; empty if it has none."""
    space = own_space(family)
    return tuple(sample_range(space, 0, 0, _TRIED_ON)) if space.dimensions else ()


def _middle(_name: str) -> float:
    """Return 0.5 for every draw, for a `repair` whose draws do not matter."""
    return 0.5


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
