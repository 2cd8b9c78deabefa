"""The names of code in a trial config: whose they are, and whether they may be imported.

A config that was read from a row or a file names no code, unless the user trusts its module; so a path that forgets to
ask is refused. Start reading at `config_of_user` and `trusting`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any

from featurize.configs.trial import TrialConfig, config_from_mapping
from featurize.families import family_names, get_family
from featurize.job.code_names import LIBRARY_MODULES, CodeName, TrustedName, granted_model

_MARKS = {"typed": CodeName, "trusted": TrustedName}


def named_by_user(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config that the user typed, or of a task that the user submitted: its names of code count."""
    marked = dict(values)
    for name in code_fields(family):
        if isinstance(marked.get(name), str):
            marked[name] = CodeName(marked[name])
    return marked


def config_of_user(mapping: Mapping[str, Any]) -> TrialConfig:
    """`config_from_mapping` of what the user typed, or of a task that the user submitted. Errors as there."""
    family = mapping.get("family")
    return config_from_mapping(named_by_user(family, mapping) if isinstance(family, str) else mapping)


def trusting(config: TrialConfig, trust: Sequence[str]) -> TrialConfig:
    """The config, its names of code marked as `granted_model` marks them."""
    granted: dict[str, Any] = {
        name: granted_model(getattr(config, name), trust) for name in code_fields(config.family) if trust
    }
    return replace(config, **granted) if granted else config


def code_marks(config: TrialConfig) -> dict[str, str]:
    """The permissions of a config's names of code, by field, for a process that receives the config as JSON."""
    types = {name: type(getattr(config, name)) for name in code_fields(config.family)}
    return {name: mark for name, kind in types.items() for mark, marked in _MARKS.items() if kind is marked}


def config_with_marks(mapping: Mapping[str, Any], marks: Mapping[str, str]) -> TrialConfig:
    """`config_from_mapping` with the permissions that `code_marks` returned. Errors as there."""
    return config_from_mapping({**mapping, **{name: _MARKS[mark](mapping[name]) for name, mark in marks.items()}})


def data_refusal(config: TrialConfig) -> str | None:
    """`refusal` of the config as data would bring it, whoever named its code."""
    plain: dict[str, Any] = {name: str(getattr(config, name)) for name in code_fields(config.family)}
    return refusal(replace(config, **plain))


def code_entries(config: TrialConfig) -> dict[str, str]:
    """Each name of code in a config, with the text by which the same code is known again. A library's model stands
    with its arguments where these are more than plain data."""
    entries = {}
    for name in (getattr(config, field) for field in code_fields(config.family)):
        library = name.partition(":")[0].partition(".")[0] in LIBRARY_MODULES
        arguments = getattr(config, "arguments", "{}")
        entries[name] = f"{name} {arguments}" if library and data_refusal(config) else str(name)
    return entries


def refusal(config: TrialConfig) -> str | None:
    """Why nothing is imported for this config, or None. Imports nothing itself."""
    family = _family_of_code(config.family) if code_fields(config.family) else None
    return None if family is None else family.refusal(config)


def code_fields(family: str) -> tuple[str, ...]:
    """The fields of a family's config that name code; none of a family that is not known."""
    return getattr(_family_of_code(family), "CODE_FIELDS", ())


@lru_cache(maxsize=256)
def _family_of_code(family: str) -> ModuleType | None:
    """The family's module, remembered: every row asks for it."""
    return get_family(family) if family in family_names() else None
