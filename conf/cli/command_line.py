"""Turns a settings class into a command line: parses arguments into an object, and prints one-line errors.

Start reading at `command`; `conf.cli.overrides` reads the arguments. Hydra's compose API is used
without its decorator, which prints several lines for a mistyped key, exits with 1, writes `outputs/` folders and stops
at the first mistake. `StepBar` is the progress bar of all commands.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from conf.cli.commands import COMMANDS, description, naming_the_extra, settings_class
from conf.cli.overrides import check_readable, load_config, made
from conf.cli.settings import documented_keys, group_options
from conf.errors import (
    PASSING_ERRNOS,
    CommandError,
    EnvironmentProblem,
    UsageError,
    one_line,
    printable,
    shown,
    truncated,
)

if TYPE_CHECKING:
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
    _check_current_folder()
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


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise EnvironmentProblem("the current folder has been removed; change to an existing one") from error


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
