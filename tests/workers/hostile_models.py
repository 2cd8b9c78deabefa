"""Models that misbehave in a trial's process, for tests: `hostile_models:act` with `arguments={"name": ...}`.

Each act runs once, when the model is built, in the trial's own process, and with all that it may do there.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
import time

import torch
from torch import nn

_DONE = []
FOR_EVER = "import time; time.sleep(3600)"


def act(name: str, path: str = "") -> nn.Module:
    """Do what `name` says (a function of this module) the first time, then be a plain model."""
    if not _DONE:
        _DONE.append(name)
        globals()[name](path)
    return nn.Linear(4, 3)


# What it may report.


def say(data: bytes) -> None:
    channel = own_socket()
    with contextlib.suppress(OSError):
        channel.sendall(data)
    channel.detach()


def own_socket() -> socket.socket:
    (number,) = [fd for fd, target in descriptors().items() if target.startswith("socket:")]
    return socket.socket(fileno=number)


def descriptors() -> dict[int, str]:
    folder = "/proc/self/fd"
    return {int(fd): os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder) if os.path.islink(f"{folder}/{fd}")}


def say_event(event: str, **values) -> None:
    say(json.dumps({"event": event, **values}).encode() + b"\n")


def says_file(path: str) -> None:
    with open(path, "rb") as data:
        say(data.read())
    time.sleep(3600)


def flood_of_steps(path: str) -> None:
    say_event("warmup", t_ns=time.monotonic_ns())
    line = json.dumps({"event": "step", "t_ns": time.monotonic_ns(), "values": {"step_time_ms": 1.0}}).encode() + b"\n"
    for _ in range(int(path) // 1000):
        say(line * 1000)
    say_event("window", t_ns=time.monotonic_ns())
    values = {"step_time_ms": 1.0, "steps": 1, "half_widths": {}}
    say_event("result", window_end_ns=time.monotonic_ns(), window_ended="fixed", values=values)
    time.sleep(3600)


# How it may fail.


def huge_error(path: str) -> None:
    raise RuntimeError("begin " + "x" * (50 << 20) + " end of it")


def surrogate_error(path: str) -> None:
    raise RuntimeError("lone \ud800 and NUL \x00 and \x1b[2Jescape; No CUDA GPUs are available")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def unspeakable_error(path: str) -> None:
    raise Unspeakable


def keyboard_interrupt(path: str) -> None:
    raise KeyboardInterrupt


def system_exit(path: str) -> None:
    sys.exit(0)


def os_exit(path: str) -> None:
    os._exit(0)


def closes_descriptors(path: str) -> None:
    os.closerange(0, 4096)


def changes_folder(path: str) -> None:
    os.chdir(tempfile.mkdtemp())
    os.rmdir(os.getcwd())


def forks_and_both_go_on(path: str) -> None:
    os.fork()


def writes_much_and_fails(path: str) -> None:
    os.write(1, b"first words\n")
    for _ in range(64):
        _write_all(b"y" * (1 << 20))
    _write_all(b"\nlast words\n")
    raise RuntimeError("after much output")


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def closes_its_output(path: str) -> None:
    os.close(1)
    os.close(2)


# What it may leave behind. Each process writes its id into the folder `path`.


def _note(path: str) -> None:
    with open(os.path.join(path, str(os.getpid())), "w"):
        pass


def _become_daemon(path: str) -> None:
    """In a child: leave the session, drop every descriptor, ignore signals, and stay."""
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 4096)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    _note(path)
    while True:
        time.sleep(3600)


def _await(path: str, count: int) -> None:
    while len(os.listdir(path)) < count:
        time.sleep(0.002)


def daemonizes(path: str) -> None:
    child = os.fork()
    if not child:
        _become_daemon(path)
    os.waitpid(child, 0)
    _await(path, 1)


def leaves_exec_without_environment(path: str) -> None:
    """Executed from nothing: no environment, no session, no descriptors, and its parent gone."""
    code = f"import os; open(os.path.join({path!r}, str(os.getpid())), 'w').close(); {FOR_EVER}"
    child = os.fork()
    if not child:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execve(sys.executable, [sys.executable, "-S", "-E", "-c", code], {})
    os.waitpid(child, 0)
    _await(path, 1)


def daemonizes_and_hangs(path: str) -> None:
    daemonizes(path)
    time.sleep(3600)


def daemonizes_undoing_the_subreaper(path: str) -> None:
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
    daemonizes(path)


def kills_its_server(path: str) -> None:
    daemonizes(path)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)


# What one rank of several may do.


def second_rank_takes_all_memory(path: str) -> None:
    if os.environ["RANK"] == "1":
        held = []
        while True:
            held.append(torch.ones(2**22))


def second_rank_raises(path: str) -> None:
    if os.environ["RANK"] == "1":
        raise RuntimeError("the second rank does not like this model")


def second_rank_exits(path: str) -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)


def second_rank_says_junk(path: str) -> None:
    if os.environ["RANK"] == "1":
        say(b"\x00\xff not a report\n")


def second_rank_hangs(path: str) -> None:
    if os.environ["RANK"] == "1":
        time.sleep(3600)


# What it may do to the trials beside it.


def raises(path: str) -> None:
    raise RuntimeError("not today")


def sleeps(path: str) -> None:
    time.sleep(3600)
