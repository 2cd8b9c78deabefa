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
import importlib.resources
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, ClassVar, TypeGuard, TypeVar, cast

from conf.errors import UsageError, collected, refuse, require_known, shown, unknown_name

_NUMBER = r"-?\d+(?:\.\d+)?(?:e\d+)?"
_BOUNDED = re.compile(rf"(int|number)(?: (?:(>=?) )?({_NUMBER})(?: to ({_NUMBER}))?| <= ({_NUMBER}))?")
_INT64_MAX = 2**63 - 1  # the limit of SQLite and Parquet
_SHAPES = {"[": ("list", "]"), "{": ("mapping", "}")}
_TEXTS = {"text", "any text", "path", "new path"}
_QUOTE = "in its own quotes it is taken as text"
REQUIRED = "???"  # OmegaConf's mark of a missing value
_hints: Callable[[type], dict[str, Any]] = cache(typing.get_type_hints)
Value = TypeVar("Value")


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


# Kind -> (its text in messages, function that checks a value), in the order of messages. `Kind` checks numbers.
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
_ORDER = ("int", "number", *_PLAIN)


@dataclass(frozen=True)
class Kind:
    """The alternatives that a key may hold.

    declared: the kind as `--help` shows it
    names: the alternatives without bounds, in the order of messages; `int` and `number` have the bounds `low` and
        `high`, both included
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
        names, above = list[str](), False
        bounds: tuple[str | None, str | None] = (None, None)
        for name in (part.strip() for part in declared.split("|")):
            if bounded := _BOUNDED.fullmatch(name):
                name, sign, low, high, most = bounded.groups()
                bounds, above = (low, high or most), sign == ">"
            if name not in _ORDER:
                raise ValueError(f"unknown kind {name!r} of {declared!r}")
            names.append(name)
        low, high = (None if text is None else float(text) for text in bounds)
        return cls(declared, tuple(sorted(names, key=_ORDER.index)), low, high, above, tuple(choices))

    def takes_as_typed(self, key: str, written: str) -> bool:
        """Return whether an argument is plain text: not in quotes, not null, and not a list where a list is allowed.

        Raises `UsageError` for text that looks like a list or a mapping, or refers to a value in a new path.
        """
        if written in ("", "null") or written[0] in "'\"" or _TEXTS.isdisjoint(self.names):
            return False
        if "bool" in self.names and written.lower() in ("true", "false"):
            return False
        shape, end = _SHAPES.get(written[0], ("", ""))
        is_whole = shape != "" and written.endswith(end)
        if is_whole and any(name.partition(" ")[0] == shape for name in self.names):
            return False
        may_begin = "any text" in self.names or (not is_whole and not {"path", "new path"}.isdisjoint(self.names))
        if shape and not may_begin:
            problem = f", got a {shape}:"
        elif "new path" in self.names and "${" in written:
            problem = "; nothing fills ${...} in here:"
        else:
            return True
        raise UsageError(f"{key} must be {self.words()}{problem} {shown(f'{key}={written}')}; {_QUOTE}")

    def problem(self, key: str, value: object) -> str | None:
        """Return a message such as `KEY must be an integer >= 1, got 'many'`; None if the kind allows the value."""
        if not any(self._takes(name, value) for name in self.names):
            return f"{key} must be {self.words(value)}, got {shown(value)}"
        given = value if isinstance(value, list | tuple) else [value]
        unknown = [choice for choice in given if self.choices and choice is not None and choice not in self.choices]
        name = f"name in {key}:" if "list of text" in self.names else key
        return str(unknown_name(name, unknown[0], self.choices)) if unknown else None

    def words(self, value: object = None) -> str:
        """Return the kind in words, such as `a path or a list of names`, with the bound that `value` exceeds."""
        words = (_PLAIN[name][0] if name in _PLAIN else self._number_words(name, value) for name in self.names)
        return " or ".join(dict.fromkeys(filter(None, words)))

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
            return f"{kind} <= {high if high == _INT64_MAX else f'{high:.15g}'}"
        return kind if self.low is None else f"{kind} {'>' if self.above else '>='} {self.low:.15g}"


def problems_of(values: Mapping[str, Any], kinds: Mapping[str, Kind], section: str = "") -> list[str]:
    """Return the problems of values. Messages name the dotted key after `section`.

    Missing keys have no problem, also if they are required.
    """
    given = ((key, kind, _at(values, key.split("."))) for key, kind in kinds.items())
    return [
        problem for key, kind, value in given if value != REQUIRED and (problem := kind.problem(section + key, value))
    ]


def _at(values: Any, names: Sequence[str]) -> Any:
    for name in names:
        values = values.get(name, REQUIRED) if isinstance(values, Mapping) else REQUIRED
    return values


_DEFAULT, _HELP, _KIND, _CHOICES, _BUILD = "default", "help", "kind", "choices", "build"
_GROUP, _SECTION = "group", "section"
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
    """Properties of a key whose value is chosen by name from the files of `conf/NAME/`.

    build: makes the typed value from a file's values; None: an object of `schema`
    schema: settings class with the kinds of the files' keys; None: the files themselves define the keys
    added: whether it is chosen with `+NAME=CHOICE`, without a default
    described: whether only descriptions of GPU models are choices, without the backends that run trials
    """

    build: Callable[[Mapping[str, Any]], Any] | None
    schema: type[Checked] | None
    added: bool
    described: bool


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
    return dataclasses.field(
        default=default, metadata={_HELP: help, _KIND: kind, _CHOICES: tuple(choices), _BUILD: build}
    )


def format_key() -> Any:
    """Return the field `format` of commands that print a table or JSON."""
    return key("table", choices=("table", "json"))


def data_key() -> Any:
    """Return the field `data` of commands that read or write a data folder."""
    return key(None, "data folder; default $GPUFARM_DATA, else ./data", "new path")


def section(settings: type[Checked], required: bool = False) -> Any:
    """Return a dataclass field that groups further keys, such as `log.file` and `log.format`."""
    default: dict[str, Any] = {} if required else {"default_factory": settings}
    return dataclasses.field(**default, metadata={_SECTION: settings})


def group(
    default: str | None,
    help: str,
    build: Callable[[Mapping[str, Any]], Any] | None = None,
    schema: type[Checked] | None = None,
    *,
    added: bool = False,
    described: bool = False,
) -> Any:
    """Return a dataclass field whose value is chosen from the files of `conf/NAME/`; see `ConfigGroup`.

    `default` is the name of a file, or None.
    """
    return dataclasses.field(
        default=None,
        metadata={_DEFAULT: default, _HELP: help, _GROUP: ConfigGroup(build, schema, added, described)},
    )


@dataclass(frozen=True)
class Key:
    """One key of a command, by its dotted name. `default` is None for null, `REQUIRED` for a required key.

    kind: the allowed values; None for a group
    """

    name: str
    default: Any
    help: str = ""
    kind: Kind | None = None
    group: ConfigGroup | None = None

    @property
    def text(self) -> str:
        """The help, which begins with the kind."""
        return f"[{self.kind.declared}] {self.help}".strip() if self.kind else self.help

    @property
    def written_default(self) -> str:
        """The default as `written`; of a required key, `(required)`."""
        return "(required)" if self.default == REQUIRED else written(self.default)

    @property
    def options(self) -> tuple[str, ...]:
        """The choices of a group."""
        options = group_options(self.name)
        if self.group is None or not self.group.described:
            return options
        return tuple(name for name in options if "backend" not in choice_values(self.name, name))

    @property
    def choice_keys(self) -> tuple[Key, ...]:
        """The keys in the file of a group's default choice, with its values as defaults."""
        if self.group is None or self.default not in group_options(self.name):
            return ()
        known = {key.name: key for key in keys_of(self.group.schema)} if self.group.schema else {}
        return tuple(
            dataclasses.replace(known.get(name, Key(name, None)), name=f"{self.name}.{name}", default=value)
            for name, value in flat(choice_values(self.name, self.default))
        )


