"""KEY=VALUE arguments and exit codes of developers' commands, which have no YAML file of their own.

Start reading at `keyed_values`; what users call goes through `conf.cli`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from conf.cli import EXIT_INTERRUPTED, EXIT_USAGE
from conf.errors import UsageError


def keyed_values(argv: Sequence[str], known: Iterable[str]) -> dict[str, Any]:
    """The arguments by key, values as YAML has them. Raises `UsageError` that lists the `known` keys."""
    from omegaconf import OmegaConf

    known = tuple(known)
    for item in argv:
        if item.partition("=")[0] not in known or "=" not in item:
            raise UsageError(f"unknown argument {item!r}; valid are KEY=VALUE of {', '.join(known)}")
    return OmegaConf.to_container(OmegaConf.from_dotlist(list(argv)))


def exit_code(work: Callable[[], object]) -> int:
    """Do work that a repeat of the same command goes on with; 0, or 2 and 130 as users' commands have them."""
    try:
        work()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0
