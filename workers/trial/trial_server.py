"""The trial server: a server of children (`conf.children.running`) that has imported torch and forks a child per trial.

A worker executes it and never forks it, because a worker under Ray has many threads. The server imports what the first
training step needs, but runs no operator and does not touch CUDA. A child therefore starts within milliseconds with a
clean context and allocator. Start reading at `prepare`; children call `run`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from conf.children.containment import become_subreaper
from conf.children.running import run_server
from conf.cli.own_packages import search_working_folder


def prepare() -> dict[str, Any]:
    """Import what trials need; return the software environment."""
    from workers.devices import TRACES_ONLY, software_environment

    if os.environ.get(TRACES_ONLY):
        from featurize.trace import import_tracer

        import_tracer()
        import workers.devices.simulated
    else:
        from featurize.training.training_step import preload

        preload()
    import workers.trial.body  # noqa: F401

    search_working_folder()
    return software_environment()


def modules_of_trace(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the modules that the server imports once for traces of the config, instead of in each trial.

    Libraries import torch's compiler, and checkpointing reads its settings.
    """
    compiles = config.get("family") == "zoo" or bool(config.get("activation_checkpointing"))
    return ("torch._dynamo.convert_frame",) if compiles else ()


def run(trial: dict[str, Any], channel: int) -> None:
    """Run one trial in its own process, reporting over the socket."""
    from workers.trial.body import run_trial

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the dispatcher's to handle
    _be_the_first_to_go()
    become_subreaper()  # a process whose parent in the trial has ended still counts in the trial's memory and time
    with socket.socket(fileno=channel) as reports:
        run_trial(trial, reports)


def _be_the_first_to_go() -> None:
    """Make the kernel kill the trial before Ray or the server when the machine runs out of memory."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        pass


if __name__ == "__main__":
    run_server(int(sys.argv[1]), "", prepare)
