"""Errors that a command prints in one line, without a traceback, and ends with exit code 2.

Start reading at `CommandError`.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator

from conf.plain_text import shown

__all__ = ["CommandError", "EnvironmentProblem", "UsageError", "kept_from_exit", "shown", "unknown_name"]

# Of this process, machine or disk, and not of what a file holds: they may be gone at the next look.
PASSING_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ETIMEDOUT)


class CommandError(Exception):
    """The base of both: the message says what to change; catch it where either kind ends the work at hand.

    Args:
        keep_lines: whether the message has lines of its own, such as DuckDB's, which points at a position. Otherwise a
            line break comes from a name that is quoted, and is shown escaped.
    """

    def __init__(self, *args: object, keep_lines: bool = False) -> None:
        super().__init__(*args)
        self.keep_lines = keep_lines


class UsageError(CommandError, ValueError):
    """A mistake in the user's input: a key, a value, a name, a model; the message names it and the valid choices.

    The same call fails again until the arguments change.
    """


class EnvironmentProblem(CommandError, RuntimeError):
    """A lack of the machine or a folder: space, a package, a GPU, an undamaged file, a lock that nobody else holds.

    The arguments are right: the same call succeeds once the environment is repaired, or another program has ended.
    """


def unknown_name(kind: str, name: object, known: Iterable[object]) -> UsageError:
    """Return the error for an unknown name, with the known ones: `unknown family 'cmm'; known: cnn, mlp`."""
    return UsageError(f"unknown {kind} {shown(name)}; known: {', '.join(sorted(map(str, known)))}")


@contextlib.contextmanager
def kept_from_exit() -> Iterator[None]:
    """Turn what a user's code raises to end the process, as `sys.exit` does, into a `RuntimeError`; not Ctrl-C."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        left = RuntimeError(f"it ends the process by {type(error).__name__}({error})")
        raise left.with_traceback(error.__traceback__) from error
