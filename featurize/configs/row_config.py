"""The trial config that a stored row holds, read as data: whatever its text is, the answer is a config or one reason.

Start reading at `config_of_row`; `problem_of` says what of it cannot be built. Torch-free.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from conf.errors import UsageError
from conf.plain_text import one_line
from featurize.configs.own_code import code_fields, refusal, trusting
from featurize.configs.trial import TrialConfig, config_from_mapping
from featurize.families import get_family, layers_of
from featurize.job.code_names import CodeName

MOST_CHARACTERS = 200_000
MOST_DEPTH = 8
MOST_VALUES = 20_000
MOST_INTEGER = 2**31 - 1
MOST_REPEATS = 10_000
_REPEATED = ("depth", "bottom_depth", "top_depth", "levels", "blocks")  # how often families build something
_LONG_NUMBER = re.compile(r"\d{16,}")
# What parsing and checking of values nobody has checked before may raise.
_ODD = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class UnreadableConfig(UsageError):
    """A row whose config this code makes nothing of; the message has no control characters."""


def config_of_row(text: object, trust: Sequence[str] = ()) -> TrialConfig:
    """The config that `runs.config` holds as JSON, its names of code not allowed to run but for those of modules in
    `trust` (see `featurize.configs.own_code`). Raises `UnreadableConfig` for anything else, however large, deep or
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
    """`config_of_row` of a row whose figures are those of its whole job. `UnreadableConfig` also for a job on several
    GPUs: what one rank takes and how long it waits for the others is no label of its config alone."""
    config = config_of_row(text, trust)
    if config.parallel is not None:
        raise UnreadableConfig(f"a rank's figures of a job on several GPUs ({config.parallel})")
    return config


def problem_of(config: TrialConfig) -> str | None:
    """Why the layers of a row's config cannot be had, or None. Builds a library's model, without memory."""
    if (reason := refusal(config)) is not None:
        return reason
    family = get_family(config.family)
    if hasattr(family, "identity") or hasattr(family, "kind"):
        return _problem_of_layers(config)
    return None


def printable(text: str, most: int = 80) -> str:
    """The text in one line without control characters and lone surrogates, cut to `most` characters."""
    shown = one_line(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def code_problem(config: TrialConfig) -> str | None:
    """Why this config must not become a task, which may import whatever it names; None for what the user named, and
    for models of libraries that data may name."""
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
    """The mapping that the text holds, all of it plain data of bounded size."""
    if text is None or text == "":
        raise UnreadableConfig("the row has no config")
    if not isinstance(text, str):
        raise UnreadableConfig(f"config is {type(text).__name__}, not JSON")
    values = _parsed(text, "config")
    for name, value in values.items():
        if isinstance(value, str) and value.lstrip().startswith("{"):
            _parsed(value, name)  # what a family takes for YAML in what people type is JSON in what it stores
        if name in _REPEATED and isinstance(value, int) and value > MOST_REPEATS:
            raise UnreadableConfig(f"{name} must be at most {MOST_REPEATS:,}, got {value}")
    return values


def _parsed(text: str, name: str) -> dict[str, Any]:
    name = printable(name)
    if len(text) > MOST_CHARACTERS:
        raise UnreadableConfig(f"{name} has {len(text):,} characters, more than {MOST_CHARACTERS:,}")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and endless brackets
        raise UnreadableConfig(f"{name} is no JSON: {printable(str(error))}") from error
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
                    return f"holds {value}, which is no figure"
            elif value is not None:
                waiting.append((value, depth + 1))
    return None
