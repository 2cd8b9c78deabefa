"""Kinds of keys: what a key may hold, as `settings` derives it from a field, and `--help` shows it in brackets.

Start reading at `Kind.parse`; `problems_of` holds values against kinds.

    n: ???  # [int 1 to 10000000] how many trials the job has
    grace_s: 3600  # [number 0 to 1e9] seconds before a later compaction deletes the files
    families: null  # [text | list of text | null] as in [cnn,gpt]

Kinds: `int` and `number`, with bounds (`>= 1`, `> 0`, `1 to 5`, `> 0 to 1`) where there are some; `bool`; `text`;
`any text`, which may look like a list or a mapping; `path`; `new path`, which is made where it is not there; `mapping`;
`list`, `list of text`, `list of int`; `null`.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from conf.errors import shown, unknown_name

_NUMBER = r"-?\d+(?:\.\d+)?(?:e\d+)?"
_BOUNDED = re.compile(rf"(int|number)(?: (?:(>=?) )?({_NUMBER})(?: to ({_NUMBER}))?| <= ({_NUMBER}))?")
_INT64_MAX = 2**63 - 1  # what SQLite and Parquet hold
_SHAPES = {"list": ("[", "]"), "mapping": ("{", "}")}
_TEXTS = {"text", "any text", "path", "new path"}
_QUOTE = "in quotes of its own it is taken as text"


def _is_number(value: object, whole: bool) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return whole or abs(value) <= sys.float_info.max  # false of NaN, too


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_path(value: object) -> bool:
    return _is_text(value) or isinstance(value, os.PathLike)


def _is_list(value: object, takes: Callable[[object], bool] = lambda _: True) -> bool:
    return isinstance(value, list | tuple) and all(map(takes, value))


# Kind -> its words in messages, and whether it takes a value. Numbers have bounds, too.
_PLAIN: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "text": ("text", _is_text),
    "any text": ("text", _is_text),
    "path": ("a path", _is_path),
    "new path": ("a path", _is_path),
    "mapping": ("a mapping such as {key: value}", lambda value: isinstance(value, Mapping)),
    "list": ("a list", _is_list),
    "list of text": ("a list of names", lambda value: _is_list(value, lambda item: isinstance(item, str))),
    "list of int": (
        "a list of integers",
        lambda value: _is_list(value, lambda item: _is_number(item, True) and abs(item) <= _INT64_MAX),
    ),
    "null": ("", lambda value: value is None),
}


@dataclass(frozen=True)
class Kind:
    """The alternatives that a key may hold.

    declared: as `--help` shows them
    names: the alternatives without bounds; `int` or `number` comes with `low` and `high`, both included, or `above` low
    choices: the only values, where there are some
    """

    declared: str
    names: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[object, ...] = ()

    @classmethod
    def parse(cls, declared: str, choices: Sequence[object] = ()) -> Kind:
        """Read a kind as text, as `int >= 1 | null`. Raises `ValueError`."""
        names, low, high, above = [], None, None, False
        for alternative in (part.strip() for part in declared.split("|")):
            if bounded := _BOUNDED.fullmatch(alternative):
                name, sign, low, high, most = bounded.groups()
                high, above = high or most, sign == ">"
                names.append(name)
            elif alternative in _PLAIN:
                names.append(alternative)
            else:
                raise ValueError(f"unknown kind {alternative!r} of {declared!r}")
        return cls(declared, tuple(names), _bound(low), _bound(high), above, tuple(choices))

    @property
    def optional(self) -> bool:
        """Return whether the key may be null."""
        return "null" in self.names

    def stands_as_typed(self, written: str) -> bool:
        """Return whether an argument is plain text: not in quotes, not null, no list where a list is allowed."""
        if written in ("", "null") or written[0] in "'\"" or _TEXTS.isdisjoint(self.names):
            return False
        if "bool" in self.names and written.lower() in ("true", "false"):
            return False
        return not any(name.partition(" ")[0] in _SHAPES and _has_shape(written, name) for name in self.names)

    def problems_as_written(self, key: str, written: str) -> list[str]:
        """Return the problems of text as typed, before anything reads it."""
        begun = not {"path", "new path"} & set(self.names)  # a path may begin with a bracket
        shapes = [name for name in _SHAPES if "any text" not in self.names and _has_shape(written, name, begun)]
        if shapes:
            problem = f"got a {shapes[0]}:"
        elif "new path" in self.names and "${" in written:
            problem = "nothing fills ${...} in here:"
        else:
            return []
        separator = "," if shapes else ";"
        return [f"{key} must be {self.words()}{separator} {problem} {shown(f'{key}={written}')}; {_QUOTE}"]

    def problem(self, key: str, value: object) -> str | None:
        """Return `KEY must be an integer >= 1, got 'many'`; None where the kind takes the value."""
        if not any(self._takes(name, value) for name in self.names):
            return f"{key} must be {self.words(value)}, got {shown(value)}"
        if self.choices:
            given = value if isinstance(value, list | tuple) else [value]
            unknown = [one for one in given if one is not None and one not in self.choices]
            name = f"name in {key}:" if "list of text" in self.names else key
            return str(unknown_name(name, unknown[0], self.choices)) if unknown else None
        return None

    def words(self, value: object = None) -> str:
        """Return the kind in words, as `a path or a list of names`, with the bound that `value` exceeds."""
        names = [name for name in ("int", "number", *_PLAIN) if name in self.names and name != "null"]
        words = (_PLAIN[name][0] if name in _PLAIN else self._number_words(name, value) for name in names)
        return " or ".join(dict.fromkeys(words))

    def _takes(self, name: str, value: object) -> bool:
        if name in _PLAIN:
            return _PLAIN[name][1](value)
        if not _is_number(value, whole=name == "int") or (self.above and value == self.low):
            return False
        low, high = self._bounds(name)
        return low <= value <= high

    def _bounds(self, name: str) -> tuple[float, float]:
        most = _INT64_MAX if name == "int" else math.inf
        return -most if self.low is None else self.low, most if self.high is None else self.high

    def _number_words(self, name: str, value: Any) -> str:
        kind = "an integer" if name == "int" else "a number"
        if name == "number" and isinstance(value, float) and not math.isfinite(value):
            kind = "a finite number"
        _, high = self._bounds(name)
        if (_is_number(value, whole=name == "int") and value > high) or (self.low is None and self.high is not None):
            return f"{kind} <= {_plain(high)}"
        return kind if self.low is None else f"{kind} {'>' if self.above else '>='} {_plain(self.low)}"


def _bound(text: str | None) -> float | None:
    return None if text is None else int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:.15g}"


def _has_shape(written: str, name: str, begun: bool = False) -> bool:
    begins, ends = _SHAPES[name.partition(" ")[0]]
    return written.startswith(begins) and (begun or written.endswith(ends))


def problems_of(values: Mapping[str, Any], kinds: Mapping[str, Kind], section: str = "") -> list[str]:
    """Return the problems of values by dotted key, which `section` goes before in messages.

    Keys that are missing, or required and not given, have none.
    """
    given = ((key, kind, _at(values, key.split("."))) for key, kind in kinds.items())
    return [problem for key, kind, value in given if value != "???" and (problem := kind.problem(section + key, value))]


def _at(values: Any, names: Sequence[str]) -> Any:
    for name in names:
        values = values.get(name, "???") if isinstance(values, Mapping) else "???"
    return values
