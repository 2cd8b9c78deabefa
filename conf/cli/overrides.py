"""Reads command-line arguments into a composed config, and lists the keys of a command.

Start reading at `load_config`. Hydra composes the defaults of a command with the chosen files of `conf/`, and its
parser reads each value. This module checks the keys, because Hydra's grammar allows more than these commands do
(packages, deletions, sweeps, Hydra's settings). It reports all mistakes together. `--help` and docs/commands.md show
the results of `documented_keys` and `documented_choice`, which import neither Hydra nor OmegaConf.
"""

from __future__ import annotations

import difflib
import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from conf.cli.commands import settings_class
from conf.cli.settings import (
    ConfigGroup,
    Key,
    Kind,
    Settings,
    built,
    defaults_of,
    groups_of,
    keys_of,
    kinds_of,
    problems_of,
    written,
)
from conf.device_names import is_device_file, read_device_file, resolve_device, slice_values, split_slice
from conf.errors import UsageError, shown, unknown_name
from conf.plain_text import first_line

if TYPE_CHECKING:
    from omegaconf import DictConfig


_LONGEST_VALUE = 20_000  # limit for Hydra's parser, which takes seconds per 100,000 characters
_LONGEST_TEXT = 1_000_000  # limit for a value that is taken as typed
DEVICES = "device"  # the group of GPU models and backends
_SPACE = "arch.space."
_QUOTE = "quote values that hold spaces or commas"
_ARGUMENT = re.compile(r"(\+{0,2})([A-Za-z_][\w.-]*)=(.*)", re.DOTALL | re.ASCII)
# (command, group) that offers no choices with a backend that runs trials
_DESCRIPTIONS_ONLY = {("estimate", "device"), ("plan", "device")}


@dataclass(frozen=True)
class Override:
    """One argument `[+]KEY=VALUE`, its value as typed."""

    plus: str
    key: str
    written: str
    verbatim: bool = False  # text, even if it looks like a list

    @property
    def choice(self) -> str:
        """Return the value without quotes, for the name of a group's choice."""
        return self.written[1:-1] if re.fullmatch(r"(['\"]).*\1", self.written) else self.written

    def text(self) -> str:
        return f"{self.plus}{self.key}={self.written}"


def parsed(arguments: Sequence[str]) -> list[Override]:
    """Split the arguments. Raises `UsageError` that names every argument that is not `KEY=VALUE`."""
    overrides, problems = [], []
    for argument in arguments:
        match = _ARGUMENT.fullmatch(argument)
        if argument.startswith("-"):
            problems.append(
                f"unknown option {shown(argument)}; valid options: --help, --cfg job, and KEY=VALUE overrides"
            )
        elif argument.startswith("~"):
            problems.append(f"{shown(argument)}: a key cannot be taken out; write KEY=VALUE")
        elif match:
            plus, key, written = match.groups()
            overrides.append(Override(plus, key, written))
        elif re.fullmatch(r"[+]*[^=\s]+=.*", argument, re.DOTALL):
            problems.append(f"unknown key {shown(argument.partition('=')[0].lstrip('+'))}; --help lists the keys")
        else:
            problems.append(f"cannot read {shown(argument)}; write KEY=VALUE (--help lists the keys)")
    if problems:
        raise UsageError("; ".join(problems))
    return overrides


def check_readable(arguments: Sequence[str]) -> None:
    """Raise `UsageError` for arguments that are not UTF-8, hold a null character, or are far too long."""
    if problems := [problem for argument in arguments if (problem := _unreadable(argument))]:
        raise UsageError("; ".join(problems))


def _unreadable(argument: str) -> str | None:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return f"{shown(argument)} is not valid UTF-8: names in the data folder, DuckDB and Parquet have to be"
    if "\0" in argument:
        return f"{shown(argument)} holds a null character"
    if len(argument) > _LONGEST_TEXT:
        return f"{shown(argument)} is longer than {_LONGEST_TEXT:,} characters"
    return None


