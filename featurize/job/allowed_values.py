"""Rules of single values: what a setting, a field of a config or a key of a search space may be, in words. Torch-free.

Start reading at `Allowed`; `problem_of_value` applies the rules of one name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard


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


def integer(least: int) -> Allowed:
    """Return the rule of an integer from `least` on."""
    return Allowed(lambda value: type(value) is int and value >= least, f"an integer >= {least}")


def at_most(most: int) -> Allowed:
    """Return the rule of a number up to `most`, behind a rule that it is a number."""
    return Allowed(lambda value: value <= most, f"<= {most}")


COUNT = integer(1)
BOOLEAN = Allowed(lambda value: isinstance(value, bool), "true or false")


def problem_of_value(name: str, value: Any, rules: Iterable[Allowed]) -> str | None:
    """Return `batch_size must be an integer >= 1, got 0` for a value that breaks a rule, else None."""
    for rule in rules:
        if not rule.fit(value):
            return f"{name} must be {rule.words}, got {value!r}"
    return None
