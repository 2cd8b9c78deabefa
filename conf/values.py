"""Kinds of keys: what a key may hold, as `conf.settings` derives it from a field, and `--help` shows it in brackets.

Start reading at `Kind.parse`; `conf.overrides` holds every composed value against its kind.

    n: ???  # [int 1 to 10000000] how many trials the job has
    grace_s: 3600  # [number 0 to 1e9] seconds before a later compaction deletes the files
    families: null  # [text | list of text | null] as in [cnn,gpt]

Kinds: `int` and `number`, with bounds (`>= 1`, `> 0`, `1 to 5`) where there are some; `bool`; `text`; `any text`, which
may look like a list or a mapping; `path`; `new path`, which is made where it is not there; `mapping`; `list`,
`list of text`, `list of int`; `null`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from conf.errors import shown

_NUMBER = r"-?\d+(?:\.\d+)?(?:e\d+)?"
_BOUNDED = re.compile(rf"(int|number)(?: (>=|>|<=) ({_NUMBER})| ({_NUMBER}) to ({_NUMBER}))?")
_TEXTS = ("text", "any text", "path", "new path")
_PLAIN = ("bool", *_TEXTS, "mapping", "list", "list of text", "list of int", "null")
_INT64_MAX = 2**63 - 1  # what SQLite and Parquet hold
_SHAPES = {"list": ("[", "]"), "mapping": ("{", "}")}
_WORDS = {
    "bool": "true or false",
    "text": "text",
    "any text": "text",
    "path": "a path",
    "new path": "a path",
    "mapping": "a mapping such as {key: value}",
    "list": "a list",
    "list of text": "a list of names",
    "list of int": "a list of integers",
}
_QUOTE = "in quotes of its own it is taken as text"


@dataclass(frozen=True)
class _Number:
    """`int` or `number` within bounds, both included unless `above`."""

    whole: bool
    low: float | None = None
    high: float | None = None
    above: bool = False  # `low` itself is too low

    def takes(self, value: object) -> bool:
        if not self._is_number(value) or value < self._floor:
            return False
        return value <= self._ceiling and not (self.above and value == self.low)

    def words(self, value: object = None) -> str:
        """Return the kind in words, as `an integer >= 1`, with the bound that `value` exceeds."""
        kind = "an integer" if self.whole else "a number"
        if isinstance(value, float) and not (self.whole or math.isfinite(value)):
            kind = "a finite number"
        if self._is_number(value) and value > self._ceiling:
            return f"{kind} <= {_plain(self._ceiling)}"
        if self.low is not None:
            return f"{kind} {'>' if self.above else '>='} {_plain(self.low)}"
        return kind if self.high is None else f"{kind} <= {_plain(self.high)}"

    @property
    def _floor(self) -> float:
        return self.low if self.low is not None else (-_INT64_MAX if self.whole else -math.inf)

    @property
    def _ceiling(self) -> float:
        return self.high if self.high is not None else (_INT64_MAX if self.whole else math.inf)

    def _is_number(self, value: object) -> TypeGuard[int | float]:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        try:
            return math.isfinite(value)
        except OverflowError:  # an integer beyond all floats
            return self.whole


def _bound(text: str | None) -> float | None:
    if text is None:
        return None
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:.15g}"


@dataclass(frozen=True)
class Kind:
    """The alternatives that a key may hold."""

    numbers: tuple[_Number, ...] = ()
    plain: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, declared: str) -> Kind:
        """Read a kind as text, as `int >= 1 | null`. Raises `ValueError`."""
        numbers: list[_Number] = []
        plain: set[str] = set()
        for alternative in (part.strip() for part in declared.split("|")):
            bounded = _BOUNDED.fullmatch(alternative)
            if bounded is None and alternative not in _PLAIN:
                raise ValueError(f"unknown kind {alternative!r} of {declared!r}")
            if bounded is None:
                plain.add(alternative)
                continue
            kind, sign, bound, low, high = bounded.groups()
            if sign is not None:
                low, high = (None, bound) if sign == "<=" else (bound, None)
            numbers.append(_Number(kind == "int", _bound(low), _bound(high), above=sign == ">"))
        return cls(tuple(numbers), frozenset(plain))

    @property
    def optional(self) -> bool:
        """Return whether the key may be null."""
        return "null" in self.plain

    @property
    def is_text(self) -> bool:
        """Return whether text is among the alternatives, so that a value is taken as it stands."""
        return not self.plain.isdisjoint(_TEXTS)

    def stands_as_typed(self, written: str) -> bool:
        """Return whether an argument is plain text: not in quotes, not null, no list where a list is allowed."""
        if written in ("", "null") or written[0] in "'\"":
            return False
        return self.is_text and not self.is_structure(written)

    def is_structure(self, written: str) -> bool:
        """Return whether an argument is written as a list or a mapping (or `true`) that this kind takes."""
        if "bool" in self.plain and written.lower() in ("true", "false"):
            return True
        kinds = {name.partition(" ")[0] for name in self.plain}
        return any(name in kinds and _has_shape(written, name) for name in _SHAPES)

    def problems_as_written(self, key: str, written: str) -> list[str]:
        """Return the problems of text as typed, before anything reads it."""
        begun = self.plain.isdisjoint({"path", "new path"})  # a path may begin with a bracket
        shapes = [] if "any text" in self.plain else [name for name in _SHAPES if _has_shape(written, name, begun)]
        typed = shown(f"{key}={written}")
        if shapes:
            return [f"{key} must be {self.words()}, got a {shapes[0]}: {typed}; {_QUOTE}"]
        if "new path" in self.plain and "${" in written:
            return [f"{key} must be {self.words()}; nothing fills ${{...}} in here: {typed}; {_QUOTE}"]
        return []

    def problem(self, value: object) -> str | None:
        """`must be an integer >= 1, got 'many'`; None where the kind takes the value."""
        if self._takes(value):
            return None
        return f"must be {self.words(value)}, got {shown(value)}"

    def words(self, value: object = None) -> str:
        """Return the kind in words, as `a path or a list of names`, with the bound that `value` exceeds."""
        parts = [number.words(value) for number in self.numbers]
        parts += dict.fromkeys(words for name, words in _WORDS.items() if name in self.plain)
        return " or ".join(parts)

    def _takes(self, value: object) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, str):
            return self.is_text and value != "" and "\0" not in value
        if isinstance(value, bool):
            return "bool" in self.plain
        if isinstance(value, Mapping):
            return "mapping" in self.plain
        if isinstance(value, list | tuple):
            if "list" in self.plain:
                return True
            if "list of text" in self.plain and all(isinstance(item, str) for item in value):
                return True
            whole = _Number(whole=True)
            return "list of int" in self.plain and all(whole.takes(item) for item in value)
        return any(number.takes(value) for number in self.numbers)


def _has_shape(written: str, name: str, begun: bool = False) -> bool:
    begins, ends = _SHAPES[name]
    return written.startswith(begins) and (begun or written.endswith(ends))


def problems_of(values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> list[str]:
    """Return the problems of each value, by dotted key; missing keys are named too."""
    problems = []
    for key, kind in kinds.items():
        value, present, parent = _at(values, key)
        if not present and parent is not None:
            line = f"{parent} must be {_WORDS['mapping']}, got {shown(value)}"
            if line not in problems:
                problems.append(line)
        elif present and value != "???" and (problem := kind.problem(value)):
            problems.append(f"{key} {problem}")
    return problems


def _at(values: Mapping[str, Any], key: str) -> tuple[Any, bool, str | None]:
    """(value, whether the key is there, the parent that is no mapping and has that value instead)."""
    node: Any = values
    names = key.split(".")
    for depth, name in enumerate(names):
        if not isinstance(node, Mapping):
            return node, False, ".".join(names[:depth])
        if name not in node:
            return None, False, None
        node = node[name]
    return node, True, None
