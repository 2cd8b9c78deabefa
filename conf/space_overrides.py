"""Overrides of a search space: a new value of a dimension replaces the old one whole.

Start reading at `replacing`. Hydra would merge a range into the range that stood there (and keep its `scale`), and
refuse a list where there was a range.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_DIMENSION = re.compile(r"(?P<plus>\+*)(?P<key>arch\.space(?:\.\w+)?)=")


def replacing(overrides: Sequence[str]) -> list[str]:
    """Return the arguments with clearing overrides before each list, range or whole `arch.space`."""
    result: list[str] = []
    for text in overrides:
        match = _DIMENSION.match(text)
        result += [*(_clearing(text, match) if match else ()), text]
    return result


def _clearing(text: str, match: re.Match[str]) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_overrides([text])[0]
        value = None if override.is_sweep_override() else override.value()
    except HydraException:  # composing says what is wrong with it
        return []
    if not isinstance(value, dict | list):
        return []
    plus, key = "++" if match["plus"] else "", match["key"]
    if key != "arch.space":
        return [f"{plus}{key}=null"]
    names = value if isinstance(value, dict) else ()
    # Other names are of no dimension, as composing says.
    return [f"{plus}{key}.{name}=null" for name in names if isinstance(name, str) and re.fullmatch(r"\w+", name)]
