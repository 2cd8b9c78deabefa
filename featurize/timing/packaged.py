"""The packaged file of parameters: each part of the kernel model reads its own section.

Start reading at `packaged_section`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any, TypeVar

from conf.errors import EnvironmentProblem

FILE = "parameters.json"
Section = TypeVar("Section")


def packaged_text() -> str:
    """Return the content of the file."""
    return resources.files("featurize.timing").joinpath(FILE).read_text(encoding="utf-8")


@contextlib.contextmanager
def damage_named() -> Iterator[None]:
    """Turn the errors that a damaged file causes inside into `EnvironmentProblem`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EnvironmentProblem(f"{FILE} is damaged ({error!r}); install gpufarm again") from error


def packaged_section(name: str, read: Callable[[Any], Section]) -> Section:
    """Return the result of `read` on a section of the file. Raises `EnvironmentProblem` for a damaged file."""
    with damage_named():
        return read(json.loads(packaged_text())[name])
