"""Settings of a command: a frozen dataclass whose fields are the keys of its command line.

Start reading at `key`. A field's annotation, default and metadata are all that composition, checks, `--help` and
docs/commands.md know of a key. `schema` makes Hydra's structured config of the class, `built` an object.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, TypeVar

from conf.errors import UsageError
from conf.values import Kind

Settings = TypeVar("Settings")
_HELP, _KIND, _SECTION, _GROUP = "help", "kind", "section", "group"
_GIVEN = "given"
_WORDS: dict[Any, str] = {
    bool: "bool", int: "int", float: "number", str: "text", type(None): "null", list: "list",
    tuple[str, ...]: "list of text", tuple[int, ...]: "list of int",
}  # fmt: skip
_NARROWER = {"path": "text", "new": "text", "any": "text"}  # first word of a kind -> the kind that it is one of


@dataclass(frozen=True)
class ConfigGroup:
    """A key whose value is chosen by name from the files of `conf/NAME/`.

    schema: dataclass that says what the files' keys may hold; None where the files themselves do
    build: makes the typed value of a file's values
    added: chosen with `+NAME=CHOICE`, without a default
    """

    default: str | None
    schema: type | None
    build: Callable[[Mapping[str, Any]], Any]
    added: bool


def key(default: Any = MISSING, help: str = "", kind: str | None = "") -> Any:
    """Return a dataclass field that is a key of a command.

    Args:
        default: The value where none is given; left out, the key is required.
        help: Meaning, for `--help`.
        kind: Narrows the annotation, as `int >= 1` or `new path`; where it holds a `|`, it is the whole kind.
            None leaves the value to the class's own checks, which report it together with all else.
    """
    return dataclasses.field(default=default, metadata={_HELP: help, _KIND: kind})


def same_key(settings: type, name: str) -> Any:
    """Return a dataclass field that is the same key as that of another command's settings: default, meaning, kind."""
    other = next(field for field in dataclasses.fields(settings) if field.name == name)
    return dataclasses.field(default=other.default, metadata=other.metadata)


def section(settings: type) -> Any:
    """Return a dataclass field that holds keys of its own: `log.file`, `log.format`, ..."""
    return dataclasses.field(default_factory=settings, metadata={_SECTION: settings})


def group(
    default: str | None, help: str, build: Callable[[Mapping[str, Any]], Any], schema: type | None = None
) -> Any:  # fmt: skip
    """Return a dataclass field whose value is chosen with `NAME=CHOICE` from the files of `conf/NAME/`."""
    return _group(ConfigGroup(default, schema, build, added=False), help)