def _cached(function: Callable[[type[Checked]], Value]) -> Callable[[type[Checked]], Value]:
    """Cache a function of a settings class; mypy rejects a `type[...]` as an argument of `functools.cache`."""
    return cast("Callable[[type[Checked]], Value]", cache(function))


@_cached
def keys_of(settings: type[Checked]) -> tuple[Key, ...]:
    """Return the keys of a settings class: groups first, then its own, then those of its sections."""
    return tuple(sorted(_own_keys(settings), key=lambda key: (key.group is None, "." in key.name)))


def _own_keys(settings: type[Checked]) -> Iterator[Key]:
    for field in dataclasses.fields(settings):
        about = field.metadata
        if _SECTION in about:
            for inner in _own_keys(about[_SECTION]):
                yield dataclasses.replace(inner, name=f"{field.name}.{inner.name}")
        elif _GROUP in about:
            yield Key(field.name, about[_DEFAULT], about[_HELP], group=about[_GROUP])
        elif _HELP in about:
            kind = _kind_of(_hints(settings)[field.name], about[_KIND], about[_CHOICES])
            yield Key(field.name, REQUIRED if field.default is MISSING else field.default, about[_HELP], kind)


def documented_keys(settings: type[Checked]) -> tuple[Key, ...]:
    """Return the keys that have a default or are required: all but groups that are added with a `+`."""
    return tuple(key for key in keys_of(settings) if key.group is None or not key.group.added)


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


