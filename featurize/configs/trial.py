"""Trial configs for the rest of the project: from mappings and rows, their hashes, and the code that they name.

Start reading at `config_from_mapping`; `config_of_row` reads a row, whatever its text. Code named by a config from a
row or a file is not imported, unless the user trusts its module (`config_of_user`, `trusting`). A path that forgets to
ask is therefore refused. Torch-free, so that sampling and the dispatcher can use it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache, lru_cache
from typing import Any

from conf.errors import UsageError, one_line, unknown_names
from conf.files.identity import canonical_json as canonical_json, mapping_hash as mapping_hash
from featurize.families import family_names, get_family, layers_of
from featurize.job.code_names import LIBRARY_MODULES, CodeName, TrustedName, granted_model
from featurize.job.training_settings import TrialConfig as TrialConfig

_MARKS = {"typed": CodeName, "trusted": TrustedName}


def named_by_user(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that the user typed or submitted, with their names of code permitted."""
    marked = dict(values)
    for name in code_fields(family):
        if isinstance(marked.get(name), str):
            marked[name] = CodeName(marked[name])
    return marked


def config_of_user(mapping: Mapping[str, Any]) -> TrialConfig:
    """Return `config_from_mapping` of a mapping that the user typed or submitted. Raises as there."""
    family = mapping.get("family")
    return config_from_mapping(named_by_user(family, mapping) if isinstance(family, str) else mapping)


def trusting(config: TrialConfig, trust: Sequence[str]) -> TrialConfig:
    """Return the config, with its names of code marked as `granted_model` marks them."""
    granted: dict[str, Any] = {
        name: granted_model(getattr(config, name), trust) for name in code_fields(config.family) if trust
    }
    return replace(config, **granted) if granted else config


def code_marks(config: TrialConfig) -> dict[str, str]:
    """Return the permissions of a config's names of code, by field, for a process that receives the config as JSON."""
    types = {name: type(getattr(config, name)) for name in code_fields(config.family)}
    return {name: mark for name, kind in types.items() for mark, marked in _MARKS.items() if kind is marked}


def config_with_marks(mapping: Mapping[str, Any], marks: Mapping[str, str]) -> TrialConfig:
    """Return `config_from_mapping` with the permissions that `code_marks` returned. Raises as there."""
    return config_from_mapping({**mapping, **{name: _MARKS[mark](mapping[name]) for name, mark in marks.items()}})


def data_refusal(config: TrialConfig) -> str | None:
    """Return the `refusal` of the config as if it came from data, whoever named its code."""
    plain: dict[str, Any] = {name: str(getattr(config, name)) for name in code_fields(config.family)}
    return refusal(replace(config, **plain))


def code_entries(config: TrialConfig) -> dict[str, str]:
    """Return each name of code in a config, with a text that identifies the code. A library's model is listed with its
    arguments if these are more than plain data."""
    entries = {}
    for name in (getattr(config, field) for field in code_fields(config.family)):
        library = name.partition(":")[0].partition(".")[0] in LIBRARY_MODULES
        arguments = getattr(config, "arguments", "{}")
        entries[name] = f"{name} {arguments}" if library and data_refusal(config) else str(name)
    return entries


def refusal(config: TrialConfig) -> str | None:
    """Return why nothing may be imported for this config, or None. Imports nothing itself."""
    reason: str | None = get_family(config.family).refusal(config) if code_fields(config.family) else None
    return reason


@lru_cache(maxsize=256)  # needed for every row
def code_fields(family: str) -> tuple[str, ...]:
    """Return the fields of a family's config that name code; empty for an unknown family."""
    return getattr(get_family(family), "CODE_FIELDS", ()) if family in family_names() else ()


def config_hash(config: TrialConfig) -> str:
    """Return the trial config's identity, see `mapping_hash`."""
    return mapping_hash(config.to_mapping())


def config_from_mapping(mapping: Mapping[str, Any]) -> TrialConfig:
    """Return the config that `TrialConfig.to_mapping` wrote. Raises `UsageError`, with the known names, for an unknown
    family or field."""
    values = dict(mapping)
    if "family" not in values:
        raise UsageError("a trial config needs the key 'family'")
    cls = get_family(values.pop("family")).Config
    if problem := problem_of_fields(cls, values):
        raise UsageError(f"{cls.family}: {problem}")
    config: TrialConfig = cls(**values)
    return config


@cache  # needed for every leased task
def _fields_of(cls: type) -> dict[str, bool]:
    """Return the names of a dataclass's fields, in their order, and whether each must have a value."""
    return {field.name: field.default is MISSING for field in fields(cls)}


def problem_of_fields(cls: type, values: Mapping[Any, Any]) -> str | None:
    """Return the problem of values whose names are unknown to a dataclass, or that lack one of its required fields."""
    known = _fields_of(cls)
    if problem := unknown_names(sorted(values, key=str), sorted(known)):
        return problem
    if missing := missing_fields(cls, values):
        return f"missing {', '.join(missing)}"
    return None


