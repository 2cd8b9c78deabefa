"""The processes of the service: one that watches and traces, and those that answer. Start reading at `serve`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

import uvicorn

from conf.cli.command_line import EXIT_INTERRUPTED
from conf.errors import EnvironmentProblem
from farm.serving.connections import GuardedServer, listen, url_of
from farm.serving.gate import FOLDER_VARIABLE, RequestLog
from farm.serving.settings import ServeSettings
from farm.serving.traces import TraceLimits, TracePool, TraceStore
from warehouse.files.folder import DataFolder
from warehouse.files.plain_file import locked

_STOP_S = 10  # for requests in progress
_KEEP_ALIVE_S = 30
_SWITCH_S = 0.001  # switch interval of the computing and the answering thread
_SETTLED_S = 30.0  # a process that ends sooner has failed to start
_FAILED_STARTS = 5  # failed starts in a row that end the service


def serve(settings: ServeSettings) -> int:
    """Serve until a signal ends it. Returns the exit code.

    Raises:
        UsageError: The address is taken or not this machine's, or the log cannot be written.
        EnvironmentProblem: Another service has the data folder, or the answering processes keep ending.
    """
    folder = DataFolder.resolve(settings.data)
    if settings.data is None and not folder.root.exists():
        folder.create()  # a service that only estimates needs no runs
    folder.open()
    with only_service(folder):
        log = RequestLog(settings.log)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):  # each connection is a file
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        limits = TraceLimits(
            str(folder.root), settings.trust, settings.limits.trace_s, int(settings.limits.trace_gib * 2**30)
        )
        with (
            listen(settings.host, settings.port, named=f"host={settings.host} port={settings.port}") as listening,
            contextlib.closing(TraceStore(folder.service, settings)) as store,
            tempfile.TemporaryDirectory(prefix="gpufarm-metrics-", ignore_cleanup_errors=True) as metrics_folder,
            TracePool(store, limits, settings.traces, log.event),
        ):
            os.environ[FOLDER_VARIABLE] = metrics_folder
            url = url_of(listening, "http" if settings.certificate is None else "https")
            print(f"serving {folder.root} on {url}", flush=True)
            return _AnsweringProcesses(settings, listening, log).run()


def only_service(folder: DataFolder) -> contextlib.AbstractContextManager[object]:
    """Hold the lock of the data folder's one service: two would trace each other's questions."""
    problem = f"another service answers from data={folder.root}; name another folder"
    return locked(folder.service_lock, lambda: EnvironmentProblem(problem))


class _AnsweringProcesses:
    """The answering processes, each restarted when it ends."""

    def __init__(self, settings: ServeSettings, listening: socket.socket, log: RequestLog) -> None:
        self._settings, self._listening, self._log = settings, listening, log
        self._processes: dict[SpawnProcess, float] = {}  # -> start time
        self._woken, self._wakes = os.pipe()
        self._signal: int | None = None
        self._failed_starts = 0

    def run(self) -> int:
        """Watch them until a signal arrives. Returns the exit code."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for _ in range(self._settings.processes):
                self._start()
            while self._signal is None:
                wait([self._woken, *(process.sentinel for process in self._processes)])
                if self._signal is None:
                    self._replace_ended()
        finally:
            self._stop()
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._woken)
            os.close(self._wakes)
        return EXIT_INTERRUPTED if self._signal == signal.SIGINT else 0

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        os.write(self._wakes, b".")

    def _start(self) -> None:
        process = multiprocessing.get_context("spawn").Process(
            target=_answer_requests, args=(self._settings, self._listening), name="answers"
        )
        process.start()
        self._processes[process] = time.monotonic()

    def _replace_ended(self) -> None:
        for process in [process for process in self._processes if not process.is_alive()]:
            lived_s = time.monotonic() - self._processes.pop(process)
            self._log.event("process_ended", ended=process.pid, exit_code=process.exitcode, lived_s=round(lived_s, 1))
            self._failed_starts = (
                0 if lived_s > _SETTLED_S or process.exitcode == -signal.SIGKILL else (self._failed_starts + 1)
            )
            if self._failed_starts >= _FAILED_STARTS:
                raise EnvironmentProblem(
                    f"the processes that answer ended {_FAILED_STARTS} times in a row, the last with exit code "
                    f"{process.exitcode}; the log has the reasons"
                )
            self._start()

    def _stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_STOP_S + 2)
            process.kill()
            process.join()


def _answer_requests(settings: ServeSettings, listening: socket.socket) -> None:
    """Answer requests until SIGTERM, or until the parent process ends. The main function of a process."""
    from farm.serving.application import make_application

    sys.setswitchinterval(_SWITCH_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent passes it on
    config = uvicorn.Config(
        make_application(settings),
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_STOP_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.private_key,
        ws="none",
    )
    server = GuardedServer(config, listening, settings.limits)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    server.run()


def _end_with_parent(server: uvicorn.Server) -> None:
    parent: Any = multiprocessing.parent_process()
    wait([parent.sentinel])
    server.should_exit = True
