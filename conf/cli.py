"""Turns a YAML file of this package into a command line: overrides in, a composed config out, one-line errors.

Start reading at `command`. Hydra's own decorator is not used because it prints several lines for a mistyped key,
exits with 1, writes `outputs/` folders and stops at the first mistake; Hydra's compose API underneath is the same.
"""

from __future__ import annotations

import difflib
import errno
import importlib.resources
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from conf.device_names import resolve_device
from conf.errors import UsageError, unknown_name
from conf.space_overrides import replacing

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# What the user's machine, not our code, is to blame for: printed in one line instead of a traceback.
_ENVIRONMENT_ERRNOS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EFBIG,
}  # fmt: skip


_DESCRIPTIONS_ONLY = {("estimate", "device")}


def command(name: str, entry: Callable, positional: str | None = None, text: Sequence[str] = ()) -> NoReturn:
    """Run `entry(cfg)` with `conf/NAME.yaml` and the process's arguments, then exit with its return value.

    `positional` names the key that takes the one argument that is no override: the one with white space in it. The
    values of the keys `text` are taken as they stand, whatever commas and brackets they hold.
    Exit codes: 0, what `entry` returns, 2 for anything the user can mend, 130 after Ctrl-C.
    """
    code = run(name, entry, sys.argv[1:], positional, text)
    if code == EXIT_INTERRUPTED:  # at once, and with this code: Ray's clean-up at exit would put its own in its place
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(
    name: str, entry: Callable, argv: Sequence[str], positional: str | None = None, text: Sequence[str] = ()
) -> int:
    """`command` without the exit: parses `argv`, runs `entry`, returns the exit code."""
    try:
        arguments = list(argv)
        if {"-h", "--help"} & set(arguments):
            print(help_text(name))
            return 0
        show_config = "--cfg" in arguments
        if show_config:  # as Hydra spells it: --cfg job
            at = arguments.index("--cfg")
            del arguments[at : at + 2]
        value = None
        if positional is not None:
            value, arguments = _split_positional(arguments)
        cfg = load_config(name, [_quoted(item, text) for item in arguments])
        if value is not None:
            cfg[positional] = value
        if show_config:
            from omegaconf import OmegaConf

            print(OmegaConf.to_yaml(cfg), end="")
            return 0
        _require(name, cfg)
        return entry(cfg) or 0
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # `... | head`: what was wanted has been read
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in _ENVIRONMENT_ERRNOS:
            raise
        where = f": {error.filename}" if error.filename else ""
        print(f"error: {error.strerror}{where}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def load_config(name: str, overrides: Sequence[str]):
    """Compose `conf/NAME.yaml` with Hydra overrides into a `DictConfig`.

    Raises `UsageError` that reports every bad override together, each with its nearest or its valid choices.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    for item in overrides:
        if item.startswith("-"):
            raise UsageError(f"unknown option {item!r}; valid options: --help, --cfg job, and KEY=VALUE overrides")
    overrides = [_with_device(name, item) for item in overrides]
    with initialize_config_module(config_module="conf", version_base="1.3"):
        try:
            cfg = compose(name, overrides=replacing(overrides))
            _refuse_additions(overrides, cfg)
            return cfg
        except (HydraException, OmegaConfBaseException) as error:
            problems = _problems(name, overrides, compose) or [_first_line(error)]
            raise UsageError("; ".join(problems)) from error


def _with_device(name: str, text: str) -> str:
    """`device=h100` as `device=H100-SXM5-80GB`; what stands for no choice is left for composing to refuse."""
    key, equals, choice = text.partition("=")
    if key.lstrip("+") != "device" or not equals or choice in ("", "null"):
        return text
    try:
        return f"{key}={resolve_device(choice.strip(chr(39) + chr(34)), command_options(name, 'device'))}"
    except UsageError:
        return text


def _unknown_choice(name: str, group: str, choice: object) -> str:
    options = command_options(name, group)
    if group == "device":
        try:
            resolve_device(choice, options)
        except UsageError as error:
            return str(error)
    return str(unknown_name(group, choice, options))


def _refuse_additions(overrides: Sequence[str], cfg) -> None:
    """`+key=value` is for choosing a group and for a key of a search space; elsewhere nobody would read it."""
    for text in overrides:
        key = text.partition("=")[0]
        if key.startswith("+") and key.lstrip("+") not in groups() and not key.lstrip("+").startswith("arch.space."):
            known = [name for name in _flat_keys(cfg) if name != key.lstrip("+")]
            raise UsageError(_unknown_key(key.lstrip("+"), known))


def _problems(name: str, overrides: Sequence[str], compose: Callable) -> list[str]:
    """What is wrong with each override on its own; group choices are applied first, they bring further keys."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    parser, problems, choices, values = OverridesParser.create(), [], [], []
    for text in overrides:
        try:
            parsed = parser.parse_overrides([text])[0]
        except HydraException:
            problems.append(f"cannot read {text!r}; write KEY=VALUE (quote values that hold spaces or commas)")
            continue
        (choices if parsed.key_or_group in groups() else values).append((text, parsed))

    good = []
    for text, parsed in choices:
        group, choice = parsed.key_or_group, parsed.value()
        if choice not in group_options(group):
            problems.append(_unknown_choice(name, group, choice))
            continue
        try:
            compose(name, overrides=[text])
            good.append(text)
        except (HydraException, OmegaConfBaseException):
            problems.append(f"{group!r} is chosen with {'' if parsed.is_add() else '+'}{group}={choice} here")
    base = compose(name, overrides=good)
    for text, parsed in values:
        try:
            compose(name, overrides=[*good, *replacing([text])])
        except (HydraException, OmegaConfBaseException) as error:
            keys = _flat_keys(base)
            if parsed.key_or_group in keys:
                problems.append(f"{parsed.key_or_group}: {_first_line(error)}")
            else:
                problems.append(_unknown_key(parsed.key_or_group, keys))
    return problems


def _unknown_key(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=3)
    parent = key.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == parent] or [k for k in known if "." not in k]
    choices = f"did you mean {' or '.join(near)}? " if near else ""
    return f"unknown key {key!r}; {choices}valid keys: {', '.join(siblings)}"


