"""Keys of a command: names, defaults, help texts and choices, from its settings class and the files of its groups.

Start reading at `documented_keys`. Nothing is composed here, and neither Hydra nor OmegaConf is imported.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from conf.cli.commands import settings_class
from conf.cli.settings import Key, groups_of, keys_of, written

# (command, group): no choices with a backend that runs trials
_DESCRIPTIONS_ONLY = {("estimate", "device"), ("plan", "device")}


@cache
def groups() -> tuple[str, ...]:
    """Return the config groups: the folders of this package that hold YAML files."""
    root = importlib.resources.files("conf")
    return tuple(
        sorted(d.name for d in root.iterdir() if d.is_dir() and any(f.name.endswith(".yaml") for f in d.iterdir()))
    )


def group_options(group: str) -> tuple[str, ...]:
    """Return the choices of a group, by file name."""
    folder = importlib.resources.files("conf") / group
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def command_options(name: str, group: str) -> tuple[str, ...]:
    """Return the choices of a group that a command takes; `estimate` takes GPU models and no trial backends."""
    options = group_options(group)
    if (name, group) not in _DESCRIPTIONS_ONLY:
        return options
    return tuple(option for option in options if "backend" not in choice_values(group, option))


def documented_keys(name: str) -> tuple[tuple[str, str, str], ...]:
    """Return (dotted key, default as written, help text with the kind) of each key of a command."""
    return tuple(
        (one.name, written(one.default), text_of(one))
        for one in keys_of(settings_class(name))
        if one.group is None or not one.group.added
    )


def text_of(key: Key) -> str:
    """Return a key's help text, which begins with its kind."""
    return f"[{key.kind.declared}] {key.help}".strip() if key.kind else key.help


def documented_choice(name: str, group: str, choice: str) -> tuple[tuple[str, str, str], ...]:
    """Return the same of each key of a group's choice, as a command takes it."""
    described = groups_of(settings_class(name))[group].schema
    texts = {one.name: text_of(one) for one in keys_of(described)} if described else {}
    return tuple((key, written(value), texts.get(key, "")) for key, value in flat(choice_values(group, choice)))


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
