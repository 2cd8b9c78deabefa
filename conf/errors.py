"""Errors that a command prints in one line, without a traceback, before it exits with code 2, and text for messages.

Start reading at `CommandError`; for the rules of a setting, a config's field or a search space's key at `Allowed`. Text
is made safe for terminals and storage: `printable` escapes control characters, `shown` quotes a value, `error_line`
finds the line of a stored error that says what happened, `safe_text` cuts the output of a trial.
"""

from __future__ import annotations

import contextlib
import errno
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO, TypeGuard

# Errors of this process, machine or disk rather than of a file's content: a later attempt may succeed.
PASSING_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ETIMEDOUT)


class CommandError(Exception):
    """Base class of both errors. The message says what to change.

    Args:
        keep_lines: whether the message has several lines, such as DuckDB's, which point at a position. Otherwise a line
            break comes from a quoted name, and is shown escaped.
    """

    def __init__(self, *args: object, keep_lines: bool = False) -> None:
        super().__init__(*args)
        self.keep_lines = keep_lines


class UsageError(CommandError, ValueError):
    """A mistake in the user's input: a key, a value, a name, a model. The message names it and the valid choices.

    The same call fails again until the arguments change.
    """


class EnvironmentProblem(CommandError, RuntimeError):
    """A problem of the machine or a folder: no space, a missing package or GPU, a damaged file, a lock held elsewhere.

    The arguments are right: the same call succeeds once the environment is repaired, or another program has ended.
    """


@contextlib.contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Append the message of a `UsageError` to the problems, and continue after the block."""
    try:
        yield
    except UsageError as error:
        problems.append(str(error))


def refuse(problems: Iterable[str], place: str = "") -> None:
    """Raise `UsageError` with all problems in one line, behind the place where they stand; nothing without any."""
    if text := "; ".join(problems):
        raise UsageError(f"{place}{text}")


def unknown_name(kind: str, name: object, known: Iterable[object]) -> UsageError:
    """Return the error for an unknown name, which lists the known ones: `unknown family 'cmm'; known: cnn, mlp`."""
    return UsageError(f"unknown {kind} {shown(name)}; known: {', '.join(sorted(map(str, known)))}")


def require_one_of(kind: str, name: object, known: Collection[object]) -> None:
    """Raise `unknown_name` for a name that is not among the known ones."""
    if name not in known:
        raise unknown_name(kind, name, known)


def unknown_names(names: Iterable[object], known: Sequence[str]) -> str | None:
    """Return the problem of names that are not known, such as `unknown bckend; known: backend, count`; else None."""
    unknown = [str(name) for name in names if name not in known]
    return f"unknown {', '.join(unknown)}; known: {', '.join(known)}" if unknown else None


def require_known(place: str, names: Iterable[object], known: Sequence[str]) -> None:
    """Raise `UsageError` for names that are not known, with the place where they stand."""
    if problem := unknown_names(names, known):
        raise UsageError(f"{place}: {problem}")


@contextlib.contextmanager
def kept_from_exit() -> Iterator[None]:
    """Turn a user's code's attempt to end the process, such as `sys.exit`, into a `RuntimeError`; not Ctrl-C."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        problem = RuntimeError(f"it ends the process by {type(error).__name__}({error})")
        raise problem.with_traceback(error.__traceback__) from error


class Allowed(NamedTuple):
    """Allowed values of a setting, with a description. `read` converts values from texts, YAML and JSON."""

    fit: Callable[[Any], bool]
    words: str
    read: Callable[[Any], Any] = lambda value: value


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def one_of(choices: Iterable[Any]) -> Allowed:
    """Return the rule of a value that is one of the choices."""
    known = tuple(choices)  # also for values that cannot be hashed
    return Allowed(lambda value: value in known, f"one of {', '.join(map(str, known))}")


def optional(rule: Allowed) -> Allowed:
    """Return the rule of a value that may also be None."""
    return Allowed(lambda value: value is None or rule.fit(value), rule.words)


def integer(least: int, most: float = math.inf) -> Allowed:
    """Return the rule of an integer from `least` to `most`."""
    words = f">= {least}" if most == math.inf else f"from {least} to {most}"
    return Allowed(lambda value: type(value) is int and least <= value <= most, f"an integer {words}")


def at_most(most: int) -> Allowed:
    """Return the rule of a number up to `most`, behind a rule that it is a number."""
    return Allowed(lambda value: value <= most, f"<= {most}")


COUNT = integer(1)
BOOLEAN = Allowed(lambda value: isinstance(value, bool), "true or false")


def problem_of_value(name: str, value: Any, rules: Iterable[Allowed]) -> str | None:
    """Return `batch_size must be an integer >= 1, got 0` for a value that breaks a rule, else None."""
    for rule in rules:
        if not rule.fit(value):
            return f"{name} must be {rule.words}, got {shown(value)}"
    return None


