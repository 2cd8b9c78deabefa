"""Turns a settings class into a command line: parses arguments into an object, and prints one-line errors.

Start reading at `command`, and at `load_config` for the arguments. Hydra's compose API composes the defaults of a
command with the chosen files of `conf/`, and Hydra's parser reads each value. Its decorator is not used: it prints
several lines for a mistyped key, exits with 1, writes `outputs/` folders and stops at the first mistake. The keys are
checked here, because Hydra's grammar allows more than these commands do (packages, deletions, sweeps, Hydra's
settings). `StepBar` is the progress bar of all commands.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from conf.cli.commands import COMMANDS, description, naming_the_extra, settings_class
from conf.cli.settings import (
    Checked,
    Key,
    Kind,
    Settings,
    built,
    choice_values,
    defaults_of,
    documented_keys,
    flat,
    group_options,
    groups_of,
    keys_of,
    kinds_of,
    problems_of,
)
from conf.device_names import DEVICE_FILES, read_device_file, resolve_device, slice_values, split_slice
from conf.errors import (
    PASSING_ERRNOS,
    CommandError,
    EnvironmentProblem,
    UsageError,
    collected,
    first_line,
    one_line,
    printable,
    refuse,
    shown,
    truncated,
    unknown_name,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID
    from typing_extensions import Buffer


EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TEMPORARY = 75  # EX_TEMPFAIL: the same command can continue later

# Errors of the user's machine rather than of this code: printed in one line instead of a traceback.
_ENVIRONMENT_ERRNOS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EFBIG,
    errno.ENXIO,
    errno.ENODEV,
    *PASSING_ERRNOS,
}

Entry: TypeAlias = "Callable[[Any], int | None]"  # takes an object of the command's settings class
Rewrite = Callable[[Sequence[str]], list[str]]


def command(
    name: str, entry: Entry, rewrite: Rewrite | None = None, entry_of_rest: Callable[..., int | None] | None = None
) -> NoReturn:
    """Run `entry(settings)` with the settings of the process's arguments, then exit with its return value.

    Values of text keys are taken as typed, with their commas and brackets. `rewrite` turns a command's special
    spellings into `KEY=VALUE`; it raises `UsageError`. If the arguments have a `--`, `entry_of_rest` replaces `entry`,
    and gets the arguments after it as `command`.

    Exit codes: 0 or the value from `entry`, 2 for anything that the user can fix, 130 after Ctrl-C.
    """
    if not _standard_files():
        sys.exit(EXIT_USAGE)
    arguments = sys.argv[1:]
    if entry_of_rest is not None and "--" in arguments:
        dashes = arguments.index("--")
        arguments, program = arguments[:dashes], arguments[dashes + 1 :]
        entry = functools.partial(entry_of_rest, command=program)
    code = _flush_output(run(name, entry, arguments, rewrite))
    if code in (EXIT_INTERRUPTED, EXIT_TEMPORARY):
        # Exit immediately: Ray's clean-up at exit would replace the code.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(name: str, entry: Entry, argv: Sequence[str], rewrite: Rewrite | None = None) -> int:
    """Parse `argv`, run `entry` and return the exit code: `command` without the exit."""
    try:
        with naming_the_extra():
            return _run(name, entry, list(argv), rewrite)
    except CommandError as error:
        print_error(error)
        return EXIT_USAGE
    except BrokenPipeError:  # the reader has enough, as in `... | head`
        _discard_output()
        return 0
    except OSError as error:
        if error.errno not in _ENVIRONMENT_ERRNOS:
            raise
        where = f": {os.fsdecode(error.filename)}" if error.filename else ""
        print_error(f"{error.strerror}{where}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(name: str, entry: Entry, arguments: list[str], rewrite: Rewrite | None) -> int:
    if {"-h", "--help"} & set(arguments):
        print(help_text(name, everything="all" in arguments))
        return 0
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise EnvironmentProblem("the current folder has been removed; change to an existing one") from error
    show_config, arguments = _split_show_config(arguments)
    check_readable(arguments)
    if rewrite is not None:
        arguments = rewrite(arguments)
    cfg = load_config(settings_class(name), arguments)
    if show_config:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(cfg), end="")
        return 0
    settings = made(settings_class(name), cfg)
    try:
        return entry(settings) or 0
    except SystemExit as error:  # raised by a user's model
        raise UsageError(f"the code that was run ends the process, with exit code {shown(error.code)}") from error


def print_error(error: CommandError | str) -> None:
    """Print `error: ...` on standard error, in one line unless the error keeps its lines."""
    keep_lines = isinstance(error, CommandError) and error.keep_lines
    text = truncated(str(error))
    print(f"error: {printable(text) if keep_lines else one_line(text)}", file=sys.stderr)


def _standard_files() -> bool:
    """Make the standard files safe to use. If standard output is closed, print an error and return False.

    The next opened file, such as a database, would get the number of a closed standard file, and later prints would
    write into it. Characters that the terminal's encoding lacks are printed escaped.
    """
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        if stream is None:
            try:
                os.fstat(number)  # another file already uses the number
            except OSError:  # the number is free, so the next opened file gets it
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print_error("standard output is closed; redirect it, as in >/dev/null")
        return False
    for text in (sys.stderr, sys.stdout):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        is_unbuffered = isinstance(sys.stdout.buffer, io.RawIOBase)
        sys.stdout = io.TextIOWrapper(
            _Output() if is_unbuffered else io.BufferedWriter(_Output()),
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=sys.stdout.line_buffering,
            write_through=sys.stdout.write_through,
        )
    return True


def _flush_output(code: int) -> int:
    """Flush standard output and return the exit code, or `EXIT_USAGE` if the output cannot be written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
    except EnvironmentProblem as error:
        _discard_output()
        if code != EXIT_USAGE:  # its error has been printed
            print_error(error)
        return EXIT_USAGE
    return code


