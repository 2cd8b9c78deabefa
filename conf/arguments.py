"""KEY=VALUE arguments of developers' commands, which have no YAML file of their own.

Start reading at `keyed_values`; what users call goes through `conf.cli`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from conf.errors import UsageError


def keyed_values(argv: Sequence[str], known: Iterable[str]) -> dict[str, Any]:
    """The arguments by key, values as YAML has them. Raises `UsageError` that lists the `known` keys."""
    from omegaconf import OmegaConf

    known = tuple(known)
    for item in argv:
        if item.partition("=")[0] not in known or "=" not in item:
            raise UsageError(f"unknown argument {item!r}; valid are KEY=VALUE of {', '.join(known)}")
    return OmegaConf.to_container(OmegaConf.from_dotlist(list(argv)))