# ---- text for messages

_LONGEST_LINE = 4000  # characters; some messages list every valid name
_LONGEST_SHOWN = 200  # characters of a value that is quoted back
OUTPUT_STARTS = "\n--- the trial's output ends:"  # separates the error of a run from the last output of its trial
_TRACEBACK_STARTS = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*(?:[|+]\s*)?File ".*", line \d+')
_IN_A_GROUP = re.compile(r"^ {2,}[|+] ")  # frame that a traceback draws around the exceptions of a group
ERROR_CHARACTERS = 32_000  # characters of an error's text that are kept
_HEAD_SHARE = 0.25  # share of a kept text for its beginning; a traceback has its message at the end
_TAB_OR_LINE_FEED = re.compile("([\t\n])")
_LINE_END = re.compile("\r\n?")


def printable(text: str) -> str:
    """Return `text` with control characters escaped, such as `\\x1b`. Line feeds stay, tabs become blanks."""
    return text if text.isprintable() else "".join(map(_spell, text))


def one_line(text: str) -> str:
    """Return `printable` text in one line: tabs and line feeds are also escaped."""
    return printable(text.replace("\t", "\\t")).replace("\n", "\\n")


def print_lines(lines: Iterable[str], file: TextIO | None = None) -> None:
    """Print lines on standard output or `file`, each through `one_line`: file names may hold any character."""
    for line in lines:
        print(one_line(line), file=file)


def first_few(texts: Sequence[str], most: int, between: str = "; ") -> str:
    """Return the first `most` texts and the number of the others: `a; b; 3 more`."""
    more = [f"{len(texts) - most:,} more"] if len(texts) > most else []
    return between.join([*texts[:most], *more])


def left_out(count: int, unit: str) -> str:
    """Return the line that marks a cut."""
    return f"\n[... {count:,} {unit} left out ...]\n"


def truncated(text: str) -> str:
    """Return `text`, or its beginning and end if it is too long for a message."""
    return _cut(text, _LONGEST_LINE, " ... ")


def shown(value: object) -> str:
    """Return the `repr` of a value for a message, cut if it is long; bytes that are not UTF-8 appear as `\\xNN`."""
    text = re.sub(r"(?<!\\)((?:\\\\)*)\\udc([89a-f][0-9a-f])", r"\1\\x\2", repr(value))
    cut = _cut(text, _LONGEST_SHOWN, "...")
    return text if cut == text else f"{cut} ({len(text):,} characters)"


def first_line(error: BaseException) -> str:
    """Return the first non-blank line of an exception's text, or the name of its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def exception_line(error: BaseException) -> str:
    """Return an exception as one line: `TypeError: first non-blank line of its text`, or only its type."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"


def error_line(text: str) -> str:
    """Return the line of an error that says what happened, made `printable`; empty for an empty text.

    In a traceback this is the first line of its last exception (`TypeError: ...`), otherwise the first line that is not
    blank. The output of a trial, which may follow, is ignored.
    """
    lines = [line for line in text.partition(OUTPUT_STARTS)[0].splitlines() if line.strip()]
    traced = [number for number, line in enumerate(lines) if _TRACEBACK_STARTS in line or _FRAME.match(line)]
    if not traced and lines and lines[0].startswith("Traceback"):  # a shortened one
        traced = [0]
    if traced:  # source lines and their markers are indented, the exception is not
        behind = [_IN_A_GROUP.sub("", line) for line in lines[traced[-1] + 1 :]]
        lines = [line for line in behind if not line[0].isspace()] or lines[traced[-1] :]
    return printable(lines[0].strip()) if lines else ""


def _cut(text: str, limit: int, between: str) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}{between}{text[-half:]}"


def _spell(character: str) -> str:
    if character == "\n" or character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    if character == "\t":
        return " "
    # Control characters, surrogates, direction marks, invisible characters, line ends and unassigned characters.
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that Python could not decode (PEP 383)
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def safe_text(text: str, limit: int = ERROR_CHARACTERS) -> str:
    """Return `printable` text, but with its tabs, cut to about `limit` characters.

    The beginning and the end are kept; a line between them says how many characters were left out.
    """
    parts = _TAB_OR_LINE_FEED.split(_LINE_END.sub("\n", shortened(text, limit)))
    return "".join(part if part == "\t" else printable(part) for part in parts)


def shortened(text: str, limit: int = ERROR_CHARACTERS) -> str:
    """Return the beginning and the end of `text`, with a line that says how many characters were left out."""
    if len(text) <= limit:
        return text
    head = int(limit * _HEAD_SHARE)
    tail = limit - head
    return f"{text[:head]}{left_out(len(text) - limit, 'characters')}{text[-tail:]}"