@_cached
def kinds_of(settings: type[Checked]) -> dict[str, Kind]:
    """Return the kind of each key of a class and of its groups' files, except search spaces and descriptions."""
    kinds = {key.name: key.kind for key in keys_of(settings) if key.kind is not None}
    for key in keys_of(settings):
        if key.group is not None and key.group.schema is not None:
            kinds |= {f"{key.name}.{inner}": kind for inner, kind in kinds_of(key.group.schema).items()}
    return kinds


def groups_of(settings: type[Checked]) -> dict[str, Key]:
    """Return the keys of a command that are groups, by name."""
    return {key.name: key for key in keys_of(settings) if key.group is not None}


@dataclass(frozen=True)
class Checked:
    """Base of settings classes, which checks values against the kinds of their keys when an object is made.

    `section` is the parent key in messages: `class LogSettings(Checked, section="log")`.

    COMMON: keys that `--help` explains, in this order; empty: all
    POSITIONAL: key that an argument without `KEY=` sets, the first with white space
    SPELLINGS: other spelling of a key, as in `+NAME` -> the key; `NAME[` is a list that is given for `NAME`
    """

    COMMON: ClassVar[Sequence[str]] = ()
    POSITIONAL: ClassVar[str] = ""
    SPELLINGS: ClassVar[Mapping[str, str]] = {}
    _section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str | None = None) -> None:
        if section is not None:
            cls._section = f"{section}."

    def __post_init__(self) -> None:
        """Make the values of sections, groups and keys, and check them. Raises `UsageError` with every problem."""
        settings = type(self)
        problems = problems_of(vars(self), kinds_of(settings), self._section)
        fields = [field for field in dataclasses.fields(settings) if field.metadata]
        for field in fields if not problems else ():
            with collected(problems):
                value = _make_value(field, _hints(settings)[field.name], getattr(self, field.name))
                object.__setattr__(self, field.name, value)
        refuse(problems or self.problems())

    def problems(self) -> Iterable[str]:
        """Return further problems of values that match their kinds, one line each."""
        return ()


Settings = TypeVar("Settings", bound=Checked)


def _make_value(field: dataclasses.Field[Any], annotation: Any, value: Any) -> Any:
    """Return a field's value: an object for a section, the result of `build`, or a tuple for several names."""
    about = field.metadata
    chosen: ConfigGroup | None = about.get(_GROUP)
    settings = chosen.schema if chosen else about.get(_SECTION)
    build = chosen.build if chosen else about.get(_BUILD)
    if chosen and build:
        is_built = not isinstance(value, Mapping | list | str | int | float)
        return value if is_built else build(_mapping(field.name, value))
    if settings and not isinstance(value, settings) and not (chosen and value is None):
        # Another release may have other keys.
        require_known(field.name, _mapping(field.name, value), [own.name for own in dataclasses.fields(settings)])
        return built(settings, value)
    if build:
        return build(value)
    annotations = _alternatives(annotation)
    if isinstance(value, list | str) and any(typing.get_origin(alternative) is tuple for alternative in annotations):
        return value if type(value) in annotations else (value,) if isinstance(value, str) else tuple(value)
    return value


def built(settings: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Return an object of a settings class from the values of a composed command line. Raises `UsageError`.

    A field `given` takes all values.
    """
    given = {"given": values, **values}
    return settings(**{field.name: given[field.name] for field in dataclasses.fields(settings) if field.name in given})


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a mapping such as {{key: value}}, got {value!r}")
    return value


def defaults_of(settings: type[Checked]) -> dict[str, Any]:
    """Return the composed values of an empty command line: `???` for a required key, without added groups."""
    values: dict[str, Any] = {}
    for key in documented_keys(settings):
        *parents, name = key.name.split(".")
        node = values
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = key.default if key.group is None else None
    return values


def written(value: object) -> str:
    """Return a default in the syntax of the command line: `null`, `true`, `[a, b]`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(written, value))}]"
    return str(value)


def group_options(group: str) -> tuple[str, ...]:
    """Return the choices of a group, by file name."""
    folder = importlib.resources.files("conf") / group
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


@cache
def choice_values(group: str, choice: str) -> Mapping[str, Any]:
    """Return the values of `conf/GROUP/CHOICE.yaml`."""
    import yaml

    text = (importlib.resources.files("conf") / group / f"{choice}.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    assert isinstance(values, dict)
    return values


def flat(values: Mapping[str, Any], parent: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values by dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping) and "low" not in value:  # a range of a search space is one value
            yield from flat(value, f"{parent}{key}.")
        else:
            yield f"{parent}{key}", value