class _Output(io.FileIO):
    """The process's standard output; closing this object does not close it.

    If it cannot be written, for example on a full disk, it raises `EnvironmentProblem`: a failed print names no file.
    """

    def __init__(self) -> None:
        super().__init__(1, "w", closefd=False)

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise EnvironmentProblem(f"standard output cannot be written: {error.strerror}") from error


def _discard_output() -> None:
    with contextlib.suppress(OSError, ValueError):  # the stream may have no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _split_show_config(arguments: list[str]) -> tuple[bool, list[str]]:
    """Return whether the arguments include Hydra's `--cfg job`, and the other arguments."""
    if "--cfg" not in arguments:
        return False, arguments
    flag = arguments.index("--cfg")
    if arguments[flag + 1 : flag + 2] != ["job"]:
        given = shown(arguments[flag + 1]) if flag + 1 < len(arguments) else "nothing"
        raise UsageError(f"--cfg takes job, got {given}; `--cfg job` prints the composed configuration")
    return True, arguments[:flag] + arguments[flag + 2 :]


def help_text(name: str, everything: bool) -> str:
    """Return the `--help` of a command from its settings class: description, keys and defaults, choices.

    Without `everything`, it explains only the keys in the class's `COMMON`, in that order, and names the others.
    """
    described = "\n".join(description(name)).replace("{arch}", ", ".join(group_options("arch")))
    rows: list[tuple[str, str]] = []
    documented = {key.name: key for key in documented_keys(settings_class(name))}
    common = documented if everything else settings_class(name).COMMON or documented
    for key in (documented[key_name] for key_name in common):
        choices = f" [{' | '.join(key.options)}]" if key.group else ""
        rows.append((f"{key.name}={key.written_default}", f"{key.text}{choices}".strip()))
        rows += [(f"  {inner.name}={inner.written_default}", inner.text) for inner in key.choice_keys]
    width = min(38, max(len(left) for left, _ in rows))
    lines = [f"  {left:<{width}}  {text}".rstrip() for left, text in rows]
    if others := [key for key in documented if key not in common]:
        lines += ["", f"`--help all` explains {len(others)} more keys: {', '.join(others)}."]
    if name in COMMANDS:
        described += f"\n\n`gpufarm {name}` and `python -m {COMMANDS[name]}` are the same command."
    return "\n".join([described, "", "Keys (KEY=VALUE; `--cfg job` prints the composed configuration):", *lines])


