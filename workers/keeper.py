"""The keeper of a trial server: it ends the processes that a killed server leaves (`conf.children.keeper`).

`python -m workers.keeper LINE CONTROL`: the worker executes it, and it executes the trial server. A trial's
processes can outlive the trial, and a killed server cannot end them; they then become the keeper's children, and it
kills them. When the keeper is killed, the server ends everything and exits. If both are killed at once, the next
server sweeps the control groups and the next dispatcher the processes.
Start reading at `main`. Imports no torch, and costs some 10 MB for each worker.
"""

from __future__ import annotations

import os
import sys

from conf.children.containment import ControlGroup
from conf.children.keeper import keep
from conf.identity import identity

_GRACE_S = 10.0  # for the server to end its trials after the worker has gone


def main() -> None:
    """Start the server, wait until it or the worker ends, and end what remains."""
    line, control = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(line, False)
    group = ControlGroup.of_owner(identity(os.getpid()))
    kept_read, _ = os.pipe()  # closing it signals the keeper's death to the server
    keep(
        lambda: _execute_server(control, kept_read, group),
        line,
        group=group,
        handed_over=(control, kept_read),
        grace_s=_GRACE_S,
    )
    os._exit(0)


def _execute_server(control: int, kept: int, group: ControlGroup | None) -> None:
    for descriptor in (control, kept):
        os.set_inheritable(descriptor, True)
    arguments = [str(control), str(kept), "" if group is None else str(group.path)]
    os.execv(sys.executable, [sys.executable, "-m", "workers.trial_server", *arguments])


if __name__ == "__main__":
    main()
