"""Settings of a command: a frozen dataclass whose fields are the keys of its command line, each with its kind.

Start reading at `key`. Composition, checks, `--help` and docs/commands.md read a key's annotation, default and metadata
only. `defaults_of` returns the values that Hydra composes, `built` makes an object.

A `Kind` defines the values that a key may hold; `--help` shows it in brackets:

    n: ???  # [int 1 to 10000000] how many trials the job has
    grace_s: 3600  # [number 0 to 1e9] seconds before a later compaction deletes the files
    families: null  # [text | list of text | null] as in [cnn,gpt]

Kinds: `int` and `number`, with optional bounds (`>= 1`, `> 0`, `1 to 5`, `> 0 to 1`); `bool`; `text`; `any text`, which
may look like a list or a mapping; `path`; `new path`, which is made if it is missing; `mapping`; `list`,
`list of text`, `list of int`; `null`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, TypeGuard, TypeVar, cast

from conf.errors import UsageError, require_known, shown, unknown_name

_NUMBER = r"-?\d+(?:\.\d+)?(?:e\d+)?"
_BOUNDED = re.compile(rf"(int|number)(?: (?:(>=?) )?({_NUMBER})(?: to ({_NUMBER}))?| <= ({_NUMBER}))?")
_INT64_MAX = 2**63 - 1  # the limit of SQLite and Parquet
_SHAPES = {"list": ("[", "]"), "mapping": ("{", "}")}
_TEXTS = {"text", "any text", "path", "new path"}
_QUOTE = "in its own quotes it is taken as text"
Settings = TypeVar("Settings")
_hints = cache(typing.get_type_hints)


def _is_number(value: object, whole: bool) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return whole or abs(value) <= sys.float_info.max  # also False for NaN


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_path(value: object) -> bool:
    return _is_text(value) or isinstance(value, os.PathLike)


def _is_list(value: object, takes: Callable[[object], bool] = lambda _: True) -> bool:
    return isinstance(value, list | tuple) and all(map(takes, value))


# Kind -> (its text in messages, function that checks a value). Numbers are checked elsewhere, with their bounds.
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

    declared: the kind as `--help` shows it
    names: the alternatives without bounds; `int` and `number` have the bounds `low` and `high`, both included
    above: whether `low` itself is excluded
    choices: the only allowed values, if any
    """

    declared: str
    names: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    above: bool = False
    choices: tuple[object, ...] = ()

    @classmethod
    def parse(cls, declared: str, choices: Sequence[object] = ()) -> Kind:
        """Parse the text of a kind, such as `int >= 1 | null`. Raises `ValueError`."""
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

    def stands_as_typed(self, written: str) -> bool:
        """Return whether an argument is plain text: not in quotes, not null, and not a list where a list is allowed."""
        if written in ("", "null") or written[0] in "'\"" or _TEXTS.isdisjoint(self.names):
            return False
        if "bool" in self.names and written.lower() in ("true", "false"):
            return False
        return not any(name.partition(" ")[0] in _SHAPES and _has_shape(written, name) for name in self.names)

    def problem_as_written(self, key: str, written: str) -> str | None:
        """Return the problem of an argument's text, before it is parsed."""
        begun = not {"path", "new path"} & set(self.names)  # a path may begin with a bracket
        shapes = [name for name in _SHAPES if "any text" not in self.names and _has_shape(written, name, begun)]
        if shapes:
            problem = f"got a {shapes[0]}:"
        elif "new path" in self.names and "${" in written:
            problem = "nothing fills ${...} in here:"
        else:
            return None
        separator = "," if shapes else ";"
        return f"{key} must be {self.words()}{separator} {problem} {shown(f'{key}={written}')}; {_QUOTE}"

    def problem(self, key: str, value: object) -> str | None:
        """Return a message such as `KEY must be an integer >= 1, got 'many'`; None if the kind allows the value."""
        if not any(self._takes(name, value) for name in self.names):
            return f"{key} must be {self.words(value)}, got {shown(value)}"
        if self.choices:
            given = value if isinstance(value, list | tuple) else [value]
            unknown = [choice for choice in given if choice is not None and choice not in self.choices]
            name = f"name in {key}:" if "list of text" in self.names else key
            return str(unknown_name(name, unknown[0], self.choices)) if unknown else None
        return None

    def words(self, value: object = None) -> str:
        """Return the kind in words, such as `a path or a list of names`, with the bound that `value` exceeds."""
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
    """Return the problems of values. Messages name the dotted key after `section`.

    Missing keys have no problem, also if they are required.
    """
    given = ((key, kind, _at(values, key.split("."))) for key, kind in kinds.items())
    return [problem for key, kind, value in given if value != "???" and (problem := kind.problem(section + key, value))]


