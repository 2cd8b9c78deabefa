"""A farm in a process group of its own, for tests that kill parts of it."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys

import psutil

from conf.files.identity import identity
from farm.queue.leftovers import SESSION_VARIABLE
from tests.surroundings import PATIENCE_S, await_
from warehouse.reading.connection import connect

SUBMIT = (
    "farm.submit",
    "+arch=mlp",
    "arch.space.input_size={low:4,high:128}",  # small models: what is tested is the farm
    "arch.space.batch_size={low:4,high:64}",
    "window=fixed",
    "window.seconds=0.1",
    "window.warmup_steps=1",
    "window.warmup_max_seconds=0",
)


class Farm:
    """`python -m farm.submit ...` on a data folder; `kill` and `wait` as for any process."""

    def __init__(self, data, *arguments, temporary=None):
        self.data = str(data)
        folder = {} if temporary is None else {"TMPDIR": str(temporary)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env={**os.environ, "GPUFARM_DATA": self.data, **folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.marker = identity(self.process.pid)

    def wait(self):
        """(exit code, everything it printed)."""
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, output

    def ends_with(self, expected):
        """Return everything it printed, once it has ended with that code."""
        code, output = self.wait()
        assert code == expected, output
        return output

    def await_runs(self, count):
        """Wait until that many runs have landed."""
        await_(lambda: landed(self.data) >= count or self._ended(), f"{count} landed runs")

    def _ended(self):
        if self.process.poll() is not None:
            raise AssertionError(f"the farm ended early: {self.process.communicate()[0]}")
        return False

    def processes(self):
        """Every process that carries this farm's marker, the dispatcher excepted."""
        marked = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(SESSION_VARIABLE) == self.marker and process.pid != self.process.pid:
                    marked.append(process)
        return marked

    def trials(self):
        """The trials that run now: each is the child of a keeper, and this of a trial server."""
        keepers = [keeper for server in self.servers() for keeper in _children(server)]
        return [trial for keeper in keepers for trial in _children(keeper)]

    def servers(self):
        return [p for p in self.processes() if "-m workers.trial" in _cmdline(p) and not _is_trial(p)]

    def actors(self):
        return [p for p in self.processes() if _cmdline(p).startswith("ray::RayWorker")]


def _cmdline(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_trial(process):
    try:
        return "-m workers.trial" in _cmdline(process.parent())
    except (psutil.Error, AttributeError):
        return False


def _children(process):
    try:
        return process.children()
    except psutil.Error:
        return []


def queue_rows(data, sql, *values):
    with contextlib.closing(sqlite3.connect(os.path.join(data, "queue.sqlite"))) as queue:
        return queue.execute(sql, values).fetchall()


def landed(data):
    return sum(name.endswith(".parquet") for _, _, names in os.walk(os.path.join(data, "runs")) for name in names) - 1


def kill(processes):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.send_signal(signal.SIGKILL)


def check_jobs(data, *tasks):
    """Every task of every job has exactly one visible run, and telemetry belongs to visible runs; `tasks`: of each job,
    in any order. Runs by status."""
    with contextlib.closing(connect(data)) as connection:
        rows = connection.execute(
            "SELECT count(*), count(DISTINCT run_id), count(DISTINCT task_index) FROM runs GROUP BY job_id"
        ).fetchall()
        assert sorted(rows) == sorted((count, count, count) for count in tasks)
        orphans = "SELECT count(*) FROM telemetry WHERE run_id NOT IN (SELECT run_id FROM runs)"
        assert connection.execute(orphans).fetchone() == (0,)
        return dict(connection.execute("SELECT status, count(*) FROM runs GROUP BY ALL").fetchall())
