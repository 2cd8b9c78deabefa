"""The keeper, a trial server's parent: it ends the processes that a killed server leaves.

`python -m workers.keeper LINE CONTROL`: the worker executes it, and it executes the trial server. A trial's
processes can outlive the trial, and a killed server cannot end them; they then become the keeper's children, and it
kills them. When the keeper is killed, the server ends everything and exits. If both are killed at once, the next
server sweeps the control groups and the next dispatcher the processes.
Start reading at `main`. Imports no torch, and costs some 10 MB for each worker.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from conf.identity import identity
from workers.containment import ControlGroup, become_subreaper, children_of, end_below

_GRACE_S = 10.0  # for the server to end its trials after the worker has gone


def main() -> None:
    """Start the server, wait until it or the worker ends, and end what remains."""
    line, control = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its server or its worker
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wake-up byte to be written
    os.set_inheritable(line, False)
    become_subreaper()
    owner = identity(os.getpid())
    group = ControlGroup.of_owner(owner)
    kept_read, _ = os.pipe()  # closing it signals the keeper's death to the server
    server = os.fork()
    if not server:
        _execute_server(control, kept_read, group)
    os.close(control)
    os.close(kept_read)
    worker_gone = False
    while True:
        waiting = [wake_read] if worker_gone else [wake_read, line]
        readable, _, _ = select.select(waiting, [], [], _GRACE_S if worker_gone else None)
        if not readable:
            break  # the server does not end by itself
        if line in readable:
            worker_gone = True
        if wake_read in readable:
            os.read(wake_read, 512)
            if _has_ended(server):
                break
            for child in children_of(os.getpid()):
                if child != server:
                    os.waitpid(child, os.WNOHANG)
    end_below(os.getpid(), group=group)
    os._exit(0)


def _execute_server(control: int, kept: int, group: ControlGroup | None) -> None:
    try:
        os.setsid()  # a kill of the keeper's session or group does not meet the server
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in (control, kept):
            os.set_inheritable(descriptor, True)
        arguments = [str(control), str(kept), "" if group is None else str(group.path)]
        os.execv(sys.executable, [sys.executable, "-m", "workers.trial_server", *arguments])
    finally:
        os._exit(127)


def _has_ended(server: int) -> bool:
    """Return whether the server has ended; it stays a zombie until `end_below`, so that its id is not reused."""
    return os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


if __name__ == "__main__":
    main()