def missing_fields(cls: type, values: Mapping[Any, Any]) -> list[str]:
    """Return the fields of a dataclass that have neither a value nor a default."""
    return [name for name, required in _fields_of(cls).items() if required and name not in values]


MOST_CHARACTERS = 200_000
MOST_DEPTH = 8
MOST_VALUES = 20_000
MOST_INTEGER = 2**31 - 1
_LONG_NUMBER = re.compile(r"\d{16,}")
# Exceptions of parsing and checking unchecked values.
_ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class UnreadableConfig(UsageError):
    """A row with an invalid config; the message has no control characters."""


def config_of_row(text: object, trust: Sequence[str] = ()) -> TrialConfig:
    """Return the config that `runs.config` holds as JSON; its names of code may not run, except those of modules in
    `trust` (see the module's docstring). Raises `UnreadableConfig` for anything else, however large, deep or
    absurd."""
    try:
        config = config_from_mapping(_plain(text))
    except UsageError as error:
        raise UnreadableConfig(printable(str(error), 300)) from error
    except _ODD as error:
        message = printable(f"{type(error).__name__}: {error}", 200)
        raise UnreadableConfig(f"config makes no sense: {message}") from error
    return trusting(config, trust)


def config_of_one_gpu(text: object, trust: Sequence[str] = ()) -> TrialConfig:
    """Return `config_of_row` of a row whose figures are those of its whole job.

    Also raises `UnreadableConfig` for a job on several GPUs: one rank's memory and waiting time are not labels of the
    config alone.
    """
    config = config_of_row(text, trust)
    if config.parallel is not None:
        raise UnreadableConfig(f"a rank's figures of a job on several GPUs ({config.parallel})")
    return config


def problem_of(config: TrialConfig) -> str | None:
    """Return why the layers of a row's config are not known, or None. Builds a library's model, without memory."""
    if (reason := refusal(config)) is not None:
        return reason
    family = get_family(config.family)
    if hasattr(family, "identity") or hasattr(family, "kind"):
        return _problem_of_layers(config)
    return None


def printable(text: str, most: int = 80) -> str:
    """Return the text in one line without control characters and lone surrogates, cut to `most` characters."""
    shown = one_line(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def code_problem(config: TrialConfig) -> str | None:
    """Return why this config must not become a task, which may import any code that it names; None for code that the
    user named, and for models of libraries that data may name."""
    named = [getattr(config, name) for name in code_fields(config.family)]
    return None if all(isinstance(name, CodeName) for name in named) else problem_of(config)


@lru_cache(maxsize=4096)
def _problem_of_layers(config: TrialConfig) -> str | None:
    try:
        layers_of(config)
    except UsageError as error:
        return printable(str(error), 300)
    return None


def _plain(text: object) -> Mapping[str, Any]:
    """Return the mapping that the text holds, all of it plain data of bounded size."""
    if text is None or text == "":
        raise UnreadableConfig("the row has no config")
    if not isinstance(text, str):
        raise UnreadableConfig(f"config is {type(text).__name__}, not JSON")
    values = _parse(text, "config")
    for name, value in values.items():
        if isinstance(value, str) and value.lstrip().startswith("{"):
            _parse(value, name)  # YAML that people type into this field is stored as JSON
    return values


def _parse(text: str, name: str) -> dict[str, Any]:
    name = printable(name)
    if len(text) > MOST_CHARACTERS:
        raise UnreadableConfig(f"{name} has {len(text):,} characters, more than {MOST_CHARACTERS:,}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and endless brackets
        raise UnreadableConfig(f"{name} is not JSON: {printable(str(error))}") from error
    if not isinstance(values, dict):
        raise UnreadableConfig(f"{name} is JSON of a {type(values).__name__}, not of an object")
    if problem := _problem_of_values(values):
        raise UnreadableConfig(f"{name} {problem}")
    return values


def _problem_of_values(mapping: dict[str, Any]) -> str | None:
    waiting: list[tuple[Any, int]] = [(mapping, 0)]
    count = 0
    while waiting:
        group, depth = waiting.pop()
        values = [*group, *group.values()] if isinstance(group, dict) else group
        count += len(values)
        if depth > MOST_DEPTH or count > MOST_VALUES:
            return f"is nested deeper than {MOST_DEPTH} or holds more than {MOST_VALUES:,} values"
        for value in values:
            if isinstance(value, str):
                if not value.isprintable() or (len(value) > 15 and _LONG_NUMBER.search(value)):
                    return "holds a text with control characters or endless numbers"
            elif isinstance(value, int):
                if not -MOST_INTEGER <= value <= MOST_INTEGER:
                    return f"holds a number beyond {MOST_INTEGER:,}"
            elif isinstance(value, float):
                if not math.isfinite(value):
                    return f"holds {value}, which is not a figure"
            elif value is not None:
                waiting.append((value, depth + 1))
    return None