def load_config(name: str, arguments: Sequence[str | Override], settings: type | None = None) -> DictConfig:
    """Compose a command's settings with `KEY=VALUE` arguments into a `DictConfig` whose values are of their kinds.

    If a key is given twice, the last value counts: a user can override a script's arguments. Values of text keys are
    taken as typed. Required keys may still be missing. `settings` is the class of a command that is not in
    `conf.cli.commands.TABLE`.

    Raises:
        UsageError: Reports all bad arguments together, each with its nearest or valid choices.
    """
    overrides = [item if isinstance(item, Override) else parsed([item])[0] for item in arguments]
    overrides = [_as_own_key(name, override) for override in overrides]
    settings = settings or settings_class(name)
    groups, kinds = groups_of(settings), kinds_of(settings)
    chosen: dict[str, tuple[Override, Mapping[str, Any] | None]] = {}
    problems: list[str] = []
    for override in overrides:
        if override.key in groups:
            with _collected(problems):
                chosen[override.key] = _chosen(name, override, groups[override.key])
    cfg = _compose(settings, [override for override, _ in chosen.values()])
    composed = plain_values(cfg)
    known = [known_key.name for known_key in keys_of(settings) if known_key.name.partition(".")[0] in composed]
    known += [key for key, _ in flat(composed) if key not in known]
    for group, (_, values) in chosen.items():
        if values is not None:
            with _collected(problems):
                _put(cfg, group, values)
    for override in overrides:
        if override.key not in groups:
            with _collected(problems):
                _require_known(cfg, override.plus, override.key, known)
                _set(cfg, override.plus, override.key, _value(override, kinds.get(override.key)), known)
    with _collected(problems):
        problems += problems_of(plain_values(cfg), kinds)
    if problems:
        raise UsageError("; ".join(problems))
    return cfg


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Append the message of a `UsageError` to the problems, and continue."""
    try:
        yield
    except UsageError as error:
        problems.append(str(error))


def _as_own_key(name: str, override: Override) -> Override:
    """Translate a command's special spellings into its keys; return any other override unchanged.

    `device=[A,B]` of an estimate is `devices`, `arch=[A,B]` of a submission `families`, and `+collocate` `collocate`.
    """
    several = override.choice.startswith("[")
    if name == "estimate" and override.key == DEVICES and several:
        return Override("", "devices", override.choice)
    if name == "submit" and override.key == "arch" and several:
        return Override("", "families", override.choice)
    if name == "grow" and override.key == "grow.collocate":
        return replace(override, key="collocate")
    if name == "submit" and override.key == "collocate":
        return replace(override, plus="")
    return override


def _chosen(name: str, override: Override, group: ConfigGroup) -> tuple[Override, Mapping[str, Any] | None]:
    """Return the override with the chosen file of its group, and values that replace the file's, if any.

    Raises:
        UsageError: The choice is unknown, or needs or forbids a `+`.
    """
    choice, values = override.choice, None
    options = group_options(override.key)
    if override.key == DEVICES and choice not in options:
        choice, values = ("null", None) if choice == "null" and group.default is None else _device(name, choice)
    if choice not in options and not (choice == "null" and group.default is None and not group.added):
        raise unknown_name(override.key, override.choice, options)
    if override.plus != (needed := "+" if group.added else ""):
        raise UsageError(f"write {needed}{override.key}={override.choice}{'' if needed else ', without +'}")
    return replace(override, written=choice), values


def _device(name: str, choice: str) -> tuple[str, Mapping[str, Any] | None]:
    """Return the file of a device with another name, and the values of a device without a file.

    A user's own file and a slice are not in conf/device/; a described GPU model provides their keys.
    """
    options = command_options(name, DEVICES)
    if is_device_file(choice):
        read = read_device_file(choice)
        values = {key: literal(value) if isinstance(value, str) else value for key, value in read.items()}
        vendor = "llvm_target" if "llvm_target" in values else "compute_capability"
        return next(option for option in options if vendor in choice_values(DEVICES, option)), values
    if (parts := split_slice(choice)) is not None:
        whole = resolve_device(parts[0], options)
        return whole, {**choice_values(DEVICES, whole), **slice_values(choice_values(DEVICES, whole), parts[1])}
    return resolve_device(choice, options), None


def _compose(settings: type, choices: Sequence[Override]) -> DictConfig:
    """Compose the command's defaults with the chosen files of its groups by Hydra."""
    from hydra import compose, initialize_config_module
    from hydra.core.config_store import ConfigStore

    name = settings.__name__
    defaults = [{group: group_key.default} for group, group_key in groups_of(settings).items() if not group_key.added]
    store = ConfigStore.instance()
    store.store(name=name, node={"defaults": ["_self_", *defaults], **defaults_of(settings)})
    try:
        with initialize_config_module(config_module="conf", version_base="1.3"):
            # Hydra does not accept null for a group; the default of such a group is null anyway.
            return compose(name, overrides=[choice.text() for choice in choices if choice.written != "null"])
    finally:  # Hydra would copy it at each later call
        del store.repo[f"{name}.yaml"]


def _require_known(cfg: DictConfig, plus: str, key: str, known: Sequence[str]) -> None:
    """Raise `UsageError` for an unknown key. Keys of a search space may be added with `plus`."""
    in_space = "arch" in cfg and key.startswith(_SPACE)
    if plus and not in_space:
        raise UsageError(f"{key} is set without +: {key}=VALUE" if key in known else _unknown_key(key, known))
    if plus or key in known or _has_keys_below(key, known):
        return
    name, _, end = key.removeprefix(_SPACE).partition(".")
    if not (in_space and end and isinstance(cfg.arch.space.get(name), Mapping)):  # low or high of a range
        raise UsageError(_unknown_key(key, known))


def _has_keys_below(key: str, known: Sequence[str]) -> bool:
    return any(other.startswith(f"{key}.") for other in known)


