"""Command-line arguments as values of a composed config; all mistakes are reported together.

Start reading at `load_config`. Keys and choices are checked against the settings class before Hydra sees anything, as
its own grammar knows more (packages, deletions, sweeps, its own settings) than these commands have.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from conf.commands import settings_class
from conf.device_names import is_device_file, read_device_file, resolve_device
from conf.errors import UsageError, shown, unknown_name
from conf.keys import (
    choice_values,
    chosen_by_default,
    command_options,
    group_options,
    groups,
    kinds,
    known_keys,
    offered_groups,
)
from conf.mig_slices import slice_values, split_slice
from conf.plain_text import first_line
from conf.settings import Settings, built, schema
from conf.space_overrides import replacing
from conf.values import Kind, problems_of

if TYPE_CHECKING:
    from omegaconf import DictConfig

_LONGEST_VALUE = 20_000  # characters that Hydra's parser is given: it takes seconds for each 100,000
_LONGEST_TEXT = 1_000_000  # characters of a value that is taken as it stands
DEVICES = "device"  # the group of GPU models and backends
_RATES = "peak_tflops."
_QUOTE = "quote values that hold spaces or commas"
_ARGUMENT = re.compile(r"(\+{0,2})([A-Za-z_][\w.-]*)=(.*)", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class Override:
    """One argument `[+]KEY=VALUE`, its value as typed."""

    plus: str
    key: str
    written: str
    verbatim: bool = False  # text whatever it looks like

    @property
    def choice(self) -> str:
        """Return the value without quotes, as the name of a group's choice."""
        return self.written[1:-1] if re.fullmatch(r"(['\"]).*\1", self.written) else self.written

    def text(self) -> str:
        return f"{self.plus}{self.key}={self.written}"


def parsed(arguments: Sequence[str]) -> list[Override]:
    """Split the arguments. Raises `UsageError` that names every one that is no `KEY=VALUE`."""
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
        if (encoding := sys.getfilesystemencoding()) != "utf-8":
            return f"{shown(argument)} cannot be read as {encoding}, this locale's encoding; set PYTHONUTF8=1"
        return f"{shown(argument)} is not valid UTF-8: names in the data folder, DuckDB and Parquet have to be"
    if "\0" in argument:
        return f"{shown(argument)} holds a null character"
    if len(argument) > _LONGEST_TEXT:
        return f"{shown(argument)} is longer than {_LONGEST_TEXT:,} characters"
    return None


def load_config(name: str, arguments: Sequence[str | Override]) -> DictConfig:
    """Compose a command's settings with `KEY=VALUE` arguments into a `DictConfig` whose values are of their kinds.

    Of a key that is given twice the last value counts, so that a script's own arguments can be overridden. The values
    of keys whose kind is text are taken as they stand. Required keys may be missing
    still. Raises `UsageError` that reports every bad argument together, each with its nearest or valid choices.
    """
    from omegaconf import OmegaConf

    overrides = [item if isinstance(item, Override) else parsed([item])[0] for item in arguments]
    overrides = [_with_device(name, _as_own_key(name, override)) for override in overrides]
    overrides, own_device = _with_file(name, overrides)
    overrides, slice_problems = _with_slices(name, overrides)
    chosen, problems = _choices(name, overrides)
    problems += slice_problems
    keys = known_keys(name, chosen)
    problems += [problem for override in overrides if (problem := _problem_of_key(override, keys, name, chosen))]
    declared = kinds(name, chosen)
    texts: dict[str, str] = {}
    for override in overrides:
        kind = declared.get(override.key)
        texts.pop(override.key, None)
        if _stands_as_typed(override, kind):
            texts[override.key] = override.written
            if kind is not None and not override.verbatim:
                problems += kind.problems_as_written(override.key, override.written)
        elif len(override.written) > _LONGEST_VALUE:
            problems.append(f"{override.key} is longer than {_LONGEST_VALUE:,} characters: {shown(override.text())}")
    if problems:
        raise UsageError("; ".join(problems))
    # Hydra takes no null for a group, and of these the default is null anyway.
    no_choices = [group for group, choice in chosen.items() if choice == "null"]
    composed = _composed(
        name, [override for override in overrides if override.key not in (*texts, *no_choices)], declared
    )
    absent = [group for group in offered_groups(name) if group not in chosen]
    cfg = OmegaConf.masked_copy(composed, [str(key) for key in composed if key not in absent])
    for key, written in texts.items():
        OmegaConf.update(cfg, key, literal(written))
    if own_device is not None:
        given = {override.key: OmegaConf.select(cfg, override.key) for override in overrides}
        cfg[DEVICES] = _plain_texts(own_device)
        for key, value in given.items():
            if key.startswith(f"{DEVICES}."):
                OmegaConf.update(cfg, key, value)
    if problems := problems_of(plain_values(cfg), declared):
        raise UsageError("; ".join(problems))
    return cfg


