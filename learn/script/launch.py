"""What a launcher starts: processes of a job, one GPU each, and how its command line is read.

Start reading at `Launch`; `learn.script.launchers` has the launchers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from conf.errors import UsageError
from conf.plain_text import one_line
from featurize.parallel.layout import Parallel

_GPUS = Parallel.gpus_per_node  # of a node that is not full
PORT = "29500"


class Started(NamedTuple):
    """What each process runs."""

    script: str
    module: bool
    arguments: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The processes of a job, one GPU each.

    launcher      its name, for people
    ranks         all processes
    per_node      those of a node
    environment   variables that the launcher sets for the first one
    """

    launcher: str
    ranks: int
    per_node: int
    environment: Mapping[str, str]

    def __post_init__(self) -> None:
        Parallel(own=self.ranks, gpus_per_node=self.gpus_per_node)  # refuses what is out of range

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node: several nodes are full."""
        return max(self.per_node, _GPUS) if self.ranks == self.per_node else self.per_node


def thread_limit(per_node: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that launchers set for several processes of a node, unless it is set."""
    return {} if "OMP_NUM_THREADS" in environment or per_node == 1 else {"OMP_NUM_THREADS": "1"}


def count_of(text: object, option: str) -> int:
    """Return a number of processes or of nodes. Raises `UsageError` for what is none."""
    try:
        number = int(str(text))
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"{option} must be a whole number >= 1, got {text}")
    return number


def parsed_options(parser: argparse.ArgumentParser, launcher: str, words: list[str]) -> argparse.Namespace:
    """Return a launcher's options, read by its own parser, whose errors are `UsageError`."""

    def refuse(message: str) -> NoReturn:
        raise UsageError(f"{launcher}: {one_line(message)}")

    vars(parser)["error"] = refuse
    if "-h" in words[:1] or "--help" in words[:1]:
        refuse("give the command line that starts a script")
    return parser.parse_args(words)
