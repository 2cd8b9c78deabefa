"""Parts that the programs beside a scheduler share: the loop in which they ask the service, and their words.

Start reading at `keep_asking`. `farm.slurm`, `farm.sbatch` and `farm.kueue` are these programs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from conf.errors import EnvironmentProblem

if TYPE_CHECKING:
    from learn.client import Client
    from learn.estimation.job_estimate import Estimate

TOKEN_VARIABLE = "GPUFARM_TOKEN"


def keep_asking(look: Callable[[Client, threading.Event], None], *, server: str, once: bool, every_s: float) -> int:
    """Call `look` with a client of the service and the event that ends it, again and again until SIGTERM or Ctrl-C.

    Returns the exit code. Raises `EnvironmentProblem` with `once`, where `look` does; else it is printed.
    """
    from learn.client import Client

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    with Client(server, token=os.environ.get(TOKEN_VARIABLE)) as service:
        while not ended.is_set():
            try:
                look(service, ended)
            except EnvironmentProblem as error:
                if once:
                    raise
                print(f"{error}; trying again", file=sys.stderr, flush=True)
            if once:
                break
            ended.wait(every_s)
    return 0


def figures_of(done: Estimate) -> str:
    """Return an estimate's memory in words, such as `7,196 MiB, bound 8,664 MiB`."""
    return f"{done.peak_memory_mib:,.0f} MiB, bound {done.needed_mib:,.0f} MiB"
