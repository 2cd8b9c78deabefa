"""Keys of a command, read from its YAML file: names, defaults, help texts, kinds, and groups with their choices.

Start reading at `documented_keys`. Nothing is composed here, and neither Hydra nor OmegaConf is imported.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping
from functools import cache

from conf.values import Kind

SPACES = "arch"  # the group of search spaces
_DESCRIPTIONS_ONLY = {("estimate", "device")}  # (command, group): no choices with a backend that runs trials
_KIND = re.compile(r"\[([^\]]+)\](?: |$)")  # at the start of a key's comment
_OFFERED = re.compile(r"\{(\w+)\}")


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
    return tuple(
        option for option in options if not any(key == "backend" for key, *_ in documented_keys(f"{group}/{option}"))
    )


def offered_groups(name: str) -> tuple[str, ...]:
    """Return the groups that a command takes with `+GROUP=CHOICE`: those whose choices its description lists."""
    return tuple(group for group in _OFFERED.findall("\n".join(description(name))) if group in groups())


def chosen_by_default(name: str) -> dict[str, str]:
    """Return the groups of a command's defaults list with their default choice (`null`: none)."""
    return {key: default for key, default, _text in documented_keys(name) if key in groups()}


@cache
def description(name: str) -> tuple[str, ...]:
    """Return the comment lines at the top of `conf/NAME.yaml`."""
    lines = []
    for line in _yaml_text(name).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return tuple(lines)


@cache
def documented_keys(name: str) -> tuple[tuple[str, str, str], ...]:
    """Return (dotted key, default as written, trailing comment) of each key of `conf/NAME.yaml`."""
    rows: list[tuple[str, str, str]] = []
    path: list[str] = []
    for line in _yaml_text(name).splitlines():
        body, _, comment = line.partition(" # ")
        stripped = body.strip()
        if not stripped or stripped.startswith("#"):
            continue
        depth = (len(body) - len(body.lstrip())) // 2
        if stripped.startswith("- ") or ":" not in stripped:
            if path[:1] == ["defaults"] and ":" in stripped:
                key, _, default = stripped[2:].partition(":")
                rows.append((key.strip(), default.strip(), comment.strip()))
            continue
        key, _, default = stripped.partition(":")
        path = [*path[:depth], key.strip().strip('"')]  # quoted where YAML would read it as true or false
        if path == ["defaults"]:
            continue
        rows.append((".".join(path), default.strip(), comment.strip()))
    parents = {key.rpartition(".")[0] for key, _, _ in rows}
    return tuple(row for row in rows if row[1] or row[0] not in parents)


def known_keys(name: str, chosen: Mapping[str, str]) -> tuple[str, ...]:
    """Return every key of a command with these choices of groups, the groups included."""
    keys = [key for key, _default, _text in documented_keys(name)]
    keys += [group for group in chosen if group not in keys]
    for group, choice in chosen.items():
        if choice in group_options(group):
            keys += [f"{group}.{key}" for key, _default, _text in documented_keys(f"{group}/{choice}")]
    return tuple(keys)


def meaning(text: str) -> str:
    """Return a key's help text without its kind."""
    return _KIND.sub("", text, count=1) if _KIND.match(text) else text


def kinds(name: str, chosen: Mapping[str, str]) -> dict[str, Kind]:
    """Return the kind of each key that declares one.

    Other keys are checked where they are parsed, as are the keys of search spaces, whose comments have lists of values
    in brackets.
    """
    declared = _own_kinds(name)
    for group, choice in chosen.items():
        if group != SPACES and choice in group_options(group):
            declared |= {f"{group}.{key}": kind for key, kind in _own_kinds(f"{group}/{choice}").items()}
    return declared


def _own_kinds(name: str) -> dict[str, Kind]:
    matches = ((key, _KIND.match(text)) for key, _default, text in documented_keys(name))
    return {key: Kind.parse(match[1]) for key, match in matches if match}


def _yaml_text(name: str) -> str:
    return (importlib.resources.files("conf") / f"{name}.yaml").read_text(encoding="utf-8")