def literal(value: str) -> str:
    r"""Escape text for OmegaConf, for which `${` begins an interpolation and `\${` does not."""
    return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", value)


def _with_device(name: str, override: Override) -> Override:
    """Return `device=h100` as `device=H100-SXM5-80GB`; `_choices` refuses names that fit no device."""
    if override.key != DEVICES or override.choice in group_options(DEVICES):
        return override
    try:
        return replace(override, written=resolve_device(override.choice, command_options(name, DEVICES)))
    except UsageError:
        return override


def _as_own_key(name: str, override: Override) -> Override:
    """Return a command's own spellings as its keys, and any other override as it is.

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


def _with_file(name: str, overrides: Sequence[Override]) -> tuple[list[Override], dict[str, Any] | None]:
    """Return the overrides with a described GPU model in place of `device=FILE.yaml`, and what the file holds.

    The model in its place has the keys that a description has, so that `device.memory_mib=20000` goes with a file too.
    """
    files = [override.choice for override in overrides if override.key == DEVICES and is_device_file(override.choice)]
    if not files or DEVICES not in chosen_by_default(name):
        return list(overrides), None
    values = read_device_file(files[-1])
    vendor = "llvm_target" if "llvm_target" in values else "compute_capability"
    like = next(option for option in command_options(name, DEVICES) if vendor in choice_values(DEVICES, option))
    return [replace(one, written=like) if one.key == DEVICES else one for one in overrides], values


def _plain_texts(value: Any) -> Any:
    """Return the value with no text that OmegaConf would interpolate."""
    if isinstance(value, dict):
        return {str(key): _plain_texts(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain_texts(one) for one in value]
    return literal(value) if isinstance(value, str) else value


def _with_slices(name: str, overrides: Sequence[Override]) -> tuple[list[Override], list[str]]:
    """Return the overrides with those of each MIG slice in place of its name, and the problems of slices."""
    result, problems = [], []
    for override in overrides:
        parts = split_slice(override.choice) if override.key == DEVICES else None
        try:
            result += [override] if parts is None else _of_slice(name, override, *parts)
        except UsageError as error:
            problems.append(str(error))
    return result, problems


def _of_slice(name: str, override: Override, parent: str, profile: str) -> list[Override]:
    """Return `device=A100-SXM4-40GB:3g.20gb` as the whole GPU and the keys that differ in the slice.

    Raises:
        UsageError: An unknown GPU model, or one without such a slice.
    """
    parent = resolve_device(parent, command_options(name, DEVICES))
    flat = choice_values(DEVICES, parent)
    rates = {key.removeprefix(_RATES): rate for key, rate in flat.items() if key.startswith(_RATES)}
    values = slice_values({**flat, "peak_tflops": rates}, profile)
    values |= {f"{_RATES}{rate}": tflops for rate, tflops in values.pop("peak_tflops").items()}
    keys = [Override("", f"{DEVICES}.{key}", "null" if value is None else str(value)) for key, value in values.items()]
    return [replace(override, written=parent), *keys]


def _unknown_choice(name: str, group: str, choice: str) -> str:
    options = command_options(name, group)
    if group == DEVICES:
        try:
            resolve_device(choice, options)
        except UsageError as error:
            return str(error)
    return str(unknown_name(group, choice, options))


def _choices(name: str, overrides: Sequence[Override]) -> tuple[dict[str, str], list[str]]:
    """Return group -> choice, by default or by argument, and the problems of the arguments' choices."""
    defaults, offered = chosen_by_default(name), offered_groups(name)
    chosen, problems = dict(defaults), []
    for override in overrides:
        group = override.key
        if group not in groups() or (group not in defaults and group not in offered):
            continue
        if override.choice not in group_options(group) and not (override.choice == defaults.get(group) == "null"):
            problems.append(_unknown_choice(name, group, override.choice))
        elif override.plus != ("" if group in defaults else "+"):
            needed = "" if group in defaults else "+"
            problems.append(f"{group!r} is chosen with {needed}{group}={override.choice} here")
        else:
            chosen[group] = override.choice
    return chosen, problems


