"""A server of children: a small single-threaded process that forks a keeper for each child that is asked for.

Start reading at `serve`; `conf.children.running` is the caller's side. What a program needs for long, such as torch, is
imported here once, so that a child starts within milliseconds.

Wire: the control socket and each child's line are SOCK_SEQPACKET, a JSON object a packet.
  caller -> server   {"function": "module:name", "arguments": VALUE, ...} + the keeper's end of the line [+ a channel]
  server -> caller   {"hello": VALUE}, once; or {"problem": TEXT}
  keeper -> caller   on the line: {"started": PID}, then the fields of `Ended`
A word of the caller's on the line, or its end, ends the child. The line is at its end when the server has reaped the
keeper. Where a keeper was killed, the server ends what became its own child; where the server was, the keepers end
their children. The end of the control socket ends everything.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from conf.children.containment import become_subreaper, end_below, run_as_child
from conf.children.keeper import ChildOutput, keep, kept_folder, wakes_on_exit

PACKET_BYTES = 1 << 20
_GRACE_S = 10.0  # for keepers to end by themselves
_LOOK_S = 1.0  # between two looks at whether the caller is still there


def run_server(control: int, folder_base: str, prepare: Callable[[], Any]) -> None:
    """Serve until the caller is gone; the main function of a process, which ends with it.

    Args:
        control: Descriptor of the control socket.
        folder_base: Where a folder is made that lives as long as the server, which its hello names; empty for none.
        prepare: Imports what children need, and returns what else the hello says.
    """
    os.set_inheritable(control, False)
    caller = os.getppid()
    hello = prepare() or {}
    with socket.socket(fileno=control) as channel:
        try:
            with kept_folder(folder_base) if folder_base else contextlib.nullcontext() as folder:
                serve(channel, hello if folder is None else {**hello, "folder": folder}, caller)
        except OSError as error:
            _tell(channel, {"problem": str(error)})
    os._exit(0)  # an orderly end of torch takes a second, and nothing is left to be written


def serve(control: socket.socket, hello: dict[str, Any], caller: int) -> None:
    """Fork a keeper for each request until the caller is gone; then end everything below this process.

    On the main thread, with one thread only.
    """
    wake = wakes_on_exit()
    become_subreaper()
    _tell(control, {"hello": hello})
    gc.collect()
    gc.freeze()  # what is here now is never collected: children do not copy its pages
    server = os.getpid()
    lines: dict[int, socket.socket] = {}
    while os.getppid() == caller:  # the socket alone does not tell: a process forked from the caller may hold it
        waiting: list[Any] = [control, wake[0]]
        readable = select.select(waiting, [], [], _LOOK_S)[0]
        if wake[0] in readable:
            os.read(wake[0], 512)
            _reap(lines)
        if control not in readable:
            continue
        packet, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, 2)
        if not packet:
            break
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # programs that a child runs do not get them
        line, *channels = descriptors
        wanted = json.loads(packet)
        for module in wanted["imports"]:
            importlib.import_module(module)
        try:
            keeper = os.fork()
        except OSError as error:
            with socket.socket(fileno=line) as to_caller:
                _tell(to_caller, {"problem": f"no process can be started: {error.strerror}"})
            for descriptor in channels:
                os.close(descriptor)
            continue
        if not keeper:
            for end in (control, *lines.values()):
                end.close()
            for descriptor in wake:
                os.close(descriptor)
            run_as_child(functools.partial(_keep, server, wanted, line, channels))
        lines[keeper] = socket.socket(fileno=line)
        for descriptor in channels:
            os.close(descriptor)
    for end in lines.values():
        end.shutdown(socket.SHUT_RD)  # its keeper sees it, ends its child and deletes the child's folder
    give_up = time.monotonic() + _GRACE_S
    while lines and time.monotonic() < give_up:
        if select.select([wake[0]], [], [], _GRACE_S)[0]:
            os.read(wake[0], 512)
            _reap(lines)
    end_below(server)


def _reap(lines: dict[int, socket.socket]) -> None:
    """Close the lines of keepers that have ended; where one did not do so by itself, end what it kept."""
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            keeper, status = end
            line = lines.pop(keeper, None)
            if line is not None:
                if status:
                    end_below(os.getpid(), spared=tuple(lines))
                line.close()


def _keep(server: int, wanted: dict[str, Any], line: int, channels: list[int]) -> None:
    """Keep one child; the body of a keeper's process."""
    output = ChildOutput() if wanted["keeps_output"] else None
    with (
        socket.socket(fileno=line) as to_caller,
        kept_folder(tempfile.gettempdir()) if wanted["has_folder"] else contextlib.nullcontext() as folder,
    ):
        ended = keep(
            lambda: _run(wanted, folder, channels),
            to_caller,
            server,
            time_limit_s=wanted["time_limit_s"],
            memory_limit_bytes=wanted["memory_limit_bytes"],
            output=output,
        )
        _tell(to_caller, ended._asdict())


def _run(wanted: dict[str, Any], folder: str | None, channels: list[int]) -> None:
    if folder is not None:  # for all temporary files: the keeper deletes it
        os.environ["TMPDIR"] = tempfile.tempdir = folder
    pkgutil.resolve_name(wanted["function"])(wanted["arguments"], *channels)


def run_program(program: list[str]) -> None:
    """Run a Python file with its arguments as a program; the function of a child."""
    sys.argv = program
    try:
        runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def _tell(to: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the caller is gone
        to.send(json.dumps(message).encode())
