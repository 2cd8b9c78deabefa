"""Errors that a command prints in one line, without a traceback, before it exits with code 2; rules of single values.

Start reading at `CommandError`, and for the rules of a setting, a config's field or a search space's key at `Allowed`.
"""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

from conf.plain_text import shown

__all__ = [
    "BOOLEAN",
    "COUNT",
    "Allowed",
    "CommandError",
    "EnvironmentProblem",
    "UsageError",
    "at_most",
    "collected",
    "integer",
    "is_finite",
    "kept_from_exit",
    "one_of",
    "optional",
    "problem_of_value",
    "refuse",
    "require_known",
    "require_one_of",
    "shown",
    "unknown_name",
    "unknown_names",
]

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
