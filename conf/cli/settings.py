"""Settings of a command: a frozen dataclass whose fields are the keys of its command line.

Start reading at `key`. A field's annotation, default and metadata are all that composition, checks, `--help` and
docs/commands.md know of a key. `defaults_of` is what Hydra composes, `built` makes an object.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, TypeVar, cast

from conf.cli.values import Kind, problems_of
from conf.errors import UsageError

Settings = TypeVar("Settings")
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
    build: makes the typed value of a file's values; None: an object of `schema`
    schema: settings class that says what the files' keys may hold; None where the files themselves do
    added: chosen with `+NAME=CHOICE`, without a default
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
        default: The value where none is given; left out, the key is required.
        help: Meaning, for `--help`.
        kind: Narrows the annotation, as `int >= 1` or `new path`; where it holds a `|`, it is the whole kind.
        choices: The only values that the key may hold.
        build: Makes the field's value of what is given. Raises `UsageError`.
    """
    metadata = {_HELP: help, _KIND: kind, _CHOICES: tuple(choices), _BUILD: build}
    return dataclasses.field(default=default, metadata=metadata)


def section(settings: type, required: bool = False) -> Any:
    """Return a dataclass field that holds keys of its own: `log.file`, `log.format`, ..."""
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
    """Return a dataclass field that `+NAME=CHOICE` chooses, and None where it is not given."""
    return dataclasses.field(default=None, metadata={_HELP: "", _GROUP: ConfigGroup(None, build, added=True)})


def given_values() -> Any:
    """Return a dataclass field for all values of the command line, as they were composed."""
    return dataclasses.field(default_factory=dict, repr=False, metadata={_GIVEN: True})


@dataclass(frozen=True)
class Key:
    """One key of a command. `default` is None for null, `dataclasses.MISSING` for a required key.

    kind: what it may hold; None of a group
    """

    name: str  # dotted
    default: Any
    help: str
    kind: Kind | None = None
    group: ConfigGroup | None = None


_hints = cache(typing.get_type_hints)


@cache
def keys_of(settings: type) -> tuple[Key, ...]:
    """Return the keys of a settings class: groups first, then its own, then those of its sections."""
    return tuple(sorted(_own_keys(settings), key=lambda one: (one.group is None, "." in one.name)))


def _own_keys(settings: type) -> Iterator[Key]:
    hints = _hints(settings)
    for field in dataclasses.fields(settings):
        about = field.metadata
        if _SECTION in about:
            inner = _own_keys(about[_SECTION])
            yield from (dataclasses.replace(one, name=f"{field.name}.{one.name}") for one in inner)
        elif _HELP in about:
            if (chosen := about.get(_GROUP)) is not None:
                yield Key(field.name, chosen.default, about[_HELP], group=chosen)
            else:
                kind = _kind_of(hints[field.name], about[_KIND], about[_CHOICES])
                yield Key(field.name, field.default, about[_HELP], kind)


def _kind_of(annotation: Any, narrower: str, choices: tuple[object, ...]) -> Kind:
    """Return the kind of a key, as `new path | null` for `str | None` that is narrowed to `new path`."""
    alternatives = _alternatives(annotation)
    optional = ["null"] if type(None) in alternatives else []
    if narrower:
        return Kind.parse(narrower if "|" in narrower else " | ".join([narrower, *optional]), choices)
    words = [_WORDS.get(one) or _WORDS[typing.get_origin(one)] for one in alternatives]
    kind = Kind.parse(" | ".join(words), choices)
    return dataclasses.replace(kind, declared=" | ".join([*map(str, choices), *optional])) if choices else kind


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if is_union else (annotation,)


@cache
def kinds_of(settings: type) -> dict[str, Kind]:
    """Return what each key may hold: those of a class with its groups' files, search spaces and descriptions aside."""
    kinds = {one.name: one.kind for one in keys_of(settings) if one.kind is not None}
    for name, chosen in groups_of(settings).items():
        if chosen.schema is not None:
            kinds |= {f"{name}.{inner}": kind for inner, kind in kinds_of(chosen.schema).items()}
    return kinds


def groups_of(settings: type) -> dict[str, ConfigGroup]:
    """Return the groups that a command takes, by name."""
    return {one.name: one.group for one in keys_of(settings) if one.group is not None}


class Checked:
    """Base of settings classes: an object holds what its keys may hold, or it is not made.

    `section` is the name of the key that holds the others in messages: `class LogSettings(Checked, section="log")`.
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
                value = _made(field, _hints(settings)[field.name], getattr(self, field.name))
                object.__setattr__(self, field.name, value)
            except UsageError as error:
                problems.append(str(error))
        if problems := problems or [*self.problems()]:
            raise UsageError("; ".join(problems))

    def problems(self) -> Iterable[str]:
        """Return what is wrong with values that are of their kinds, a line each."""
        return ()


def _made(field: dataclasses.Field[Any], annotation: Any, value: Any) -> Any:
    """Return a field's value: the object of a section, what `build` makes, several names as a tuple."""
    about = field.metadata
    chosen = about.get(_GROUP)
    if chosen and (chosen.build or value is None):
        is_built = not isinstance(value, Mapping | list | str | int | float)
        return value if is_built else chosen.build(_mapping(field.name, value))
    settings = about.get(_SECTION) or (chosen and chosen.schema)
    if settings and not isinstance(value, settings):
        known = [one.name for one in dataclasses.fields(settings)]
        if unknown := [str(key) for key in _mapping(field.name, value) if key not in known]:  # of another version
            raise UsageError(f"{field.name}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
        return built(settings, value)
    if build := about.get(_BUILD):
        return build(value)
    annotations = _alternatives(annotation)
    if isinstance(value, list | str) and any(typing.get_origin(one) is tuple for one in annotations):
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
    """Return the composed values where nothing is given: `???` for a required key, added groups left out."""
    values: dict[str, Any] = {}
    for one in keys_of(settings):
        *parents, name = one.name.split(".")
        node = values
        for parent in parents:
            node = node.setdefault(parent, {})
        if one.group is None:
            node[name] = "???" if one.default is MISSING else one.default
        elif not one.group.added:
            node[name] = None
    return values


def written(default: object) -> str:
    """Return a default as a command line has it: `null`, `true`, `[a, b]`, `???` for a required key."""
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
