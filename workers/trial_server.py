"""The trial server: a small single-threaded process that has torch imported and forks one child per trial.

Executed by its keeper (`workers.keeper`) for a worker, never forked from one: a worker under Ray has many threads. It
imports what the first training step needs and then runs no operator and touches no CUDA, so that a child starts
within milliseconds with a clean context and allocator. Start reading at `Server.serve`.

Wire: one SOCK_SEQPACKET socket, a JSON object a packet.
  worker -> server   {"run": TRIAL} + one file descriptor, the trial's own socket   |   {"kill": PID}
  server -> worker   {"hello": ENVIRONMENT, "pid": PID}   |   {"started": PID}
                     {"exited": PID, "code": N | null, "signal": N | null, "output": TEXT, "left": N, "stayed": N}
Two trials at most live at a time: the one that is measured, and the next, which is made ready and waits. A trial's
output is read here, so that it never has to wait and never fills a disk; its beginning and end are kept. When a trial
has ended, so does every process that it started (`conf.children.containment`): `left` says how many had to be killed,
`stayed` how many could not be. End of file on the socket means that the worker died, on the keeper's pipe that the
keeper did: everything is ended and the server exits.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.children.containment import ControlGroup, become_subreaper, die_with_parent, end_below
from conf.children.forked import run_as_child
from conf.children.output import ChildOutput
from conf.own_packages import search_working_folder
from workers.safe_text import safe_text

PACKET_BYTES = 1 << 20
MOST_TRIALS = 4  # at a time


@dataclass(frozen=True)
class _Child:
    """A living trial: its output and, if it has one, its control group."""

    output: ChildOutput
    group: ControlGroup | None


class Server:
    """Forks and reaps trials until its worker or its keeper is gone. On the main thread, with one thread only."""

    def __init__(self, control: socket.socket, kept: int, group: ControlGroup | None) -> None:
        """`kept` ends with the keeper. Trials get control groups of their own below `group`, if there is one."""
        self._control = control
        self._kept = kept
        self._group = group
        self._wake_read, self._wake_write = os.pipe()
        self._children: dict[int, _Child] = {}
        self._forked = 0

    def serve(self) -> None:
        from workers.environment import software_environment

        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wake-up byte to be written
        become_subreaper()
        self._send({"hello": {**software_environment(), "threads": _thread_count()}, "pid": os.getpid()})
        gc.collect()
        gc.freeze()  # what is here now is never collected: children do not copy its pages
        while self._turn():
            pass
        for pid in self._children:
            _kill_group(pid)
        end_below(os.getpid(), group=self._group)

    def _turn(self) -> bool:
        """Wait for one event and handle it; return False at the end."""
        outputs = [child.output for child in self._children.values() if child.output.open]
        watched: list[Any] = [self._control, self._wake_read, self._kept, *outputs]
        readable, _, _ = select.select(watched, [], [])
        for output in outputs:
            if output in readable:
                output.drain()
        if self._wake_read in readable:
            os.read(self._wake_read, 512)
        for pid in tuple(self._children):
            self._reap(pid)
        if self._kept in readable:
            return False
        if self._control in readable:
            packet, descriptors, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
            if not packet:
                return False
            self._obey(json.loads(packet), descriptors)
        return True

    def _obey(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "run" in message:
            assert len(self._children) < MOST_TRIALS, "a group, or one trial that runs and one that is made ready"
            os.set_inheritable(descriptors[0], False)
            if _imports_the_compiler(message["run"]["config"]):
                import torch._dynamo.convert_frame  # noqa: F401  here, once, and not in each trial
            pid = self._fork(message["run"], descriptors[0])
            os.close(descriptors[0])
            self._send({"started": pid})
        elif message["kill"] in self._children:
            _kill_group(message["kill"])

    def _fork(self, trial: dict[str, Any], descriptor: int) -> int:
        server = os.getpid()
        self._forked += 1
        child = _Child(ChildOutput(), ControlGroup.below(self._group, f"trial-{self._forked}"))
        pid = os.fork()
        if pid:
            os.setpgid(pid, pid)  # here as well as in the child: a kill of the group may come before the child has run
            child.output.close_writer()
            self._children[pid] = child
            return pid

        def body() -> None:
            os.setpgid(0, 0)
            die_with_parent(server)
            become_subreaper()  # what it leaves while another trial lives stays with it, and is known as its own
            if child.group is not None:
                child.group.enter()
            self._forget(child)
            _be_the_first_to_go()
            from workers.trial import run_trial

            with socket.socket(fileno=descriptor) as channel:
                run_trial(trial, channel)

        run_as_child(body)

    def _forget(self, child: _Child) -> None:
        """Release the server's resources in a trial's process, and write to the trial's own output."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(child.output.writer, 1)
        os.dup2(child.output.writer, 2)
        self._control.close()
        for end in (self._wake_read, self._wake_write, self._kept, child.output.reader, child.output.writer):
            os.close(end)
        for other in self._children.values():
            other.output.close()

    def _reap(self, pid: int) -> None:
        """If the trial has ended, end the processes that it left and notify the worker."""
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        left, stayed = end_below(os.getpid(), spared=tuple(self._children), group=self._children[pid].group)
        child = self._children.pop(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        child.output.drain()
        self._send(
            {
                "exited": pid,
                "code": code if code >= 0 else None,
                "signal": -code if code < 0 else None,
                "output": safe_text(child.output.text()).strip(),
                "left": left,
                "stayed": stayed,
            }
        )
        child.output.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is gone: the next receive sees the end of file


def _be_the_first_to_go() -> None:
    """Make the kernel kill the trial first, not Ray or the server, when the machine runs out of memory."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        pass


def _kill_group(pid: int) -> None:
    """Kill a trial that has not been reaped, and its group, which it may have left."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the group is empty; macOS and gVisor return EPERM for zombies
            pass


def _import_the_trace() -> None:
    """Import the modules that tracing a step needs, without torch's compiler, which takes as long as torch itself."""
    from featurize.light_imports import without_compiler

    without_compiler()
    import torch.fx.experimental.symbolic_shapes  # sympy comes with it, and with a trace's first convolution or product
    import torch.utils._device  # noqa: F401
    import yaml  # noqa: F401  devices are described in it

    import featurize.meta_results
    import featurize.modules
    import featurize.own_code
    import featurize.parallel.overlap
    import featurize.recorder
    import featurize.simulate
    import featurize.trace  # noqa: F401
    import workers.devices.simulated
    import workers.trial  # noqa: F401


def _imports_the_compiler(config: dict[str, Any]) -> bool:
    """Return whether the trace itself imports torch's compiler: libraries do, and checkpointing reads its settings."""
    return config.get("family") == "zoo" or bool(config.get("activation_checkpointing"))


def _thread_count() -> int | None:
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return None


def main() -> None:
    """Run `python -m workers.trial_server CONTROL KEPT GROUP`: two descriptors, and a control group's path or ''."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the dispatcher's to handle
    from workers.environment import TRACES_ONLY

    if os.environ.get(TRACES_ONLY):
        _import_the_trace()
    from featurize.training import preload

    search_working_folder()
    preload()
    for descriptor in map(int, sys.argv[1:3]):
        os.set_inheritable(descriptor, False)
    group = ControlGroup(Path(sys.argv[3])) if sys.argv[3] else None
    with socket.socket(fileno=int(sys.argv[1])) as control:
        Server(control, int(sys.argv[2]), group).serve()
    os._exit(0)  # an orderly end of torch takes a second, and nothing is left to be written


if __name__ == "__main__":
    main()