class StepBar:
    """Shows a bar with the running step on stderr, if that is a terminal. A context manager."""

    def __init__(self, label: str) -> None:
        from rich.console import Console

        self._label = label
        self._console = Console(stderr=True, highlight=False)
        self._running: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> StepBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running[0].stop()

    @property
    def is_shown(self) -> bool:
        """Return whether stderr is a terminal."""
        return self._console.is_terminal

    def update(self, step: str, completed: int, total: int) -> None:
        """Show the running step and its progress, `completed` of `total`; 0 of 0 if the number is unknown.

        With an empty step, the bar shows only the label.
        """
        if not self.is_shown:
            return
        if self._running is None:  # start it late: until now another bar may be on the screen
            from rich.progress import TimeRemainingColumn

            self._running = start_bar(self._console, self._label, TimeRemainingColumn())
        bar, task = self._running
        description = f"{self._label}: {step}" if step else self._label
        bar.update(task, description=description, completed=completed, total=total or None)


def start_bar(console: Console, label: str, column: ProgressColumn, **fields: Any) -> tuple[Progress, TaskID]:
    """Start a bar (spinner, `label`, bar, count, `column`) of unknown total, and return it with its task.

    `fields` are the values that `column` shows. The caller stops the bar.
    """
    from rich import progress as bars

    bar = bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=None),
        bars.MofNCompleteColumn(),
        column,
        console=console,
    )
    bar.start()
    return bar, bar.add_task(label, total=None, **fields)


# ---- arguments

_LONGEST_VALUE = 20_000  # limit for Hydra's parser, which takes seconds per 100,000 characters
_LONGEST_TEXT = 1_000_000  # limit for a value that is taken as typed
DEVICES = "device"  # the group of GPU models and backends
_SPACE = "arch.space."
_QUOTE = "quote values that hold spaces or commas"
_ARGUMENT = re.compile(r"(\+{0,2})([A-Za-z_][\w.-]*)=(.*)", re.DOTALL | re.ASCII)
_WITH_KEY = re.compile(r"[+~]*[\w.@/]+=")


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


def parsed(settings: type[Checked], arguments: Sequence[str]) -> list[Override]:
    """Return the arguments as overrides. The first with white space and no leading `KEY=` sets the positional key.

    Raises `UsageError` that names every argument that is not `KEY=VALUE`.
    """
    key, keyed = settings.POSITIONAL, list(arguments)
    overrides: list[Override] = []
    problems: list[str] = []
    texts = [text for text in arguments if re.search(r"\s", text) and not _WITH_KEY.match(text)]  # SQL may hold a `=`
    if is_positional := bool(key and texts):
        keyed.remove(texts[0])
    for argument in keyed:
        with collected(problems):
            overrides.append(_override(argument))
    refuse(problems)
    if is_positional:
        if any(override.key == key for override in overrides):
            raise UsageError(f"{key} is given twice: {shown(texts[0])} and {key}=...")
        overrides.append(Override("", key, texts[0], verbatim=True))
    return overrides