def _require(name: str, cfg) -> None:
    """Every required key that is missing, in one message, with its help text."""
    from omegaconf import OmegaConf

    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        texts = {key: text for key, _default, text in documented_keys(name)}
        said = [f"{key}=... ({texts[key]})" if texts.get(key) else f"{key}=..." for key in missing]
        raise UsageError(f"missing {'; '.join(said)}")


def _split_positional(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The first argument that holds white space and is no `KEY=...` is the positional one; SQL may hold `=` itself."""
    for at, item in enumerate(arguments):
        if any(character.isspace() for character in item) and not re.match(r"[+~]*[\w.@/]+=", item):
            return item, arguments[:at] + arguments[at + 1 :]
    return None, arguments


def _quoted(item: str, text: Sequence[str]) -> str:
    """`KEY=a:1,b:2` as `KEY='a:1,b:2'` for the keys `text`; null and what is quoted already stay."""
    key, equals, value = item.partition("=")
    if not equals or key not in text or value in ("", "null") or value[0] in "'\"":
        return item
    # In Hydra's quotes a backslash is one, but before a quote; OmegaConf would look for what ${...} names.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value)
    escaped = escaped.replace("${", "\\${")
    return f"{key}='{escaped}'"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _flat_keys(cfg, prefix: str = "") -> list[str]:
    from omegaconf import DictConfig

    keys = []
    for key in cfg:
        keys.append(prefix + key)
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            keys += _flat_keys(node, f"{prefix}{key}.")
    return keys


def groups() -> tuple[str, ...]:
    """The config groups: the folders of this package that hold YAML files."""
    root = importlib.resources.files("conf")
    return tuple(
        sorted(d.name for d in root.iterdir() if d.is_dir() and any(f.name.endswith(".yaml") for f in d.iterdir()))
    )


def group_options(group: str) -> tuple[str, ...]:
    """The choices of a group, by file name."""
    folder = importlib.resources.files("conf") / group
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def command_options(name: str, group: str) -> tuple[str, ...]:
    """The choices of a group that a command takes: an estimate is for a GPU model, not for a backend of trials."""
    options = group_options(group)
    if (name, group) not in _DESCRIPTIONS_ONLY:
        return options
    return tuple(
        option for option in options if not any(key == "backend" for key, *_ in documented_keys(f"{group}/{option}"))
    )


def documented_keys(name: str) -> list[tuple[str, str, str]]:
    """(dotted key, default as written, help text) for each key of `conf/NAME.yaml`; help is its trailing comment."""
    rows, path = [], []
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
        path = [*path[:depth], key.strip()]
        if path == ["defaults"]:
            continue
        rows.append((".".join(path), default.strip(), comment.strip()))
    parents = {key.rpartition(".")[0] for key, _, _ in rows}
    return [row for row in rows if row[1] or row[0] not in parents]


def help_text(name: str) -> str:
    """The command's `--help`, read from its YAML file: description, keys with defaults, groups with choices."""
    described = []
    for line in _yaml_text(name).splitlines():
        if not line.startswith("#"):
            break
        line = line.removeprefix("#").removeprefix(" ")
        for group in groups():  # {arch} in a description stands for the choices there are
            line = line.replace(f"{{{group}}}", ", ".join(group_options(group)))
        described.append(line)
    rows = []
    for key, default, text in documented_keys(name):
        if key not in groups():
            rows.append((f"{key}={'(required)' if default == '???' else default}", text))
            continue
        rows.append((f"{key}={default}", f"{text} [{' | '.join(command_options(name, key))}]".strip()))
        if default in group_options(key):
            rows += [(f"  {key}.{inner}={value}", said) for inner, value, said in documented_keys(f"{key}/{default}")]
    width = min(38, max(len(left) for left, _ in rows))
    lines = [f"  {left:<{width}}  {text}".rstrip() for left, text in rows]
    return "\n".join([*described, "", "Keys (KEY=VALUE; `--cfg job` prints the composed configuration):", *lines])


def _yaml_text(name: str) -> str:
    return (importlib.resources.files("conf") / f"{name}.yaml").read_text()
