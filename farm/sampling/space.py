"""The search space of one family, as `conf/arch/NAME.yaml` defines it, checked as a whole and made canonical.

Start reading at `parse_space`; `farm.sampling.dimensions` has the types, `farm.sampling.space_limits` the values that a
family refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from conf.errors import UsageError
from farm.sampling.dimensions import (
    Choice,
    Constant,
    Dimension,
    Range,
    Scalar,
    Space,
    default_space,
    own_space,
    read_dimensions,
    required,
    valid_keys,
)
from farm.sampling.space_limits import refused_values

__all__ = [
    "Choice",
    "Constant",
    "Dimension",
    "Range",
    "Scalar",
    "Space",
    "default_space",
    "own_space",
    "parse_space",
    "space_of_mapping",
    "valid_keys",
]


def parse_space(family: str, mapping: Mapping[str, Any]) -> Space:
    """Return the space of a YAML mapping name -> spec, see `farm.sampling.dimensions.read_dimensions`.

    Raises `UsageError` that reports every problem together: an unknown family or key, and a listed value that the
    family's config never takes (`optimizer: [adam, lion]`). `farm.sampling.space_limits` has the limits of numbers.
    """
    return _checked(family, mapping.items())


def space_of_mapping(mapping: Mapping[str, Any]) -> Space:
    """Return the space that `Space.to_mapping` wrote, or that a file of `conf/arch` holds: `{family: ..., space: ...}`.

    Raises `UsageError` as `parse_space` does.
    """
    if set(mapping) != {"family", "space"}:
        got = ", ".join(sorted(map(str, mapping))) or "nothing"
        raise UsageError(f"a search space has the keys family and space, got {got}")
    space = mapping["space"]
    if not isinstance(space, Mapping | list):
        raise UsageError(f"space must be a mapping name -> values, got {space!r}")
    return _checked(mapping["family"], space.items() if isinstance(space, Mapping) else space)


def _checked(family: str, items: Iterable[tuple[str, Any]]) -> Space:
    dimensions, problems = read_dimensions(family, items, lambda dimension: refused_values(family, dimension))
    return Space(family, required(family, dimensions, problems))