def _problem_of_key(override: Override, known: Sequence[str], name: str, chosen: Mapping[str, str]) -> str | None:
    """Return why no command reads this key, or None. The keys of a search space may be added with `+`."""
    key = override.key
    if key in groups() and (key in chosen or key in offered_groups(name)):
        return None
    space = "arch" in chosen and key.startswith("arch.space.")
    if override.plus:
        if space:
            return None
        if key in known:
            return f"{key} is set without +: {key}=VALUE"
    elif key in known or any(other.startswith(f"{key}.") for other in known):
        return None
    elif space and any(key.startswith(f"{other}.") for other in known if other.startswith("arch.space.")):
        return None  # an end of a range
    return _unknown_key(key, [other for other in known if other != key])


def _unknown_key(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key[:100], known, n=3)
    parent = key.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == parent] or [k for k in known if "." not in k]
    choices = f"did you mean {' or '.join(near)}? " if near else ""
    return f"unknown key {shown(key)}; {choices}valid keys: {', '.join(siblings)}"


def _stands_as_typed(override: Override, kind: Kind | None) -> bool:
    return override.verbatim or (kind is not None and kind.stands_as_typed(override.written))


def _composed(name: str, overrides: Sequence[Override], declared: Mapping[str, Kind]) -> DictConfig:
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if problems := list(_unfit(overrides, declared)):
        raise UsageError("; ".join(problems))
    with _schema_stored(name), initialize_config_module(config_module="conf", version_base="1.3"):
        try:
            return compose(name, overrides=replacing([override.text() for override in overrides]))
        except (HydraException, OmegaConfBaseException) as error:
            problems, chosen = [], [override.text() for override in overrides if override.key in groups()]
            for override in overrides:
                if override.key in groups():
                    continue
                try:
                    compose(name, overrides=[*chosen, *replacing([override.text()])])
                except (HydraException, OmegaConfBaseException) as own:
                    problems.append(f"{override.key}: {first_line(own)}")
            raise UsageError("; ".join(problems) or first_line(error)) from error


@contextmanager
def _schema_stored(name: str) -> Iterator[None]:
    """Hold a command's schema where Hydra looks for it, and no longer: Hydra copies all that is there each time."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name=name, node=schema(settings_class(name)))
    try:
        yield
    finally:
        del store.repo[f"{name}.yaml"]


def _unfit(overrides: Sequence[Override], declared: Mapping[str, Kind]) -> Iterator[str]:
    """Yield the problems of each value by itself: before composing, which would make 5 of `'5'` and true of 2."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for override in overrides:
        try:
            parsed_override = parser.parse_override(override.text())
        except (HydraException, RecursionError):
            quoted_keys = re.search(r"[{,]\s*[\"'][^\"']*[\"']\s*:", override.written)
            advice = "a mapping's keys have no quotes: {key: value}" if quoted_keys else _QUOTE
            yield f"cannot read {shown(override.text())}; write KEY=VALUE ({advice})"
            continue
        if parsed_override.is_sweep_override():
            yield f"{override.key} takes one value, not several to choose from: {shown(override.text())}"
        elif "${" not in override.written and override.key not in groups():
            yield from problems_of(_nested(override.key, parsed_override.value()), declared)


def _nested(key: str, value: Any) -> dict[str, Any]:
    *parents, last = key.split(".")
    values = {last: value}
    for name in reversed(parents):
        values = {name: values}
    return values


def load_settings(settings: type[Settings], name: str, arguments: Sequence[str]) -> Settings:
    """Return what a command's `entry` is given for these arguments, as an object of its settings class."""
    return built(settings, plain_values(load_config(name, arguments)))


def plain_values(cfg: DictConfig) -> dict[str, Any]:
    """Return the config as plain values with `${...}` filled in. Raises `UsageError` where that fails."""
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
