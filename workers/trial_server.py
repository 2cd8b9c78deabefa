"""The trial server: a small single-threaded process that has torch imported and forks one child per trial.

Executed by a worker (`python -m workers.trial_server`), never forked from it: a worker under Ray has many threads. It
imports what the first training step needs and then runs no operator and touches no CUDA, so that a child starts
within milliseconds with a clean context and allocator. Start reading at `serve`.

Wire: one SOCK_SEQPACKET socket, a JSON object a packet.
  worker -> server   {"run": TRIAL} + one file descriptor, the trial's own socket   |   {"kill": PID}
  server -> worker   {"hello": ENVIRONMENT}, {"started": PID}, {"exited": PID, "code": N | null, "signal": N | null}
A trial's output goes to a log of its own, `trial_log(folder, PID)`. Two trials at most live at a time: the one that is
measured, and the next, which is made ready and waits. End of file on the socket means that the worker died: its trials
are killed and the server exits.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
PACKET_BYTES = 1 << 20


def trial_log(folder: str, pid: int) -> str:
    """Where a trial's standard output and error go."""
    return os.path.join(folder, f"trial-{pid}.log")


def serve(control: socket.socket, folder: str) -> None:
    """Fork and reap trials until the control socket ends. Runs on the main thread, with one thread only."""
    from workers.environment import software_environment

    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wake-up byte to be written
    _send(control, {"hello": {**software_environment(), "threads": _thread_count()}})
    gc.collect()
    gc.freeze()  # what is here now is never collected: children do not copy its pages
    children: set[int] = set()
    while True:
        readable, _, _ = select.select([control, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 512)
            for child in tuple(children):
                if (exited := _reap(child)) is not None:
                    children.remove(child)
                    _send(control, exited)
        if control not in readable:
            continue
        packet, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, 1)
        if not packet:
            break
        message = json.loads(packet)
        if "run" in message:
            assert len(children) < 2, "one trial that runs, and one that is made ready"
            child = _fork(message["run"], descriptors[0], control, (wake_read, wake_write), folder)
            os.close(descriptors[0])
            children.add(child)
            _send(control, {"started": child})
        elif message["kill"] in children:
            _kill_group(message["kill"])
    for child in children:
        _kill_group(child)
        os.waitpid(child, 0)


def _fork(trial: dict, descriptor: int, control: socket.socket, wake: tuple[int, int], folder: str) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # here as well as in the child: a kill of the group may come before the child has run
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        _die_with_parent(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        for end in wake:
            os.close(end)
        _be_the_first_to_go()
        log = os.open(trial_log(folder, os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        from workers.trial import run_trial

        with socket.socket(fileno=descriptor) as channel:
            run_trial(trial, channel)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # never run the server's own clean-up in a child


def _die_with_parent(parent: int) -> None:
    """SIGKILL for this process when its parent dies, whatever the reason (the parent has one thread only)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _be_the_first_to_go() -> None:
    """When the machine runs out of memory, the kernel shall take the trial and not Ray or the server."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        pass


def _reap(child: int) -> dict | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid == 0:
        return None
    _kill_group(child)  # what the trial itself started
    code = os.waitstatus_to_exitcode(status)
    return {"exited": child, "code": code if code >= 0 else None, "signal": -code if code < 0 else None}


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # nobody is left; macOS and gVisor say EPERM for zombies
        pass


def _send(control: socket.socket, message: dict) -> None:
    try:
        control.send(json.dumps(message).encode())
    except (BrokenPipeError, ConnectionResetError):
        pass  # the worker is gone: the next receive sees the end of file


def _thread_count() -> int | None:
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return None


def main() -> None:
    """`python -m workers.trial_server FD FOLDER`: the worker passes its socket's number and where logs of trials go."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the dispatcher's to handle
    from featurize.training import preload

    preload()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        serve(control, sys.argv[2])
    os._exit(0)  # an orderly end of torch takes a second, and nothing is left to be written


if __name__ == "__main__":
    main()
