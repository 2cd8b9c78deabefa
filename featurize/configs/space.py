"""The search space of one family, as `conf/arch/NAME.yaml` defines it, checked in full and made canonical.

Start reading at `space_of_mapping`; `featurize.configs.dimensions` has `parse_space` and the types.
`require_within_limits` finds values that the family never uses: beyond the limits of their key, or changed by the
family's `repair`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from conf.errors import CommandError, UsageError, problem_of_value, refuse
from featurize import families
from featurize.configs.dimensions import Constant, Dimension, Range, Scalar, Space, is_number, own_space
from featurize.configs.dimensions import parse_space as parse_space
from featurize.configs.draws import sample_range
from featurize.configs.trial import TrialConfig
from featurize.job.training_settings import rules_of

_TRIED_ON = 16  # configs that a value is tried on


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


def _values(dimension: Dimension) -> Iterable[tuple[Scalar, str | None]]:
    """Return the distinct values, each with the end of its range, low or high; 1 and True are distinct."""
    if isinstance(dimension, Range):
        return ((dimension.low, "low"), (dimension.high, "high"))
    values = (dimension.fixed,) if isinstance(dimension, Constant) else dimension.choices
    return [(value, None) for value in {(type(value), value): value for value in values}.values()]


def _problem(family: str, name: str, value: Scalar, end: str | None) -> str | None:
    """Return why the value is beyond its key's limits; None if it is not, or if `repair` may change it.

    `repair` would turn -3 into the least depth. It may adjust the end of a range (to a multiple of 32, say), but not
    raise a low end. It fills other values than numbers in (null), or takes them apart (a model with its inputs).
    """
    problem = _problem_alone(family, name, value)
    if problem is None:
        return None
    repaired = [_repair(config, name, value) for config in _own_configs(family)]
    if not is_number(value):
        return problem if value in repaired else None
    adjusted = [result for result in repaired if is_number(result) and (end == "high" or result <= value)]
    fits = end is not None and any(_problem_alone(family, name, result) is None for result in adjusted)
    return None if fits else problem


def _problem_alone(family: str, name: str, value: Any) -> str | None:
    """Return why no config has this value, whatever its other fields are."""
    if rules := families.key_rules(family)[name]:
        return problem_of_value(name, value, rules)
    texts = _problems(_own_configs(family)[0], name, value)  # a layout or tensors, which the config itself parses
    return "; ".join(text for text in texts if text.startswith(f"{name} ")) or None


def _repair(config: TrialConfig, name: str, value: Scalar) -> Any:
    """Return the value of a key after the family's `repair`."""
    return families.repaired(config.family, {**vars(config), name: value}, lambda _name: 0.5).get(name, value)


def _problems(config: TrialConfig, name: str, value: Any) -> list[str]:
    """Return the problems of a valid config after its field `name` is set to `value`."""
    try:
        dataclasses.replace(config, **{name: value})
    except UsageError as error:
        return str(error).removeprefix(f"{config.family}: ").split("; ")
    return []


@cache
def _own_configs(family: str) -> tuple[TrialConfig, ...]:
    """Return configs of the family's own space, spread over every dimension."""
    return tuple(sample_range(own_space(family), 0, 0, _TRIED_ON))


# ---- constants that conflict with other dimensions of the same space


def _changed_constants(space: Space) -> Iterator[str]:
    """Yield a problem for each given number that no config of this space has, because `repair` changes it."""
    fields = rules_of(families.get_family(space.family).Config)
    given = [d for d in space.dimensions if isinstance(d, Constant) and d.name in fields]
    constants = [d for d in given if isinstance(d.fixed, bool | int | float)]
    dimensions = tuple(d for d in space.dimensions if d.name != "use_dropout")  # false sets the rate to 0 on purpose
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