def _set(cfg: DictConfig, plus: str, key: str, value: Any, known: Sequence[str]) -> None:
    """Set a key to a value, or those below it one by one.

    The value replaces the old one completely, so that a new range keeps nothing of the old range.

    Raises:
        UsageError: The key has keys below it, but the value is not a mapping of these.
    """
    if not _has_keys_below(key, known):
        _put(cfg, key, value)
    elif not isinstance(value, dict):
        raise UsageError(f"{key} must be {Kind.parse('mapping').words()}, got {shown(value)}")
    else:
        for name, inner in value.items():
            _require_known(cfg, plus, f"{key}.{name}", known)
            _set(cfg, plus, f"{key}.{name}", inner, known)


def _put(cfg: DictConfig, key: str, value: Any) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    except OmegaConfBaseException as error:
        raise UsageError(f"{key}: {first_line(error)}") from error


def _unknown_key(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key[:100], known, n=3)
    parent = key.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == parent] or [k for k in known if "." not in k]
    choices = f"did you mean {' or '.join(near)}? " if near else ""
    return f"unknown key {shown(key)}; {choices}valid keys: {', '.join(siblings)}"


def _value(override: Override, kind: Kind | None) -> Any:
    """Return an argument's value: text as typed, anything else through Hydra's parser.

    Raises:
        UsageError: The value cannot be read, or is a sweep over several values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, written = override.key, override.written
    if override.verbatim:
        return literal(written)
    if kind is not None and kind.stands_as_typed(written):
        if (problem := kind.problem_as_written(key, written)) is not None:
            raise UsageError(problem)
        return literal(written)
    if len(written) > _LONGEST_VALUE:
        raise UsageError(f"{key} is longer than {_LONGEST_VALUE:,} characters: {shown(override.text())}")
    try:
        read = OverridesParser.create().parse_override(override.text())
    except (HydraException, RecursionError) as error:
        quoted_keys = re.search(r"[{,]\s*[\"'][^\"']*[\"']\s*:", written)
        advice = "a mapping's keys have no quotes: {key: value}" if quoted_keys else _QUOTE
        raise UsageError(f"cannot read {shown(override.text())}; write KEY=VALUE ({advice})") from error
    if read.is_sweep_override():
        raise UsageError(f"{key} takes one value, not several to choose from: {shown(override.text())}")
    return read.value()


def literal(value: str) -> str:
    r"""Escape text for OmegaConf, where `${` begins an interpolation and `\${` does not."""
    return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", value)


def load_settings(settings: type[Settings], name: str, arguments: Sequence[str]) -> Settings:
    """Return the settings that a command's `entry` gets for these arguments. Raises `UsageError`."""
    return made(settings, load_config(name, arguments, settings))


def made(settings: type[Settings], cfg: DictConfig) -> Settings:
    """Make an object of the settings class from the composed config.

    Raises:
        UsageError: Names every missing required key with its meaning, or the values that the class refuses.
    """
    from omegaconf import OmegaConf

    if missing := OmegaConf.missing_keys(cfg):
        meanings = {
            known_key.name: f" ({known_key.help})" for known_key in keys_of(cast(type, settings)) if known_key.help
        }
        raise UsageError("missing " + "; ".join(f"{key}=...{meanings.get(key, '')}" for key in sorted(missing)))
    return built(settings, plain_values(cfg))


def plain_values(cfg: DictConfig) -> dict[str, Any]:
    """Return the config as plain values with `${...}` filled in. Raises `UsageError` if that fails."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise UsageError(f"{getattr(error, 'full_key', None) or 'config'}: {first_line(error)}") from error
    except RecursionError as error:
        raise UsageError("a value refers to itself through ${...}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


@cache
def groups() -> tuple[str, ...]:
    """Return the config groups: the folders of `conf` with YAML files."""
    root = importlib.resources.files("conf")
    return tuple(
        sorted(d.name for d in root.iterdir() if d.is_dir() and any(f.name.endswith(".yaml") for f in d.iterdir()))
    )


def group_options(group: str) -> tuple[str, ...]:
    """Return the choices of a group, by file name."""
    folder = importlib.resources.files("conf") / group
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def command_options(name: str, group: str) -> tuple[str, ...]:
    """Return the choices of a group for a command; `estimate` allows GPU models but no trial backends."""
    options = group_options(group)
    if (name, group) not in _DESCRIPTIONS_ONLY:
        return options
    return tuple(option for option in options if "backend" not in choice_values(group, option))


def documented_keys(name: str) -> tuple[tuple[str, str, str], ...]:
    """Return (dotted key, default, help text with the kind) of each key of a command."""
    return tuple(
        (documented.name, written(documented.default), text_of(documented))
        for documented in keys_of(settings_class(name))
        if documented.group is None or not documented.group.added
    )


def text_of(key: Key) -> str:
    """Return a key's help text, which begins with its kind."""
    return f"[{key.kind.declared}] {key.help}".strip() if key.kind else key.help


def documented_choice(name: str, group: str, choice: str) -> tuple[tuple[str, str, str], ...]:
    """Return (dotted key, value, help text) of each key of a group's choice."""
    described = groups_of(settings_class(name))[group].schema
    texts = {known_key.name: text_of(known_key) for known_key in keys_of(described)} if described else {}
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