def _override(argument: str) -> Override:
    """Return an argument as an override. Raises `UsageError`."""
    if argument.startswith("-"):
        raise UsageError(f"unknown option {shown(argument)}; valid options: --help, --cfg job, and KEY=VALUE overrides")
    if argument.startswith("~"):
        raise UsageError(f"{shown(argument)}: a key cannot be taken out; write KEY=VALUE")
    if match := _ARGUMENT.fullmatch(argument):
        plus, key, written = match.groups()
        return Override(plus, key, written)
    if re.fullmatch(r"[+]*[^=\s]+=.*", argument, re.DOTALL):
        raise UsageError(f"unknown key {shown(argument.partition('=')[0].lstrip('+'))}; --help lists the keys")
    raise UsageError(f"cannot read {shown(argument)}; write KEY=VALUE (--help lists the keys)")


def check_readable(arguments: Sequence[str]) -> None:
    """Raise `UsageError` for arguments that are not UTF-8, hold a null character, or are far too long."""
    problems = []
    for argument in arguments:
        if re.search(r"[\ud800-\udfff]", argument):
            problem = "is not valid UTF-8: names in the data folder, DuckDB and Parquet have to be"
        elif "\0" in argument:
            problem = "holds a null character"
        elif len(argument) > _LONGEST_TEXT:
            problem = f"is longer than {_LONGEST_TEXT:,} characters"
        else:
            continue
        problems.append(f"{shown(argument)} {problem}")
    refuse(problems)


def load_config(settings: type[Checked], arguments: Sequence[str]) -> DictConfig:
    """Compose a command's settings with `KEY=VALUE` arguments into a `DictConfig` whose values are of their kinds.

    If a key is given twice, the last value counts: a user can override a script's arguments. Values of text keys are
    taken as typed. Required keys may still be missing.

    Raises:
        UsageError: Reports all bad arguments together, each with its nearest or valid choices.
    """
    overrides = [_as_own_key(override, settings.SPELLINGS) for override in parsed(settings, arguments)]
    groups, kinds = groups_of(settings), kinds_of(settings)
    chosen: dict[str, tuple[str, Mapping[str, Any] | None]] = {}
    problems: list[str] = []
    for override in overrides:
        if override.key in groups:
            with collected(problems):
                chosen[override.key] = _chosen(groups[override.key], override)
    cfg = _compose(settings, [choice for choice, _ in chosen.values() if choice])
    composed = plain_values(cfg)
    declared = [key.name for key in keys_of(settings) if key.name.partition(".")[0] in composed]
    known = list(dict.fromkeys([*declared, *dict(flat(composed))]))
    for group, (_, values) in chosen.items():
        if values is not None:
            with collected(problems):
                _put(cfg, group, values)
    for override in overrides:
        if override.key not in groups:
            with collected(problems):
                _require_known(cfg, override.plus, override.key, known)
                _set(cfg, override.plus, override.key, _value(override, kinds.get(override.key)), known)
    with collected(problems):
        problems += problems_of(plain_values(cfg), kinds)
    refuse(problems)
    return cfg


def _as_own_key(override: Override, spellings: Mapping[str, str]) -> Override:
    """Translate a command's special spelling into its key; return any other override unchanged."""
    if override.choice.startswith("[") and (own := spellings.get(f"{override.key}[")):
        return Override("", own, override.choice)
    own = spellings.get(f"{override.plus[:1]}{override.key}")
    return replace(override, plus="", key=own) if own else override


def _chosen(key: Key, override: Override) -> tuple[str, Mapping[str, Any] | None]:
    """Return Hydra's override for a group, empty for null, and values that replace the chosen file's, if any.

    Raises:
        UsageError: The choice is unknown, or needs or forbids a `+`.
    """
    assert key.group is not None
    choice, values, options = override.choice, None, group_options(key.name)
    is_null = choice == "null" and key.default is None and not key.group.added
    if key.name == DEVICES and choice not in options and not is_null:
        choice, values = _device(choice, key.options)
    if choice not in options and not is_null:
        raise unknown_name(key.name, override.choice, options)
    if override.plus != (plus := "+" if key.group.added else ""):
        raise UsageError(f"write {plus}{key.name}={override.choice}{'' if plus else ', without +'}")
    return "" if is_null else f"{plus}{key.name}={choice}", values