def _at(values: Any, names: Sequence[str]) -> Any:
    for name in names:
        values = values.get(name, "???") if isinstance(values, Mapping) else "???"
    return values


_HELP, _KIND, _CHOICES, _BUILD, _GROUP = "help", "kind", "choices", "build", "group"
_SECTION, _GIVEN = "section", "given"
_WORDS: dict[Any, str] = {
    bool: "bool",
    int: "int",
    float: "number",
    str: "text",
    type(None): "null",
    list: "list",
    Mapping: "mapping",
    tuple[str, ...]: "list of text",
    tuple[int, ...]: "list of int",
}


@dataclass(frozen=True)
class ConfigGroup:
    """A key whose value is chosen by name from the files of `conf/NAME/`.

    default: the name of a file, or None
    build: makes the typed value from a file's values; None: an object of `schema`
    schema: settings class with the kinds of the files' keys; None: the files themselves define the keys
    added: whether it is chosen with `+NAME=CHOICE`, without a default
    """

    default: str | None
    build: Callable[[Mapping[str, Any]], Any] | None
    schema: type | None = None
    added: bool = False


def key(
    default: Any = MISSING,
    help: str = "",
    kind: str = "",
    choices: Sequence[object] = (),
    build: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a dataclass field that is a key of a command.

    Args:
        default: Default value; without one, the key is required.
        help: Meaning, for `--help`.
        kind: Narrows the annotation, as in `int >= 1` or `new path`; with a `|` it replaces the whole kind.
        choices: The only allowed values.
        build: Makes the field's value from the given one. Raises `UsageError`.
    """
    metadata = {_HELP: help, _KIND: kind, _CHOICES: tuple(choices), _BUILD: build}
    return dataclasses.field(default=default, metadata=metadata)


def section(settings: type, required: bool = False) -> Any:
    """Return a dataclass field that groups further keys, such as `log.file` and `log.format`."""
    default: dict[str, Any] = {} if required else {"default_factory": settings}
    return dataclasses.field(**default, metadata={_SECTION: settings})


def group(
    default: str | None,
    help: str,
    build: Callable[[Mapping[str, Any]], Any] | None = None,
    schema: type | None = None,
) -> Any:
    """Return a dataclass field whose value is chosen with `NAME=CHOICE` from the files of `conf/NAME/`."""
    return dataclasses.field(default=None, metadata={_HELP: help, _GROUP: ConfigGroup(default, build, schema)})


def added_group(build: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return a dataclass field that is chosen with `+NAME=CHOICE`; None if it is not given."""
    return dataclasses.field(default=None, metadata={_HELP: "", _GROUP: ConfigGroup(None, build, added=True)})


def given_values() -> Any:
    """Return a dataclass field for all composed values of the command line."""
    return dataclasses.field(default_factory=dict, repr=False, metadata={_GIVEN: True})


@dataclass(frozen=True)
class Key:
    """One key of a command. `default` is None for null, `dataclasses.MISSING` for a required key.

    kind: the allowed values; None for a group
    """

    name: str  # dotted
    default: Any
    help: str
    kind: Kind | None = None
    group: ConfigGroup | None = None


@cache
def keys_of(settings: type) -> tuple[Key, ...]:
    """Return the keys of a settings class: groups first, then its own, then those of its sections."""
    return tuple(sorted(_own_keys(settings), key=lambda key: (key.group is None, "." in key.name)))


def _own_keys(settings: type) -> Iterator[Key]:
    hints = _hints(settings)
    for field in dataclasses.fields(settings):
        about = field.metadata
        if _SECTION in about:
            inner = _own_keys(about[_SECTION])
            yield from (dataclasses.replace(inner_key, name=f"{field.name}.{inner_key.name}") for inner_key in inner)
        elif _HELP in about:
            if (chosen := about.get(_GROUP)) is not None:
                yield Key(field.name, chosen.default, about[_HELP], group=chosen)
            else:
                kind = _kind_of(hints[field.name], about[_KIND], about[_CHOICES])
                yield Key(field.name, field.default, about[_HELP], kind)


def _kind_of(annotation: Any, narrower: str, choices: tuple[object, ...]) -> Kind:
    """Return the kind of a key, such as `new path | null` for `str | None` that is narrowed to `new path`."""
    alternatives = _alternatives(annotation)
    optional = ["null"] if type(None) in alternatives else []
    if narrower:
        return Kind.parse(narrower if "|" in narrower else " | ".join([narrower, *optional]), choices)
    words = [_WORDS.get(alternative) or _WORDS[typing.get_origin(alternative)] for alternative in alternatives]
    kind = Kind.parse(" | ".join(words), choices)
    return dataclasses.replace(kind, declared=" | ".join([*map(str, choices), *optional])) if choices else kind


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if is_union else (annotation,)


@cache
def kinds_of(settings: type) -> dict[str, Kind]:
    """Return the kind of each key of a class and of its groups' files, except search spaces and descriptions."""
    kinds = {key.name: key.kind for key in keys_of(settings) if key.kind is not None}
    for name, chosen in groups_of(settings).items():
        if chosen.schema is not None:
            kinds |= {f"{name}.{inner}": kind for inner, kind in kinds_of(chosen.schema).items()}
    return kinds


def groups_of(settings: type) -> dict[str, ConfigGroup]:
    """Return the groups that a command takes, by name."""
    return {key.name: key.group for key in keys_of(settings) if key.group is not None}


class Checked:
    """Base of settings classes, which checks values against the kinds of their keys when an object is made.

    `section` is the parent key in messages: `class LogSettings(Checked, section="log")`.
    """

    _section = ""

    def __init_subclass__(cls, section: str | None = None) -> None:
        if section is not None:
            cls._section = f"{section}."

    def __post_init__(self) -> None:
        """Make the values of sections, groups and keys, and check them. Raises `UsageError` with every problem."""
        settings: type = type(self)
        problems = problems_of(vars(self), kinds_of(settings), self._section)
        fields = [field for field in dataclasses.fields(settings) if field.metadata and _GIVEN not in field.metadata]
        for field in fields if not problems else ():
            try:
                value = _make_value(field, _hints(settings)[field.name], getattr(self, field.name))
                object.__setattr__(self, field.name, value)
            except UsageError as error:
                problems.append(str(error))
        if problems := problems or [*self.problems()]:
            raise UsageError("; ".join(problems))

    def problems(self) -> Iterable[str]:
        """Return further problems of values that match their kinds, one line each."""
        return ()


def _make_value(field: dataclasses.Field[Any], annotation: Any, value: Any) -> Any:
    """Return a field's value: an object for a section, the result of `build`, or a tuple for several names."""
    about = field.metadata
    chosen = about.get(_GROUP)
    if chosen and (chosen.build or value is None):
        is_built = not isinstance(value, Mapping | list | str | int | float)
        return value if is_built else chosen.build(_mapping(field.name, value))
    settings = about.get(_SECTION) or (chosen and chosen.schema)
    if settings and not isinstance(value, settings):
        # Another release may have other keys.
        require_known(field.name, _mapping(field.name, value), [own.name for own in dataclasses.fields(settings)])
        return built(settings, value)
    if build := about.get(_BUILD):
        return build(value)
    annotations = _alternatives(annotation)
    if isinstance(value, list | str) and any(typing.get_origin(alternative) is tuple for alternative in annotations):
        return value if type(value) in annotations else (value,) if isinstance(value, str) else tuple(value)
    return value


def built(settings: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Return an object of a settings class from the values of a composed command line. Raises `UsageError`."""
    names = [field.name for field in dataclasses.fields(cast(Any, settings))]
    given = {field.name: values for field in dataclasses.fields(cast(Any, settings)) if _GIVEN in field.metadata}
    return settings(**{name: values[name] for name in names if name in values}, **given)


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a mapping such as {{key: value}}, got {value!r}")
    return value


def defaults_of(settings: type) -> dict[str, Any]:
    """Return the composed values of an empty command line: `???` for a required key, without added groups."""
    values: dict[str, Any] = {}
    for key in keys_of(settings):
        *parents, name = key.name.split(".")
        node = values
        for parent in parents:
            node = node.setdefault(parent, {})
        if key.group is None:
            node[name] = "???" if key.default is MISSING else key.default
        elif not key.group.added:
            node[name] = None
    return values


def written(default: object) -> str:
    """Return a default in the syntax of the command line: `null`, `true`, `[a, b]`, `???` for a required key."""
    if default is MISSING:
        return "???"
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, Sequence) and not isinstance(default, str):
        return f"[{', '.join(map(written, default))}]"
    return str(default)


def format_key() -> Any:
    """Return the field `format` of commands that print a table or JSON."""
    return key("table", choices=("table", "json"))


def data_key() -> Any:
    """Return the field `data` of commands that read or write a data folder."""
    return key(None, "data folder; default $GPUFARM_DATA, else ./data", "new path")