def added_group(build: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return a dataclass field that `+NAME=CHOICE` chooses, and None where it is not given."""
    return _group(ConfigGroup(None, None, build, added=True), "")


def _group(chosen: ConfigGroup, help: str) -> Any:
    return dataclasses.field(default=None, metadata={_HELP: help, _GROUP: chosen})


def given_values() -> Any:
    """Return a dataclass field for all values of the command line, as they were composed."""
    return dataclasses.field(default_factory=dict, repr=False, metadata={_GIVEN: True})


@dataclass(frozen=True)
class Key:
    """One key of a command. `default` is None for null, `dataclasses.MISSING` for a required key."""

    name: str  # dotted
    default: Any
    help: str
    kind: str  # as `int >= 1 | null`; empty for a group, and for what the class checks
    group: ConfigGroup | None = None


@cache
def keys_of(settings: type) -> tuple[Key, ...]:
    """Return the keys of a settings class: groups first, then its own, then those of its sections."""
    keys = list(_own_keys(settings))
    return tuple(sorted(keys, key=lambda one: (one.group is None, "." in one.name)))


def _own_keys(settings: type) -> Iterator[Key]:
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        if inner := field.metadata.get(_SECTION):
            yield from (dataclasses.replace(one, name=f"{field.name}.{one.name}") for one in _own_keys(inner))
        elif chosen := field.metadata.get(_GROUP):
            yield Key(field.name, chosen.default, field.metadata[_HELP], "", chosen)
        elif _HELP in field.metadata:
            narrower = field.metadata[_KIND]
            kind = "" if narrower is None else declared_kind(hints[field.name], narrower)
            yield Key(field.name, field.default, field.metadata[_HELP], kind)


def declared_kind(annotation: Any, narrower: str) -> str:
    """Return the kind of a key, as `new path | null` for `str | None` that is narrowed to `new path`."""
    if "|" in narrower:
        return narrower
    first = narrower.partition(" ")[0]
    general = _NARROWER.get(first, first)
    kinds = [_WORDS.get(one) or ("mapping" if _is_mapping(one) else "list") for one in _alternatives(annotation)]
    if narrower and general not in kinds:
        raise TypeError(f"{narrower!r} narrows none of {', '.join(kinds)}")
    return " | ".join(narrower if narrower and kind == general else kind for kind in kinds)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return typing.get_args(annotation)
    return (annotation,)


def _is_mapping(annotation: Any) -> bool:
    origin = typing.get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, Mapping)


def kinds_of(settings: type) -> dict[str, Kind]:
    """Return what each key may hold, groups aside."""
    return {one.name: Kind.parse(one.kind) for one in keys_of(settings) if one.kind}


def groups_of(settings: type) -> dict[str, ConfigGroup]:
    """Return the groups that a command takes, by name."""
    return {one.name: one.group for one in keys_of(settings) if one.group is not None}


@cache
def schema(settings: type) -> type:
    """Return the dataclass that Hydra composes a command from: the same keys, in annotations that OmegaConf knows.

    OmegaConf has no unions with lists and mappings, and would make 300.0 of `timeout_s=300`, which gives a job another
    identity: numbers stay what they are.
    """
    hints = typing.get_type_hints(settings)
    fields: list[tuple[str, Any, Any]] = []
    defaults: list[Any] = []
    for field in dataclasses.fields(settings):
        if inner := field.metadata.get(_SECTION):
            typed = schema(inner)
            fields.append((field.name, typed, dataclasses.field(default_factory=typed)))
        elif chosen := field.metadata.get(_GROUP):
            fields.append((field.name, Any, None))
            defaults += [] if chosen.added else [{field.name: chosen.default}]
        elif _HELP in field.metadata:
            narrower = field.metadata[_KIND]
            annotation = Any if narrower is None or "|" in narrower else _for_omegaconf(hints[field.name])
            fields.append((field.name, annotation, _default(field.default)))
    if groups_of(settings):
        fields.append(("defaults", list[Any], _default(["_self_", *defaults])))
    return dataclasses.make_dataclass(settings.__name__, fields)


def _default(value: Any) -> Any:
    if value is MISSING:
        return "???"
    return dataclasses.field(default_factory=lambda: list(value)) if isinstance(value, list | tuple) else value


def _for_omegaconf(annotation: Any) -> Any:
    alternatives = [one for one in _alternatives(annotation) if one is not type(None)]
    if len(alternatives) > 1 or alternatives[0] not in _WORDS:
        return Any
    (only,) = alternatives
    known: dict[Any, Any] = {
        float: int | float,
        tuple[str, ...]: list[str],
        tuple[int, ...]: list[int],
        list: list[Any],
    }
    typed = known.get(only, only)
    return typed | None if len(_alternatives(annotation)) > 1 else typed


def built(settings: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Return an object of a settings class from the values of a composed command line.

    Raises:
        UsageError: From the class's own checks, and from those of its sections and groups.
    """
    hints = typing.get_type_hints(settings)
    arguments: dict[str, Any] = {}
    assert dataclasses.is_dataclass(settings)
    for field in dataclasses.fields(settings):
        if _GIVEN in field.metadata:
            arguments[field.name] = values
        if field.name not in values:
            continue
        value = values[field.name]
        if inner := field.metadata.get(_SECTION):
            value = _built_section(field.name, inner, value)
        elif chosen := field.metadata.get(_GROUP):
            value = None if value is None else chosen.build(_mapping(field.name, value))
        elif isinstance(value, list) and any(
            typing.get_origin(one) is tuple for one in _alternatives(hints[field.name])
        ):
            value = tuple(value)
        arguments[field.name] = value
    return settings(**arguments)


def _built_section(name: str, settings: type, values: object) -> Any:
    known = [field.name for field in dataclasses.fields(settings)]
    if unknown := [str(key) for key in _mapping(name, values) if key not in known]:  # of another version's journal
        raise UsageError(f"{name}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return built(settings, _mapping(name, values))


def _mapping(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{name} must be a mapping such as {{key: value}}, got {value!r}")
    return value


def written(default: object) -> str:
    """Return a default as a command line has it: `null`, `true`, `[a, b]`, `???` for a required key."""
    if default is MISSING:
        return "???"
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, Sequence) and not isinstance(default, str):
        return f"[{', '.join(map(written, default))}]"
    return str(default)


def data_key() -> Any:
    """Return the field `data` of commands that read or write a data folder."""
    return key(None, "data folder; default $GPUFARM_DATA, else ./data", "new path")