def _device(choice: str, options: Sequence[str]) -> tuple[str, Mapping[str, Any] | None]:
    """Return the file of a device with another name, and the values of a device without a file.

    A user's own file and a slice are not in conf/device/; a described GPU model provides their keys.
    """
    if choice.endswith(DEVICE_FILES):
        read = read_device_file(choice)
        values = {key: literal(value) if isinstance(value, str) else value for key, value in read.items()}
        vendor = "llvm_target" if "llvm_target" in values else "compute_capability"
        return next(option for option in options if vendor in choice_values(DEVICES, option)), values
    if (parts := split_slice(choice)) is not None:
        whole = resolve_device(parts[0], options)
        return whole, {**choice_values(DEVICES, whole), **slice_values(choice_values(DEVICES, whole), parts[1])}
    return resolve_device(choice, options), None


def _compose(settings: type[Checked], choices: Sequence[str]) -> DictConfig:
    """Compose the command's defaults with the chosen files of its groups by Hydra."""
    from hydra import compose, initialize_config_module
    from hydra.core.config_store import ConfigStore

    name = settings.__name__
    # Hydra does not accept null for a group in `choices`; the default of such a group is null anyway.
    defaults = [{key.name: key.default} for key in documented_keys(settings) if key.group]
    store = ConfigStore.instance()
    store.store(name=name, node={"defaults": ["_self_", *defaults], **defaults_of(settings)})
    try:
        with initialize_config_module(config_module="conf", version_base="1.3"):
            return compose(name, overrides=[*choices])
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
    import omegaconf

    try:
        omegaconf.OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    except omegaconf.errors.OmegaConfBaseException as error:
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
    if override.verbatim or (kind is not None and kind.takes_as_typed(key, written)):
        return literal(written)
    if len(written) > _LONGEST_VALUE:
        raise UsageError(f"{key} is longer than {_LONGEST_VALUE:,} characters: {shown(override.text())}")
    try:
        read = OverridesParser.create().parse_override(override.text())
    except (HydraException, RecursionError) as error:
        has_quoted_keys = re.search(r"[{,]\s*[\"'][^\"']*[\"']\s*:", written)
        advice = "a mapping's keys have no quotes: {key: value}" if has_quoted_keys else _QUOTE
        raise UsageError(f"cannot read {shown(override.text())}; write KEY=VALUE ({advice})") from error
    if read.is_sweep_override():
        raise UsageError(f"{key} takes one value, not several to choose from: {shown(override.text())}")
    return read.value()


def literal(value: str) -> str:
    r"""Escape text for OmegaConf, where `${` begins an interpolation and `\${` does not."""
    return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", value)


def load_settings(settings: type[Settings], arguments: Sequence[str]) -> Settings:
    """Return the settings that a command's `entry` gets for these arguments. Raises `UsageError`."""
    return made(settings, load_config(settings, arguments))


def made(settings: type[Settings], cfg: DictConfig) -> Settings:
    """Make an object of the settings class from the composed config.

    Raises:
        UsageError: Names every missing required key with its meaning, or the values that the class refuses.
    """
    from omegaconf import OmegaConf

    if missing := OmegaConf.missing_keys(cfg):
        meanings = {key.name: f" ({key.help})" for key in keys_of(settings) if key.help}
        raise UsageError("missing " + "; ".join(f"{key}=...{meanings.get(key, '')}" for key in sorted(missing)))
    return built(settings, plain_values(cfg))


def plain_values(cfg: DictConfig) -> dict[str, Any]:
    """Return the config as plain values with `${...}` filled in. Raises `UsageError` if that fails."""
    import omegaconf

    try:
        values = omegaconf.OmegaConf.to_container(cfg, resolve=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        raise UsageError(f"{getattr(error, 'full_key', None) or 'config'}: {first_line(error)}") from error
    except RecursionError as error:
        raise UsageError("a value refers to itself through ${...}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
