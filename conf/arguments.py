"""KEY=VALUE arguments and exit codes of developers' commands, which have no settings class of their own.

Start reading at `keyed_values`; what users call goes through `conf.cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from conf.cli import EXIT_INTERRUPTED, EXIT_USAGE, print_error
from conf.errors import CommandError, UsageError, shown
from conf.overrides import check_readable, plain_values
from conf.values import Kind, problems_of


def keyed_values(argv: Sequence[str], known: Iterable[str] | Mapping[str, str]) -> dict[str, Any]:
    """Return arguments by key, values read as YAML; text stays as typed where `known` gives the keys' kinds.

    Raises `UsageError` that lists the `known` keys, or names every value that is not of its kind (`conf.values`).
    """
    check_readable(argv)
    kinds = {key: Kind.parse(kind) for key, kind in known.items()} if isinstance(known, Mapping) else {}
    names = tuple(known)
    values: dict[str, Any] = {}
    for item in argv:
        key, equals, written = item.partition("=")
        if key not in names or not equals:
            raise UsageError(f"unknown argument {shown(item)}; valid are KEY=VALUE of {', '.join(names)}")
        kind = kinds.get(key)
        if kind is not None and kind.stands_as_typed(written):
            if problems := kind.problems_as_written(key, written):
                raise UsageError("; ".join(problems))
            values[key] = written
        else:
            values[key] = _read(item)
    if problems := problems_of(values, kinds):
        raise UsageError("; ".join(problems))
    return values


def _read(item: str) -> Any:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        (value,) = plain_values(OmegaConf.from_dotlist([item])).values()
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {shown(item)}; write KEY=VALUE as YAML has it") from error
    return value


def exit_code(work: Callable[[], int | None]) -> int:
    """Run work that the same command can continue, and return its exit code, or 2 or 130 as users' commands do."""
    try:
        return work() or 0
    except CommandError as error:
        print_error(error)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue", file=sys.stderr)
        return EXIT_INTERRUPTED
